"""docs/tracing.md says what specwire.tracing.spec declares."""

from pathlib import Path

import pytest

from specwire.tracing.spec import BY_NAME, SPANS, SpanSpec

TEXT = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")


def span_row(spec: SpanSpec) -> str:
    parents = ", ".join([f"`{name}`" for name in spec.parents] + ["none, or the client's span"] * spec.is_entry)
    return f"| `{spec.name}` | {spec.service} | {spec.kind} | {parents} | {spec.text} |"


def attribute_rows(spec: SpanSpec) -> list[str]:
    always = [f"| `{spec.name}` | `{name}` | {text} |" for name, text in spec.attributes.items()]
    return always + [f"| `{spec.name}` | `{name}` (some) | {text} |" for name, text in spec.optional.items()]


def test_spans() -> None:
    rows = [line for line in TEXT.partition("## Spans")[2].partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert rows == [span_row(spec) for spec in SPANS]


def test_attributes() -> None:
    rows = [line for line in TEXT.partition("## Attributes")[2].partition("\n## ")[0].splitlines() if line.startswith("| `")]
    assert rows == [row for spec in SPANS for row in attribute_rows(spec)]


@pytest.mark.parametrize("spec", SPANS, ids=lambda spec: spec.name)
def test_links_and_events(spec: SpanSpec) -> None:
    assert set(spec.parents) <= set(BY_NAME)
    if spec.links:
        assert f"`{spec.name}` spans link to the `{spec.links}` spans" in TEXT
    for event, attributes in (spec.events or {}).items():
        assert f"`{spec.name}` spans may have an event `{event}` with {', '.join(f'`{name}`' for name in attributes)}" in TEXT
