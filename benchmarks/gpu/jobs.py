"""What there is to measure on a GPU: jobs, each a process, with the seconds that its slices take on an H200. Imports nothing heavy."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

SECONDS: dict[str, dict[str, int]] = {
    "kernels": {
        "attention-check": 10, "attention": 8, "prefill": 2, "layer-ops": 2, "row-sampling": 3, "sweep": 45, "sweep-prefill": 20,
    },
    "engine": {
        "noise": 3, "check": 31, "check-processed": 6, "check-synthetic": 4, "llama8b": 74, "smollm": 17, "prefill": 23, "profile": 90,
        "profile-draft": 40, "round": 45, "memory": 6,
    },
    "services": {"llama8b-unix": 90, "llama8b-tcp": 52, "llama8b-w1": 63, "smollm-unix": 35, "smollm-tcp": 16, "smollm-w1": 16, "smollm-w4": 17},
    "draft": {"alone": 15, "fixed": 150, "schedule": 130},
    "pareto": {"block-uniform": 150, "block-mixed": 80, "rollout": 50, "model-uniform": 160, "model-mixed": 165},
    "two_gpus": {"placement": 240, "lanes": 105, "loss": 50},
    "invariance": {"text": 16, "plain": 7, "drafters": 75, "faults": 45},
    "startup": {"cold": 50, "warm": 50},
    "variants": {"check": 55, "products": 30, "rows": 75, "draft": 110, "decode": 100, "smollm": 50},
    "draft_heads": {"eagle3": 240, "smollm-eagle3": 160, "smollm-dspark": 160},
}  # fmt: skip
"""By benchmark and slice. Of services, draft, pareto and two_gpus the first slice of a call also pays for the start."""
_KEEP_ROWS = {"services", "draft", "pareto", "two_gpus", "draft_heads"}
START_S = 12
"""Of a process: imports, the device, weights; services come on top."""


@dataclass(frozen=True, slots=True)
class Job:
    """A process that measures.

    Args:
        module: of the process.
        slices: of a benchmark that has some: it leaves out those that are complete. Without any the job is done once it has ended well.
        arguments: for every call; {NAME} stands for an option of the driver.
        seconds: of a job without slices.
        takes_seconds: it goes on at its next call: it is told how many seconds it has, and needs no more than `seconds`.
        takes_folder: a job without slices that writes its results into a folder, and knows --device and --tiny as benchmarks with slices do.
    """

    module: str
    slices: tuple[str, ...] = ()
    arguments: tuple[str, ...] = ()
    seconds: int = 0
    takes_seconds: bool = False
    takes_folder: bool = False

    @property
    def benchmark(self) -> str:
        return self.module.rpartition(".")[2]

    @property
    def keeps_rows(self) -> bool:
        """A slice that is cut goes on behind its last row."""
        return self.benchmark in _KEEP_ROWS

    def estimate_s(self, slices: Sequence[str]) -> float:
        """Of a call with these slices."""
        return START_S + sum(SECONDS[self.benchmark][name] for name in slices) if self.slices else self.seconds

    def pending(self, folder: Path, commit: str, *, is_tiny: bool) -> list[str]:
        """Slices without a complete file of this commit in the folder."""
        return [name for name in self.slices if not is_complete(folder / f"{self.benchmark}-{name}.json", commit, is_tiny=is_tiny)]

    def needs(self, given: Mapping[str, str]) -> list[str]:
        """Options of the driver that the arguments name and that were not given."""
        return [name for name in FILES if any(f"{{{name}}}" in argument for argument in self.arguments) and not given.get(name)]


FILES = {
    "model": "GGUF file or folder of the default model's weights",
    "head": "folder of an EAGLE-3 head for the default model",
    "dspark": "folder of a DSpark head for it",
    "train": "JSONL file of training prompts",
    "prompts": "JSONL file of benchmark prompts, never trained on",
}
"""Options of the driver that jobs may need."""


def _bench(name: str, *slices: str, arguments: tuple[str, ...] = ()) -> Job:
    return Job(f"benchmarks.gpu.{name}", slices, arguments)


_TESTS = (
    "-q", "-p", "no:cacheprovider", "-o", "addopts=", "-o", "filterwarnings=default", "--import-mode=importlib", "--strict-markers", "--durations=5",
)  # fmt: skip
"""A machine that is lent may lack plug-ins of pytest: their options are no error then."""


def _tests(seconds: int, *arguments: str) -> Job:
    return Job("pytest", arguments=(*_TESTS, *arguments), seconds=seconds)


JOBS: dict[str, Job] = {
    "check": _bench("engine", "noise", "check", "check-processed", "check-synthetic"),
    "check-variants": _bench("variants", "check"),
    "rows": _bench("variants", "rows"),
    "draft-variants": _bench("variants", "draft"),
    "profile-draft": _bench("engine", "profile-draft"),
    "round": _bench("engine", "round"),
    "draft-alone": _bench("draft", "alone"),
    "draft": _bench("draft", "fixed", "schedule"),
    "pareto-block": _bench("pareto", "block-uniform", "block-mixed", "rollout"),
    "pareto-model": _bench("pareto", "model-mixed", "model-uniform"),
    "eagle3": _bench("draft_heads", "eagle3"),
    "head": _bench("draft_heads", "smollm-eagle3", arguments=("--model", "{model}", "--head", "{head}", "--prompts", "{prompts}")),
    "head-dspark": _bench("draft_heads", "smollm-dspark", arguments=("--model", "{model}", "--head", "{dspark}", "--prompts", "{prompts}")),
    "sweep": Job("benchmarks.gpu.sweep", seconds=270, takes_folder=True),
    "engine": _bench("engine", "llama8b", "smollm", "prefill"),
    "profile": _bench("engine", "profile"),
    "services-llama": _bench("services", "llama8b-unix", "llama8b-w1", "llama8b-tcp"),
    "services-smollm": _bench("services", "smollm-unix", "smollm-w4", "smollm-w1", "smollm-tcp"),
    "invariance": _bench("invariance", "plain", "drafters", "faults", "text", arguments=("--model", "{model}")),
    "startup": _bench("startup", "cold", "warm"),
    "kernels": _bench("kernels", "attention-check", "attention", "prefill", "layer-ops", "row-sampling"),
    "two-placement": _bench("two_gpus", "placement"),
    "two-lanes": _bench("two_gpus", "lanes"),
    "two-loss": _bench("two_gpus", "loss", arguments=("--model", "{model}")),
    "tests-kernels": _tests(60, "tests/engine/kernels"),
    "tests-graphs": _tests(
        100, "-m", "gpu", "tests/engine/graphs/test_backends.py", "tests/engine/graphs/test_cuda.py", "tests/engine/graphs/test_draft_runner.py"
    ),
    "tests-engine": _tests(50, "-m", "gpu", "tests/engine/test_dummy.py", "tests/engine/test_runner.py", "tests/engine/sampling/test_cuda.py"),
    "tests-services": _tests(
        150, "-m", "gpu", "tests/verifier/test_cuda.py", "tests/verifier/test_sizing.py", "tests/drafter/test_feature_memory.py"
    ),
    "train": Job(
        "benchmarks.gpu.train_heads",
        arguments=("--model", "{model}", "--prompts", "{train}", "--bench", "{prompts}"),
        seconds=480,
        takes_seconds=True,
    ),
}


def is_complete(path: Path, commit: str, *, is_tiny: bool) -> bool:
    """Whether a slice's file is, of this commit and of models of this size."""
    if not path.is_file():
        return False
    found = json.loads(path.read_text(encoding="utf-8"))
    return bool(found.get("is_complete")) and (found["versions"]["specwire"], found["settings"]["tiny"]) == (commit, is_tiny)
