"""Services as real processes: what does not fit together ends or waits with one clear line, and what may follow another does."""

import asyncio
import json
import socket
from collections.abc import Iterator
from pathlib import Path

import pytest

from specwire.client.aio import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.errors import UnavailableError
from specwire.rpc import is_serving, open_channel
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from specwire.tokenizer import Tokenizer
from tests.drafter.helpers import serve_drafter
from tests.engine.tiny_models import save_tiny_model
from tests.waiting import until

from .reference import OneTokenLoop
from .stack import Service, serve_engine, serve_verifier
from .tiny import drafter_config, tiny_stack, verifier_config

_PROMPT = [72, 105, 32, 116, 104]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("processes") / "tiny"
    save_tiny_model(path)
    return path


@pytest.fixture
def services() -> Iterator[list[Service]]:
    """Processes that a test starts; those that are left end with it."""
    started: list[Service] = []
    yield started
    for service in started:
        if service.is_running:
            service.kill()


def start(services: list[Service], *configs: VerifierConfig | DrafterConfig | CoordinatorConfig) -> list[Service]:
    """Starts processes side by side."""
    new = [Service(config) for config in configs]
    services += new
    for service in new:
        service.start()
    return new


def coordinator_config(folder: Path, name: str, verifier: str, *, drafters: tuple[str, ...] = (), **fields: object) -> CoordinatorConfig:
    return CoordinatorConfig(listen=(f"unix:{folder}/{name}",), verifiers=(verifier,), drafters=drafters, **fields)  # type: ignore[arg-type]


def check_ends_with_one_line(service: Service, *parts: str) -> None:
    """Status 1, no traceback, and an error whose line holds all of these."""
    assert service.wait_ended() == 1, service.log
    assert "Traceback" not in service.log
    [line] = [line for line in service.log.splitlines() if "ERROR" in line]
    for part in parts:
        assert part in line, (part, line)


def test_missing_models(socket_dir: Path, services: list[Service], tmp_path: Path) -> None:
    spec = SpeculativeConfig.from_dict({"method": "draft_model", "model": str(tmp_path / "nowhere")})
    verifier, drafter = start(
        services,
        VerifierConfig(listen=(f"unix:{socket_dir}/v",), model=str(tmp_path / "nowhere.gguf")),
        DrafterConfig(listen=(f"unix:{socket_dir}/d",), speculative_config=spec),
    )
    check_ends_with_one_line(verifier, str(tmp_path / "nowhere.gguf"))
    check_ends_with_one_line(drafter, str(tmp_path / "nowhere"))


