"""Writes into the documentation what it takes from the code: `make docs`. Tables stand between two comments that name them.

<!-- generated: NAME -->
<!-- end -->
"""

import dataclasses
import inspect
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

import typer

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from coordinator import exposition  # noqa: E402
from drafter_svc import metrics as drafter_metrics  # noqa: E402
from specwire.cli import app  # noqa: E402
from specwire.config import ClientConfig, CoordinatorConfig, DrafterConfig, HttpConfig, UpConfig, VerifierConfig  # noqa: E402
from specwire.config_fields import MAX_NUMBER, flag_name, format_value  # noqa: E402
from specwire.config_reader import DRAFTING_KEYS  # noqa: E402
from specwire.http import metrics as http_metrics  # noqa: E402
from specwire.http.fields import UNSUPPORTED  # noqa: E402
from specwire.http.vllm_names import VLLM_METRICS  # noqa: E402
from specwire.metrics import Metric  # noqa: E402
from specwire.speculative_config import SpeculativeConfig  # noqa: E402
from specwire.speculative_keys import FOREIGN_KEYS  # noqa: E402
from specwire.tracing.spec import SPANS, SpanSpec  # noqa: E402
from verifier_svc import metrics as verifier_metrics  # noqa: E402

_BLOCK = re.compile(r"(<!-- generated: ([\w ]+) -->\n)(.*?)(<!-- end -->)", re.DOTALL)


def table(header: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *([cell.replace("|", "\\|") for cell in row] for row in rows)]
    return "".join(re.sub(r"  +", " ", f"| {' | '.join(line)} |") + "\n" for line in lines)


def flags_table(kind: type) -> str:
    """Of a service's configuration: flags, defaults, what they may be."""
    rows = [(code(flag_name(f.name)), _default(f), _values(f), f.metadata["help"]) for f in dataclasses.fields(kind)]
    return table(("flag", "default", "values", "meaning"), rows)


def keys_table(kind: type) -> str:
    """Of a section of the file that has no flags of its own."""
    rows = [(code(f.name), code(str(f.default).lower() if isinstance(f.default, bool) else str(f.default)), _values(f), f.metadata["help"])
            for f in dataclasses.fields(kind)]  # fmt: skip
    return table(("key", "default", "values", "meaning"), rows)


def speculation_table() -> str:
    """Keys of speculative_config; their meaning is what the docstring of SpeculativeConfig says."""
    meanings = docstring_arguments(SpeculativeConfig)
    fields = dataclasses.fields(SpeculativeConfig)
    assert list(meanings) == [field.name for field in fields], f"the docstring of SpeculativeConfig explains {list(meanings)}"
    return table(("key", "default", "meaning"), ((code(f.name), _json(f.default), meanings[f.name]) for f in fields))


def foreign_keys_table() -> str:
    """Keys of speculative configurations elsewhere."""
    rows = (
        (code(name), ", ".join(code(_json_text(value)) for value in key.neutral), re.sub(r"'(\w+)'", r"`\1`", key.remedy))
        for name, key in FOREIGN_KEYS.items()
    )
    return table(("key", "taken, without effect, as", "instead"), rows)


def metrics_table(metrics: Iterable[Metric]) -> str:
    """Every family of series."""
    rows = ((code(metric.name), str(metric.kind), ", ".join(map(code, metric.labels)), metric.text) for metric in metrics)
    return table(("metric", "kind", "labels", "meaning"), rows)


def spans_table() -> str:
    """Every span."""
    return table(("span", "service", "kind", "parent", "covers"), ((code(s.name), s.service, s.kind, _parents(s), s.text) for s in SPANS))


def attributes_table() -> str:
    """Every attribute of every span."""
    rows = [row for s in SPANS for row in (
        *((code(s.name), code(name), text) for name, text in s.attributes.items()),
        *((code(s.name), f"{code(name)} (some)", text) for name, text in s.optional.items()),
    )]  # fmt: skip
    return table(("span", "attribute", "meaning"), rows)


