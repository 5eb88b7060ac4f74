"""What a type checker makes of the public names; checked with `mypy --strict`, never run."""

from collections.abc import Iterator
from typing import assert_type

from specwire import (
    AsyncBatch,
    AsyncClient,
    AsyncTokenStream,
    Batch,
    Chat,
    Choice,
    Client,
    GenerationResult,
    Prompt,
    SamplingParams,
    SpecStats,
    SpecwireError,
    StreamEvent,
    TlsOptions,
    TokenLogprobs,
    TokenOrigin,
    TokenStream,
    UnavailableError,
    Usage,
)

MESSAGES = [{"role": "user", "content": "hello"}]
TOOLS = [{"type": "function", "function": {"name": "now", "parameters": {}}}]


def prompts() -> Iterator[Prompt]:
    yield "text"
    yield [1, 2, 3]
    yield range(3)
    yield Chat(MESSAGES, tools=TOOLS, add_generation_prompt=False, chat_template_kwargs={"enable_thinking": True})


def blocking() -> None:
    with Client("localhost:50050", max_message_mb=1, max_retries=0, tls=TlsOptions(ca="ca.pem"), api_key="key", tenant_cache_key=b"me") as client:
        result = client.generate("text", SamplingParams(n=2), timeout=1.5, request_id="label", seed=1, stop=["a"])
        assert_type(result, GenerationResult)
        assert_type(result.choices, list[Choice])
        assert_type(result.text, str)
        assert_type(result.usage, Usage)
        assert_type(result.spec, SpecStats)
        choice = result.choices[0]
        assert_type(choice.origins, tuple[TokenOrigin, ...])
        assert_type(choice.logprobs, list[TokenLogprobs] | None)
        assert_type(choice.error, SpecwireError | None)
        assert_type(choice.spec.acceptance_length, float)
        assert_type(client.stream([1, 2]), TokenStream)
        assert_type(client.chat(MESSAGES, tools=TOOLS), GenerationResult)
        with client.chat_stream(MESSAGES) as stream:
            for event in stream:
                assert_type(event, StreamEvent)
                assert_type(event.text, str)
                assert_type(event.finish_reason, str | None)
        batch = client.generate_batch(prompts(), [SamplingParams()] * 4, max_concurrency=2)
        assert_type(batch, Batch)
        for index, outcome in batch:
            assert_type(index, int)
            assert_type(outcome, GenerationResult | SpecwireError)
            if isinstance(outcome, UnavailableError):
                assert_type(outcome.retry_after_ms, int | None)
            elif not isinstance(outcome, SpecwireError):
                assert_type(outcome, GenerationResult)
        assert_type(client.num_retries, int)
        assert_type(client.get_tokenizer().encode("text"), list[int])
        client.wait_ready(5)


async def asynchronous() -> None:
    async with AsyncClient() as client:
        assert_type(await client.generate("text"), GenerationResult)
        assert_type(await client.chat(MESSAGES), GenerationResult)
        assert_type(client.stream("text"), AsyncTokenStream)
        async for event in client.chat_stream(MESSAGES):
            assert_type(event, StreamEvent)
        batch = client.generate_batch(["text"])
        assert_type(batch, AsyncBatch)
        async for index, outcome in batch:
            assert_type((index, outcome), tuple[int, GenerationResult | SpecwireError])
        await client.wait_ready()


def mistakes(client: Client) -> None:
    """Each is an error: `warn_unused_ignores` says so if it is not."""
    client.generate(5)  # type: ignore[arg-type]
    client.generate("text", {"seed": 1})  # type: ignore[arg-type]
    client.chat("text")  # type: ignore[arg-type]
    client.generate_batch(5)  # type: ignore[arg-type]
    client.generate("text").txt  # type: ignore[attr-defined]  # noqa: B018
    Client(port=5)  # type: ignore[call-arg]
