"""Where the time of a lockstep round with drafts goes in a verifier, without gRPC: host before the device, device, host behind it.

One round at a time, K drafts a row, at three levels that contain each other: `engine` is the round runner; `verifier` plans rounds and takes their
results in one thread; `worker` has the threads that a service has. Device times are taken in rounds of their own, since events cost the host time.
"""

import statistics
import time
from collections import deque
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch

from benchmarks.gpu.sizes import BLOCK_SIZE, Sizes
from specwire.engine.graphs.results import Round
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow, SentRound
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.loader import dummy_model
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import VerifyOpen, VerifyResult, VerifyRound, VerifyRow
from specwire.sampling_params import SamplingParams
from verifier_svc.launched import LaunchedRound
from verifier_svc.metrics import VerifierMetrics
from verifier_svc.round_executor import RoundExecutor
from verifier_svc.slots import VerifierLimits
from verifier_svc.verifier import Verifier
from verifier_svc.worker import RoundWorker

_NUM_ROUNDS, _WARM_ROUNDS, _TINY_ROUNDS = 60, 10, 4
_GREEDY = SamplingParams(temperature=0.0, max_tokens=None)
Parts = list[dict[str, float]]


@dataclass(slots=True)
class Marks:
    """Of one launch, ns since the epoch, and with events on the device ms between them."""

    begun_ns: int = 0
    packed_ns: int = 0
    replayed_ns: int = 0
    launched_ns: int = 0
    events: list[torch.cuda.Event] = field(default_factory=list)

    def host_ms(self) -> dict[str, float]:
        """Of the launch."""
        times = (self.begun_ns, self.packed_ns, self.replayed_ns, self.launched_ns)
        return {name: (end - begin) / 1e6 for name, begin, end in zip(("pack_ms", "replay_ms", "behind_ms"), times, times[1:], strict=False)}

    def device_ms(self) -> dict[str, float]:
        """Once the round is over; empty without events."""
        names = ("upload_device_ms", "graph_device_ms", "download_device_ms") if self.events else ()
        return {name: begin.elapsed_time(end) for name, begin, end in zip(names, self.events, self.events[1:], strict=False)}


class TimedRunner(RoundRunner):
    """Notes when the parts of a launch begin and end.

    Attributes:
        marks: of the last launch.
        uses_events: they are put between the upload, the graph and the download, too.
    """

    marks = Marks()
    uses_events = False

    def launch(self, rows: Sequence[RoundRow]) -> Round:
        """See `RoundRunner.launch`."""
        self.marks = Marks(begun_ns=time.time_ns())
        self._record()
        launched = super().launch(rows)
        self._record()
        self.marks.launched_ns = time.time_ns()
        return launched

    def _run(self, sent: SentRound) -> None:
        self.marks.packed_ns = time.time_ns()
        self._record()
        super()._run(sent)
        self._record()
        self.marks.replayed_ns = time.time_ns()

    def _record(self) -> None:
        if self.uses_events:
            event = torch.cuda.Event(enable_timing=True)
            event.record()
            self.marks.events.append(event)


class TimedWorker(RoundWorker):
    """Notes when a round had arrived, when its reader's turn came, and when its answer was there.

    Attributes:
        arrived_ns, begun_ns, finished_ns: of the last round.
    """

    arrived_ns = begun_ns = finished_ns = 0

    def _finish(self, job: Any, launched: LaunchedRound, arrived_ns: int) -> VerifyResult:
        self.arrived_ns, self.begun_ns = arrived_ns, time.time_ns()
        result = super()._finish(job, launched, arrived_ns)
        self.finished_ns = time.time_ns()
        return result


