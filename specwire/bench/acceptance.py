"""Acceptance of groups of prompts: counts as they are, ratios weighted by prompt."""

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.bench.calibration import Calibration, Observations, calibrate
from specwire.bench.metrics import add_stats
from specwire.bench.record import RequestRecord
from specwire.bench.workload import Prompt
from specwire.messages import SpecStats

TOTAL = "total"


@dataclass(frozen=True, slots=True)
class PositionRates:
    """One position of a draft, from 0.

    Attributes:
        unconditional: share of all drafts (of any length) whose tokens up to here were all accepted; weighted.
        conditional: share of the observed draft tokens here that were accepted; None where the coordinator does not report verifications.
        num_observed: draft tokens here whose predecessors were all accepted.
    """

    unconditional: float
    conditional: float | None
    num_observed: int
    calibration: Calibration | None


@dataclass(frozen=True, slots=True)
class Acceptance:
    """One category, or all of them.

    Attributes:
        weight: of all its prompts.
        stats: plain sums.
        acceptance_rate, acceptance_length, tokens_per_step: weighted by prompt: sums of weight x count, divided. acceptance_length is
            1 + accepted / drafts over verifications with drafts, tokens_per_step counts all steps.
    """

    name: str
    num_prompts: int
    weight: float
    num_output_tokens: int
    stats: SpecStats
    acceptance_rate: float
    acceptance_length: float
    tokens_per_step: float
    positions: tuple[PositionRates, ...]
    calibration: Calibration | None


@dataclass(frozen=True, slots=True)
class Difference:
    """A prompt whose answer is not the same without drafts: the first position (from 0) at which the tokens differ or one answer has ended."""

    name: str
    position: int


@dataclass(frozen=True, slots=True)
class AcceptReport:
    """Everything that `specwire bench accept` reports.

    Attributes:
        groups: the total, then each category.
        num_compared: answers that were compared with a run without drafts; None if there was none.
    """

    model_id: str
    groups: list[Acceptance]
    num_failed: int
    errors: dict[str, int]
    interrupted: bool
    num_compared: int | None
    differences: list[Difference]


def measure_acceptance(answers: Sequence[tuple[Prompt, RequestRecord]]) -> list[Acceptance]:
    """The total, then each category in the order of its first prompt; the total alone if there are no categories."""
    by_category: dict[str, list[tuple[Prompt, RequestRecord]]] = {}
    for prompt, record in answers:
        by_category.setdefault(prompt.category, []).append((prompt, record))
    groups = [_measure(TOTAL, answers)]
    if len(by_category) > 1 or any(by_category):
        groups += [_measure(name or "(none)", part) for name, part in by_category.items()]
    return groups


def find_differences(prompts: Sequence[Prompt], drafted: Sequence[RequestRecord], plain: Sequence[RequestRecord]) -> list[Difference]:
    """Prompts that both runs answered, and not with the same tokens."""
    expected = {record.index: record.token_ids for record in plain if record.is_ok}
    differences = []
    for record in drafted:
        other = expected.get(record.index)
        if record.is_ok and other is not None and record.token_ids != other:
            pairs = zip(record.token_ids, other, strict=False)
            position = next((index for index, (left, right) in enumerate(pairs) if left != right), min(len(record.token_ids), len(other)))
            differences.append(Difference(prompts[record.index].name, position))
    return differences


def _measure(name: str, answers: Sequence[tuple[Prompt, RequestRecord]]) -> Acceptance:
    weights = [prompt.weight for prompt, _ in answers]
    stats = [record.spec or SpecStats() for _, record in answers]
    total = add_stats(stats)

    def weighted(counts: Sequence[int]) -> float:
        return sum(weight * count for weight, count in zip(weights, counts, strict=True))

    drafts = weighted([entry.num_drafts for entry in stats])
    draft_tokens = weighted([entry.num_draft_tokens for entry in stats])
    accepted = weighted([entry.num_accepted_tokens for entry in stats])
    steps = weighted([entry.num_steps for entry in stats])
    tokens = weighted([record.num_output_tokens for _, record in answers])
    reports = [record.drafts for _, record in answers if record.drafts is not None]
    observations = Observations.of(reports) if reports else None
    positions = []
    for position in range(len(total.accepted_per_position)):
        at = weighted([entry.accepted_per_position[position] if position < len(entry.accepted_per_position) else 0 for entry in stats])
        here = None if observations is None else observations.at(position)
        positions.append(
            PositionRates(
                at / drafts if drafts else 0.0,
                None if here is None else here.rate,
                0 if here is None else len(here.accepted),
                None if here is None else calibrate(here),
            )
        )
    return Acceptance(
        name=name,
        num_prompts=len(answers),
        weight=sum(weights),
        num_output_tokens=sum(record.num_output_tokens for _, record in answers),
        stats=total,
        acceptance_rate=accepted / draft_tokens if draft_tokens else 0.0,
        acceptance_length=1 + accepted / drafts if drafts else 1.0,
        tokens_per_step=tokens / steps if steps else 0.0,
        positions=tuple(positions),
        calibration=None if observations is None else calibrate(observations),
    )
