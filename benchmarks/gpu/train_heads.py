"""Trains and compares draft heads for the default model on one GPU, and counts what they are worth on benchmark prompts.

Answers, features and the target are shared by all heads of a call. Started again with the same folders it goes on; a recipe that no longer fits into
the seconds of this call is left for another one (exit status 3). `--pack` writes what must be kept into a few files of at most 15 MiB, anew after
every head, so that a call that is cut has lost at most the head that it was at.
"""

import argparse
import json
import logging
import random
import shutil
import signal
import sys
import time
from dataclasses import replace
from multiprocessing import TimeoutError as NoAnswer
from multiprocessing import get_context
from multiprocessing.pool import AsyncResult, Pool
from pathlib import Path
from typing import Any

from benchmarks.gpu.bench_answers import MAX_NEW, Answers, make_answers
from benchmarks.gpu.bench_heads import describe_head, describe_lookups, head_drafts, load_drafts, save_drafts
from benchmarks.gpu.train_pack import pack
from specwire.config import DEFAULT_MODEL
from specwire.errors import SpecwireError
from specwire.train.data import DataConfig
from specwire.train.deadline import Deadline, TimeUp
from specwire.train.recipe import Recipe, load_recipe
from specwire.train.run import Material, TrainOptions, TrainResult, train
from specwire.train.stored import load_stored

RECIPES: dict[str, tuple[str, dict[str, Any]]] = {
    "eagle3": ("eagle3", {"train_seconds": 150, "num_steps": 6000}),
    "dspark": ("dspark", {"train_seconds": 120, "num_steps": 5000}),
    "eagle3-short": ("eagle3", {"train_seconds": 40, "num_steps": 1600}),
    "eagle3-half": ("eagle3", {"train_seconds": 40, "num_steps": 1600, "train_share": 0.5}),
    "eagle3-kl": ("eagle3", {"train_seconds": 40, "num_steps": 1600, "tv_weight": 0}),
    "eagle3-unroll3": ("eagle3", {"train_seconds": 40, "num_steps": 1600, "num_draft_tokens": 3}),
    "eagle3-layers2": ("eagle3", {"train_seconds": 40, "num_steps": 1600, "num_layers": 2}),
    "dspark-short": ("dspark", {"train_seconds": 40, "num_steps": 1600}),
    "dspark-layers1": ("dspark", {"train_seconds": 40, "num_steps": 1600, "num_layers": 1}),
    "dspark-rank128": ("dspark", {"train_seconds": 40, "num_steps": 1600, "markov_rank": 128}),
}
"""Name -> recipe and changes. The first two are served, the others what they are compared with."""
SERVED = ("eagle3", "dspark")
_ORDER = ("eagle3", "dspark", "eagle3-short", "eagle3-kl", "dspark-short", "eagle3-unroll3")
_OVERHEAD_S = 25.0
"""Of a recipe, beside its training."""
_COUNTING_S = 60.0
"""Kept for the benchmark prompts and the packing."""
_LINE_EVERY_S = 10.0
_IN_LOOKUPS = "suffix"
"""The last of the figures that need no head."""

logger = logging.getLogger("train_heads")


