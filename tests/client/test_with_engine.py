"""SDK, gRPC, server and engine together, over scripted verifiers and drafters."""

import asyncio
import random
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import pytest

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire import AsyncClient, Client, SamplingParams
from specwire.config import CoordinatorConfig
from specwire.errors import (
    DeadlineExceededError,
    FailedPreconditionError,
    InternalError,
    InvalidArgumentError,
    ResourceExhaustedError,
    SpecwireError,
    UnavailableError,
)
from specwire.messages import TokenOrigin
from specwire.speculative_config import SpeculativeConfig
from tests.coordinator.byte_tokenizer import VOCAB_SIZE, ids_of
from tests.scripted.drafter import ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.scripts import byte_drafter_script, byte_verifier_script
from tests.scripted.verifier import ScriptedVerifier
from tests.waiting import until

MAX_LEN = 512


class Stack:
    """One verifier, one drafter, the coordinator and a client."""

    def __init__(self, network: LocalNetwork, verifier: ScriptedVerifier, drafter: ScriptedDrafter, engine: Engine, client: AsyncClient) -> None:
        self.network = network
        self.verifier = verifier
        self.drafter = drafter
        self.engine = engine
        self.client = client

    def expected(self, prompt: str | list[int], num_tokens: int, seed: int, choice: int = 0) -> list[int]:
        token_ids = ids_of(prompt) if isinstance(prompt, str) else prompt
        return self.verifier.target.generate(token_ids, num_tokens, seed, choice)

    async def idle(self) -> None:
        """Waits until both services hold no sequence; then nothing may be left in the coordinator either."""
        await until(lambda: self.verifier.num_blocks_used == 0 and self.drafter.num_open == 0)
        self.engine.check_integrity()


@pytest.fixture
async def stack(socket_dir: Path) -> AsyncIterator[Stack]:
    network = LocalNetwork()
    verifier, drafter = ScriptedVerifier(byte_verifier_script()), ScriptedDrafter(byte_drafter_script(acceptance=0.7))
    network.put("v:1", verifier)
    network.put("d:1", drafter)
    config = CoordinatorConfig(
        listen=(f"unix:{socket_dir}/coordinator.sock",),
        verifiers=("v:1",),
        drafters=("d:1",),
        max_queue=256,
        max_message_mb=1,
        speculative_config=SpeculativeConfig(num_speculative_tokens=5),
    )
    engine = Engine(config, network.connect_verifier, network.connect_drafter, network.resolve)
    server = CoordinatorServer(engine, config)
    await server.start()
    await engine.start()
    following = asyncio.create_task(server.follow_readiness())
    async with AsyncClient(server.bound_addresses[0], max_message_mb=1) as client:
        await client.wait_ready(10)
        yield Stack(network, verifier, drafter, engine, client)
    following.cancel()
    await asyncio.gather(engine.stop(0), server.stop(1))


async def test_text_and_statistics(stack: Stack) -> None:
    result = await stack.client.generate("once upon", max_tokens=60, seed=0)
    assert result.token_ids == stack.expected("once upon", 60, 0)
    assert result.text == bytes(result.token_ids).decode()
    assert result.spec.num_accepted_tokens > 0
    assert sum(origin is TokenOrigin.ACCEPTED for origin in result.choices[0].origins) == result.spec.num_accepted_tokens
    assert sum(result.spec.accepted_per_position) == result.spec.num_accepted_tokens
    assert (result.usage.num_prompt_tokens, result.usage.num_generated_tokens) == (9, 60)
    plain = await stack.client.generate("once upon", max_tokens=60, seed=0, max_draft_tokens=0)
    assert (plain.text, plain.spec.num_drafts) == (result.text, 0)
    await stack.idle()


async def test_two_runs_with_seed_zero_are_equal_and_not_like_seed_one(stack: Stack) -> None:
    first, second, other = await asyncio.gather(*(stack.client.generate("a", max_tokens=40, seed=seed, temperature=1.0) for seed in (0, 0, 1)))
    assert first.text == second.text != other.text


async def test_streams_give_what_generate_gives(stack: Stack) -> None:
    for stop in ((), ("e",)):
        whole = await stack.client.generate("tell me", max_tokens=50, seed=3, n=2, stop=stop, logprobs=1)
        texts, ids = ["", ""], [[], []]  # type: ignore[var-annotated]
        async for event in stack.client.stream("tell me", max_tokens=50, seed=3, n=2, stop=stop, logprobs=1):
            texts[event.index] += event.text
            ids[event.index] += event.token_ids
            assert event.logprobs is None or len(event.logprobs) == len(event.token_ids)
        assert texts == [choice.text for choice in whole.choices]
        assert ids == [choice.token_ids for choice in whole.choices]
        assert [len(choice.logprobs or ()) for choice in whole.choices] == [len(choice.token_ids) for choice in whole.choices]


