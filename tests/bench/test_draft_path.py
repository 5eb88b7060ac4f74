"""The benchmark of the way of drafts runs, and what it measures is a healthy stack."""

from benchmarks.draft_path import measure


async def test_prompts_that_are_cached_are_drafted_for_from_the_first_step() -> None:
    new, cached = await measure(num_seqs=3, slowdown=8.0, num_tokens=25)
    assert (new["prompts"], cached["prompts"]) == ("new", "cached")
    assert cached["catching_up"] == 0
    assert cached["rounds"] < 25, "no draft was accepted"
    assert new["batch_ms"] > 0