@dataclass(slots=True)
class Rounds:
    """Lockstep rounds over `count` slots behind prompts of random ids, as a coordinator sends them.

    Args:
        k: drafts of each row.
    """

    count: int
    k: int
    num_prompt_tokens: int
    vocab_size: int
    number: int = 0
    lengths: list[int] = field(default_factory=list)
    last_tokens: list[int] = field(default_factory=list)

    def open(self, slot: int) -> VerifyRound:
        """A slot with its prompt, all in one row."""
        self.number += 1
        prompt = torch.randint(3, self.vocab_size, (self.num_prompt_tokens,)).tolist()
        message = VerifyOpen(slot, self.number, prompt, self.num_prompt_tokens, _GREEDY, noise_key=slot)
        return VerifyRound(1, 0, self.number, opens=[message], rows=[VerifyRow(slot, self.number, 0, token_budget=self.num_prompt_tokens)])

    def take(self, result: VerifyResult) -> None:
        """An opened slot's first token."""
        [row] = result.rows
        self.lengths.append(self.num_prompt_tokens + 1)
        self.last_tokens += row.token_ids

    def step(self, epochs: Sequence[int], before: Sequence[int]) -> VerifyRound:
        """The next round of all slots.

        Args:
            epochs: of the slots.
            before: the round of each one's last row.
        """
        self.number += 1
        drafts = torch.randint(3, self.vocab_size, (self.count, self.k)).tolist()
        rows = [
            VerifyRow(slot, epochs[slot], before[slot], base_len=self.lengths[slot], first_token=self.last_tokens[slot], draft_tokens=drafts[slot])
            for slot in range(self.count)
        ]
        return VerifyRound(1, 0, self.number, rows=rows)

    def settle(self, result: VerifyResult) -> None:
        """What a round emitted."""
        for slot, row in enumerate(result.rows):
            self.lengths[slot] += len(row.token_ids)
            self.last_tokens[slot] = row.token_ids[-1]


