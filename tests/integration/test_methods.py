"""What every method promises behind real services: the target's text, and drafts that depend on a request's own tokens and noise alone, not on
whoever ran beside it, on steps without drafts, on cancelled requests, prefix caches, preemptions, lost rounds or another drafter's end."""

import asyncio
import itertools
import json
import threading
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from specwire.client import AsyncClient
from specwire.client.results import GenerationResult
from specwire.config import DrafterConfig
from specwire.messages import VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.speculative_method import LOOKUP_METHODS
from tests.drafter.helpers import serve_drafter
from tests.engine.tiny_models import save_tiny_model
from tests.heads.checkpoints import WRITERS
from tests.heads.target import Target, make_target
from verifier_svc.launched import LaunchedRound
from verifier_svc.verifier import Verifier

from .reference import OneTokenLoop
from .stack import Stack, coordinate, serve_verifier
from .tiny import drafter_config, verifier_config

K = 3
NUM_REQUESTS = 12
NUM_TOKENS = 20
COMMON = [(11 * index * index + 5) % 250 for index in range(40)]
PROMPTS = [(COMMON[:31], [*COMMON[:28], 7, 7], [3, 5] * 7, [9, 8, 7])[index % 4] for index in range(NUM_REQUESTS)]
SAMPLING = [
    SamplingParams(
        temperature=0.6 * (index % 2), seed=index, max_tokens=NUM_TOKENS, ignore_eos=True, allowed_token_ids=(3, 5, 90) if index % 3 else None
    )
    for index in range(NUM_REQUESTS)
]
"""Those with three tokens to choose from repeat themselves. Two tenants take turns in pairs, so that both have every prompt."""
TENANTS = [b"first", b"second"]
HEADS = {"eagle": "eagle_plain", "eagle3": "eagle3_speculators", "mtp": "mtp_speculators", "dflash": "dflash_speculators", "dspark": "dspark_native"}
METHODS = ["ngram", "suffix", "draft_model", "pard", *HEADS]


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def speculation(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """speculative_config by method."""
    folder = tmp_path_factory.mktemp("models")
    for name in ("draft", "pard"):
        save_tiny_model(folder / name, seed=5)
    path = folder / "pard" / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"pard_token": 258}))
    models = {
        "ngram": {"method": "ngram", "model": None},
        # Without past outputs: with them its drafts are of these, too.
        "suffix": {"method": "suffix", "model": None, "suffix_decoding_max_cached_requests": 0},
        "draft_model": {"method": "draft_model", "model": str(folder / "draft")},
        "pard": {"method": "draft_model", "model": str(folder / "pard"), "parallel_drafting": True},
    }
    heads = {name: {"method": name, "model": str(WRITERS[writer](folder / writer).folder)} for name, writer in HEADS.items()}
    return {name: spec | {"num_speculative_tokens": K} for name, spec in (models | heads).items()}


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """What the target says alone."""
    loop = OneTokenLoop(target.folder, 256, num_threads=1)
    return [loop.generate(prompt, params).token_ids for prompt, params in zip(PROMPTS, SAMPLING, strict=True)]


@dataclass
class Watch:
    """The drafts that a verifier got, by seed and number of tokens before them; some of its launches fail."""

    drafts: dict[tuple[int, int], list[list[int]]] = field(default_factory=dict)
    failing: tuple[int, ...] = ()
    has_some: threading.Event = field(default_factory=threading.Event)

    def follow(self, verifier: Verifier) -> None:
        launch, numbers = verifier.launch, itertools.count()

        def watched(request: VerifyRound) -> LaunchedRound:
            if next(numbers) in self.failing:
                raise RuntimeError("the device is gone")
            launched = launch(request)
            for segment in launched.segments:
                if segment.draft_tokens:
                    assert segment.slot.sampling is not None
                    key = (segment.slot.sampling.key, len(segment.slot.token_ids))
                    self.drafts.setdefault(key, []).append(list(segment.draft_tokens))
            if len(self.drafts) > 8:
                self.has_some.set()
            return launched

        verifier.launch = watched  # type: ignore[method-assign]


@asynccontextmanager
async def tenants(stack: Stack) -> AsyncIterator[list[AsyncClient]]:
    """A client of each."""
    async with AsyncExitStack() as clients:
        yield [await clients.enter_async_context(AsyncClient(stack.address, tenant_cache_key=key)) for key in TENANTS]