def commands_table() -> str:
    """Every command of the command line."""
    rows: list[tuple[str, str]] = []
    waiting = [("specwire", typer.main.get_command(app))]
    while waiting:
        name, command = waiting.pop(0)
        inner = getattr(command, "commands", {})
        waiting += [(f"{name} {word}", each) for word, each in inner.items()]
        if not inner:
            rows.append((code(name), (command.help or "").split("\n\n")[0].replace("\n", " ").partition(" (specwire ")[0].rstrip(".")))
    return table(("command", "does"), rows)


def docstring_arguments(documented: object) -> dict[str, str]:
    """The entries under `Args:`, each as one line."""
    section = (inspect.getdoc(documented) or "").partition("Args:\n")[2].partition("\n\n")[0]
    entries = re.split(r"^    (?=\S)", section, flags=re.MULTILINE)[1:]
    return {name: " ".join(text.split()) for name, _, text in (entry.partition(":") for entry in entries)}


def code(text: str) -> str:
    return f"`{text}`" if text else ""


def _default(field: "dataclasses.Field[object]") -> str:
    return "" if isinstance(field.default, SpeculativeConfig) else code(format_value(field.default))


def _values(field: "dataclasses.Field[object]") -> str:
    """What a field may be, where that is a range or a few words."""
    rules, default = field.metadata, field.default
    if rules["instead"]:
        return "only this"
    if isinstance(default, bool):
        return "`true`, `false`"
    if rules["low"] is not None:
        return f"at least {rules['low']:g}" if rules["high"] >= MAX_NUMBER else f"{rules['low']:g} to {rules['high']:g}"
    words = (rules["pattern"] or "").replace(r"(:\d+)?", "").split("|")
    return ", ".join(map(code, words)) if len(words) > 1 and all(re.fullmatch(r"\w+", word) for word in words) else ""


def _json(value: object) -> str:
    return "" if value is None else code(_json_text(value))


def _json_text(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)


def _parents(spec: SpanSpec) -> str:
    return ", ".join([*map(code, spec.parents), *(["none, or the client's span"] if spec.is_entry else [])])


METRICS = (exposition.METRICS, verifier_metrics.METRICS, drafter_metrics.METRICS, http_metrics.METRICS)
"""Of each service."""
PARTS: dict[str, Callable[[], str]] = {
    "commands": commands_table,
    "up": lambda: keys_table(UpConfig),
    "client": lambda: keys_table(ClientConfig),
    "coordinator": lambda: flags_table(CoordinatorConfig),
    "verifier": lambda: flags_table(VerifierConfig),
    "drafter": lambda: flags_table(DrafterConfig),
    "http": lambda: flags_table(HttpConfig),
    "speculation": speculation_table,
    "foreign keys": foreign_keys_table,
    "drafting keys": lambda: f"{', '.join(map(code, DRAFTING_KEYS))}.\n",
    "unsupported parameters": lambda: table(("parameter", "why, and what instead"), ((code(name), text) for name, text in UNSUPPORTED.items())),
    "metrics of the coordinator": lambda: metrics_table(exposition.METRICS),
    "metrics of the verifier": lambda: metrics_table(verifier_metrics.METRICS),
    "metrics of the drafter": lambda: metrics_table(drafter_metrics.METRICS),
    "metrics of HTTP": lambda: metrics_table(http_metrics.METRICS),
    "metrics of vLLM": lambda: metrics_table(VLLM_METRICS),
    "spans": spans_table,
    "attributes": attributes_table,
}
"""What the comments name."""


def current(text: str) -> str:
    """A document with its tables as the code has them now."""
    return _BLOCK.sub(lambda block: f"{block[1]}\n{PARTS[block[2]]()}\n{block[4]}", text)


def main() -> None:
    for path in sorted((ROOT / "docs").glob("*.md")):
        text = path.read_text(encoding="utf-8")
        if current(text) != text:
            path.write_text(current(text), encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)} is written anew\n")


if __name__ == "__main__":
    main()
