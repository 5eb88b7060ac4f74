"""`specwire up` as a process."""

import re
import signal
import subprocess
import sys
import threading
from pathlib import Path

TIMEOUT_S = 60.0


class Up:
    """A running `specwire up`; its output is collected while it runs."""

    def __init__(self, folder: Path, *options: str, timeout_s: float = TIMEOUT_S) -> None:
        if "--http-port" not in options:  # whose default every other test would need, too
            options = (*options, "--no-http")
        self.timeout_s = timeout_s
        # Elsewhere than in the checkout, whose real services would be found first.
        command = [sys.executable, "-m", "specwire.cli", "up", *options]
        self.process = subprocess.Popen(command, cwd=folder, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        self.output = {"stdout": "", "stderr": ""}
        self._changed = threading.Condition()
        self._readers = [threading.Thread(target=self._read, args=(name,)) for name in self.output]
        for reader in self._readers:
            reader.start()

    def wait_for(self, pattern: str, stream: str = "stdout", count: int = 1) -> str:
        """The first group of a pattern, once the stream has it `count` times."""
        with self._changed:
            found = self._changed.wait_for(lambda: len(re.findall(pattern, self.output[stream])) >= count, self.timeout_s)
        assert found, f"no {pattern!r} in {self.output}"
        return re.findall(pattern, self.output[stream])[-1]

    def wait_ready(self) -> str:
        """The address that clients call."""
        return self.wait_for(r"serving on (\S+) until")

    def end(self, number: signal.Signals = signal.SIGTERM) -> int:
        self.process.send_signal(number)
        return self.join()

    def join(self) -> int:
        status = self.process.wait(self.timeout_s)
        for reader in self._readers:
            reader.join(TIMEOUT_S)
        return status

    def _read(self, name: str) -> None:
        stream = getattr(self.process, name)
        with stream:
            for line in stream:
                with self._changed:
                    self.output[name] += line
                    self._changed.notify_all()


def children(up: Up) -> dict[str, int]:
    """Process of each service by the first word of its module."""
    found = {}
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            parent = int((folder / "stat").read_text(encoding="ascii", errors="replace").rpartition(")")[2].split()[1])
            command = (folder / "cmdline").read_text(encoding="utf-8", errors="replace").split("\0")
        except (FileNotFoundError, ProcessLookupError):
            continue
        if parent == up.process.pid and "-m" in command:
            found[command[command.index("-m") + 1].removesuffix("_svc")] = int(folder.name)
    return found
