"""Slices of a GPU benchmark: each is a file of results, written after every row. A complete one of the same commit and settings is not measured
again."""

import argparse
import datetime
import json
import os
import re
import shlex
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Any

from benchmarks.gpu.jobs import SECONDS, START_S
from benchmarks.report import describe_machine, describe_versions, print_table

RESULTS = Path(__file__).parent.parent / "results" / "gpu"


def make_parser(text: str, slices: Mapping[str, int]) -> argparse.ArgumentParser:
    """The options that all these benchmarks have.

    Args:
        text: what the benchmark measures.
        slices: their names, and about how many seconds each takes on an H200.
    """
    listed = ", ".join(f"{name} {seconds} s" for name, seconds in slices.items())
    parser = argparse.ArgumentParser(
        description=text, epilog=f"slices, on an H200: {listed}", formatter_class=argparse.RawDescriptionHelpFormatter
    )  # fmt: skip
    parser.add_argument("--only", nargs="+", choices=list(slices), default=list(slices), metavar="SLICE", help="slices; all if none is named")
    parser.add_argument("--again", action="store_true", help="measure slices again that are complete")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="the same code on tiny random models, to try it; the figures say nothing")
    parser.add_argument("--out", type=Path, default=os.environ.get("OUT"), help="folder of the results; OUT in the environment, or results/gpu")
    parser.add_argument("--commit", default="", help="what is measured, where there is no checkout")
    return parser


class Slices:
    """The slices that were asked for.

    Args:
        benchmark: its module in benchmarks.gpu.
        options: of `make_parser`'s parser.
        arguments: the command line that they are from.
    """

    @classmethod
    def parse(cls, benchmark: str, parser: argparse.ArgumentParser, arguments: Sequence[str] | None) -> "tuple[Slices, argparse.Namespace]":
        """Of a command line, by default the process's own."""
        given = sys.argv[1:] if arguments is None else arguments
        options = parser.parse_args(given)
        return cls(benchmark, options, given), options

    def __init__(self, benchmark: str, options: argparse.Namespace, arguments: Sequence[str]) -> None:
        if options.device == "cpu" and not options.tiny:
            raise SystemExit("--device cpu would take hours with models of real sizes; add --tiny")
        if options.tiny and options.out is None:
            raise SystemExit("--tiny needs --out: its figures must not lie among the results")
        self._benchmark = benchmark
        self._folder = Path(options.out or RESULTS)
        self._only, self._again = options.only, options.again
        versions = describe_versions()
        self._header: dict[str, Any] = {
            "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
            "command": describe_command(benchmark, arguments),
            "machine": describe_machine() | (_describe_gpu() if options.device != "cpu" else {}),
            "versions": versions | {"triton": _version("triton"), "specwire": options.commit or versions["specwire"]},
            "settings": {name: _without_folder(value) for name, value in vars(options).items() if name not in ("only", "again", "out", "commit")},
        }

    def pending(self) -> list[str]:
        """Those that are not complete, or are to be measured again; says which are left out, and how long the others take."""
        pending = []
        for name in self._only:
            done = None if self._again else next(filter(None, map(self._find_complete, {self._path(name), RESULTS / self._path(name).name})), None)
            if done is None:
                pending.append(name)
            else:
                print(f"{self._benchmark} {name}: measured on {done['date']}; --again measures it again", flush=True)
        if pending:
            seconds = SECONDS.get(self._benchmark, {})
            needed_s = START_S + sum(seconds.get(name, 0) for name in pending)
            print(f"{self._benchmark}: {', '.join(pending)}; about {needed_s} s on an H200", flush=True)
        return pending

    def open(self, name: str, keep: Callable[[Mapping[str, Any]], bool] | None = None) -> "Slice":
        """Begins to measure one, or goes on with one that was cut short.

        Args:
            keep: rows of an earlier run of the same commit and settings that stay; None: it starts anew.
        """
        rows = [] if keep is None or self._again else [row for row in self._cut_rows(self._path(name)) if keep(row)]
        header = {"benchmark": f"gpu/{self._benchmark}-{name}", **self._header} | ({"rows_of_earlier_runs": len(rows)} if rows else {})
        return Slice(f"{self._benchmark} {name}", self._path(name), header, rows)

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Of a slice's complete file of the same commit and settings; none if there is none."""
        done = self._find_complete(self._path(name))
        return [] if done is None else list(done["rows"])

    def _path(self, name: str) -> Path:
        return self._folder / f"{self._benchmark}-{name}.json"

    def _find_complete(self, path: Path) -> dict[str, Any] | None:
        found = self._find(path)
        return found if found is not None and found.get("is_complete") else None

    def _cut_rows(self, path: Path) -> list[dict[str, Any]]:
        found = self._find(path)
        return [] if found is None or found.get("is_complete") else list(found["rows"])

    def _find(self, path: Path) -> dict[str, Any] | None:
        """A file of the same commit and settings."""
        if not path.is_file():
            return None
        found: dict[str, Any] = json.loads(path.read_text())
        same = found.get("settings") == self._header["settings"] and found["versions"]["specwire"] == self._header["versions"]["specwire"]
        return found if same else None


