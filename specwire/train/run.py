"""`specwire train` from prompts to a checkpoint: answers, features, training, evaluation, export; each can be interrupted and gone on with."""

import json
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import torch

from specwire.engine.checkpoint import resolve_model
from specwire.engine.models.loader import check_device, parse_dtype
from specwire.tokenizer import Tokenizer
from specwire.train.answers import check_about, load_or_generate
from specwire.train.batches import BatchSource
from specwire.train.data import DataConfig, Job, Sequences, jobs_hash, join_answers, make_jobs
from specwire.train.deadline import Deadline, TimeUp
from specwire.train.evaluate import Evaluation, evaluate
from specwire.train.export import Trained, export
from specwire.train.heads import Head, choose_draft_ids, feature_layers, make_head
from specwire.train.recipe import Recipe
from specwire.train.sampled import Sampled, fit_sampled
from specwire.train.target import Target
from specwire.train.trainer import Trainer

logger = logging.getLogger(__name__)

PHASES = ("answers", "features", "training", "evaluation")

OnProgress = Callable[[str, float, float, str], None]
"""Called with (phase, done, total, what to show beside it)."""


@dataclass(frozen=True, slots=True)
class TrainOptions:
    """One run.

    Args:
        model: the target: a folder, .gguf file, hub id or the default model's name.
        prompts: JSONL file (also gzipped) with `prompt` or `turns`.
        output: folder of the run; the checkpoint is its subfolder `head`.
        recipe: how the head is made.
        data: how the answers are.
        answers: folder of the answers, to share them between heads; None = the output's own.
        device: cpu, cuda or cuda:N.
        dtype: of the target; auto = bfloat16 on CUDA, float32 on a CPU.
        max_seconds: the run stops then, to be gone on with; 0 = never.
    """

    model: str
    prompts: Path
    output: Path
    recipe: Recipe
    data: DataConfig = field(default_factory=DataConfig)
    answers: Path | None = None
    device: str = "cpu"
    dtype: str = "auto"
    max_seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class TrainResult:
    """How far a run came.

    Args:
        phase: the one that it stopped in; empty = all are done.
        head: folder of the checkpoint; None if it is not done.
        evaluation: of the head.
    """

    phase: str
    head: Path | None = None
    evaluation: Evaluation | None = None


class Material:
    """What the heads of one target learn from, made when it is first asked for: several of them may share it.

    Args:
        options: model, prompts, data, device and dtype count.

    Raises:
        SpecwireError: a model, file or value that can't be used.
    """

    def __init__(self, options: TrainOptions) -> None:
        check_device(options.device)
        folder, device = resolve_model(options.model), torch.device(options.device)
        name = "bfloat16" if device.type == "cuda" else "float32"
        self.target = Target(folder, parse_dtype(name if options.dtype == "auto" else options.dtype), device)
        self.tokenizer = Tokenizer.from_folder(folder)
        self.jobs = make_jobs(options.prompts, self.tokenizer, options.data, self.target.config.max_position_embeddings)
        self._data = options.data
        self._sequences: Sequences | None = None
        self._source: BatchSource | None = None
        self._feature_layers: tuple[int, ...] = ()

    def sequences(self, folder: Path, deadline: Deadline, on_answers: Callable[[float, float], None]) -> Sequences:
        """Prompts and answers; those that the folder lacks are generated."""
        if self._sequences is None:
            answers = load_or_generate(folder, self.target, self.jobs, self._data, deadline, on_answers)
            self._sequences = join_answers(self.jobs, answers)
            counts = len(self._sequences.lengths), self._sequences.num_answer_tokens, self._sequences.num_loops
            logger.info("%d answers, %d tokens, %d loops cut", *counts)
        return self._sequences

    def source(self, feature_layers: tuple[int, ...]) -> BatchSource:
        """Of these layers; that of other layers is dropped."""
        assert self._sequences is not None, "no sequences yet"
        if self._source is None or self._feature_layers != feature_layers:
            self._source = None  # frees its memory before the next one looks what is free
            self._source, self._feature_layers = BatchSource(self.target, self._sequences, feature_layers), feature_layers
        return self._source


