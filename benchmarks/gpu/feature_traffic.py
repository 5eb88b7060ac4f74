"""What a drafter's metrics say of the features that it reads."""

import re
import urllib.request
from dataclasses import dataclass

_LINE = re.compile(r"^(\w+)(?:\{([^}]*)\})? (\S+)$", re.MULTILINE)


@dataclass(frozen=True, slots=True)
class FeatureTraffic:
    """Since the drafter's start.

    Args:
        num_bytes, seconds, num_reads: by way; a read is of all sequences that a batch or chunk needs of a verifier.
    """

    num_bytes: dict[str, float]
    seconds: dict[str, float]
    num_reads: dict[str, float]

    @classmethod
    def parse(cls, text: str) -> "FeatureTraffic":
        """From the text format of Prometheus."""
        found: dict[str, dict[str, float]] = {"bytes": {}, "seconds_sum": {}, "seconds_count": {}}
        for name, labels, value in _LINE.findall(text):
            path = re.search(r'path="(\w+)"', labels or "")
            for key in found:
                if path and re.fullmatch(rf"specwire_drafter_feature_{key}(_total)?", name):
                    found[key][path[1]] = float(value)
        return cls(found["bytes"], found["seconds_sum"], found["seconds_count"])

    @classmethod
    def read(cls, address: str) -> "FeatureTraffic":
        """Of the drafter whose metrics are at host:port."""
        with urllib.request.urlopen(f"http://{address}/metrics", timeout=10) as answer:
            return cls.parse(answer.read().decode())

    def since(self, before: "FeatureTraffic") -> dict[str, dict[str, float]]:
        """Per read, by way: bytes and milliseconds; ways without reads are left out."""
        result = {}
        for path, count in self.num_reads.items():
            num_reads = count - before.num_reads.get(path, 0.0)
            if num_reads > 0:
                seconds = self.seconds[path] - before.seconds.get(path, 0.0)
                num_bytes = self.num_bytes.get(path, 0.0) - before.num_bytes.get(path, 0.0)
                result[path] = {"reads": num_reads, "bytes_per_read": num_bytes / num_reads, "ms_per_read": 1e3 * seconds / num_reads}
        return result