async def test_200_streams_over_one_verifier(stack: Stack) -> None:
    async def read(i: int) -> bool:
        stream = stack.client.stream(f"prompt {i}", max_tokens=10 + i % 20, seed=i)
        return [token_id async for event in stream for token_id in event.token_ids] == stack.expected(f"prompt {i}", 10 + i % 20, i)

    assert all(await asyncio.gather(*map(read, range(200))))
    await stack.idle()


async def test_a_batch_of_more_than_the_queue_holds(stack: Stack) -> None:
    """600 at once to a queue of 256, while another client's streams go on: none is refused to the caller."""
    other = asyncio.gather(*(stack.client.generate("other", max_tokens=50, seed=i) for i in range(20)))
    prompts = [f"prompt {i}" for i in range(600)]
    params = [SamplingParams(max_tokens=1 + i % 5, seed=i) for i in range(600)]
    outcomes = dict([each async for each in stack.client.generate_batch(prompts, params, max_concurrency=600)])
    for i in range(600):
        outcome = outcomes[i]
        assert not isinstance(outcome, SpecwireError), outcome
        assert outcome.token_ids == stack.expected(f"prompt {i}", 1 + i % 5, i)
    assert [result.token_ids for result in await other] == [stack.expected("other", 50, i) for i in range(20)]
    await stack.idle()


@pytest.mark.parametrize(
    ("prompt", "sampling", "error", "parts"),
    [
        ([], {}, InvalidArgumentError, ["empty"]),
        ("", {}, InvalidArgumentError, ["empty"]),
        ([-1], {}, InvalidArgumentError, ["prompt_token_ids[0] is -1", f"0 to {VOCAB_SIZE - 1}"]),
        ([1, VOCAB_SIZE], {}, InvalidArgumentError, [f"prompt_token_ids[1] is {VOCAB_SIZE}", f"0 to {VOCAB_SIZE - 1}"]),
        ("a\ud800", {}, InvalidArgumentError, ["not valid UTF-8", "character 1"]),
        ([1] * MAX_LEN, {}, InvalidArgumentError, [str(MAX_LEN), "shorten it"]),
        ([1] * (MAX_LEN + 1), {}, InvalidArgumentError, [str(MAX_LEN + 1), "shorten it"]),
        ([1] * 500, {"max_tokens": 13}, InvalidArgumentError, ["513", "max_tokens to 12 or less"]),
        ([1], {"stop_token_ids": [VOCAB_SIZE]}, InvalidArgumentError, ["stop_token_ids", str(VOCAB_SIZE)]),
        ([1], {"logit_bias": {VOCAB_SIZE: 1.0}}, InvalidArgumentError, ["logit_bias", str(VOCAB_SIZE)]),
        ([1], {"temperature": -1}, InvalidArgumentError, ["temperature is -1", "0 to 100"]),
        ([1], {"top_k": -2}, InvalidArgumentError, ["top_k is -2"]),
        ([1], {"max_new_tokens": 5}, InvalidArgumentError, ["max_new_tokens", "max_tokens"]),
        ([1] * 400_000, {}, ResourceExhaustedError, ["160", "1048512", "max_message_mb"]),
    ],
)
async def test_bad_input(stack: Stack, prompt: str | list[int], sampling: dict[str, Any], error: type[SpecwireError], parts: list[str]) -> None:
    """Value, limit and remedy; and nobody else notices."""
    running = asyncio.create_task(stack.client.generate("good", max_tokens=30, seed=1))
    with pytest.raises(error) as failure:
        await stack.client.generate(prompt, **sampling)
    assert all(part in str(failure.value) for part in parts), str(failure.value)
    if not isinstance(prompt, str) or prompt.isascii():
        with pytest.raises(error):
            await anext(stack.client.stream(prompt, **sampling))
    assert (await running).token_ids == stack.expected("good", 30, 1)


async def test_the_longest_prompt(stack: Stack) -> None:
    result = await stack.client.generate([97] * (MAX_LEN - 1), max_tokens=None, seed=1)
    assert (len(result.token_ids), result.finish_reason) == (1, "length")


@pytest.mark.parametrize("max_tokens", range(1, 13))
async def test_every_length(stack: Stack, max_tokens: int) -> None:
    result = await stack.client.generate("abc", max_tokens=max_tokens, seed=5)
    assert (result.token_ids, result.finish_reason) == (stack.expected("abc", max_tokens, 5), "length")


