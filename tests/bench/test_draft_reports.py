"""The coordinator's record of verifications: only where asked for, and no score that is not the draft's own."""

import math
from dataclasses import dataclass, field
from typing import Any

import pytest

from coordinator.draft_log import DraftLog
from specwire.messages import DraftReport, GenerateRequest
from specwire.sampling_params import SamplingParams
from tests.scripted.cluster import Cluster
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript


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
