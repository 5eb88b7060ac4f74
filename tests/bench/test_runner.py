"""When requests are sent and what their times count from, in virtual time: every number is exact."""

import asyncio
from collections.abc import AsyncGenerator, Sequence

import pytest

from specwire.bench.record import INTERRUPTED, RequestRecord
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.workload import Prompt
from specwire.messages import ChoiceDelta, FinishReason
from tests.bench.fake_backend import Answer, Refused, fake_backend, prompts
from tests.bench.virtual_time import run_virtual

ANSWER = Answer([(0.5, 1), (0.5, 3), (1.0, 2)])  # 6 tokens in 2 s


def run(
    answers: Sequence[Answer], count: int, arrivals_s: Sequence[float] | None, max_concurrency: int | None = None, stop_after_s: float | None = None
) -> LoadRun:
    async def main() -> LoadRun:
        loop, stop = asyncio.get_running_loop(), asyncio.Event()
        generator = LoadGenerator(fake_backend(answers), loop.time, max_concurrency=max_concurrency, keep_tokens=True)
        if stop_after_s is not None:
            loop.call_later(stop_after_s, stop.set)
        return await generator.run(prompts(count), arrivals_s, stop)

    return run_virtual(main())  # type: ignore[no-any-return]


def times(records: Sequence[RequestRecord]) -> list[tuple[float, float, float, float]]:
    return [(record.start_s, record.sent_s, record.ttft_s, record.e2el_s) for record in records]


def test_an_open_loop_sends_on_schedule_whatever_runs() -> None:
    result = run([ANSWER], 3, [0.0, 1.0, 1.25])
    assert times(result.records) == [(0, 0, 0.5, 2), (1, 1, 0.5, 2), (1.25, 1.25, 0.5, 2)]
    assert (result.start_s, result.end_s, result.interrupted) == (0, 3.25, False)


def test_what_waits_for_its_turn_counts_from_its_scheduled_arrival() -> None:
    """No coordinated omission: the third request is due at 2 s, but two that take 2 s each are ahead of it."""
    result = run([ANSWER], 3, [0.0, 1.0, 2.0], max_concurrency=1)
    assert times(result.records) == [(0, 0, 0.5, 2), (1, 2, 1.5, 3), (2, 4, 2.5, 4)]
    assert [record.wait_s for record in result.records] == [0, 1, 2]


def test_a_closed_loop_counts_from_sending() -> None:
    result = run([ANSWER, Answer([(1.0, 1)])], 4, None, max_concurrency=2)
    assert times(result.records) == [(0, 0, 0.5, 2), (0, 0, 1, 1), (1, 1, 0.5, 2), (2, 2, 1, 1)]
    assert result.end_s == 3


def test_all_at_once() -> None:
    result = run([ANSWER], 5, [0.0] * 5)
    assert times(result.records) == [(0, 0, 0.5, 2)] * 5


def test_tokens_and_chunks_are_kept() -> None:
    [record] = run([ANSWER], 1, None).records
    assert (record.chunk_times_s, record.chunk_sizes, record.token_ids) == ([0.5, 1, 2], [1, 3, 2], [7] * 6)
    assert (record.finish_reason, record.num_prompt_tokens, record.is_ok) == ("length", 4, True)


def test_failures_are_results(caplog: pytest.LogCaptureFixture) -> None:
    """A refusal, a fault of the backend, an answer that just ends, one without tokens: the others go on."""
    answers = [
        Answer([], error=Refused("no")), Answer([(0.5, 2)], error=ZeroDivisionError("oh")), Answer([(0.5, 2)], finish_reason=None),
        Answer([(0.5, 0)]), ANSWER,
    ]  # fmt: skip
    result = run(answers, 10, None, max_concurrency=2)
    assert [record.error for record in result.records] == ["Refused", "ZeroDivisionError", "InternalError", "InternalError", ""] * 2
    assert [record.error_text for record in result.records[:2]] == ["no", "oh"]
    assert [record.num_output_tokens for record in result.records[:5]] == [0, 2, 2, 0, 6]
    assert all(record.ended_s >= record.sent_s for record in result.records)
    assert caplog.text.count("request 1 failed") == 1  # only what nobody foresaw is logged


@pytest.mark.parametrize("arrivals_s", [None, [0.0, 0.5, 1.0, 5.0, 6.0]])
def test_stopping_keeps_what_was_measured(arrivals_s: list[float] | None) -> None:
    result = run([ANSWER], 5, arrivals_s, max_concurrency=2, stop_after_s=2.25)
    assert result.interrupted
    assert [record.error for record in result.records] == ["", *([""] if arrivals_s is None else []), *[INTERRUPTED] * 2]
    assert [record.ended_s for record in result.records if record.error] == [2.25, 2.25]
    assert times(result.records[:1]) == [(0, 0, 0.5, 2)]


def test_cancelling_the_run_ends_its_requests() -> None:
    ended: list[int] = []

    async def send(prompt: Prompt, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
        try:
            await asyncio.sleep(60)
            yield ChoiceDelta(0, [1], finish_reason=FinishReason.LENGTH)
        finally:
            ended.append(record.index)

    async def main() -> None:
        running = asyncio.create_task(LoadGenerator(send, asyncio.get_running_loop().time).run(prompts(3), None))
        await asyncio.sleep(1)
        running.cancel()
        await asyncio.wait([running])
        assert running.cancelled()

    run_virtual(main())
    assert sorted(ended) == [0, 1, 2]
