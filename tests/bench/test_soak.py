"""benchmarks.soak for some seconds: real processes, exact answers and counters; and that it would notice if they were not."""

import dataclasses

from benchmarks.soak import Plan, Sample, find_growth, find_problems, soak

PLAN = Plan(num_requests=128, concurrency=64, duration_s=2.0, step_s=0.02, sample_s=0.5)


async def test_answers_and_counters_are_exact() -> None:
    outcome = await soak(PLAN)
    assert find_problems(outcome) == []
    assert (len(outcome.run.records), outcome.server.requests) == (128, 128)
    assert outcome.server.accepted_tokens > 0
    assert max(record.num_output_tokens for record in outcome.run.records) > PLAN.output_len
    assert all(sample.rss_mib > 10 for sample in outcome.samples)

    outcome.run.records[7].token_ids[3] += 1
    outcome.run.records[8].error = "UnavailableError"
    wrong = dataclasses.replace(outcome, server=dataclasses.replace(outcome.server, drafts=outcome.server.drafts + 1), num_left=1)
    problems = find_problems(wrong)
    assert len(problems) == 4
    assert "request 7 has other tokens" in problems[0]
    assert "request 8 failed with UnavailableError" in problems[1]
    assert "drafts: " in problems[2]
    assert "still holds 1" in problems[3]


def test_growth_is_noticed() -> None:
    flat = [Sample(10.0 * index, 50.0 + (index < 8) * index) for index in range(60)]
    assert find_growth(flat) == []
    assert "grew by 7.2 MiB" in find_growth([Sample(10.0 * index, 50 + 0.2 * index) for index in range(60)])[0]
