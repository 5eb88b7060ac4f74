"""README and docs: what they take from the code is current, and links, pictures and targets of make are there."""

import importlib.util
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.metrics.scrape import series_of

ROOT = Path(__file__).parents[2]
DOCUMENTS = ("README.md", "benchmarks/README.md", *(f"docs/{path.name}" for path in sorted((ROOT / "docs").glob("*.md"))))


def load_script(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"docs_{name}", ROOT / "docs" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


GENERATE = load_script("generate")
PICTURES = load_script("pictures")


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if "<!-- generated: " in (ROOT / name).read_text(encoding="utf-8")])
def test_generated_tables_are_current(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    assert GENERATE.current(text) == text, f"{document} is older than the code: run `make docs`"


def test_every_table_is_somewhere(root: Path) -> None:
    texts = "".join((root / document).read_text(encoding="utf-8") for document in DOCUMENTS)
    assert sorted(re.findall(r"<!-- generated: ([\w ]+) -->", texts)) == sorted(GENERATE.PARTS)


def test_tables_show_ranges_and_escape_bars() -> None:
    flags = GENERATE.flags_table(GENERATE.CoordinatorConfig)
    assert "| `--adaptive-probe-share` | `0.01` | 0 to 0.1 |" in flags
    assert "| `--max-queue` | `1024` | at least 1 |" in flags
    assert "| `--trace-content` | `false` | `true`, `false` |" in flags
    assert "| `--weights` | `auto` | `auto`, `int4`, `int8`, `bf16`, `fp32` |" in GENERATE.flags_table(GENERATE.VerifierConfig)
    assert GENERATE.table(("a", "b"), [("", "|x|")]) == "| a | b |\n| --- | --- |\n| | \\|x\\| |\n"


@pytest.mark.parametrize("name", PICTURES.PICTURES)
def test_pictures_are_current_and_shown(root: Path, name: str) -> None:
    assert (root / "docs" / "images" / name).read_text(encoding="utf-8") == PICTURES.PICTURES[name](), (
        f"{name} is older than its script: run `make docs`"
    )
    shown = [document for document in DOCUMENTS if f"images/{name}" in (root / document).read_text(encoding="utf-8")]
    assert shown, f"no document shows {name}"


def test_every_page_is_in_the_index(root: Path) -> None:
    linked = set(re.findall(r"\]\(([\w-]+\.md)[)#]", (root / "docs" / "index.md").read_text(encoding="utf-8")))
    assert linked == {path.name for path in (root / "docs").glob("*.md")} - {"index.md"}


@pytest.mark.parametrize("document", DOCUMENTS)
def test_links_lead_somewhere(root: Path, document: str) -> None:
    text = (root / document).read_text(encoding="utf-8")
    anchors = {name: headings((root / name).read_text(encoding="utf-8")) for name in DOCUMENTS}
    for target in [*re.findall(r"\]\(([^)\s]+)\)", text), *re.findall(r'src="([^"]+)"', text)]:
        if target.startswith(("http://", "https://")):
            continue
        path, _, anchor = target.partition("#")
        linked = ((root / document).parent / path).resolve() if path else (root / document)
        assert linked.exists(), f"{document} links to {target}, which does not exist"
        if anchor:
            assert anchor in anchors[str(linked.relative_to(root))], f"{document} links to {target}, but there is no such heading"


def headings(text: str) -> set[str]:
    """Anchors as Markdown viewers make them: lower case, punctuation dropped, spaces to dashes. Comments of shell commands are no headings."""
    prose = re.sub(r"^```.*?^```", "", text, flags=re.MULTILINE | re.DOTALL)
    return {re.sub(r"[^\w\- ]", "", title.lower()).replace(" ", "-") for title in re.findall(r"^#+ (.+)$", prose, re.MULTILINE)}


def test_make_targets_named_in_the_docs_exist(root: Path) -> None:
    targets = set(re.findall(r"^([a-z-]+):", (root / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for document in ("README.md", "docs/development.md"):
        named = set(re.findall(r"`?make ([a-z-]+)", (root / document).read_text(encoding="utf-8")))
        assert named, f"{document} names no make target"
        assert named <= targets


def test_quoted_messages_are_those_of_the_code(root: Path) -> None:
    """docs/troubleshooting.md quotes what users search for; … stands for values."""
    sources = [path for package in ("specwire", "coordinator", "drafter_svc", "verifier_svc") for path in sorted((root / package).rglob("*.py"))]
    code = "".join(path.read_text(encoding="utf-8") for path in sources if "v1" not in path.parts)
    code = re.sub(r'"\s*\n\s*f?"', "", code)  # messages that go over several lines
    text = (root / "docs" / "troubleshooting.md").read_text(encoding="utf-8")
    quoted = [part.strip() for block in re.findall(r"```text\n(.*?)```", text, re.DOTALL) for line in block.splitlines() for part in line.split("…")]
    assert len(quoted) > 20
    missing = [part for part in quoted if part and part not in code]
    assert not missing, f"the code has no such messages: {missing}"


@pytest.mark.parametrize("document", DOCUMENTS)
def test_metrics_named_in_the_text_exist(root: Path, document: str) -> None:
    known = {name for metrics in GENERATE.METRICS for metric in metrics for name in series_of(metric)}
    named = set(re.findall(r"\bspecwire_(?:coordinator|verifier|drafter|http)_\w+", (root / document).read_text(encoding="utf-8")))
    assert {name for name in named - known if not any(one.startswith(name) for one in known)} == set()


def test_environment_variables_are_documented(root: Path) -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in (root / "specwire").rglob("*.py"))
    documented = (root / "docs" / "configuration.md").read_text(encoding="utf-8").partition("\n## Environment\n")[2].partition("\n## ")[0]
    assert set(re.findall(r"\bSPECWIRE_[A-Z_]+", documented)) == set(re.findall(r"\bSPECWIRE_[A-Z_]+", sources))


def test_generating_changes_nothing_that_is_current(root: Path) -> None:
    result = subprocess.run([sys.executable, root / "docs" / "generate.py"], capture_output=True, text=True, check=True)
    assert result.stdout == ""