def time_rounds(config: ModelConfig, sizes: Sizes, device: str, *, is_tiny: bool) -> Iterator[dict[str, Any]]:
    """A row for each number of sequences and level."""
    num_rounds, num_warm = (_TINY_ROUNDS, 1) if is_tiny else (_NUM_ROUNDS, _WARM_ROUNDS)
    k, most = sizes.num_draft_tokens, sizes.max_num_seqs
    max_len = sizes.num_prompt_tokens + (num_rounds + num_warm + 2) * (k + 1)
    num_blocks = -(-max_len // BLOCK_SIZE)
    dtype = torch.bfloat16 if device != "cpu" else torch.float32
    model = dummy_model(config, dtype, device)
    cache = KVCache(config, most * num_blocks, dtype, device)
    max_tokens = max(sizes.num_prompt_tokens, most * (k + 1))
    runner = TimedRunner(model, cache, RoundLimits(most, k, max_tokens, num_blocks * BLOCK_SIZE))
    runner.capture()
    limits = VerifierLimits(config.vocab_size, num_blocks * BLOCK_SIZE, most, k, max_tokens)
    for count in sizes.concurrency:
        columns = {"c": count, "k": k}
        tables: list[list[int]] = torch.arange(count * num_blocks).view(count, num_blocks).tolist()
        parts = _run_engine(_engine_rounds(runner, model, tables, sizes, num_rounds + num_warm), runner)
        if device != "cpu":
            runner.uses_events = True
            timed = _device_parts(_engine_rounds(runner, model, tables, sizes, num_rounds + num_warm), runner)
            parts = [host | on_device for host, on_device in zip(parts, timed, strict=True)]
            runner.uses_events = False
        yield columns | _row("engine", parts[num_warm:])
        verifier = Verifier(RoundExecutor(runner, cache, most), limits, enable_prefix_cache=False)
        rounds = Rounds(count, k, sizes.num_prompt_tokens, config.vocab_size)
        yield columns | _row("verifier", _run_verifier(runner, verifier, rounds, num_rounds + num_warm)[num_warm:])
        verifier.reset()
        rounds = Rounds(count, k, sizes.num_prompt_tokens, config.vocab_size)
        yield columns | _row("worker", _run_worker(runner, verifier, rounds, num_rounds + num_warm)[num_warm:])
        verifier.reset()


def _row(level: str, parts: Parts) -> dict[str, Any]:
    """Medians."""
    return {"level": level} | {name: statistics.median(part[name] for part in parts) for name in parts[0]}


def _engine_rounds(
    runner: TimedRunner, model: Decoder, tables: list[list[int]], sizes: Sizes, num_rounds: int
) -> Iterator[tuple[int, Round]]:  # fmt: skip
    """When each was begun, and the round: launched; the next one is launched once this one was read."""
    k, vocab_size = sizes.num_draft_tokens, model.config.vocab_size
    sampling = SlotSampling(_GREEDY, key=1, vocab_size=vocab_size, token_ids=[0], num_prompt_tokens=1, device=model.device)
    for slot in range(len(tables)):
        runner.open(slot, sampling)
    for number in range(num_rounds):
        position = sizes.num_prompt_tokens + number
        tokens = torch.randint(3, vocab_size, (len(tables), 1 + k)).tolist()
        blocks = -(-(position + k + 1) // BLOCK_SIZE)
        rows = [RoundRow(slot, position, tokens[slot], k, table[:blocks], sampling) for slot, table in enumerate(tables)]
        started_ns = time.time_ns()
        yield started_ns, runner.launch(rows)


def _run_engine(rounds: Iterator[tuple[int, Round]], runner: TimedRunner) -> Parts:
    parts = []
    for started_ns, launched in rounds:
        launched.wait()
        arrived_ns = time.time_ns()
        launched.results()
        ended_ns = time.time_ns()
        waited_ms, read_ms = (arrived_ns - runner.marks.launched_ns) / 1e6, (ended_ns - arrived_ns) / 1e6
        parts.append({"total_ms": (ended_ns - started_ns) / 1e6, **runner.marks.host_ms(), "wait_ms": waited_ms, "read_ms": read_ms})
    return parts


def _device_parts(rounds: Iterator[tuple[int, Round]], runner: TimedRunner) -> Parts:
    parts = []
    for _, launched in rounds:
        launched.results()
        torch.cuda.synchronize()
        parts.append(runner.marks.device_ms())
    return parts


def _run_verifier(runner: TimedRunner, verifier: Verifier, rounds: Rounds, num_rounds: int) -> Parts:
    epochs = []
    for slot in range(rounds.count):
        opening = rounds.open(slot)
        rounds.take(verifier.finish(verifier.launch(opening)))
        epochs.append(opening.round)
    parts, before = [], list(epochs)
    for _ in range(num_rounds):
        request = rounds.step(epochs, before)
        before = [request.round] * rounds.count
        started_ns = time.time_ns()
        launched = verifier.launch(request)
        launched_ns = time.time_ns()
        launched.wait()
        arrived_ns = time.time_ns()
        result = verifier.finish(launched)
        ended_ns = time.time_ns()
        rounds.settle(result)
        parts.append(
            {
                "total_ms": (ended_ns - started_ns) / 1e6,
                "plan_ms": (runner.marks.begun_ns - started_ns) / 1e6,
                **runner.marks.host_ms(),
                "noted_ms": (launched_ns - runner.marks.launched_ns) / 1e6,
                "wait_ms": (arrived_ns - launched_ns) / 1e6,
                "finish_ms": (ended_ns - arrived_ns) / 1e6,
            }
        )
    return parts


def _run_worker(runner: TimedRunner, verifier: Verifier, rounds: Rounds, num_rounds: int) -> Parts:
    with ThreadPoolExecutor(1) as launcher, ThreadPoolExecutor(1) as reader:
        worker = TimedWorker(verifier, launcher, reader, VerifierMetrics())
        queued: deque[VerifyRound] = deque()
        epochs = []
        for slot in range(rounds.count):
            opening = rounds.open(slot)
            rounds.take(worker.run(opening, queued).result())
            epochs.append(opening.round)
        parts, before = [], list(epochs)
        for _ in range(num_rounds):
            request = rounds.step(epochs, before)
            before = [request.round] * rounds.count
            started_ns = time.time_ns()
            result = worker.run(request, queued).result()
            ended_ns = time.time_ns()
            rounds.settle(result)
            timing = result.timing
            parts.append(
                {
                    "total_ms": (ended_ns - started_ns) / 1e6,
                    "forward_span_ms": (timing.finished_ns - timing.started_ns) / 1e6,
                    "handed_over_ms": (timing.started_ns - started_ns) / 1e6,
                    "plan_ms": (runner.marks.begun_ns - timing.started_ns) / 1e6,
                    **runner.marks.host_ms(),
                    "wait_ms": (worker.arrived_ns - runner.marks.launched_ns) / 1e6,
                    "turn_ms": (worker.begun_ns - worker.arrived_ns) / 1e6,
                    "finish_ms": (worker.finished_ns - worker.begun_ns) / 1e6,
                    "answer_ms": (ended_ns - worker.finished_ns) / 1e6,
                }
            )
    return parts
