"""Runs jobs one after the other within a budget of seconds, and goes on where it was at its next call.

Each job is a process with a log of its own. None is started that its estimate says will not end in time; of a benchmark's slices as many run as
will. What is complete for this commit, or has ended well, is not run again. Everything lies in one folder, which is to be kept from call to call;
with OUT in the environment what is new is also packed there after every job, in few files.

    python -m benchmarks.gpu.all rows draft-variants draft --budget 560 --out res --commit 1a2b3c4
"""

import argparse
import contextlib
import json
import logging
import os
import shutil
import signal
import subprocess
import sys
import tarfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu.jobs import FILES, JOBS, Job
from benchmarks.report import describe_versions, print_table
from specwire import fork_environment

_STATE, _LOGS, _TRITON = "all.json", "logs", "triton"
_PACKED_RESULTS, _PACKED_KERNELS = "results.tar.gz", "triton.tar.gz"
_MOST_PACKED_BYTES = 16 << 20
"""Of a file that comes back from a machine."""
_TRAINING = "train"
_OVERRUN = 2.0
"""A job is cut after so many times its estimate, so that one that hangs leaves time for the others."""
_SPARE_S = 5.0
"""Kept for the end: packing and the table."""
_LEAST_S = 60.0
"""For a job that goes on at its next call: most of less would be its start."""
_GRACE_S = 8.0
"""Between the first signal and the last one to a job that is cut."""
_TAIL_LINES = 12
_UNFINISHED = 3
"""Exit status of a job that goes on at its next call."""
logger = logging.getLogger("all")


@dataclass(slots=True)
class Outcome:
    """Of a job in this call.

    Args:
        state: done, failed, cut, unfinished or left.
        why: in words.
    """

    state: str
    seconds: float = 0.0
    why: str = ""


@dataclass(slots=True)
class Driver:
    """One call.

    Args:
        folder: of all results.
        commit: what is measured.
        end_s: in time.monotonic(), when the last job must have ended.
        given: files that jobs need.
        common: arguments of every benchmark.
        fills: a slice that keeps its rows is begun though there is no time for all of it.
    """

    folder: Path
    commit: str
    end_s: float
    given: Mapping[str, str]
    common: Sequence[str]
    fills: bool = False
    state: dict[str, Any] = field(default_factory=dict)

    def __post_init__(self) -> None:
        (self.folder / _LOGS).mkdir(parents=True, exist_ok=True)
        path = self.folder / _STATE
        if path.is_file():
            self.state = json.loads(path.read_text(encoding="utf-8"))

    def is_done(self, name: str) -> bool:
        """Of this commit."""
        job = JOBS[name]
        if job.slices:
            return not self._pending(job)
        known = self.state.get(name, {})
        return known.get("state") == "done" and known.get("commit") == self.commit

    def run(self, name: str) -> Outcome:
        """A job, as far as there is time."""
        job = JOBS[name]
        if missing := job.needs(self.given):
            return Outcome("left", why=f"needs --{' and --'.join(missing)}")
        left_s = self.end_s - time.monotonic()
        slices = self._pending(job)
        while slices and job.estimate_s(slices) > left_s:
            slices.pop()
        goes_on = job.takes_seconds and left_s > _LEAST_S
        if not slices and self.fills and job.keeps_rows and left_s > _LEAST_S:
            slices, goes_on = self._pending(job)[:1], True
        estimate_s = min(job.estimate_s(slices), left_s) if goes_on else job.estimate_s(slices)
        if (job.slices and not slices) or estimate_s > left_s:
            needed_s = job.estimate_s(self._pending(job)[:1])
            return Outcome("left", why=f"needs about {needed_s:.0f} s, {max(left_s, 0):.0f} are left")
        logger.info("%s: %s, about %.0f s of %.0f", name, " ".join(slices) or job.module, estimate_s, left_s)
        outcome = self._run_process(name, self._command(name, slices, left_s), min(left_s, _OVERRUN * estimate_s + _GRACE_S))
        remaining = self._pending(job)
        if outcome.state == "done" and remaining:
            outcome = Outcome("unfinished", outcome.seconds, f"left: {' '.join(remaining)}")
        self.state[name] = {"state": outcome.state, "commit": self.commit, "seconds": round(outcome.seconds, 1), "why": outcome.why}
        (self.folder / _STATE).write_text(json.dumps(self.state, indent=1) + "\n", encoding="utf-8")
        return outcome

    def _pending(self, job: Job) -> list[str]:
        return job.pending(self.folder, self.commit, is_tiny="--tiny" in self.common)

    def _command(self, name: str, slices: Sequence[str], left_s: float) -> list[str]:
        job = JOBS[name]
        arguments = [argument.format(**self.given) for argument in job.arguments]
        if job.slices:
            arguments += ["--only", *slices, "--commit", self.commit]
        if job.slices or job.takes_folder:
            arguments += ["--out", str(self.folder), *self.common]
        if job.takes_seconds:
            work = self.folder / name
            arguments += ["--work", str(work / "work"), "--results", str(work / "results"), "--pack", str(work / "packed")]
            arguments += ["--seconds", f"{left_s - _GRACE_S:.0f}"]
        return [sys.executable, "-m", job.module, *arguments]

    def _run_process(self, name: str, command: Sequence[str], limit_s: float) -> Outcome:
        """Until it ends or is cut."""
        started = time.monotonic()
        environment = dict([fork_environment.VARIABLE]) | {"TRITON_CACHE_DIR": str(self.folder.absolute() / _TRITON)} | os.environ
        environment["PYTHONUNBUFFERED"] = "1"
        environment.pop("OUT", None)  # results go where they are told to
        if "cpu" in self.common:
            environment["TRITON_INTERPRET"] = "1"
        path = self.folder / _LOGS / f"{name}.log"
        with path.open("a", encoding="utf-8") as log:
            log.write(f"# {' '.join(command)}\n")
            log.flush()
            process = subprocess.Popen(command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=environment, start_new_session=True)
            try:
                status: int | None = process.wait(limit_s)
            except subprocess.TimeoutExpired:
                status = None
            finally:
                _end(process)
        seconds = time.monotonic() - started
        if status == 0:
            return Outcome("done", seconds)
        if status == _UNFINISHED and JOBS[name].takes_seconds:
            return Outcome("unfinished", seconds, "goes on at the next call")
        tail = "\n".join(f"    {line}" for line in path.read_text(encoding="utf-8", errors="replace").splitlines()[-_TAIL_LINES:])
        logger.info("%s: the end of its log:\n%s", name, tail)
        return Outcome("cut", seconds, f"after {limit_s:.0f} s") if status is None else Outcome("failed", seconds, f"exit status {status}")


