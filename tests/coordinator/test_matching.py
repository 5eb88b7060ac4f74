"""Peers that do not match: refused at the start, left out later."""

from typing import Any

import pytest

from specwire.errors import FailedPreconditionError
from tests.coordinator.byte_tokenizer import make_spec
from tests.scripted.cluster import Cluster
from tests.scripted.drafter import DrafterScript
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import VerifierScript

PROMPT = [5, 6, 7, 8, 9]


@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        ({"weights_hash": "others"}, ["weights_hash", "'others'", "'weights'"]),
        ({"dtype": "bfloat16"}, ["dtype", "bfloat16", "float32"]),
        ({"numerics_version": "2"}, ["numerics_version", "'2'", "'1'"]),
        ({"vocab_size": 1001}, ["vocab_size", "1001", "1000"]),
        ({"rejection_sample_method": "synthetic"}, ["rejection_sample_method"]),
    ],
)
async def test_verifiers_that_do_not_match(changes: dict[str, Any], parts: list[str]) -> None:
    """Refused at the start; later, such a lane stays out and says why."""
    with pytest.raises(FailedPreconditionError) as refused:
        async with Cluster([VerifierScript(), VerifierScript(**changes)]):
            pass
    assert [part for part in parts if part not in str(refused.value)] == []
    async with Cluster([VerifierScript(), VerifierScript()]) as cluster:
        await cluster.all_there()
        await cluster.restart_verifier(1, **changes)
        await cluster.until(lambda: cluster.engine.counters.num_verifier_refusals > 0)
        assert cluster.engine.ready.is_ready
        assert [part for part in (*parts, "another model now, restart the coordinator") if part not in cluster.engine.ready.reason] == []
        await cluster.submit(PROMPT, seed=1, max_tokens=20).check()


async def test_capacities_are_those_of_the_smallest_verifier() -> None:
    scripts = [VerifierScript(max_model_len=300, max_num_seqs=20), VerifierScript(max_num_batched_tokens=64, num_blocks=50)]
    async with Cluster(scripts, [DrafterScript()], k=20, schedule=[[1, 4, 30], [5, 99, 2]]) as cluster:
        engine = (await cluster.ready()).engine.description
        assert engine is not None
        assert (engine.max_model_len, engine.max_num_seqs, engine.max_num_batched_tokens, engine.num_speculative_tokens) == (200, 16, 64, 8)
        assert engine.schedule == (0, *[8] * 4, *[2] * 12)
        text = "\n".join(engine.reasons)
        assert [part for part in ("from 300 to 200", "from 20 to 8", "[1, 4, 30]", "end cut to max_num_seqs = 16") if part not in text] == []


async def test_a_later_verifier_that_is_too_small_is_refused() -> None:
    async with Cluster([VerifierScript(), VerifierScript()]) as cluster:
        await cluster.all_there()
        await cluster.restart_verifier(1, max_model_len=100)
        await cluster.until(lambda: cluster.engine.counters.num_verifier_refusals > 0)
        assert "max_model_len is 100, but requests were admitted for 512" in cluster.engine.ready.reason


async def test_tokenizer_mismatch_at_the_start() -> None:
    scripts = [byte_verifier_script()], [byte_drafter_script(tokenizer_fingerprint="another", vocab_size=300)]
    with pytest.raises(FailedPreconditionError, match=f"fingerprint another and 300 ids.*{make_spec().fingerprint} and 266"):
        async with Cluster(*scripts):
            pass


async def test_a_drafter_with_too_small_messages_at_the_start() -> None:
    with pytest.raises(FailedPreconditionError, match=r"drafter d0:1 can't draft .* a round can take \d+ bytes, but messages may have 1000; raise"):
        async with Cluster(drafters=[DrafterScript(max_message_bytes=1000)]):
            pass


async def test_tokenizer_mismatch_later() -> None:
    async with Cluster([byte_verifier_script()], [byte_drafter_script()], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        await cluster.restart_drafter(0, tokenizer_fingerprint="another")
        request = cluster.submit(PROMPT, seed=1, max_tokens=300)
        await request.check()
        await cluster.until(lambda: cluster.engine.counters.num_drafter_refusals > 0)
        await cluster.restart_drafter(0)


async def test_padded_vocabularies_match() -> None:
    script = byte_drafter_script(vocab_size=512)
    async with Cluster([byte_verifier_script()], [script], min_draft_wait_ms=1000) as cluster:
        await cluster.all_there()
        await cluster.submit(PROMPT, seed=1, max_tokens=30).check()
        assert cluster.engine.counters.num_draft_tokens > 0
