"""What the gRPC backend sends, and when it sends a request again: in virtual time, over a client that gives what a test says."""

import asyncio
from collections.abc import Sequence

import pytest

from specwire.bench.backend import grpc_backend
from specwire.bench.runner import LoadGenerator, LoadRun
from specwire.bench.workload import Prompt
from specwire.errors import InvalidArgumentError, ResourceExhaustedError, SpecwireError, UnavailableError
from specwire.messages import ChoiceDelta, ErrorStatus, FinishReason, GenerateRequest, SpecStats, Usage
from specwire.sampling_params import SamplingParams
from tests.bench.virtual_time import run_virtual

FIRST = [ChoiceDelta(0, [5])]
LAST = [ChoiceDelta(0, [6, 7], finish_reason=FinishReason.LENGTH, usage=Usage(3, 0, 3), spec_stats=SpecStats(num_steps=2))]
FAILED = [
    ChoiceDelta(
        0, [6], finish_reason=FinishReason.ERROR, usage=Usage(3, 0, 2), spec_stats=SpecStats(num_steps=2), error=ErrorStatus(13, "not finite")
    )
]
Script = Sequence[list[ChoiceDelta] | SpecwireError]


class Live:
    def __init__(self, script: Script) -> None:
        self._script = list(script)
        self.is_cancelled = False

    async def read(self) -> list[ChoiceDelta]:
        await asyncio.sleep(1.0)
        if not self._script:
            return []
        entry = self._script.pop(0)
        if isinstance(entry, SpecwireError):
            raise entry
        return entry

    def cancel(self) -> None:
        self.is_cancelled = True


class Client:
    """Answers each attempt with the next script."""

    def __init__(self, *scripts: Script) -> None:
        self._scripts = list(scripts)
        self.requests: list[GenerateRequest] = []
        self.lives: list[Live] = []

    async def start(self, request: GenerateRequest) -> Live:
        self.requests.append(request)
        self.lives.append(Live(self._scripts.pop(0)))
        return self.lives[-1]


def run(client: Client, count: int = 1, **options: object) -> LoadRun:
    params = SamplingParams(seed=2**64 - 1, temperature=0.5)

    async def main() -> LoadRun:
        send = grpc_backend(client, params, label="x", **options)  # type: ignore[arg-type]
        generator = LoadGenerator(send, asyncio.get_running_loop().time, max_concurrency=1, keep_tokens=True)
        return await generator.run([Prompt(str(index), [1, 2, 3], 3 + index) for index in range(count)], None)

    return run_virtual(main())  # type: ignore[no-any-return]


def test_requests() -> None:
    client = Client([FIRST, LAST], [FIRST, LAST])
    result = run(client, 2, timeout_s=20.0, report_drafts=True)
    first, second = client.requests
    assert (first.request_id, first.sampling.max_tokens, first.sampling.seed) == ("x-0", 3, 2**64 - 1)
    assert (second.request_id, second.sampling.max_tokens, second.sampling.seed) == ("x-1", 4, 0)
    assert (first.prompt_token_ids, first.sampling.temperature, first.report_drafts) == ([1, 2, 3], 0.5, True)
    assert 19_000 < first.timeout_ms <= 20_000  # type: ignore[operator]
    assert [record.token_ids for record in result.records] == [[5, 6, 7]] * 2
    assert all(live.is_cancelled for live in client.lives)


def test_retries_before_the_first_token_count_in_the_latency() -> None:
    client = Client([UnavailableError("gone")], [ResourceExhaustedError("full", retry_after_ms=1000)], [FIRST, LAST])
    [record] = run(client, max_retries=2).records
    assert (record.error, record.num_retries, len(client.requests)) == ("", 2, 3)
    # One second for each failure and the first token, the pauses between them, one of them a second longer.
    assert record.ttft_s >= 3 + 1 + 0.25
    assert record.ttft_s == record.chunk_times_s[0] == record.e2el_s - 1


@pytest.mark.parametrize(
    ("script", "max_retries", "error", "num_attempts", "token_ids"),
    [
        ([UnavailableError("gone")], 0, "UnavailableError", 1, []),
        ([UnavailableError("gone")], 1, "UnavailableError", 2, []),
        ([FIRST, UnavailableError("gone")], 5, "UnavailableError", 1, [5]),
        ([InvalidArgumentError("no")], 5, "InvalidArgumentError", 1, []),
        ([ResourceExhaustedError("too large")], 5, "ResourceExhaustedError", 1, []),
        ([FIRST, FAILED], 5, "InternalError", 1, [5, 6]),
    ],
)
def test_what_is_not_sent_again(script: Script, max_retries: int, error: str, num_attempts: int, token_ids: list[int]) -> None:
    client = Client(*[script] * 6)
    [record] = run(client, max_retries=max_retries).records
    assert (record.error, len(client.requests), record.token_ids) == (error, num_attempts, token_ids)
    assert record.num_retries == num_attempts - 1
    assert all(live.is_cancelled for live in client.lives)


def test_a_choice_that_fails_still_counts_what_it_did() -> None:
    [record] = run(Client([FIRST, FAILED])).records
    assert (record.error_text, record.spec, record.finish_reason) == ("not finite", SpecStats(num_steps=2), "")
