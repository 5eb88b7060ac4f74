"""Heads in a whole stack: every draft is what a plain reference makes of the target's true hidden states, whatever happened on the way there."""

import asyncio
import threading
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from drafter_svc.feature_counts import FAILED, GRPC, MEMORY, READ
from drafter_svc.server import DrafterServer
from specwire.config import DrafterConfig
from specwire.messages import VerifyRound
from specwire.sampling_params import SamplingParams
from tests.drafter.helpers import serve_drafter
from tests.heads.checkpoints import WRITERS, Checkpoint
from tests.heads.reference import Noise, Reference
from tests.heads.target import Target, make_target, true_features
from verifier_svc.launched import LaunchedRound
from verifier_svc.verifier import Verifier

from .stack import Stack, coordinate, serve_verifier
from .tiny import drafter_config, verifier_config

K = 3
COMMON = [(11 * index * index + 5) % 250 for index in range(70)]
PROMPTS = [COMMON[:40], [*COMMON[:36], 7, 7], COMMON[:70], [9, 8, 7], COMMON[50:]]
SAMPLING = [SamplingParams(temperature=0.7 * (seed % 2), seed=seed, max_tokens=20, ignore_eos=True) for seed in range(len(PROMPTS))]
Drafted = tuple[list[int], list[int], int]
"""Tokens of a sequence, the drafts behind them, and its seed."""


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Target:
    return make_target(tmp_path_factory.mktemp("target"))


@pytest.fixture(scope="module")
def heads(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Checkpoint]:
    folder = tmp_path_factory.mktemp("heads")
    return {name: WRITERS[name](folder / name) for name in ("eagle3_speculators", "dspark_speculators", "eagle_plain")}


@dataclass
class Watch:
    """What drafts a verifier got, and behind which tokens; how many sequences were opened there."""

    drafted: list[Drafted] = field(default_factory=list)
    num_opens: int = 0
    has_some: threading.Event = field(default_factory=threading.Event)

    def follow(self, verifier: Verifier) -> None:
        launch = verifier.launch

        def watched(request: VerifyRound) -> LaunchedRound:
            launched = launch(request)
            self.num_opens += len(request.opens)
            for segment in launched.segments:
                if segment.draft_tokens:
                    assert segment.slot.sampling is not None
                    self.drafted.append((list(segment.slot.token_ids), list(segment.draft_tokens), segment.slot.sampling.key))
            if len(self.drafted) > 20:
                self.has_some.set()
            return launched

        verifier.launch = watched  # type: ignore[method-assign]


def check_drafts(target: Target, checkpoint: Checkpoint, drafted: list[Drafted]) -> None:
    """Each is the reference's; one in four is looked at."""
    reference = Reference(checkpoint, target.tensors)
    texts: dict[int, list[int]] = {}
    for tokens, _, seed in drafted:
        texts[seed] = max(tokens, texts.get(seed, []), key=len)
    features = {seed: true_features(target, checkpoint, text) for seed, text in texts.items()}
    for tokens, drafts, seed in drafted[::4]:
        noise = Noise(SAMPLING[seed].temperature or 0.0, seed)
        expected, _ = reference.drafts(tokens, features[seed][: len(tokens) - 1], len(drafts), noise)
        assert drafts == expected, f"seed {seed} at {len(tokens)} tokens"


def speculation(checkpoint: Checkpoint) -> dict[str, Any]:
    return {"method": checkpoint.folder.name.partition("_")[0], "model": str(checkpoint.folder), "num_speculative_tokens": K}


def head_config(target: Target, checkpoint: Checkpoint, **fields: Any) -> DrafterConfig:
    return drafter_config(target.folder, speculation=speculation(checkpoint), target_model=str(target.folder), **fields)


async def generate(stack: Stack) -> list[list[int]]:
    """All requests at once."""
    results = await asyncio.gather(*(stack.client.generate(prompt, params) for prompt, params in zip(PROMPTS, SAMPLING, strict=True)))
    return [result.choices[0].token_ids for result in results]


@pytest.fixture(scope="module")
def plain(target: Target) -> list[list[int]]:
    """What the target says alone."""
    from .reference import OneTokenLoop

    loop = OneTokenLoop(target.folder, 128, num_threads=1)
    return [loop.generate(prompt, params).token_ids for prompt, params in zip(PROMPTS, SAMPLING, strict=True)]