def _end(process: subprocess.Popen[bytes]) -> None:
    """What the job has started ends with it: services watch their parent."""
    for number, grace_s in ((signal.SIGINT, _GRACE_S), (signal.SIGKILL, _GRACE_S)):
        if process.poll() is not None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, number)
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(grace_s)


def pack(folder: Path, target: Path) -> None:
    """Results and logs in one file, compiled kernels in another one, and what a training has packed, as far as files may be that large."""
    target.mkdir(parents=True, exist_ok=True)
    results = [path for path in folder.iterdir() if (path.is_file() and path.name != _PACKED_KERNELS) or path.name == _LOGS]
    _tar(results, target / _PACKED_RESULTS)
    if (folder / _TRITON).is_dir():
        _tar([folder / _TRITON], target / _PACKED_KERNELS)
    for part in (folder / _TRAINING / "packed").glob("*"):
        shutil.copy(part, target / part.name)


def unpack_kernels(folder: Path) -> None:
    """Kernels that another machine has compiled, if they were packed and brought here: into the cache, unless there is one."""
    packed = folder / _PACKED_KERNELS
    if packed.is_file() and not (folder / _TRITON).exists():
        with tarfile.open(packed) as archive:
            archive.extractall(folder, filter="data")


def _tar(paths: Sequence[Path], target: Path) -> None:
    scratch = target.with_name(f".{target.name}")
    with tarfile.open(scratch, "w:gz", compresslevel=3) as archive:
        for path in paths:
            archive.add(path, path.name)
    if scratch.stat().st_size > _MOST_PACKED_BYTES:
        logger.warning("%s would have %d bytes, too many to come back; it is left out", target.name, scratch.stat().st_size)
        scratch.unlink()
        return
    os.replace(scratch, target)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs; 0 if everything that was asked for is done."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("jobs", nargs="*", metavar="JOB", help="in this order; without any they are listed: " + ", ".join(JOBS))
    parser.add_argument("--budget", type=float, default=560.0, help="seconds of this call")
    parser.add_argument("--out", type=Path, help="folder of results, logs, compiled kernels and what is known of jobs")
    parser.add_argument("--fill", action="store_true", help="begin slices that will be cut, if they keep their rows for the next call")
    parser.add_argument("--commit", default="", help="what is measured, where there is no checkout")
    parser.add_argument("--device", default="cuda", help="cuda, or cpu with --tiny")
    parser.add_argument("--tiny", action="store_true", help="on tiny random models, to try it")
    parser.add_argument("--model", default="", help=FILES["model"])
    parser.add_argument("--head", default="", help=FILES["head"])
    parser.add_argument("--dspark", default="", help=FILES["dspark"])
    parser.add_argument("--train", default="", help=FILES["train"])
    parser.add_argument("--prompts", default="", help=FILES["prompts"])
    started = time.monotonic()
    options = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="[%(relativeCreated)7.0f ms] %(message)s", stream=sys.stdout, force=True)
    commit = options.commit or describe_versions()["specwire"]
    if not options.jobs:
        print_table(["job", "seconds", "slices"], [[name, f"{job.estimate_s(job.slices):.0f}", " ".join(job.slices)] for name, job in JOBS.items()])
        return 0
    if unknown := [name for name in options.jobs if name not in JOBS]:
        parser.error(f"there is no job {', '.join(unknown)}; there are {', '.join(JOBS)}")
    if options.out is None:
        parser.error("--out is needed: what is measured lies there, and tells the next call what is left")
    unpack_kernels(options.out)
    common = ["--device", options.device, *(["--tiny"] if options.tiny else [])]
    driver = Driver(
        options.out, commit, started + options.budget - _SPARE_S, {name: getattr(options, name) for name in FILES}, common, fills=options.fill
    )
    outcomes: dict[str, Outcome] = {}
    for name in options.jobs:
        if driver.is_done(name):
            outcomes[name] = Outcome("done", why="before this call")
            continue
        outcomes[name] = driver.run(name)
        logger.info("%s: %s in %.0f s %s", name, outcomes[name].state, outcomes[name].seconds, outcomes[name].why)
        if outcomes[name].seconds and (target := os.environ.get("OUT")):
            pack(options.out, Path(target))
    print_table(["job", "state", "seconds", "why"], [[name, each.state, f"{each.seconds:.0f}", each.why] for name, each in outcomes.items()])
    return 0 if all(each.state == "done" for each in outcomes.values()) else 1


if __name__ == "__main__":
    sys.exit(main())