class Call:
    """One run of the script.

    Args:
        options: the command line.
    """

    def __init__(self, options: argparse.Namespace) -> None:
        self._options = options
        self._end = time.monotonic() + options.seconds
        answers = Path(options.answers or Path(options.work) / "answers")
        data = DataConfig(
            num_prompts=options.num_prompts,
            max_prompt_tokens=options.max_prompt_tokens,
            max_answer_tokens=options.max_answer_tokens,
            rows_per_part=_rows_per_part(answers, options.device),
        )
        self._work, self._results = Path(options.work), Path(options.results)
        self._bench = self._results / "bench"
        self._bench_answers, self._bench_lookups = self._bench / "answers.npz", self._bench / "drafts-lookup.npz"
        for folder in (self._work, self._bench):
            folder.mkdir(parents=True, exist_ok=True)
        self._base = TrainOptions(options.model, options.prompts, self._work, load_recipe("eagle3"), data, answers, options.device, max_seconds=0)
        self._material: Material | None = None
        self._last_line = 0.0

    def run(self) -> bool:
        """Trains and counts what time allows; whether that is all."""
        self._material = Material(self._base)
        logger.info("target and %d prompts are there", len(self._material.jobs))
        with get_context("spawn").Pool(1) as pool:  # lookups take a core, not the GPU; they end with this, wherever they are
            first, *others = self._options.recipes  # the first one is what time is for; short ones may fit where long ones do not
            num_done = int(self._train(first))
            lookups = self._begin_lookups(pool)
            num_done += sum(self._train(name) for name in others)
            try:
                self._count(lookups)
            except TimeUp:
                logger.info("the benchmark prompts are left for another call")
                return False
        return num_done == len(self._options.recipes)

    def _train(self, name: str) -> bool:
        recipe = self._recipe(name)
        output = self._work / name
        if (self._results / name / "head" / "config.json").is_file():
            return True
        left = self._end - time.monotonic() - _COUNTING_S
        needed = recipe.train_seconds + _OVERHEAD_S
        # One that was begun goes on in any case.
        if left < needed and not ((output / "checkpoint.pt").is_file() and left > _OVERHEAD_S):
            logger.info("%s needs %.0f s, %.0f are left: another call's", name, needed, left)
            return False
        logger.info("%s, %.0f s left", name, left)
        try:
            result = self._run(name, replace(self._base, output=output, recipe=recipe, max_seconds=left))
        except (SpecwireError, RuntimeError):  # torch's and the GPU's errors are RuntimeErrors
            logger.exception("%s failed; the others go on", name)
            return False
        if result.head is None:
            logger.info("%s stopped in %s", name, result.phase)
            return False
        folder = self._results / name
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in ("curve.json", "run.json"):
            shutil.copy(output / file, folder / file)
        shutil.copytree(result.head, folder / "head")
        self.pack()
        return True

    def _run(self, name: str, options: TrainOptions) -> TrainResult:
        def show(phase: str, done: float, total: float, note: str) -> None:
            now = time.monotonic()
            if now - self._last_line >= _LINE_EVERY_S or done >= total:
                self._last_line = now
                logger.info("%s: %s %.0f%% %s", name, phase, 100 * done / total, note)

        return train(options, show, self._material)

    def _recipe(self, name: str) -> Recipe:
        base, changes = RECIPES[name]
        recipe = replace(load_recipe(base), **changes)
        return replace(
            recipe,
            train_seconds=recipe.train_seconds * self._options.scale,
            num_steps=self._options.num_steps or round(recipe.num_steps * self._options.scale),
            tokens_per_step=self._options.tokens_per_step or recipe.tokens_per_step,
        )

    def _begin_lookups(self, pool: Pool) -> AsyncResult[dict[str, Any]] | None:
        """Answers to the benchmark prompts, if there are none yet, and what needs no head of them: in the pool, unless it is known."""
        if not self._options.bench:
            return None
        assert self._material is not None, "no target yet"
        deadline = Deadline(max(1.0, self._end - time.monotonic()))
        if not self._bench_answers.is_file():
            started = time.monotonic()
            counts = {"max_new": self._options.max_bench_tokens, "num_prompts": self._options.num_bench_prompts}
            try:
                answers = make_answers(
                    self._material.target, self._material.tokenizer, self._options.bench, lambda share: deadline.check(), **counts
                )  # fmt: skip
            except TimeUp:
                return None
            answers.save(self._bench_answers)
            logger.info("%d answers to benchmark prompts in %.0f s", len(answers.prompt_lens), time.monotonic() - started)
        is_known = self._bench_lookups.is_file() and _IN_LOOKUPS in self._figures()
        return None if is_known else pool.apply_async(describe_lookups, (self._bench_answers,))

    def _count(self, lookups: AsyncResult[dict[str, Any]] | None) -> None:
        """Drafts of all heads behind all tokens of the benchmark's answers, and what they are worth.

        Args:
            lookups: their figures, and their drafts in a file; None = both are there already.

        Raises:
            TimeUp: what is left is another call's.
        """
        names = [name for name in self._options.recipes if (self._results / name / "head" / "config.json").is_file()]
        if not names or not self._options.bench:
            return
        if not self._bench_answers.is_file():
            raise TimeUp
        assert self._material is not None, "no target yet"
        target, deadline = self._material.target, Deadline(max(1.0, self._end - time.monotonic()))
        answers = Answers.load(self._bench_answers)
        for name in names:
            drafts_path = self._bench / f"drafts-{name}.npz"
            if not drafts_path.is_file():
                stored = load_stored(self._results / name / "head", target)
                save_drafts(drafts_path, head_drafts(stored, target, answers, deadline, lambda share: None))
            self._write(describe_head(answers, name, load_drafts(drafts_path), None))
        if lookups is not None:
            try:
                self._write(lookups.get(max(1.0, self._end - time.monotonic())))
            except NoAnswer:
                raise TimeUp from None
        combining = load_drafts(self._bench_lookups)
        for name in names:
            self._write(describe_head(answers, name, load_drafts(self._bench / f"drafts-{name}.npz"), combining))

    def pack(self) -> None:
        """What there is so far."""
        if self._options.pack:
            pack(self._results, self._work, self._options.pack, SERVED)

    def _figures(self) -> dict[str, Any]:
        """Counted so far."""
        path = self._results / "heads.json"
        return dict(json.loads(path.read_text(encoding="utf-8"))) if path.is_file() else {}

    def _write(self, figures: dict[str, Any]) -> None:
        content = json.dumps(self._figures() | figures, indent=1) + "\n"
        (self._results / "heads.json").write_text(content, encoding="utf-8")
        for name, figure in figures.items():
            for length, by_temperature in figure.items():
                cells = (f"{key} {cell['all']} ({cell['without_loops']}) ECE {cell.get('calibration_error')}" for key, cell in by_temperature.items())
                logger.info("%s %s: %s", name, length, "; ".join(cells))


