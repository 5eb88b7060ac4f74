"""The coordinator's record of verifications: only where asked for, and no score that is not the draft's own."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.draft_log import DraftLog
from specwire.errors import InvalidArgumentError
from specwire.messages import ChoiceDelta, DraftReport, GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.wire import generate
from tests.scripted.cluster import Cluster
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript

REPORT = DraftReport([2, 3], [2, 0], [0.5, 0.25, 0.75, 0.5, 1.0])


@dataclass
class Place:
    base_len: int
    drafts: list[int]
    confidences: list[float]


@dataclass
class Sequence:
    draft_slot: Any
    token_ids: list[int] = field(default_factory=lambda: [1, 2, 3])


@pytest.mark.parametrize(
    ("place", "scores"),
    [
        (Place(3, [5, 6], [0.5, 0.25]), [0.5, 0.25]),
        (Place(3, [5, 6, 7], [0.5, 0.25, 0.125]), [0.5, 0.25]),  # trimmed
        (Place(2, [5, 6], [0.5, 0.25]), []),  # of an earlier step
        (Place(3, [5, 9], [0.5, 0.25]), []),  # another reply came meanwhile
        (Place(3, [5, 6], []), []),  # a drafter without scores
        (None, []),  # the drafter has gone
    ],
)
def test_scores_are_those_of_the_drafts(place: Place | None, scores: list[float]) -> None:
    log = DraftLog()
    log.add(Sequence(place), [5, 6], 1)  # type: ignore[arg-type]
    report = log.report()
    assert (report.num_draft_tokens, report.num_accepted_tokens) == ([2], [1])
    assert report.confidences == scores if scores else all(math.isnan(score) for score in report.confidences)
    assert len(report.confidences) == 2


async def reports(cluster: Cluster, report_drafts: bool) -> list[DraftReport | None]:
    kept: list[DraftReport | None] = []

    class Sink(CollectingSink):
        def choice(self, delta: Any) -> None:
            super().choice(delta)
            kept.append(delta.draft_report)

    sink = Sink(2)
    cluster.engine.submit(GenerateRequest([4, 5, 6], SamplingParams(max_tokens=40, n=2, seed=1), report_drafts=report_drafts), sink)
    await sink.wait()
    assert [choice.error for choice in sink.choices] == [None, None]
    return kept


@pytest.mark.parametrize("report", [REPORT, DraftReport([], [], [])])
def test_a_report_survives_the_wire(report: DraftReport) -> None:
    packed = generate.pack_choice(ChoiceDelta(1, [5], draft_report=report))
    assert generate.unpack_choice(type(packed).FromString(packed.SerializeToString())).draft_report == report


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (DraftReport([2, 1], [2], [0.5, 0.5, 0.5]), "num_accepted_tokens has 1 values"),
        (DraftReport([2], [2], [0.5]), "draft_report.confidences holds 1 values"),
        (DraftReport([-1], [0], []), "counts must be 0 or more"),
    ],
)
def test_a_report_whose_numbers_do_not_fit_together_is_refused(report: DraftReport, message: str) -> None:
    packed = generate.pack_choice(ChoiceDelta(1, [5], draft_report=report))
    with pytest.raises(InvalidArgumentError, match=message):
        generate.unpack_choice(packed)


async def test_each_choice_has_its_report_if_asked_for() -> None:
    async with Cluster(drafters=[DrafterScript(acceptance=0.6)]) as cluster:
        await cluster.all_there()
        assert await reports(cluster, False) == [None, None]
        before = cluster.verifiers[0].num_draft_tokens, cluster.verifiers[0].num_accepted_tokens
        kept = await reports(cluster, True)
        verifier = cluster.verifiers[0]
        assert sum(sum(report.num_draft_tokens) for report in kept if report) == verifier.num_draft_tokens - before[0] > 0
        assert sum(sum(report.num_accepted_tokens) for report in kept if report) == verifier.num_accepted_tokens - before[1] > 0
        assert all(report is not None and set(report.confidences) == {0.5} for report in kept)
