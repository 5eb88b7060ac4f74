"""One verifier and one drafter of dummy models, and one coordinator after the other in front of them."""

import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from benchmarks.gpu.breakdown import MAX_TRACED_STEPS
from benchmarks.gpu.load import Generated, random_prompts, run_batch
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.sizes import Sizes
from specwire import rpc
from specwire.cli.up import free_port
from specwire.client import AsyncClient
from specwire.config import CoordinatorConfig, DrafterConfig, VerifierConfig
from specwire.messages import CoordinatorStatus
from specwire.speculative_config import SpeculativeConfig

UNIX, TCP = "unix", "tcp"


@dataclass(frozen=True, slots=True)
class Peers:
    """The running verifier and drafter, each on a Unix socket and on loopback.

    Args:
        folder: for sockets and the trace file.
        vocab_size: of the prompts' ids.
    """

    folder: Path
    sizes: Sizes
    vocab_size: int
    verifier: VerifierConfig
    drafter: DrafterConfig
    log: Log

    @property
    def trace_file(self) -> Path:
        """Spans of all services."""
        return self.folder / "traces.jsonl"

    def address(self, service: str, transport: str) -> str:
        """Where the verifier or the drafter serves."""
        listen = self.verifier.listen if service == "verifier" else self.drafter.listen
        return next(address for address in listen if address.startswith("unix:") == (transport == UNIX))


def verifier_config(folder: Path, model: Path, sizes: Sizes, device: str, speculative: SpeculativeConfig) -> VerifierConfig:
    """With room for all sequences at their full length, and without a prefix cache."""
    return VerifierConfig(
        listen=(f"127.0.0.1:{free_port(0)}", f"unix:{folder}/verifier"),
        model=str(model),
        load_format="dummy",
        skip_tokenizer=True,
        device=device,
        max_model_len=sizes.max_model_len,
        max_num_seqs=sizes.max_num_seqs,
        max_num_batched_tokens=sizes.max_num_batched_tokens,
        num_kv_blocks=sizes.max_num_seqs * sizes.num_blocks,
        enable_prefix_caching=False,
        trace_file=f"{folder}/traces.jsonl",
        speculative_config=speculative,
    )


def drafter_config(folder: Path, sizes: Sizes, device: str, speculative: SpeculativeConfig) -> DrafterConfig:
    """For all sequences; it computes as many prompt tokens at a time as the verifier."""
    return DrafterConfig(
        listen=(f"127.0.0.1:{free_port(0)}", f"unix:{folder}/drafter"),
        load_format="dummy",
        skip_tokenizer=True,
        device=device,
        max_num_seqs=sizes.max_num_seqs,
        prefill_chunk=sizes.max_num_batched_tokens,
        speculative_config=speculative,
    )


@contextlib.asynccontextmanager
async def serve_peers(
    folder: Path, sizes: Sizes, vocab_size: int, verifier: VerifierConfig, drafter: DrafterConfig
) -> AsyncIterator[Peers]:  # fmt: skip
    """Both processes, healthy. They start one after the other: on one device their measurements of costs would disturb each other."""
    log = Log()
    async with running(verifier, log=log), running(drafter, log=log):
        yield Peers(folder, sizes, vocab_size, verifier, drafter, log)


@dataclass(frozen=True, slots=True)
class Served:
    """A coordinator and the way to it."""

    peers: Peers
    channel: Any
    client: AsyncClient

    async def generate(self, count: int, num_tokens: int, *, traceparent: str = "") -> Generated:
        """A batch of new random prompts."""
        sizes = self.peers.sizes
        prompts = random_prompts(self.peers.vocab_size, count, sizes.num_prompt_tokens)
        return await run_batch(self.channel, prompts, num_tokens, traceparent=traceparent)

    async def status(self) -> CoordinatorStatus:
        """With the medians of its last steps."""
        return await self.client.get_status()


@contextlib.asynccontextmanager
async def serve_coordinator(
    peers: Peers, transport: str, speculative: SpeculativeConfig, *, max_outstanding_rounds: int = 2, command: Sequence[str] = (), **fields: Any
) -> AsyncIterator[Served]:
    """A coordinator of its own process in front of the peers, all hops over one transport; connected to both.

    Args:
        command: see `running`.
        fields: more of its configuration.
    """
    own = f"unix:{peers.folder}/coordinator" if transport == UNIX else f"127.0.0.1:{free_port(0)}"
    config = CoordinatorConfig(
        listen=(own,),
        verifiers=(peers.address("verifier", transport),),
        drafters=(peers.address("drafter", transport),),
        max_outstanding_rounds=max_outstanding_rounds,
        max_stream_backlog=1 << 20,
        trace_file=str(peers.trace_file),
        trace_sample_ratio=0.0,
        trace_max_steps=MAX_TRACED_STEPS,
        speculative_config=speculative,
    )
    num_lines = len(peers.log.lines)
    config = dataclasses.replace(config, **fields)
    async with running(config, log=peers.log, command=command), rpc.open_channel(own) as channel, AsyncClient(own) as client:
        await client.wait_ready()
        served = Served(peers, channel, client)
        await peers.log.wait_for(f"drafter {config.drafters[0]} is there", num_lines)
        yield served


def no_drafts(sizes: Sizes) -> SpeculativeConfig:
    """Plain decoding with the drafter there: K is 0 for every number of sequences."""
    return SpeculativeConfig(
        num_speculative_tokens=sizes.num_draft_tokens, num_speculative_tokens_per_batch_size=((1, sizes.max_num_seqs, 0),)
    )  # fmt: skip
