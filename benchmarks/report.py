"""What every benchmark writes: one JSON file in benchmarks/results with the figures and what they were measured on."""

import datetime
import json
import os
import platform
import shlex
import subprocess
import sys
from importlib import metadata
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"
_PACKAGES = ("torch", "transformers", "grpcio", "protobuf", "uvloop", "numpy")


def write_report(name: str, figures: dict[str, Any], folder: Path = RESULTS) -> Path:
    """Writes `name`.json: the figures beside date, command line, machine and versions. Returns the file."""
    report = {
        "benchmark": name,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": _command(),
        "machine": describe_machine(),
        "versions": describe_versions(),
        **figures,
    }
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"{name}.json"
    path.write_text(json.dumps(report, indent=2) + "\n")
    return path


def describe_machine() -> dict[str, Any]:
    """CPU model, cores that this process may use, memory, and how busy the machine is."""
    return {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)),
        "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
        "kernel": platform.release(),
        "load_average": [round(load, 2) for load in os.getloadavg()],
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
    return shlex.join([*program, *sys.argv[1:]])


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    fields = dict(line.split(":", 1) for line in lines if ":" in line)
    named = {name.strip(): value.strip() for name, value in fields.items()}
    return f"{named.get('model name', platform.machine())} (family {named.get('cpu family', '?')}, model {named.get('model', '?')})"


def _commit() -> str:
    """The commit, with a mark where the sources differ from it; benchmarks' own results don't count."""
    root = Path(__file__).parent.parent

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, capture_output=True, text=True, check=True).stdout.strip()

    try:
        changed = git("status", "--porcelain", "--untracked-files=no", "--", ".", ":!benchmarks/results")
        return git("rev-parse", "--short=12", "HEAD") + ("+changes" if changed else "")
    except (OSError, subprocess.CalledProcessError):
        return metadata.version("specwire")
