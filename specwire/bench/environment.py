"""Where figures were measured: what a report needs so that it can be judged and repeated."""

import datetime
import os
import platform
import shlex
import sys
from collections.abc import Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

_PACKAGES = ("specwire", "grpcio", "protobuf", "uvloop", "numpy", "torch")


def describe_environment() -> dict[str, Any]:
    """Date (UTC), command line, machine of the load generator, and versions of what its speed depends on."""
    return {
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "command": command_line(sys.argv),
        "machine": {
            "cpu": _cpu_model(),
            "cores": len(os.sched_getaffinity(0)),
            "memory_gib": round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30, 1),
            "kernel": platform.release(),
        },
        "versions": {"python": platform.python_version(), **{name: version for name in _PACKAGES if (version := _version(name))}},
    }


def command_line(arguments: Sequence[str]) -> str:
    """The arguments as one could type them, without the API key; `python -m specwire.cli` is `specwire`."""
    program = Path(arguments[0]).name
    shown, is_secret = ["specwire" if program == "__main__.py" else program], False
    for argument in arguments[1:]:
        shown.append("..." if is_secret else "--api-key=..." if argument.startswith("--api-key=") else argument)
        is_secret = argument == "--api-key"
    return shlex.join(shown)


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _cpu_model() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        return platform.processor() or platform.machine()
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine())