def test_ports_in_use(services: list[Service], folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        address = f"127.0.0.1:{taken.getsockname()[1]}"
        for service in start(
            services,
            VerifierConfig(listen=(address,), model=str(folder)),
            DrafterConfig(listen=(address,)),
            CoordinatorConfig(listen=(address,), verifiers=("127.0.0.1:1",)),
        ):
            check_ends_with_one_line(service, f"cannot listen on {address}", "choose another address")


async def test_a_second_coordinator_waits_until_the_first_leaves(socket_dir: Path, folder: Path, services: list[Service]) -> None:
    async with serve_verifier(socket_dir, verifier_config(folder)) as (_, verifier):
        first, second = (Service(coordinator_config(socket_dir, name, verifier, coordinator_id=name)) for name in ("one", "two"))
        services += [first, second]
        first.start()
        await asyncio.to_thread(first.wait_ready)
        second.start()
        refusal = "coordinator 'one' holds this verifier, and 'two' cannot have it too; stop the holder, or give each coordinator its own verifiers"
        await asyncio.to_thread(second.wait_for, refusal)
        async with open_channel(second.address) as channel:
            assert not await is_serving(channel)
        async with AsyncClient(first.address) as client_of_first, AsyncClient(second.address) as client_of_second:
            with pytest.raises(UnavailableError, match="coordinator 'one' holds this verifier"):
                await client_of_second.generate(_PROMPT, max_tokens=4)
            text = (await client_of_first.generate(_PROMPT, max_tokens=4)).token_ids
            assert await asyncio.to_thread(first.stop) == 0
            await asyncio.to_thread(second.wait_ready)
            await client_of_second.wait_ready()
            assert (await client_of_second.generate(_PROMPT, max_tokens=4)).token_ids == text
        assert await asyncio.to_thread(second.stop) == 0


async def test_a_later_incarnation_takes_over(socket_dir: Path, folder: Path, services: list[Service]) -> None:
    expected = OneTokenLoop(folder, 250, num_threads=1)
    async with serve_verifier(socket_dir, verifier_config(folder)) as (loaded, verifier):
        first, second = (
            Service(coordinator_config(socket_dir, name, verifier, coordinator_id="same", verifier_wait_s=0.5)) for name in ("one", "two")
        )
        services += [first, second]
        first.start()
        await asyncio.to_thread(first.wait_ready)
        async with AsyncClient(first.address) as client_of_first, AsyncClient(second.address) as client_of_second:
            # Requests that run while the verifier is taken away end with what happened.
            running = [asyncio.create_task(_run_until_unavailable(client_of_first)) for _ in range(3)]
            second.start()
            await asyncio.to_thread(second.wait_ready)
            await client_of_second.wait_ready()
            result = await client_of_second.generate(_PROMPT, max_tokens=8)
            assert result.token_ids == expected.generate(_PROMPT, SamplingParams(max_tokens=8)).token_ids
            for error in await asyncio.gather(*running):
                assert "no verifier came back within 0.5 s" in str(error) or "not serving" in str(error), error
                assert "incarnation" in str(error), error
        assert loaded.verifier.num_open_slots == 0
        assert loaded.verifier.num_free_blocks == loaded.verifier.num_blocks


async def _run_until_unavailable(client: AsyncClient) -> UnavailableError:
    """Sends one request after the other until one fails."""
    while True:
        try:
            await client.generate(_PROMPT, max_tokens=200, ignore_eos=True)
        except UnavailableError as error:
            return error


def save_with_other_tokenizer(folder: Path, path: Path) -> None:
    """The same model, but its tokenizer has two ids exchanged."""
    save_tiny_model(path)
    content = json.loads((folder / "tokenizer.json").read_text(encoding="utf-8"))
    vocab = content["model"]["vocab"]
    first, second = list(vocab)[:2]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    (path / "tokenizer.json").write_text(json.dumps(content), encoding="utf-8")


async def test_a_drafter_with_another_tokenizer(socket_dir: Path, folder: Path, services: list[Service], tmp_path: Path) -> None:
    other = tmp_path / "other"
    save_with_other_tokenizer(folder, other)
    fingerprints = [Tokenizer.from_folder(path).fingerprint for path in (folder, other)]
    assert fingerprints[0] != fingerprints[1]
    async with serve_verifier(socket_dir, verifier_config(folder)) as (_, verifier):
        # Refused at start where it is there, naming both.
        async with serve_drafter(socket_dir, drafter_config(other)) as drafter:
            [coordinator] = start(services, coordinator_config(socket_dir, "c", verifier, drafters=(drafter.addresses[0],)))
            await asyncio.to_thread(check_ends_with_one_line, coordinator, *fingerprints, drafter.addresses[0], verifier, "use a draft model of")
        # Skipped and counted where it comes later.
        late = f"unix:{socket_dir}/late"
        config = CoordinatorConfig(listen=(f"unix:{socket_dir}/coordinator",), verifiers=(verifier,), drafters=(late,))
        async with serve_engine(config) as stack:
            await stack.client.wait_ready()
            async with serve_drafter(socket_dir, drafter_config(other), name="late"):
                await until(lambda: stack.engine.counters.num_drafter_refusals > 0)
                result = await stack.client.generate(_PROMPT, max_tokens=8)
    assert result.token_ids == OneTokenLoop(folder, 64, num_threads=1).generate(_PROMPT, SamplingParams(max_tokens=8)).token_ids
    assert result.spec.num_draft_tokens == 0


async def test_a_padded_vocabulary_may_be_larger(socket_dir: Path, tmp_path: Path) -> None:
    padded, small = tmp_path / "padded", tmp_path / "small"
    save_tiny_model(padded, vocab_size=320)
    save_tiny_model(small)
    expected = OneTokenLoop(padded, 64, num_threads=1)
    for target, draft in ((padded, small), (padded, padded)):
        async with tiny_stack(socket_dir, verifier_config(target, max_model_len=64), drafter_config(draft)) as stack:
            params = SamplingParams(max_tokens=24, allowed_token_ids=tuple(range(259)))
            result = await stack.client.generate(_PROMPT, params)
            assert result.token_ids == expected.generate(_PROMPT, params).token_ids
            assert result.spec.num_draft_tokens > 0
            assert result.spec.num_accepted_tokens > 0 or draft is small
