"""What the coordinator measures beside its counters: times, tokens and ends, by lane, drafter and request.

Filled by telemetry.py inside the event loop; exposition.py and status.py read it. Names and meanings are in exposition.py.
"""

import time
from collections import Counter, deque
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from specwire.errors import SpecwireError
from specwire.messages import DraftResult, RoundTiming, VerifyResult
from specwire.metrics import LATENCY_BOUNDS, NUM_TOKENS_BOUNDS, STEP_BOUNDS, Histogram
from specwire.policy.cost import verify_ms
from specwire.statuses import status_code
from specwire.tls import ServerCertificates
from specwire.tracing import Tracer

if TYPE_CHECKING:
    from .api_keys import KeyRing
    from .choice import Choice
    from .lane import Lane
    from .link import DraftLink
    from .plan import StepTimes
    from .rpc import Connectors
    from .sequence import Request, Sequence
    from .slots import Round

Value = TypeVar("Value")

STREAM_KINDS = ("generate", "session", "batch")
MAX_PEERS = 256
"""Addresses that have series of their own; those that come later share `OTHER`, so that scaling for months does not fill the memory."""
OTHER = "other"
_K_BOUNDS = (0, 1, 2, 3, 4, 5, 6, 7, 8, 10, 12, 16, 24, 32, 64)
_BUDGET_BOUNDS = (0, 1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024, 2048)
_NUM_RECENT = 128


class StepParts(NamedTuple):
    """Nanoseconds of one step by what they went to; their sum is the step.

    plan: the coordinator's own work until the round was sent. propose: waiting for drafts. verify_hop: the way to the verifier and back,
    packing included. verify_queue: waiting there for rounds before it. forward: the model. commit: from the answer to the streams.
    Where a verifier gives no times, all of its part is verify_hop.
    """

    plan: int
    propose: int
    verify_hop: int
    verify_queue: int
    forward: int
    commit: int


def step_parts(times: "StepTimes", timing: RoundTiming, now_ns: int) -> StepParts:
    """Of a step that is committed now. The verifier's clock may be set while it works: its times count only as far as they fit into the round
    trip."""
    round_trip_ns = times.answered_ns - times.sent_ns
    propose_ns = times.drafted_ns - times.asked_ns
    forward_ns = min(max(0, timing.finished_ns - timing.started_ns), round_trip_ns)
    queue_ns = min(max(0, timing.started_ns - timing.received_ns), round_trip_ns - forward_ns)
    return StepParts(
        plan=times.sent_ns - times.planned_ns - propose_ns,
        propose=propose_ns,
        verify_hop=round_trip_ns - queue_ns - forward_ns,
        verify_queue=queue_ns,
        forward=forward_ns,
        commit=now_ns - times.answered_ns,
    )


class LaneMetrics:
    """One verifier's steps. recent: the last ones.

    With adaptive verification also its drafting steps by their budget (drafts that were verified), drafts that came, its probes and steps of
    fixed K, and what steps were predicted to take and took.
    """

    __slots__ = (
        "budget", "hop", "k", "measured", "measured_step", "num_fixed", "num_offered", "num_probes", "num_speculative_tokens",
        "parts", "predicted", "predicted_step", "recent", "step",
    )  # fmt: skip

    def __init__(self) -> None:
        self.num_speculative_tokens = 0
        self.step = Histogram(STEP_BOUNDS)
        self.parts = {part: Histogram(STEP_BOUNDS) for part in StepParts._fields}
        self.hop = Histogram(STEP_BOUNDS)
        self.predicted = Histogram(STEP_BOUNDS)
        self.measured = Histogram(STEP_BOUNDS)
        self.k = Histogram(_K_BOUNDS, unit=1)
        self.budget = Histogram(_BUDGET_BOUNDS, unit=1)
        self.num_offered = self.num_probes = self.num_fixed = 0
        self.predicted_step = Histogram(STEP_BOUNDS)
        self.measured_step = Histogram(STEP_BOUNDS)
        self.recent: deque[StepParts] = deque(maxlen=_NUM_RECENT)


class DrafterMetrics:
    """One drafter's replies. recent_ns: how long the last ones took."""

    __slots__ = ("hop", "num_draft_tokens", "num_timeouts", "recent_ns", "reply")

    def __init__(self) -> None:
        self.num_draft_tokens = 0
        self.num_timeouts = 0
        self.reply = Histogram(STEP_BOUNDS)
        self.hop = Histogram(STEP_BOUNDS)
        self.recent_ns: deque[int] = deque(maxlen=_NUM_RECENT)


