"""Runs the cells: policy by policy, each at all concurrencies, and all over again for every repeat."""

import dataclasses
import logging
import secrets
from dataclasses import dataclass, field
from typing import Any

from specwire.bench.metrics import ServeMetrics, measure, to_figures
from specwire.bench.runner import LoadRun
from specwire.bench.serve import run_target
from specwire.bench.serve_options import ServeOptions
from specwire.bench.serve_report import ServeResult
from specwire.bench.sweep.options import SweepOptions
from specwire.bench.sweep.policies import ADAPTIVE, DYNAMIC, NONE, Policy, Schedule, best_schedule
from specwire.bench.sweep.stacks import Place, SweptStack
from specwire.bench.targets import GrpcTarget
from specwire.bench.workload import PromptLine
from specwire.errors import InvalidArgumentError

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Cell:
    """One run.

    Attributes:
        num_different: answers whose tokens differ from those without drafts; None if that was not measured.
    """

    policy: str
    concurrency: int
    repeat: int
    metrics: ServeMetrics
    num_different: int | None = None

    @property
    def user_tokens_per_s(self) -> float:
        """What one user sees: tokens a second after the first one; 0 if no answer had two tokens."""
        return 1000 / self.metrics.tpot_ms.median if self.metrics.tpot_ms and self.metrics.tpot_ms.median else 0.0

    def figures(self) -> dict[str, Any]:
        """For JSON."""
        own = {"policy": self.policy, "concurrency": self.concurrency, "repeat": self.repeat, "user_tokens_per_s": self.user_tokens_per_s}
        return own | {"num_different": self.num_different} | to_figures(self.metrics)


@dataclass(slots=True)
class SweepResult:
    """What a sweep has measured so far. schedule: that of the dynamic policy."""

    model_id: str = ""
    cells: list[Cell] = field(default_factory=list)
    schedule: Schedule | None = None
    interrupted: bool = False


async def sweep(options: SweepOptions, lines: list[PromptLine] | None, stack: SweptStack) -> SweepResult:
    """Measures everything; what there is when it is interrupted.

    Raises:
        SpecwireError: nothing could be measured, or a service ended.
    """
    result = SweepResult()
    async with stack:
        kinds = stack.check(options.policies)
        for k in options.fixed:
            if k > stack.configured:
                raise InvalidArgumentError(
                    f"--fixed has {k}, but the stack has num_speculative_tokens {stack.configured}; raise that, or lower --fixed"
                )
        ks = options.fixed or ((stack.configured,) if stack.configured else ())
        by_kind = {"none": [NONE], "fixed": [Policy.fixed(k) for k in ks], "dynamic": [DYNAMIC], "adaptive": [ADAPTIVE]}
        for repeat in range(options.repeats):
            answers: dict[tuple[int, int], list[int]] = {}
            for policy in (policy for kind in kinds for policy in by_kind[kind]):
                if policy is DYNAMIC and result.schedule is None:
                    result.schedule = stack.schedule or best_schedule(_rates(result.cells), stack.num_lanes)
                async with stack.place(policy, result.schedule) as place:
                    for concurrency in options.concurrencies:
                        served = await _run_cell(options.cell(concurrency), lines, place)
                        result.model_id, result.interrupted = served.model_id, served.run.interrupted
                        if result.interrupted:
                            return result
                        metrics = measure(served.run, options.load.percentiles, options.load.objective)
                        cell = Cell(policy.name, concurrency, repeat, metrics, _compare(policy, concurrency, served.run, answers))
                        speed = metrics.output_throughput
                        logger.info("%s at %d: %.1f tokens/s, %.1f of a user", cell.policy, concurrency, speed, cell.user_tokens_per_s)
                        result.cells.append(cell)
    return result


async def _run_cell(load: ServeOptions, lines: list[PromptLine] | None, place: Place) -> ServeResult:
    """Prompts are the same for all policies; a key of its own keeps a cell from finding them in the caches of those before."""
    load = dataclasses.replace(load, address=place.address, params=load.params.replace(max_draft_tokens=place.max_draft_tokens))
    key = secrets.token_bytes(8)
    return await run_target(load, lines, lambda: GrpcTarget(place.make_client(), place.address, tenant_cache_key=key))


def _compare(policy: Policy, concurrency: int, run: LoadRun, answers: dict[tuple[int, int], list[int]]) -> int | None:
    found = {(concurrency, record.index): record.token_ids for record in run.records if record.is_ok}
    if policy is NONE:
        answers.update(found)
        return 0
    both = [place for place in found if place in answers]
    return sum(found[place] != answers[place] for place in both) if both else None


def _rates(cells: list[Cell]) -> dict[int, dict[int, float]]:
    """Throughput by concurrency and K, of what has a K."""
    rates: dict[int, dict[int, float]] = {}
    for cell in cells:
        if cell.policy == NONE.name or cell.policy.startswith("fixed-"):
            k = 0 if cell.policy == NONE.name else int(cell.policy.partition("-")[2])
            rates.setdefault(cell.concurrency, {})[k] = cell.metrics.output_throughput
    if not rates:
        raise InvalidArgumentError(
            "--policies has dynamic, but there is no schedule: give num_speculative_tokens_per_batch_size, or measure none and fixed, too"
        )
    return rates
