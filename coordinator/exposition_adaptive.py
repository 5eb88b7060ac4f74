"""The metrics of adaptive verification by name, and their values now."""

from collections.abc import Iterator
from functools import partial

from specwire.metrics import Metric, Sample, make_counter, make_gauge, make_histogram

from .engine import Engine
from .metrics import LaneMetrics

_counter, _gauge, _histogram = partial(make_counter, "coordinator"), partial(make_gauge, "coordinator"), partial(make_histogram, "coordinator")
OFFERED = _counter(
    "offered_tokens", "draft tokens that came in time to a step with adaptive verification; budget_tokens has those verified", "verifier"
)
PROBES = _counter("probe_steps", "steps that asked for drafts to learn what they are worth (adaptive verification)", "verifier")
FIXED = _counter("fixed_steps", "steps of fixed K in spite of adaptive verification, since costs are not known", "verifier")
BUDGET = _histogram("budget_tokens", "draft tokens that a step with drafts verified (B; adaptive verification)", "verifier")
PREDICTED_STEP = _histogram("predicted_step_seconds", "whole steps as the cost model has them (adaptive verification)", "verifier")
MEASURED_STEP = _histogram("measured_step_seconds", "the same steps as they were", "verifier")
COST_ERROR = _gauge("cost_error_ratio", "median of |predicted - measured| / measured of the last steps (adaptive verification)", "verifier")
COST_FACTOR = _gauge(
    "cost_factor",
    "what predictions are multiplied by: verify, of the verifier's table; hop, time between peers; run_ahead and lockstep, whole steps by the clock",
    "verifier", "part",
)  # fmt: skip
CALIBRATION_ERROR = _gauge(
    "calibration_error", "mean of |predicted - observed| acceptance of drafts at this position (from 0); sampling: greedy or random",
    "method", "sampling", "position",
)  # fmt: skip
ADAPTIVE_METRICS: tuple[Metric, ...] = (
    OFFERED, PROBES, FIXED, BUDGET, PREDICTED_STEP, MEASURED_STEP, COST_ERROR, COST_FACTOR, CALIBRATION_ERROR
)  # fmt: skip


def collect_adaptive(engine: Engine) -> Iterator[Sample]:
    """Everything as it is now; may run on any thread. Errors and factors are there only where there is something that they are about."""
    lanes = list(engine.lanes)
    for address, values in {**{lane.address: _NO_STEPS for lane in lanes}, **dict(engine.metrics.lanes)}.items():
        for metric, value in (
            (OFFERED, values.num_offered),
            (PROBES, values.num_probes),
            (FIXED, values.num_fixed),
            (BUDGET, values.budget),
            (PREDICTED_STEP, values.predicted_step),
            (MEASURED_STEP, values.measured_step),
        ):
            yield Sample(metric, (address,), value)
    for lane in lanes:
        if (policy := lane.policy) is not None:
            cost = policy.cost
            yield Sample(COST_ERROR, (lane.address,), cost.clock.errors.median)
            for part, factor in (
                ("verify", cost.verify.correction.factor),
                ("hop", cost.hops.correction.factor),
                ("run_ahead", cost.clock.run_ahead.factor),
                ("lockstep", cost.clock.lockstep.factor),
            ):
                yield Sample(COST_FACTOR, (lane.address, part), factor)
    for kind in engine.calibration_statistics:
        for position, error in enumerate(kind.calibration_error_by_position):
            yield Sample(CALIBRATION_ERROR, (kind.method, "greedy" if kind.is_greedy else "random", str(position)), error)


_NO_STEPS = LaneMetrics()