def client_of(clients: list[AsyncClient], index: int) -> AsyncClient:
    return clients[index // 2 % 2]


async def generate(clients: list[AsyncClient], index: int, priority: int = 0) -> GenerationResult:
    return await client_of(clients, index).generate(PROMPTS[index], SAMPLING[index].replace(priority=priority))


async def leave_early(clients: list[AsyncClient], index: int) -> None:
    """A request that is cancelled once it has some tokens."""
    async with client_of(clients, index).stream(PROMPTS[index], SAMPLING[index].replace(seed=100 + index)) as stream:
        async for event in stream:
            if event.token_ids:
                return


async def alone(socket_dir: Path, target: Target, spec: dict[str, Any], drafter: DrafterConfig) -> tuple[list[GenerationResult], Watch]:
    """One request after the other, with drafts in every step; nothing is cached."""
    watch = Watch()
    async with AsyncExitStack() as resources:
        config = verifier_config(target.folder, speculation=spec, enable_prefix_caching=False)
        loaded, address = await resources.enter_async_context(serve_verifier(socket_dir, config))
        watch.follow(loaded.verifier)
        server = await resources.enter_async_context(serve_drafter(socket_dir, drafter))
        stack = await resources.enter_async_context(coordinate(socket_dir, [address], [server.addresses[0]], speculation=spec))
        results = []
        for index in range(NUM_REQUESTS):
            async with AsyncClient(stack.address, tenant_cache_key=str(index).encode()) as client:
                results.append(await generate([client, client], index))
    return results, watch


async def crowded(socket_dir: Path, target: Target, spec: dict[str, Any], drafter: DrafterConfig) -> tuple[list[GenerationResult], Watch]:
    """All at once and once more, through everything that may happen."""
    watch = Watch(failing=(9, 23))
    # Suffix prefers the match that promises most in as many drafts as are asked for.
    fewer = K if spec["method"] == "suffix" else 2
    schedule = {"num_speculative_tokens_per_batch_size": [[1, 2, K], [3, 4, 0], [5, 64, fewer]]}
    async with AsyncExitStack() as resources:
        # Chunks of prompts; and room for a part of the sequences, so that some are preempted by more important ones.
        config = verifier_config(target.folder, speculation=spec, max_num_batched_tokens=40, max_num_seqs=6)
        loaded, address = await resources.enter_async_context(serve_verifier(socket_dir, config))
        watch.follow(loaded.verifier)
        first = AsyncExitStack()
        drafters = [await first.enter_async_context(serve_drafter(socket_dir, drafter, name="first"))]
        drafters.append(await resources.enter_async_context(serve_drafter(socket_dir, drafter, name="second")))
        addresses = [server.addresses[0] for server in drafters]
        stack = await resources.enter_async_context(coordinate(socket_dir, [address], addresses, speculation=spec | schedule))
        clients = await resources.enter_async_context(tenants(stack))
        running = asyncio.gather(*(generate(clients, index) for index in range(4, NUM_REQUESTS)))
        assert await asyncio.to_thread(watch.has_some.wait, 60)
        important = asyncio.gather(
            *(generate(clients, index, priority=-1) for index in range(4)), *(leave_early(clients, index) for index in range(3))
        )
        await first.aclose()
        results = (await important)[:4] + await running
        results += await asyncio.gather(*(generate(clients, index) for index in range(NUM_REQUESTS)))
        counters = stack.engine.counters
        assert counters.num_verifier_losses == len(watch.failing)
        assert counters.num_drafter_losses + counters.num_drafter_handovers > 0
    return results, watch


@pytest.mark.parametrize("name", METHODS)
async def test_drafts_depend_on_a_requests_tokens_alone(socket_dir: Path, target, speculation, plain, name: str) -> None:
    spec = speculation[name]
    drafter = drafter_config(target.folder, speculation=spec, target_model=str(target.folder) if name in HEADS else "")
    first, expected = await alone(socket_dir, target, spec, drafter)
    results, found = await crowded(socket_dir, target, spec, drafter)
    assert [result.token_ids for result in (*first, *results)] == plain * 3, "drafts changed the text"
    assert sum(result.usage.num_cached_tokens for result in results) > 100
    assert sum(result.spec.num_preemptions for result in results) > 0
    num_compared = 0
    for key, runs in found.drafts.items():
        for [drafts], other in itertools.product([expected.drafts.get(key, [[]])], runs):
            common = min(len(drafts), len(other))
            assert drafts[:common] == other[:common], f"seed {key[0]} at {key[1]} tokens"
            num_compared += common > 0
    assert num_compared > (30 if name in LOOKUP_METHODS else 100), f"{num_compared} of {len(found.drafts)} places have drafts in both"


SHARED, SECRETS = (3, 5), (90, 190)
"""Tokens that both tenants' answers have, and one that only the first or second one's has."""


@pytest.mark.parametrize("method", ["suffix", ("ngram", "suffix")], ids=str)
async def test_no_draft_holds_a_token_of_another_tenant(socket_dir: Path, target, method: str | tuple[str, str]) -> None:
    """Answers of both have the same words, with past outputs to find them in; only what follows tells whose they are."""
    watch = Watch()
    spec = {"method": method if isinstance(method, str) else list(method), "model": None, "num_speculative_tokens": K}
    async with AsyncExitStack() as resources:
        loaded, address = await resources.enter_async_context(serve_verifier(socket_dir, verifier_config(target.folder, speculation=spec)))
        watch.follow(loaded.verifier)
        server = await resources.enter_async_context(serve_drafter(socket_dir, drafter_config(target.folder, speculation=spec)))
        stack = await resources.enter_async_context(coordinate(socket_dir, [address], [server.addresses[0]], speculation=spec))
        clients = await resources.enter_async_context(tenants(stack))
        for number in range(3):
            await asyncio.gather(
                *(
                    clients[seed % 2].generate(
                        [7, 8, 3, 5],
                        SamplingParams(temperature=1.5, seed=seed, max_tokens=40, ignore_eos=True, allowed_token_ids=(*SHARED, SECRETS[seed % 2])),
                    )
                    for seed in range(8 * number, 8 * number + 8)
                )
            )
    drafted = [set(), set()]
    for (seed, _), runs in watch.drafts.items():
        drafted[seed % 2].update(itertools.chain.from_iterable(runs))
    for own, other in ((0, 1), (1, 0)):
        assert SECRETS[own] in drafted[own], "nothing that could have been mixed up"
        assert SECRETS[other] not in drafted[own]
