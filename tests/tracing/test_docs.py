"""docs/tracing.md says of links and events what specwire.tracing.spec declares; its tables are generated (tests/packaging/test_docs.py)."""

from pathlib import Path

import pytest

from specwire.tracing.spec import BY_NAME, SPANS, SpanSpec

TEXT = (Path(__file__).parents[2] / "docs" / "tracing.md").read_text(encoding="utf-8")


@pytest.mark.parametrize("spec", SPANS, ids=lambda spec: spec.name)
def test_links_and_events(spec: SpanSpec) -> None:
    assert set(spec.parents) <= set(BY_NAME)
    if spec.links:
        assert f"`{spec.name}` spans link to the `{spec.links}` spans" in TEXT
    for event, attributes in (spec.events or {}).items():
        assert f"`{spec.name}` spans may have an event `{event}` with {', '.join(f'`{name}`' for name in attributes)}" in TEXT
