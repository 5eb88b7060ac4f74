"""Sends requests to a coordinator over gRPC: token ids there, token ids back. Text would only cost the load generator time that it must not take."""

import asyncio
import contextlib
from collections.abc import AsyncGenerator

from specwire.bench.record import RequestRecord
from specwire.bench.runner import Send
from specwire.bench.workload import Prompt
from specwire.client import AsyncClient
from specwire.client.generation import Deadline, Retries
from specwire.errors import SpecwireError
from specwire.messages import ChoiceDelta, GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.statuses import error_from_status


def grpc_backend(
    client: AsyncClient,
    params: SamplingParams,
    *,
    label: str,
    timeout_s: float | None = None,
    max_retries: int = 0,
    report_drafts: bool = False,
    tenant_cache_key: bytes = b"",
) -> Send:
    """A backend for runner.LoadGenerator.

    Args:
        params: of all requests; max_tokens is the prompt's own, and each request gets a seed of its own, params.seed + its number.
        label: what request ids begin with.
        timeout_s: deadline of each request.
        max_retries: how often one is sent again that failed before its first token, as the SDK's client does it.
        report_drafts: ask for a record of each verification.
        tenant_cache_key: whose cached prefixes requests may share.
    """

    retries = Retries(max_retries)

    async def send(prompt: Prompt, record: RequestRecord) -> AsyncGenerator[ChoiceDelta, None]:
        seed = None if params.seed is None else (params.seed + record.index) % 2**64
        own_params, deadline = params.replace(max_tokens=prompt.max_tokens, seed=seed), Deadline(timeout_s)
        while True:
            request = GenerateRequest(
                prompt.token_ids,
                own_params,
                f"{label}-{record.index}",
                tenant_cache_key,
                timeout_ms=deadline.remaining_ms,
                report_drafts=report_drafts,
            )
            has_tokens = False
            try:
                async with contextlib.aclosing(_stream(client, request)) as deltas:
                    async for delta in deltas:
                        has_tokens = has_tokens or bool(delta.token_ids)
                        yield delta
                return
            except SpecwireError as error:
                pause_s = retries.pause_s(error, record.num_retries + 1, deadline, waits_for_room=True)
                if has_tokens or pause_s is None:
                    raise
            record.num_retries += 1
            await asyncio.sleep(pause_s)

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
