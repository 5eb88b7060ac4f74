"""Sends requests to a coordinator over gRPC: token ids there, token ids back. Text would only cost the load generator time that it must not take."""

import asyncio
import contextlib
import random
from collections.abc import AsyncGenerator

from specwire.bench.record import RequestRecord
from specwire.bench.runner import Send
from specwire.bench.workload import Prompt
from specwire.client import AsyncClient
from specwire.errors import ResourceExhaustedError, SpecwireError, UnavailableError
from specwire.messages import ChoiceDelta, GenerateRequest
from specwire.rpc import error_from_status
from specwire.sampling_params import SamplingParams

_FIRST_PAUSE_S = 0.1
_MAX_PAUSE_S = 5.0


def grpc_backend(
    client: AsyncClient, params: SamplingParams, *, label: str, timeout_s: float | None = None, max_retries: int = 0, report_drafts: bool = False
) -> Send:
    """A backend for runner.LoadGenerator.

    Args:
        params: of all requests; max_tokens is the prompt's own, and each request gets a seed of its own, params.seed + its number.
        label: what request ids begin with.
        timeout_s: deadline of each request.
        max_retries: how often one that the coordinator refuses or that breaks before its first token is sent again.
        report_drafts: ask for a record of each verification.
    """

    async def send(prompt: Prompt, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
        seed = None if params.seed is None else (params.seed + record.index) % 2**64
        request = GenerateRequest(
            prompt.token_ids,
            params.replace(max_tokens=prompt.max_tokens, seed=seed),
            request_id=f"{label}-{record.index}",
            timeout_ms=None if timeout_s is None else max(1, round(1000 * timeout_s)),
            report_drafts=report_drafts,
        )
        while True:
            has_tokens = False
            try:
                async with contextlib.aclosing(_stream(client, request)) as deltas:
                    async for delta in deltas:
                        has_tokens = has_tokens or bool(delta.token_ids)
                        yield delta
                return
            except (UnavailableError, ResourceExhaustedError):
                if has_tokens or record.num_retries >= max_retries:
                    raise
            record.num_retries += 1
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(_MAX_PAUSE_S, _FIRST_PAUSE_S * 2**record.num_retries))

    return send


async def _stream(client: AsyncClient, request: GenerateRequest) -> AsyncGenerator[ChoiceDelta, None]:
    live = await client.start(request)
    try:
        while deltas := await live.read():
            for delta in deltas:
                if delta.error is None:
                    yield delta
                    continue
                error: SpecwireError = error_from_status(delta.error)
                # What came with the failure counts; its finish reason does not.
                yield ChoiceDelta(delta.index, delta.token_ids, delta.token_origins, usage=delta.usage, spec_stats=delta.spec_stats)
                raise error
    finally:
        live.cancel()
