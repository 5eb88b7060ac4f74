"""What every benchmark writes: one JSON file in benchmarks/results with the figures and what they were measured on."""

import datetime
import json
import os
import platform
import resource
import shlex
import subprocess
import sys
import time
from importlib import metadata
from pathlib import Path
from typing import Any

from specwire.version import build_version

RESULTS = Path(__file__).parent / "results"
_MEASURED = ("specwire", "coordinator", "drafter_svc", "verifier_svc", "benchmarks/*.py", "tests/scripted")
_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "numpy")


class Bystanders:
    """What the rest of the machine does while a benchmark runs, from its construction on."""

    def __init__(self) -> None:
        self._started_s = time.monotonic()
        self._started_busy_s = _busy_s() - _own_s()

    @property
    def cores(self) -> float:
        """Cores that were busy with other things, on average; children of this process that still run count among them."""
        return (_busy_s() - _own_s() - self._started_busy_s) / (time.monotonic() - self._started_s)


def write_report(name: str, figures: dict[str, Any], folder: Path = RESULTS, bystanders: Bystanders | None = None) -> Path:
    """Writes `name`.json: the figures beside date, command line, machine and versions. Returns the file."""
    machine = describe_machine()
    if bystanders is not None:
        machine["cores_busy_with_other_things"] = round(bystanders.cores, 2)
    report = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "machine": machine,
        "versions": describe_versions(),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory and kernel."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
    }


def describe_versions() -> dict[str, str]:
    """Python, the packages that decide the speed, and this checkout's commit."""
    versions = {"python": platform.python_version()}
    for package in _PACKAGES:
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = "not installed"
    return {**versions, "specwire": _commit()}


def print_table(header: list[str], rows: list[list[str]]) -> None:
    """Columns as wide as they need to be; the first one to the left, the others to the right."""
    widths = [max(len(line[column]) for line in [header, *rows]) for column in range(len(header))]
    for line in [header, ["-" * width for width in widths], *rows]:
        cells = [cell.rjust(width) if column else cell.ljust(width) for column, (cell, width) in enumerate(zip(line, widths, strict=True))]
        print("  ".join(cells).rstrip(), flush=True)


def _command() -> str:
    module = sys.modules["__main__"].__spec__
    program = ["python", "-m", module.name] if module is not None else ["python", sys.argv[0]]
    return shlex.join([*program, *map(_without_folders, sys.argv[1:])])


def _without_folders(argument: str) -> str:
    """An argument, of a path outside of the working folder only the name: the rest says something of this machine alone."""
    flag, equals, value = argument.rpartition("=")
    is_outside = value.startswith(("/", "~", "../"))
    return f"{flag}{equals}{Path(value).name if is_outside else value}"


def _busy_s() -> float:
    """Seconds that all cores together have worked since the machine started."""
    user, nice, system, _, _, irq, softirq, steal = map(int, Path("/proc/stat").read_text().split()[1:9])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _own_s() -> float:
    """Seconds of work of this process and of its children that have ended."""
    usages = resource.getrusage(resource.RUSAGE_SELF), resource.getrusage(resource.RUSAGE_CHILDREN)
    return sum(usage.ru_utime + usage.ru_stime for usage in usages)


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return f"{named.get('model name', platform.machine())} (family {named.get('cpu family', '?')}, model {named.get('model', '?')})"


def _commit() -> str:
    """The commit, with a mark where what is measured differs from it."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", *_MEASURED)
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return build_version()
