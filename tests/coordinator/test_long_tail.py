"""Rollouts: many sequences with lengths of a long tail, as one batch. While it drains, K grows."""

import random

from coordinator.stream import BatchStream
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

SCHEDULE = [[1, 2, 7], [3, 4, 5], [5, 8, 3], [9, 12, 1], [13, 32, 0]]
LARGEST = {7: 2, 5: 4, 3: 8, 1: 12, 0: 32}


async def test_k_grows_as_a_batch_drains() -> None:
    """By the schedule alone: with 32 sequences nothing is drafted, with the last two as much as may be."""
    lengths = [round(8 * random.Random(seed).paretovariate(1.1)) for seed in range(32)]
    requests = [GenerateRequest([5, 6, 7 + seed], SamplingParams(max_tokens=length, seed=seed)) for seed, length in enumerate(lengths)]
    script = VerifierScript(max_num_seqs=32, max_num_batched_tokens=512)
    async with Cluster([script], [DrafterScript()], k=7, schedule=SCHEDULE, min_draft_wait_ms=1000, max_num_seqs=32) as cluster:
        await cluster.all_there()
        found = {result.index: result async for result in BatchStream(cluster.engine, requests, 512).updates()}
        target, rounds = cluster.verifiers[0].target, [message for message in cluster.verifiers[0].received if message.rows]
        for index, length in enumerate(lengths):
            assert found[index].error is None
            assert found[index].choices[0].token_ids == target.generate([5, 6, 7 + index], length, index)
    most_drafts = [max(len(row.draft_tokens) for row in message.rows) for message in rounds]
    for message, num_drafts in zip(rounds, most_drafts, strict=True):
        assert len(message.rows) <= LARGEST.get(num_drafts, 32)
    used = [num_drafts for num_drafts in most_drafts if num_drafts in LARGEST]
    assert sorted(set(used)) == [0, 1, 3, 5, 7]
    assert [used.index(k) for k in (0, 1, 3, 5, 7)] == sorted(used.index(k) for k in (0, 1, 3, 5, 7))
    assert len(rounds) < 0.6 * max(lengths), "the longest one alone would take a round a token"