async def test_stop_strings_anywhere(stack: Stack) -> None:
    """Every two letters of the text as a stop string: cut where it first ends."""
    text = (await stack.client.generate("abc", max_tokens=40, seed=5)).text
    for start in range(0, 38, 3):
        stop = text[start : start + 2]
        result = await stack.client.generate("abc", max_tokens=40, seed=5, stop=stop)
        assert (result.text, result.choices[0].stop_cause) == (text[: text.index(stop)], stop)
        assert len(result.token_ids) == text.index(stop) + 2


async def test_nan_rows_end_only_their_request(stack: Stack) -> None:
    stack.verifier.script.is_bad = lambda opened, index: opened.num_prompt_tokens == 3 and index == 12
    good = asyncio.create_task(stack.client.generate("good", max_tokens=40, seed=1))
    with pytest.raises(InternalError):
        await stack.client.generate("bad", max_tokens=40, seed=1)
    assert (await good).token_ids == stack.expected("good", 40, 1)
    await stack.idle()


async def test_the_deadline_frees_everything(stack: Stack) -> None:
    stack.verifier.script.delay_s = 0.02
    with pytest.raises(DeadlineExceededError):
        await stack.client.generate("slow", max_tokens=400, timeout=0.15)
    await stack.idle()


async def test_random_ends(stack: Stack) -> None:
    """Requests that are read to the end, left after some events, or cancelled at some await: what is read is right, and all is given back."""
    draw = random.Random(0)

    async def one(i: int) -> None:
        prompt, seed, length = f"p{i % 7}", i % 5, draw.randint(1, 60)
        expected = stack.expected(prompt, length, seed)
        if i % 3 == 0:
            assert (await stack.client.generate(prompt, max_tokens=length, seed=seed)).token_ids == expected
            return
        token_ids: list[int] = []
        num_events = draw.randint(1, 6)
        async for event in stack.client.stream(prompt, max_tokens=length, seed=seed):
            token_ids += event.token_ids
            num_events -= 1
            if num_events == 0 and i % 3 == 1:
                break
        assert token_ids == expected[: len(token_ids)]

    async def cancelled(i: int) -> None:
        task = asyncio.create_task(one(i))
        for _ in range(draw.randint(0, 60)):
            await asyncio.sleep(0)
        task.cancel()
        outcome = (await asyncio.gather(task, return_exceptions=True))[0]
        assert outcome is None or isinstance(outcome, asyncio.CancelledError), outcome

    for _ in range(4):
        await asyncio.gather(*((cancelled if i % 2 else one)(i) for i in range(100)))
        await stack.idle()


async def test_a_lost_verifier_fails_or_resumes(stack: Stack) -> None:
    stream = stack.client.stream("resume", max_tokens=200, seed=4)
    stack.verifier.script.delay_s = 0.002
    token_ids = (await anext(stream)).token_ids
    stack.network.kill("v:1")
    restarted = ScriptedVerifier(stack.verifier.script)
    stack.network.put("v:1", restarted)
    async for event in stream:
        token_ids += event.token_ids
    assert token_ids == stack.expected("resume", 200, 4)


# --- the coordinator as a process -----------------------------------------------------------------------------------


@pytest.fixture
def coordinator_process(socket_dir: Path) -> Iterator[tuple[str, subprocess.Popen[bytes]]]:
    verifier, address = f"unix:{socket_dir}/v.sock", f"unix:{socket_dir}/c.sock"
    programs = [
        subprocess.Popen([sys.executable, "-m", "tests.scripted", "verifier", verifier, "delay_s=0.01"]),
        subprocess.Popen([sys.executable, "-m", "coordinator", "--listen", address, "--verifiers", verifier]),
    ]
    yield address, programs[1]
    for program in programs:
        program.kill()
        program.wait()


def test_a_killed_coordinator_is_unavailable(coordinator_process: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, process = coordinator_process
    with Client(address, max_retries=0) as client:
        client.wait_ready(30)
        stream = client.stream("text", max_tokens=400)
        assert next(stream).token_ids
        process.kill()
        with pytest.raises(UnavailableError, match="broke"):
            list(stream)
        with pytest.raises(UnavailableError, match="can't be reached"):
            client.generate("text")


def test_a_stopped_coordinator_lets_requests_end(coordinator_process: tuple[str, subprocess.Popen[bytes]]) -> None:
    address, process = coordinator_process
    with Client(address, max_retries=0) as client, Client(address) as idle:
        client.wait_ready(30)
        idle.generate("a", max_tokens=1)
        stream = client.stream("text", max_tokens=50)
        num_tokens = len(next(stream).token_ids)
        process.send_signal(signal.SIGTERM)
        assert num_tokens + sum(len(event.token_ids) for event in stream) == 50
        assert process.wait(60) == 0
        with pytest.raises((UnavailableError, FailedPreconditionError)):
            client.generate("text")
