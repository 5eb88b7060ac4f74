"""What a coordinator says of its state: for `specwire status` and whoever watches."""

import enum
from dataclasses import dataclass, field

from specwire.messages.describe import DraftCost, VerifyCost

_NO_COST = VerifyCost()


@dataclass(frozen=True, slots=True)
class StepStatus:
    """Median milliseconds of a lane's last steps, as a whole and by what they went to; 0 before the first step.

    plan: the coordinator's own work. propose: waiting for drafts. verify_hop: the way to the verifier and back. verify_queue: waiting
    there. forward: the model. commit: from the answer to the streams.
    """

    step_ms: float = 0.0
    plan_ms: float = 0.0
    propose_ms: float = 0.0
    verify_hop_ms: float = 0.0
    verify_queue_ms: float = 0.0
    forward_ms: float = 0.0
    commit_ms: float = 0.0


@dataclass(frozen=True, slots=True)
class PolicyStatus:
    """What a lane's adaptive verification does; counts since the start.

    Args:
        fallback: why K is fixed nevertheless; num_fixed_steps: steps in which it was.
        num_probes: steps that asked for drafts to learn what they are worth.
        num_offered_tokens, num_kept_tokens: drafts that came, and those of them that were verified.
        forecast: acceptance rates by position, to be expected if all drafts were verified.
        cost_error: median of |predicted - measured| / measured of the last steps.
        verify_factor, hop_factor: what the verifier's table, and the time between the peers, are multiplied by.
        run_ahead_factor, lockstep_factor: what whole steps are multiplied by, by the clock, that run ahead, or wait for drafts.
    """

    is_adaptive: bool = False
    fallback: str = ""
    num_fixed_steps: int = 0
    num_probes: int = 0
    num_offered_tokens: int = 0
    num_kept_tokens: int = 0
    forecast: tuple[float, ...] = ()
    cost_error: float = 0.0
    verify_factor: float = 1.0
    hop_factor: float = 1.0
    run_ahead_factor: float = 1.0
    lockstep_factor: float = 1.0


@dataclass(frozen=True, slots=True)
class SettingStatus:
    """One key of the configuration in effect. value and configured are JSON; reasons say why they differ. source: "default" if it was not written,
    empty where the coordinator can't know where."""

    key: str
    value: str
    configured: str = ""
    source: str = ""
    reasons: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class CalibrationStatus:
    """What is known of the scores of one kind of drafts: of greedy sequences, or of others.

    Args:
        calibration_error: mean of |predicted - observed| acceptance.
        acceptance_by_position: shares of observed drafts that were accepted; num_observed_by_position: how many were observed.
    """

    method: str
    is_greedy: bool = False
    calibration_error: float = 0.0
    calibration_error_by_position: tuple[float, ...] = ()
    acceptance_by_position: tuple[float, ...] = ()
    num_observed_by_position: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class VariantStatus:
    """What the requests of one configuration came to since the canary's start; sequences count when they end.

    Args:
        share: of the requests that don't ask for a variant.
        config: what of the speculative configuration a canary may change, as JSON; schedule: K in effect, as JSON ranges.
        first_token_ms, token_ms: means of its sequences, from arrival to the first token, and between tokens.
    """

    name: str
    share: float = 0.0
    config: str = ""
    schedule: str = ""
    num_requests: int = 0
    num_ended: int = 0
    num_failed: int = 0
    num_generated_tokens: int = 0
    num_steps: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    first_token_ms: float = 0.0
    token_ms: float = 0.0

    @property
    def acceptance_length(self) -> float:
        """Mean tokens of a verification that had drafts; 1 without drafts."""
        return 1.0 + self.num_accepted_tokens / self.num_drafts if self.num_drafts else 1.0


class CanaryAction(enum.Enum):
    """What to do with the canary; values are those of the protocol."""

    START = 1
    SET_SHARE = 2
    PROMOTE = 3
    ROLL_BACK = 4


_NO_POLICY = PolicyStatus()


@dataclass(frozen=True, slots=True)
class LaneStatus:
    """One verifier. reason: why it is not ready. num_speculative_tokens: K of its last step. num_steps: since the coordinator's start.
    verify_cost: as it describes itself."""

    index: int
    address: str
    is_ready: bool = False
    reason: str = ""
    is_draining: bool = False
    num_running: int = 0
    num_speculative_tokens: int = 0
    num_free_blocks: int = 0
    num_blocks: int = 0
    num_steps: int = 0
    times: StepStatus = StepStatus()
    verify_cost: VerifyCost = _NO_COST
    policy: PolicyStatus = _NO_POLICY


@dataclass(frozen=True, slots=True)
class DrafterStatus:
    """One drafter. Connected: to some lane; late: some lane waits for it. max_num_seqs 0 = no limit. reply_ms: median of its last replies;
    0 before the first. draft_cost, draft_ms_per_kv_token: as it describes itself."""

    address: str
    method: str = ""
    model_id: str = ""
    is_connected: bool = False
    is_late: bool = False
    is_draining: bool = False
    num_open: int = 0
    max_num_seqs: int = 0
    reply_ms: float = 0.0
    num_replies: int = 0
    num_timeouts: int = 0
    num_draft_tokens: int = 0
    draft_cost: tuple[DraftCost, ...] = ()
    draft_ms_per_kv_token: float = 0.0


@dataclass(frozen=True, slots=True)
class CoordinatorStatus:
    """State and limits now; numbers called num_* that only grow count since the start.

    Args:
        clipped: one sentence for each number that is less than configured.
        num_waiting: sequences in the queue; max_queue: its bound.
        num_parked: sequences that have no place until their clients read; num_pauses: how often one lost its place so.
        num_requests, num_requests_ended: admitted, and of those ended.
        num_draft_tokens: verified ones; drafts_per_position, accepted_per_position: how many drafts had a token there, and how many of
            those were accepted.
        sequences_by_reason: ended sequences: stop, length, cancelled, error.
        fallbacks_by_cause: sequences and steps that went without drafts though K was above 0.
        speculation: its configuration in effect; calibration: of adaptive verification.
        variants: base and canary while a canary runs.
    """

    version: str
    uptime_s: float
    is_ready: bool
    reason: str = ""
    model_id: str = ""
    max_model_len: int = 0
    max_num_seqs: int = 0
    max_num_batched_tokens: int = 0
    num_speculative_tokens: int = 0
    max_queue: int = 0
    num_waiting: int = 0
    num_requests: int = 0
    num_requests_ended: int = 0
    num_prompt_tokens: int = 0
    num_generated_tokens: int = 0
    num_preemptions: int = 0
    num_pauses: int = 0
    num_parked: int = 0
    num_drafts: int = 0
    num_draft_tokens: int = 0
    num_accepted_tokens: int = 0
    clipped: tuple[str, ...] = ()
    drafts_per_position: tuple[int, ...] = ()
    accepted_per_position: tuple[int, ...] = ()
    sequences_by_reason: dict[str, int] = field(default_factory=dict)
    fallbacks_by_cause: dict[str, int] = field(default_factory=dict)
    lanes: tuple[LaneStatus, ...] = ()
    drafters: tuple[DrafterStatus, ...] = ()
    speculation: tuple[SettingStatus, ...] = ()
    calibration: tuple[CalibrationStatus, ...] = ()
    variants: tuple[VariantStatus, ...] = ()
