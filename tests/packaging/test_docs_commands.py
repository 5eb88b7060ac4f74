"""Commands and flags that README and docs name can be parsed; tests/cli/test_documented_commands.py runs those that call a stack."""

import dataclasses
import importlib.util
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import typer

from specwire.arguments import parse_flags
from specwire.cli import app
from specwire.config import CoordinatorConfig, DrafterConfig, HttpConfig, VerifierConfig
from specwire.config_fields import flag_name
from tests.packaging.test_docs import DOCUMENTS, ROOT

SERVICES = {"verifier": VerifierConfig, "drafter": DrafterConfig, "coordinator": CoordinatorConfig, "http": HttpConfig}
MODULES = {"verifier_svc": "verifier", "drafter_svc": "drafter", "coordinator": "coordinator", "specwire.http": "http"}
END = re.compile(r"^([|&;]|\d?>.*|#)$")
OF_OTHERS = {"--scale", "--no-recreate", "--wait", "--detach", "--workers"}
"""Flags of Docker and others that the text names."""
GROUP = typer.main.get_command(app)


def shell_lines(text: str) -> Iterator[str]:
    """Commands of fenced blocks, without their prompts."""
    for language, block in re.findall(r"^```(\w*)\n(.*?)^```", text, re.DOTALL | re.MULTILINE):
        starts = {"console": ("$ ",), "sh": ("",), "bash": ("",), "": ("specwire ", "python -m ")}.get(language)
        if starts:
            yield from (line.removeprefix("$ ") for line in re.sub(r"\\\n\s*", "", block).splitlines() if line.startswith(starts))


def commands_of(line: str) -> Iterator[list[str]]:
    """Arguments of each specwire command, or of a service's module, in a line of shell."""
    words = shlex.split(line, comments=True)
    for at, word in enumerate(words):
        rest = words[at + 1 :]
        rest = rest[: next((i for i, other in enumerate(rest) if END.match(other)), len(rest))]
        if word.removeprefix(".venv/bin/") == "specwire":
            yield rest
        elif word == "-m" and rest and rest[0] in MODULES:
            yield [MODULES[rest[0]], *rest[1:]]


FENCED = sorted(
    {(name, shlex.join(command)) for name in DOCUMENTS for line in shell_lines((ROOT / name).read_text("utf-8")) for command in commands_of(line)}
)
INLINE = sorted({(name, span) for name in DOCUMENTS for span in re.findall(r"`(specwire [a-z][^`]*)`", (ROOT / name).read_text("utf-8"))})


@pytest.mark.parametrize(("document", "command"), FENCED)
def test_commands_parse(document: str, command: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    words = shlex.split(command)
    for name in re.findall(r"[\w./-]+\.(?:jsonl|json|yaml|crt|key|pem)", command):
        if not name.startswith("/"):
            (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / name).touch()
    if words and words[0] in SERVICES and "--help" not in words:
        parse_flags(SERVICES[words[0]], "specwire", words[1:])
        return
    found, words = find(words)
    assert not subcommands(found) or words == ["--help"], f"{document}: there is no command `specwire {command}`"
    if "--help" not in words:
        found.make_context("specwire", words)


@pytest.mark.parametrize(("document", "span"), INLINE)
def test_commands_in_the_text_exist(document: str, span: str) -> None:
    """Such a span is often only the beginning of a command, so what it names has to exist, no more."""
    found, words = find(span.split()[1:])
    assert not subcommands(found) or not words or words[0].startswith("-"), f"{document}: `{span}` names no command"
    flags = {word.partition("=")[0] for word in words if word.startswith("--")} - {"--help"}
    known = (
        service_flags(SERVICES[found.name])
        if found.name in SERVICES
        else {name for parameter in found.params for name in (*parameter.opts, *parameter.secondary_opts)}
    )
    assert flags <= known, f"{document}: `{span}` names flags that the command does not have"


def find(words: list[str]) -> tuple[Any, list[str]]:
    """The command that the first words name, and the others."""
    command, rest = GROUP, words
    while rest and rest[0] in subcommands(command):
        command, rest = subcommands(command)[rest[0]], rest[1:]
    return command, rest


def subcommands(command: Any) -> dict[str, Any]:
    """Of a group; none of others."""
    return getattr(command, "commands", {})


def service_flags(kind: type) -> set[str]:
    return {"--config", *(flag_name(field.name) for field in dataclasses.fields(kind))}


def all_flags() -> set[str]:
    flags = {flag for kind in SERVICES.values() for flag in service_flags(kind)} | {"--help", "--version"}
    for script in (*(ROOT / "benchmarks").rglob("*.py"), *(ROOT / "tests").rglob("__main__.py")):
        flags |= set(re.findall(r'"(--[a-z-]+)"', script.read_text(encoding="utf-8")))
    commands: list[Any] = [GROUP]
    while commands:
        command = commands.pop()
        flags |= {name for parameter in command.params for name in (*parameter.opts, *parameter.secondary_opts)}
        commands += subcommands(command).values()
    return flags


@pytest.mark.parametrize("document", [name for name in DOCUMENTS if name != "docs/from-vllm.md"])
def test_flags_in_the_text_exist(document: str) -> None:
    named = set(re.findall(r"`(--[a-z-]*[a-z])(?![a-z-])", (ROOT / document).read_text(encoding="utf-8")))
    assert named - all_flags() - OF_OTHERS == set()


@pytest.mark.parametrize("document", DOCUMENTS)
def test_modules_that_are_run_exist(document: str) -> None:
    for module in set(
        re.findall(r"python -m ((?:benchmarks|tests|specwire|coordinator|verifier_svc|drafter_svc)[\w.]*)", (ROOT / document).read_text("utf-8"))
    ):
        assert importlib.util.find_spec(module.rstrip(".")), f"{document}: there is no module {module}"