def counts_of(drafter: DrafterServer) -> dict[tuple[str, str], int]:
    features = drafter.worker.ready.result().features
    assert features is not None
    return dict(features.counts.num_spans)


@pytest.mark.parametrize("uses_memory", [True, False], ids=["memory", "grpc"])
@pytest.mark.parametrize("name", ["eagle3_speculators", "dspark_speculators", "eagle_plain"])
async def test_drafts_of_a_stack_are_the_references(socket_dir: Path, target, heads, plain, name: str, uses_memory: bool) -> None:
    """Prefill in chunks, prefix hits, sequences side by side, nearly all drafts rejected."""
    checkpoint, watch = heads[name], Watch()
    spec = speculation(checkpoint)
    config = verifier_config(target.folder, speculation=spec, max_num_batched_tokens=24, max_num_seqs=3, num_kv_blocks=40)
    async with AsyncExitStack() as resources:
        loaded, address = await resources.enter_async_context(serve_verifier(socket_dir, config))
        watch.follow(loaded.verifier)
        drafter = await resources.enter_async_context(serve_drafter(socket_dir, head_config(target, checkpoint, read_shared_features=uses_memory)))
        stack = await resources.enter_async_context(coordinate(socket_dir, [address], [drafter.addresses[0]], speculation=spec))
        assert await generate(stack) == plain, "drafts changed the text"
        used, unused = (MEMORY, GRPC) if uses_memory else (GRPC, MEMORY)
        counts = counts_of(drafter)
        assert counts.get((used, READ), 0) > 20
        assert (counts.get((unused, READ), 0), counts.get((used, FAILED), 0)) == (0, 0)
        # Equal prompts once more: nearly everything is in the prefix caches of both.
        assert await generate(stack) == plain
    assert len(watch.drafted) > 100
    check_drafts(target, checkpoint, watch.drafted)


async def test_a_drafter_that_goes_is_followed_by_one_that_needs_no_row_of_the_verifier(socket_dir: Path, target, heads, plain) -> None:
    checkpoint, watch = heads["eagle3_speculators"], Watch()
    spec, settings = speculation(checkpoint), head_config(target, checkpoint)
    config = verifier_config(target.folder, speculation=spec)
    async with AsyncExitStack() as resources:
        loaded, address = await resources.enter_async_context(serve_verifier(socket_dir, config))
        watch.follow(loaded.verifier)
        first = AsyncExitStack()
        drafters = [await first.enter_async_context(serve_drafter(socket_dir, settings, name="first"))]
        drafters.append(await resources.enter_async_context(serve_drafter(socket_dir, settings, name="second")))
        addresses = [drafter.addresses[0] for drafter in drafters]
        stack = await resources.enter_async_context(coordinate(socket_dir, [address], addresses, speculation=spec))
        running = asyncio.create_task(generate(stack))
        assert await asyncio.to_thread(watch.has_some.wait, 60)
        num_read = counts_of(drafters[1]).get((MEMORY, READ), 0)
        await first.aclose()
        assert await running == plain
        assert counts_of(drafters[1])[MEMORY, READ] > num_read
        assert watch.num_opens == len(PROMPTS), "a sequence was opened anew at the verifier"
        assert stack.engine.counters.num_drafter_losses + stack.engine.counters.num_drafter_handovers > 0
    check_drafts(target, checkpoint, watch.drafted)


async def test_a_drafter_of_another_head_is_refused_by_name(socket_dir: Path, target, heads) -> None:
    """It goes on without it."""
    spec = speculation(heads["eagle3_speculators"])
    async with AsyncExitStack() as resources:
        config = verifier_config(target.folder, features=(str(heads["eagle_plain"].folder),))
        _, address = await resources.enter_async_context(serve_verifier(socket_dir, config))
        drafter = await resources.enter_async_context(serve_drafter(socket_dir, head_config(target, heads["eagle3_speculators"])))
        with pytest.raises(Exception, match=r"it needs the features of eagle3_speculators .* but the verifiers keep eagle_plain"):
            await resources.enter_async_context(coordinate(socket_dir, [address], [drafter.addresses[0]], speculation=spec))