class Metrics:
    """Since the start of the process. Times are time.monotonic_ns().

    Args:
        tracer: whose spans are counted, too.
    """

    def __init__(self, tracer: Tracer | None = None) -> None:
        self.started_ns = time.monotonic_ns()
        self.tracer = tracer
        self.lanes: dict[str, LaneMetrics] = {}
        self.drafters: dict[str, DrafterMetrics] = {}
        self.queue = Histogram(LATENCY_BOUNDS)
        self.first_token_latency = Histogram(LATENCY_BOUNDS)
        self.inter_token_latency = Histogram(STEP_BOUNDS)
        self.request = Histogram(LATENCY_BOUNDS)
        self.prompt_tokens = Histogram(NUM_TOKENS_BOUNDS, unit=1)
        self.generated_tokens = Histogram(NUM_TOKENS_BOUNDS, unit=1)
        self.num_requests = 0
        self.num_generated_tokens = 0
        self.num_cached_tokens = 0
        self.sequences_by_reason: Counter[str] = Counter()
        self.failures_by_code: Counter[str] = Counter()
        self.refusals_by_code: Counter[str] = Counter()
        self.streams_opened: Counter[str] = Counter()
        self.streams_closed: Counter[str] = Counter()
        self.streams_stalled: Counter[str] = Counter()
        self.keys: KeyRing | None = None
        self.certificates: ServerCertificates | None = None
        self.connectors: Connectors | None = None

    def watch(self, keys: "KeyRing | None", certificates: ServerCertificates | None) -> None:
        """What the server counts itself: refusals and changed files that can't be used."""
        self.keys, self.certificates = keys, certificates

    def watch_peers(self, connectors: "Connectors") -> None:
        """What counts the changed files for connections to peers that can't be used."""
        self.connectors = connectors

    def lane(self, address: str) -> LaneMetrics:
        found = self.lanes.get(address)
        return _add(self.lanes, address, LaneMetrics) if found is None else found

    def drafter(self, address: str) -> DrafterMetrics:
        found = self.drafters.get(address)
        return _add(self.drafters, address, DrafterMetrics) if found is None else found

    # --- requests ---

    def stream_closed(self, kind: str) -> None:
        self.streams_closed[kind] += 1

    def admitted(self, request: "Request") -> None:
        self.num_requests += 1
        self.prompt_tokens.observe(len(request.message.prompt_token_ids))

    def refused(self, error: SpecwireError) -> None:
        self.refusals_by_code[status_code(error).name.lower()] += 1

    def placed(self, sequence: "Sequence") -> None:
        self.queue.observe(sequence.placed_ns - sequence.queued_ns)

    def first_token(self, sequence: "Sequence") -> None:
        self.first_token_latency.observe(sequence.first_token_ns - sequence.request.arrived_ns)
        self.num_generated_tokens += sequence.num_generated_tokens

    def sequence_ended(self, sequence: "Sequence", reason: str) -> None:
        self.sequences_by_reason[reason] += 1
        if (variant := sequence.request.variant) is not None:
            variant.ended(sequence, reason)
        self.generated_tokens.observe(sequence.num_generated_tokens)
        self.num_cached_tokens += max(0, sequence.num_cached_tokens)

    def request_failed(self, error: SpecwireError) -> None:
        self.failures_by_code[status_code(error).name.lower()] += 1

    def request_ended(self, request: "Request") -> None:
        self.request.observe(time.monotonic_ns() - request.arrived_ns)

    # --- steps ---

    def committed(self, lane: "Lane", round_: "Round", result: VerifyResult, gaps: dict[tuple[int, int], int]) -> None:
        now_ns = time.monotonic_ns()
        metrics, times, timing, k = self.lane(lane.address), round_.plan.times, result.timing, round_.plan.num_speculative_tokens
        parts = step_parts(times, timing, now_ns)
        for histogram, part_ns in zip(metrics.parts.values(), parts, strict=True):
            histogram.observe(part_ns)
        metrics.step.observe(now_ns - times.planned_ns)
        metrics.recent.append(parts)
        metrics.num_speculative_tokens = k
        metrics.k.observe(k)
        if timing.received_ns:
            metrics.hop.observe(max(0, times.answered_ns - times.sent_ns - max(0, timing.sent_ns - timing.received_ns)))
        self._compare_cost(metrics, lane, round_, result, parts.forward)
        if round_.plan.choice is not None:
            self._note_choice(metrics, round_.plan.choice)
        for (gap_ns, num_tokens), num_sequences in gaps.items():
            self.inter_token_latency.observe_parts(gap_ns, num_tokens, num_sequences)
            self.num_generated_tokens += num_tokens * num_sequences

    def _note_choice(self, metrics: LaneMetrics, choice: "Choice") -> None:
        metrics.num_probes += choice.request.is_probe
        metrics.num_fixed += choice.request.fallback != ""
        if choice.shape.num_requested:
            metrics.num_offered += choice.num_offered
            metrics.budget.observe(choice.budget)

    def priced(self, lane: "Lane", predicted_ms: float, measured_ms: float) -> None:
        metrics = self.lane(lane.address)
        metrics.predicted_step.observe(round(1e6 * predicted_ms))
        metrics.measured_step.observe(round(1e6 * measured_ms))

    def drafted(self, link: "DraftLink", result: DraftResult) -> None:
        metrics, timing, reply_ns = self.drafter(link.drafter.address), result.timing, time.monotonic_ns() - link.asked.sent_ns
        metrics.num_draft_tokens += sum([len(row.draft_tokens) for row in result.rows])
        metrics.reply.observe(reply_ns)
        metrics.recent_ns.append(reply_ns)
        if timing.received_ns:
            metrics.hop.observe(max(0, reply_ns - max(0, timing.sent_ns - timing.received_ns)))

    def draft_missed(self, link: "DraftLink") -> None:
        self.drafter(link.drafter.address).num_timeouts += 1

    def _compare_cost(self, metrics: LaneMetrics, lane: "Lane", round_: "Round", result: VerifyResult, forward_ns: int) -> None:
        """What the verifier's cost table says of a round beside what it took; nothing where either is unknown."""
        cost = lane.verify_cost
        if not cost.num_tokens or not result.num_padded_tokens or not result.timing.received_ns:
            return
        num_kv_tokens = sum([row.base_len for row in round_.rows]) if cost.ms_per_kv_token else 0
        longest_row = max((budget for _, budget in round_.plan.chunks), default=1) if cost.chunk_ms else 1
        metrics.predicted.observe(round(1e6 * verify_ms(cost, result.num_padded_tokens, len(round_.rows), num_kv_tokens, longest_row)))
        metrics.measured.observe(forward_ns)


def _add(peers: dict[str, Value], address: str, make: type[Value]) -> Value:
    """The peer's new entry, or the one that late comers share."""
    key = address if len(peers) < MAX_PEERS else OTHER
    if key not in peers:
        peers[key] = make()
    return peers[key]