def train(options: TrainOptions, on_progress: OnProgress, material: Material | None = None) -> TrainResult:
    """Runs all phases that are left.

    Args:
        material: of options that are equal in what it is made of; None = its own.

    Raises:
        SpecwireError: a model, file or value that can't be used, or an output folder of another run.
    """
    deadline = Deadline(options.max_seconds)
    material = material or Material(options)
    target, jobs = material.target, material.jobs
    options.output.mkdir(parents=True, exist_ok=True)
    made_for = {"model": model_name(options.model), "weights_hash": target.weights_hash, "jobs": jobs_hash(jobs)}
    about = made_for | {"recipe": options.recipe.to_dict(), "data": options.data.to_dict()}
    check_about(options.output / "run.json", about, "a head", "name another --output, or delete this one")
    phase = PHASES[0]

    def report(done: float, total: float, note: str = "") -> None:
        on_progress(phase, done, total, note)

    try:
        sequences = material.sequences(options.answers or options.output / "answers", deadline, report)
        run = _Run(options, target, sequences, material.source(feature_layers(options.recipe, target.config.num_layers)))
        phase = PHASES[1]
        run.prepare(deadline, report)
        phase = PHASES[2]
        run.trainer.run(deadline, report)
        run.save_curve()
        phase = PHASES[3]
        report(0, 1)
        evaluation = evaluate(run.head, target, run.source, options.recipe.num_draft_tokens, deadline)
        sampled = run.fit_sampled(jobs, deadline)
        report(1, 1, f"{evaluation.greedy.acceptance_length:.2f} tokens per step")
    except TimeUp:
        return TrainResult(phase)
    return TrainResult("", run.export(evaluation, sampled), evaluation)


class _Run:
    """One head on its way."""

    def __init__(self, options: TrainOptions, target: Target, sequences: Sequences, source: BatchSource) -> None:
        recipe = options.recipe
        self._options, self._target, self._sequences, self.source = options, target, sequences, source
        self._feature_layers = feature_layers(recipe, target.config.num_layers)
        self._draft_ids = choose_draft_ids(sequences, recipe.draft_vocab_size, target.config.vocab_size)
        draft_ids = torch.from_numpy(self._draft_ids).to(target.device) if self._draft_ids is not None else None
        self._module = make_head(recipe, target, len(self._feature_layers), draft_ids)
        assert isinstance(self._module, Head), f"{type(self._module).__name__} lacks a part of the head's protocol"
        self.head: Head = self._module
        self.trainer = Trainer(recipe, self._module, target, self.source, draft_ids, options.output / "checkpoint.pt")

    def prepare(self, deadline: Deadline, report: Callable[[float, float], None]) -> None:
        """Keeps the features of all tokens where they fit."""
        if self.source.is_kept:
            report(1, 1)
            return
        if not self.source.fits:
            logger.info("features take %.1f GB, more than is kept: they are computed for each batch", self.source.num_bytes / 1e9)
            report(1, 1)
            return

        def on_batch(done: int, total: int) -> None:
            deadline.check()
            report(done, total)

        self.source.keep(on_batch)

    def save_curve(self) -> None:
        content = {"recipe": self._options.recipe.to_dict(), "curve": self.trainer.curve}
        (self._options.output / "curve.json").write_text(json.dumps(content) + "\n", encoding="utf-8")

    def fit_sampled(self, jobs: Sequence[Job], deadline: Deadline) -> Sampled:
        """At the temperature of the answers and at 1."""
        data, num_drafts = self._options.data, self._options.recipe.num_draft_tokens
        temperatures = sorted({data.temperature, 1.0})
        return fit_sampled(self.head, self._target, jobs, self._feature_layers, num_drafts, data.max_answer_tokens, temperatures, deadline)

    def export(self, evaluation: Evaluation, sampled: Sampled) -> Path:
        folder = self._options.output / "head"
        trained = Trained(
            recipe=self._options.recipe,
            data=self._options.data,
            target_name=model_name(self._options.model),
            feature_layers=self._feature_layers,
            draft_ids=self._draft_ids,
            sequences=self._sequences,
            evaluation=evaluation,
            sampled=sampled,
            num_steps=self.trainer.num_steps,
            seconds=self.trainer.seconds,
        )
        export(folder, self._module.state_dict(), self._target, trained)
        return folder


def model_name(model: str) -> str:
    """As the checkpoint names the target: a hub id or a known name as it is, of a path only its end."""
    path = Path(model)
    return (path.stem if path.suffix == ".gguf" else path.resolve().name) if path.exists() else model