class Slice:
    """One file of results. A context that ends well makes it complete.

    Attributes:
        rows: so far, with those of a run that this one goes on with.
    """

    def __init__(self, label: str, path: Path, header: Mapping[str, Any], rows: list[dict[str, Any]]) -> None:
        self._label, self._path = label, path
        self._figures: dict[str, Any] = {**header, "is_complete": False}
        self._started_s = time.monotonic()
        self.rows = rows
        for row in rows:
            print(f"{label}: measured before: {_shown(row)}", flush=True)

    def add(self, row: dict[str, Any]) -> None:
        """Another row; shown and written at once."""
        self.rows.append(row)
        self._write()
        print(f"[{time.monotonic() - self._started_s:5.0f} s] {self._label}: {_shown(row)}", flush=True)

    def has(self, **columns: Any) -> bool:
        """Whether a row has these values."""
        return any(columns.items() <= row.items() for row in self._flat_rows())

    def note(self, **figures: Any) -> None:
        """Figures beside the rows."""
        self._figures |= figures
        self._write()
        print(f"[{time.monotonic() - self._started_s:5.0f} s] {self._label}: {_shown(figures)}", flush=True)

    def __enter__(self) -> "Slice":
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        if kind is None:
            self._figures |= {"is_complete": True, "duration_s": round(time.monotonic() - self._started_s, 1)}
            self._write()
            show_rows(self.rows)

    def _flat_rows(self) -> list[dict[str, Any]]:
        return [{key: value for key, value in row.items() if not isinstance(value, (list, dict))} for row in self.rows]

    def _write(self) -> None:
        """Whole or not at all: the process may be killed meanwhile."""
        self._path.parent.mkdir(parents=True, exist_ok=True)
        scratch = self._path.with_name(f".{self._path.name}")
        scratch.write_text(json.dumps({**self._figures, "rows": self.rows}, indent=1) + "\n")
        os.replace(scratch, self._path)


def show_rows(rows: Sequence[Mapping[str, Any]]) -> None:
    """Prints the numbers and names of the rows as a table; lists and nested figures are in the file alone."""
    header = list(dict.fromkeys(key for row in rows for key, value in row.items() if not isinstance(value, (list, dict))))
    if header:
        print_table(header, [[_cell(row.get(key, "")) for key in header] for row in rows])


def describe_command(benchmark: str, arguments: Sequence[str]) -> str:
    """The command line; of paths outside the checkout only the name."""
    return shlex.join(["python", "-m", f"benchmarks.gpu.{benchmark}", *map(_without_folder, arguments)])


def _without_folder(value: Any) -> Any:
    """What a setting or an argument is, but for the folder of an absolute path."""
    return re.sub(r"(^|=)/.*/", r"\1", value) if isinstance(value, str) else value


def _describe_gpu() -> dict[str, str]:
    import torch

    query = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.split("\n")[0]
    return {"gpu": torch.cuda.get_device_name(), "driver": driver}


def _version(package: str) -> str:
    from importlib import metadata

    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "not installed"


def _shown(figures: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {_cell(value)}" for key, value in figures.items() if not isinstance(value, (list, dict)))


def _cell(value: object) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