def _make_tiny(options: argparse.Namespace) -> None:
    """A target and prompts in the work folder, and numbers that suit them."""
    from tests.engine.tiny_models import save_tiny_model  # brings transformers

    folder = options.work / "tiny"
    options.model, options.prompts = str(folder / "model"), folder / "prompts.jsonl"
    options.bench = options.prompts
    if not options.prompts.is_file():
        save_tiny_model(folder / "model", num_hidden_layers=4)
        rng = random.Random(0)
        texts = ["".join(rng.choices("abcdefgh ", k=rng.randint(3, 24))) for _ in range(40)]
        options.prompts.write_text("".join(json.dumps({"turns": [text]}) + "\n" for text in texts), encoding="utf-8")
    options.max_prompt_tokens, options.max_answer_tokens, options.max_bench_tokens, options.num_bench_prompts = 24, 16, 16, 6
    options.scale, options.num_steps, options.tokens_per_step = 0.01, options.num_steps or 4, 400


def _rows_per_part(answers: Path, device: str) -> int:
    """As the folder has them: what is there is taken whatever the device; a CPU, which takes long for a part, begins with small ones."""
    about = answers / "answers.json"
    if about.is_file():
        return int(json.loads(about.read_text(encoding="utf-8"))["rows_per_part"])
    return 32 if device == "cpu" else DataConfig().rows_per_part


def main(arguments: list[str] | None = None) -> int:
    """Runs; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--prompts", type=Path, help="JSONL file of training prompts")
    parser.add_argument("--bench", type=Path, help="JSONL file of benchmark prompts, never trained on")
    parser.add_argument("--work", type=Path, required=True, help="folder of answers and checkpoints, some 500 MB; not needed afterwards")
    parser.add_argument("--answers", type=Path, help="folder of the target's answers, such as an earlier call's; without it, one in --work")
    parser.add_argument("--results", type=Path, required=True, help="folder of heads, curves and evaluations")
    parser.add_argument("--pack", type=Path, help="folder of the packed results")
    parser.add_argument("--seconds", type=float, default=540.0, help="of this call")
    parser.add_argument("--recipes", nargs="+", choices=list(RECIPES), default=list(_ORDER), metavar="RECIPE", help=", ".join(RECIPES))
    parser.add_argument("--scale", type=float, default=1.0, help="of all training times")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="target")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--tiny", action="store_true", help="a few steps on a random model and made-up prompts, to try it; the figures say nothing")
    parser.add_argument("--max-prompt-tokens", type=int, default=1024)
    parser.add_argument("--max-answer-tokens", type=int, default=256)
    parser.add_argument("--num-prompts", type=int, default=0, help="training prompts; 0 = all that fit")
    parser.add_argument("--num-bench-prompts", type=int, default=0, help="0 = all that fit")
    parser.add_argument("--max-bench-tokens", type=int, default=MAX_NEW)
    parser.add_argument("--num-steps", type=int, default=0, help="instead of the recipes'")
    parser.add_argument("--tokens-per-step", type=int, default=0, help="instead of the recipes'")
    options = parser.parse_args(arguments)
    if options.tiny:
        _make_tiny(options)
    elif options.prompts is None:
        parser.error("--prompts is needed, or --tiny")
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S", stream=sys.stderr, force=True)
    call = Call(options)
    try:
        return 0 if call.run() else 3
    finally:
        call.pack()


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))  # what there is will be packed
    sys.exit(main())
