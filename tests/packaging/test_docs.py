"""README and docs say what the code says: flags, defaults, keys, make targets and links."""

import dataclasses
import re
from pathlib import Path

import pytest

from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig
from specwire.speculative_config import SpeculativeConfig

SERVICES = (("Coordinator", CoordinatorConfig), ("Verifier", VerifierConfig), ("Drafter", DrafterConfig), ("HTTP", HttpConfig))
ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "benchmarks/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))


def flag_row(field: "dataclasses.Field[object]") -> str:
    default = field.default
    if isinstance(default, tuple):
        default = ",".join(default)
    if isinstance(default, bool):
        default = str(default).lower()
    shown = "" if default == "" or isinstance(default, SpeculativeConfig) else f" `{default}`"
    return f"| `--{field.name.replace('_', '-')}` |{shown} | {field.metadata['help']} |"


@pytest.mark.parametrize(("service", "config"), SERVICES)
def test_flags_are_documented_as_they_are(root: Path, service: str, config: type) -> None:
    text = (root / "docs" / "configuration.md").read_text(encoding="utf-8")
    section = text.partition(f"\n## {service}\n")[2].partition("\n## ")[0]
    documented = [line for line in section.splitlines() if line.startswith("| `--")]
    assert documented == [flag_row(field) for field in dataclasses.fields(config)], f"docs/configuration.md, {service}: copy the right-hand side"


def test_readme_lists_the_speculative_config_with_its_defaults(root: Path) -> None:
    table = re.findall(r"^\| `([a-z_]+)` \| (.*?) ?\| ", (root / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    defaults = {field.name: "" if field.default is None else str(field.default) for field in dataclasses.fields(SpeculativeConfig)}
    assert {key: value.strip("`") for key, value in table} == defaults


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    anchors = {name: headings((root / name).read_text(encoding="utf-8")) for name in DOCUMENTS}
    for target in re.findall(r"\]\(([^)\s]+)\)", text):
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = ((root / document).parent / path).resolve() if path else (root / document)
        assert linked.exists(), f"{document} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors[str(linked.relative_to(root))], f"{document} links to {target}, but there is no such heading"


def headings(text: str) -> set[str]:
    """Anchors as Markdown viewers make them: lower case, punctuation dropped, spaces to dashes."""
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}


def test_make_targets_named_in_the_docs_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in ("README.md", "docs/development.md"):
        named = set(re.findall(r"`?make ([a-z-]+)", (root / document).read_text(encoding="utf-8")))
        assert named, f"{document} names no make target"
        assert named <= targets
