"""The requests and their sequences. Only commit.py changes a sequence's tokens."""

import time
from asyncio import TimerHandle
from collections.abc import Callable
from typing import TYPE_CHECKING

from specwire.messages import GenerateRequest, SpecStats, Usage

from .draft_log import DraftLog
from .sink import Sink
from .stop import StopRules

if TYPE_CHECKING:
    from .draft_slot import DraftSlot
    from .slots import Slot
    from .trace_records import RequestTrace, SequenceTrace
    from .variants import Variant

UNLIMITED = 1 << 30


class Request:
    """One admitted request: what its choices share. trace: None unless it is traced. variant: while a canary runs."""

    __slots__ = (
        "arrival", "arrived_ns", "deadline", "is_synthetic", "message", "noise_key", "num_unfinished", "on_end", "sequences", "sink", "trace",
        "variant",
    )  # fmt: skip

    def __init__(
        self,
        message: GenerateRequest,
        sink: Sink,
        arrival: int,
        noise_key: int,
        on_end: "Callable[[Request], None]",
        *,
        is_synthetic: bool,
        variant: "Variant | None" = None,
    ) -> None:
        self.message = message
        self.is_synthetic = is_synthetic
        self.variant = variant
        self.deadline: TimerHandle | None = None
        self.trace: RequestTrace | None = None
        self.sink = sink
        self.arrival = arrival
        self.arrived_ns = time.monotonic_ns()
        self.noise_key = noise_key
        self.on_end = on_end
        self.sequences: list[Sequence] = []
        self.num_unfinished = message.sampling.n

    @property
    def label(self) -> str:
        """What the log calls it: the client's label, and its trace if it has one."""
        return repr(self.message.request_id) if self.trace is None else f"{self.message.request_id!r}, trace {self.trace.trace_id:032x}"

    @property
    def unfinished(self) -> list["Sequence"]:
        return [sequence for sequence in self.sequences if not sequence.is_finished]

    def choice_ended(self) -> None:
        """With the last one the request has ended: it lets go of its sequences, and they of their slots, which hold them in turn. So all of it is
        freed once its last row in flight is answered, without the garbage collector, which hardly ever comes."""
        self.num_unfinished -= 1
        if not self.num_unfinished:
            self.on_end(self)
            for sequence in self.sequences:
                sequence.slot = None
            self.sequences.clear()


class Sequence:
    """One choice of a request: its tokens, where it runs, and its statistics.

    Attributes:
        token_ids: prompt, then committed output.
        max_len: most tokens of prompt and output together.
        max_drafts: most drafts of a step that its request allows.
        order: what it is admitted by, smallest first; the largest is preempted first.
        slot: its place at a verifier; a closed one until it is opened anew.
        draft_slot: its place at a drafter.
        draft_log: the record of its verifications, if its request asks for one.
        is_paused: waits for its client to read; without a slot meanwhile if others want it (Admission.parked).
        accept_counts: verifications with drafts by the number accepted.
        num_setbacks: failed attempts since its last new token.
        trace: None unless its request is traced.
        queued_ns, placed_ns, first_token_ns, last_token_ns: time.monotonic_ns() of the last queueing and placing, and of its output; 0 = none.
    """

    __slots__ = (
        "accept_counts", "choice", "draft_log", "draft_slot", "first_token_ns", "is_finished", "is_greedy", "is_paused", "is_waiting",
        "last_token_ns", "max_drafts", "max_len", "num_cached_tokens", "num_draft_tokens", "num_preemptions", "num_prompt_tokens", "num_setbacks",
        "num_steps", "order", "placed_ns", "queued_ns", "request", "rules", "runs_ahead", "sink", "slot", "token_ids", "trace",
    )  # fmt: skip

    def __init__(self, request: Request, choice: int, rules: StopRules, max_len: int, num_speculative_tokens: int) -> None:
        sampling = request.message.sampling
        self.request = request
        self.choice = choice
        self.rules = rules
        self.sink = request.sink
        self.token_ids = list(request.message.prompt_token_ids)
        self.num_prompt_tokens = len(self.token_ids)
        self.max_len = max_len
        self.max_drafts = UNLIMITED if sampling.max_draft_tokens is None else sampling.max_draft_tokens
        self.runs_ahead = sampling.runs_ahead
        self.is_greedy = sampling.is_greedy
        self.order = (sampling.priority, request.arrival, choice)
        self.slot: Slot | None = None
        self.draft_slot: DraftSlot | None = None
        self.trace: SequenceTrace | None = None
        self.draft_log = DraftLog() if request.message.report_drafts else None
        self.is_waiting = False
        self.is_paused = False
        self.is_finished = False
        self.accept_counts = [0] * (num_speculative_tokens + 1)
        self.num_draft_tokens = 0
        self.num_steps = 0
        self.num_cached_tokens = -1
        self.num_preemptions = 0
        self.num_setbacks = 0
        self.queued_ns = self.placed_ns = self.first_token_ns = self.last_token_ns = 0

    @property
    def num_generated_tokens(self) -> int:
        return len(self.token_ids) - self.num_prompt_tokens

    def usage(self) -> Usage:
        return Usage(self.num_prompt_tokens, max(0, self.num_cached_tokens), self.num_generated_tokens)

    def spec_stats(self) -> SpecStats:
        counts = self.accept_counts
        return SpecStats(
            num_drafts=sum(counts),
            num_draft_tokens=self.num_draft_tokens,
            num_accepted_tokens=sum(accepted * count for accepted, count in enumerate(counts)),
            accepted_per_position=tuple(sum(counts[position:]) for position in range(1, len(counts))),
            num_steps=self.num_steps,
            num_preemptions=self.num_preemptions,
            synthetic=self.request.is_synthetic,
        )
