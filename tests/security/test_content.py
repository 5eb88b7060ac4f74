"""Neither prompts nor answers are in any log, at any level, or in any span, unless somebody asks for it."""

import contextlib
import json
import logging
from collections.abc import AsyncIterator
from pathlib import Path

import grpc
import pytest

from coordinator.engine import Engine
from coordinator.server import CoordinatorServer
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig
from specwire.errors import SpecwireError
from specwire.messages import SlotRef
from specwire.rpc import open_channel
from specwire.speculative_config import SpeculativeConfig
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire.arrays import pack_int32
from tests.coordinator.byte_tokenizer import VOCAB_SIZE, make_spec
from tests.drafter.helpers import serve_drafter
from tests.verifier.harness import Rounds, decode, make_verifier, open_message, prefill, serve, tiny_model
from tests.waiting import until

CANARY = "kumquat zebra kumquat zebra"
CANARY_IDS = list(CANARY.encode())
NUM_IN_A_ROW = 5


def find_content(text: str, token_ids: list[int]) -> list[str]:
    """Where a text has some of these ids in a row, however they are written, or the canary's words."""
    found = [word for word in ("kumquat", "zebra") if word in text]
    for start in range(len(token_ids) - NUM_IN_A_ROW + 1):
        run = token_ids[start : start + NUM_IN_A_ROW]
        forms = (", ".join(map(str, run)), ",".join(map(str, run)), " ".join(map(str, run)), repr(pack_int32(run))[2:-1], pack_int32(run).hex())
        found += [form for form in forms if form in text]
    return found


def test_what_is_looked_for_is_found() -> None:
    for text in (
        CANARY,
        str(CANARY_IDS),
        repr(pack_int32(CANARY_IDS)),
        pack_int32(CANARY_IDS).hex(),
        json.dumps(CANARY_IDS),
        f"x{tuple(CANARY_IDS)}",
    ):
        assert find_content(text, CANARY_IDS), text
    assert not find_content("lane 0: 107 of 117 sequences", CANARY_IDS)


@contextlib.asynccontextmanager
async def stack(folder: Path, trace_file: Path, *, trace_content: bool = False) -> AsyncIterator[CoordinatorServer]:
    """All three services, the real ones, with a tiny model that speaks bytes."""
    verifier = make_verifier(tiny_model(vocab_size=VOCAB_SIZE), max_model_len=128)
    drafting = DrafterConfig(trace_file=str(trace_file))
    async with serve(verifier, folder, tokenizer=make_spec()) as served, serve_drafter(folder, drafting) as drafter:
        config = CoordinatorConfig(
            listen=(f"unix:{folder}/coordinator",),
            verifiers=(served.address,),
            drafters=(drafter.addresses[0],),
            trace_file=str(trace_file),
            trace_content=trace_content,
            speculative_config=SpeculativeConfig(num_speculative_tokens=3),
        )
        engine = Engine(config)
        server = CoordinatorServer(engine, config)
        await server.start()
        await engine.start()
        await until(lambda: engine.ready.is_ready and all(link.is_connected for lane in engine.lanes for link in lane.links), 30)
        try:
            yield server
        finally:
            await engine.stop(0)
            await server.stop(0)


async def use(server: CoordinatorServer) -> list[int]:
    """Everything that a prompt can go through, mistakes included; the ids of an answer."""
    async with AsyncClient(server.bound_addresses[0], max_retries=0) as client:
        answer = (await client.generate(CANARY, max_tokens=24, seed=1, temperature=1.0)).choices[0].token_ids
        await client.generate(CANARY, max_tokens=8, stop=("zebra", CANARY), logprobs=2, n=2)
        async with client.stream(CANARY, max_tokens=60) as stream:
            await anext(stream)
        for mistake in (
            {"max_tokens": 1000},
            {"stop": ("zebra", "")},
            {"stop_token_ids": (*CANARY_IDS, 10**6)},
            {"allowed_token_ids": CANARY_IDS[:1], "bad_words_token_ids": (tuple(CANARY_IDS[:1]),)},
            {"allowed_token_ids": CANARY_IDS[:1], "bad_words_token_ids": (tuple(CANARY_IDS[:1] * 2),), "max_tokens": 9},
            {"timeout": 0.000_001},
        ):
            with pytest.raises(SpecwireError):
                await client.generate(CANARY, **mistake)
        with pytest.raises(SpecwireError):
            await client.generate([*CANARY_IDS, 10**6])
        with pytest.raises(SpecwireError):
            await client.generate(CANARY * 20)
    async with open_channel(server.bound_addresses[0]) as channel:
        call = channel.unary_stream("/specwire.v1.CoordinatorService/Generate")(pack_int32(CANARY_IDS) + CANARY.encode())
        assert await call.code() is grpc.StatusCode.INVALID_ARGUMENT
        broken = pb.GenerateRequest(prompt_token_ids=CANARY.encode() + b"x" * (5 - len(CANARY) % 4))
        with pytest.raises(grpc.aio.AioRpcError):
            [_ async for _ in CoordinatorServiceStub(channel).Generate(broken)]
    return answer


async def test_logs_and_spans_have_no_content(socket_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    trace_file = tmp_path / "trace.jsonl"
    async with stack(socket_dir, trace_file) as server:
        answer = await use(server)
    for name in ("coordinator", "verifier_svc", "drafter_svc", "specwire"):
        assert any(record.name.startswith(name) for record in caplog.records), f"{name} has logged nothing"
    spans = trace_file.read_text()
    assert "generate" in spans
    for ids in (CANARY_IDS, answer):
        for text in (caplog.text, spans):
            assert not find_content(text, ids)


async def test_content_is_in_spans_when_asked_for(socket_dir: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    trace_file = tmp_path / "trace.jsonl"
    async with stack(socket_dir, trace_file, trace_content=True) as server, AsyncClient(server.bound_addresses[0]) as client:
        await client.generate(CANARY, max_tokens=8)
    ids = [value["intValue"] for value in _values(trace_file.read_text(), "prompt")]
    assert [int(value) for value in ids] == CANARY_IDS
    assert not find_content(caplog.text, CANARY_IDS)


def _values(spans: str, part: str) -> list[dict[str, str]]:
    """The values of the array attribute whose name has this part."""
    for line in spans.splitlines():
        for scopes in json.loads(line)["resourceSpans"]:
            for scope in scopes["scopeSpans"]:
                for span in scope["spans"]:
                    for attribute in span.get("attributes", ()):
                        if part in attribute["key"] and "arrayValue" in attribute["value"]:
                            return attribute["value"]["arrayValue"]["values"]
    raise AssertionError(f"no attribute named like {part}")


def test_a_verifier_names_no_tokens_of_others(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    verifier = make_verifier(tiny_model(vocab_size=VOCAB_SIZE))
    rounds = Rounds(verifier)
    rounds.open(0, CANARY_IDS)
    row = rounds.launch([decode(0, [*CANARY_IDS, 7])]).rows[0]
    again = rounds.launch([prefill(0, 200, epoch=2)], closes=[SlotRef(0, 1)], opens=[open_message(0, [*CANARY_IDS, 10**6], epoch=2)]).rows[0]
    for text in (row.error, again.error, caplog.text):
        assert not find_content(text, CANARY_IDS)
    assert row.error
    assert again.error
