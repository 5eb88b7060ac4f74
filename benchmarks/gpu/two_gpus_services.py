"""The services of `two_gpus`: verifiers and drafters with a GPU each, one coordinator after the other in front of some.

A name is what a service is and, at its end, which of the two GPUs it has: v verifier, d draft model, e EAGLE-3 head, g the same head, which gets
features over gRPC instead of reading the verifier's memory.
"""

import asyncio
import contextlib
import dataclasses
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.gpu import peer
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, TINY, TINY_DRAFT, save_shape
from benchmarks.gpu.head_files import save_eagle3_head
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.schedule import Schedule
from benchmarks.gpu.sizes import Sizes
from benchmarks.gpu.stack import UNIX, Peers, Served, drafter_config, serve_coordinator, verifier_config
from specwire.cli.up import free_port
from specwire.config import DrafterConfig, VerifierConfig
from specwire.errors import UnavailableError
from specwire.launch import Supervisor
from specwire.speculative_config import SpeculativeConfig

HEAD_NUM_DRAFTS = 3
_HEADS = ("e", "g")
_DRAFT_KV_BYTES, _HEAD_KV_BYTES, _TINY_KV_BYTES = 16 << 30, 4 << 30, 16 << 20
_PREFILL_CHUNK = 1024
_DRAFT_VOCAB, _TINY_DRAFT_VOCAB = 32_000, 128
_DRAFT_WAIT_MS, _TINY_WAIT_MS = 100.0, 10_000.0
"""A step waits so long for its drafts at least: what is compared is how long they take, not when they are given up."""


@dataclass(frozen=True, slots=True)
class Services:
    """Those that run, by name.

    Args:
        peers: the first verifier, and a draft model.
        addresses, supervisors: of each.
        metrics: host:port, of drafters with a head.
        failed: drafters that could not be started, and why; what needs none of them is measured all the same.
    """

    peers: Peers
    is_tiny: bool
    addresses: dict[str, str] = field(default_factory=dict)
    supervisors: dict[str, Supervisor] = field(default_factory=dict)
    metrics: dict[str, str] = field(default_factory=dict)
    failed: dict[str, str] = field(default_factory=dict)

    def check(self) -> None:
        """Raises UnavailableError if a verifier has ended: nothing can be measured then."""
        for name, supervisor in self.supervisors.items():
            if name[0] == "v" and supervisor.groups[0][0].pid is None:
                raise UnavailableError(f"the verifier {name} has ended; its lines say why")

    @contextlib.asynccontextmanager
    async def coordinate(self, schedule: Schedule, verifiers: Sequence[str], drafters: Sequence[str], **fields: Any) -> AsyncIterator[Served]:
        """A coordinator in front of these, every drafter connected to every lane.

        Args:
            schedule: K by batch size.
            fields: more of its configuration.

        Raises:
            UnavailableError: one of them is not there.
        """
        self.check()
        if missing := [name for name in drafters if name in self.failed]:
            raise UnavailableError(f"{missing[0]} could not be started: {self.failed[missing[0]]}")
        log = self.peers.log
        since = len(log.lines)
        speculative = dataclasses.replace(self.peers.verifier.speculative_config, num_speculative_tokens_per_batch_size=schedule)
        async with serve_coordinator(
            self.peers,
            UNIX,
            speculative,
            verifiers=tuple(self.addresses[name] for name in verifiers),
            drafters=tuple(self.addresses[name] for name in drafters),
            min_draft_wait_ms=_TINY_WAIT_MS if self.is_tiny else _DRAFT_WAIT_MS,
            **fields,
        ) as served:
            for lane in range(len(verifiers)):
                for name in drafters:
                    await log.wait_for(f"lane {lane}: drafter {self.addresses[name]} is there", since)
            yield served


def fixed(sizes: Sizes, k: int) -> Schedule:
    """The same K for every number of sequences."""
    return ((1, sizes.max_num_seqs, k),)


def synthetic_rates(num_drafts: int) -> tuple[float, ...]:
    """Probability that the first i drafts are all accepted, for i = 1..num_drafts."""
    known = peer.SYNTHETIC_RATES
    return known[:num_drafts] + (0.0,) * (num_drafts - len(known))


@dataclass(frozen=True, slots=True)
class _Configs:
    """By the first letter of a name."""

    v: VerifierConfig
    d: DrafterConfig
    e: DrafterConfig | None

    @classmethod
    def make(cls, folder: Path, sizes: Sizes, device: str, *, is_tiny: bool, has_heads: bool) -> "_Configs":
        target, draft = (TINY, TINY_DRAFT) if is_tiny else (LLAMA_8B, LLAMA_1B)
        num_drafts = sizes.num_draft_tokens
        model = SpeculativeConfig(
            method="draft_model", model=str(save_shape(draft, folder / "draft")), num_speculative_tokens=num_drafts,
            rejection_sample_method="synthetic", synthetic_acceptance_rates=synthetic_rates(num_drafts), max_model_len=sizes.max_model_len,
        )  # fmt: skip
        verifier = verifier_config(folder, save_shape(target, folder / "target"), sizes, device, model)
        verifier = dataclasses.replace(verifier, enable_prefix_caching=True, num_kv_blocks=2 * verifier.num_kv_blocks)
        kv_bytes = (_TINY_KV_BYTES, _TINY_KV_BYTES) if is_tiny else (_DRAFT_KV_BYTES, _HEAD_KV_BYTES)
        drafter = dataclasses.replace(
            drafter_config(folder, sizes, device, model), kv_cache_memory=kv_bytes[0], trace_file=verifier.trace_file,
            prefill_chunk=min(_PREFILL_CHUNK, sizes.max_num_batched_tokens),
        )  # fmt: skip
        if not has_heads:
            return cls(verifier, drafter, None)
        head = save_eagle3_head(target, _TINY_DRAFT_VOCAB if is_tiny else _DRAFT_VOCAB, folder / "head", HEAD_NUM_DRAFTS)
        eagle3 = dataclasses.replace(
            model, method="eagle3", model=str(head), num_speculative_tokens=HEAD_NUM_DRAFTS,
            synthetic_acceptance_rates=synthetic_rates(HEAD_NUM_DRAFTS),
        )  # fmt: skip
        with_head = dataclasses.replace(drafter, speculative_config=eagle3, kv_cache_memory=kv_bytes[1])
        return cls(dataclasses.replace(verifier, features=(str(head),)), drafter, with_head)

    def of(self, folder: Path, name: str) -> VerifierConfig | DrafterConfig:
        """A service's own."""
        listen = (f"unix:{folder}/{name}",)
        if name[0] == "v":
            return dataclasses.replace(self.v, listen=listen)
        if name[0] not in _HEADS:
            return dataclasses.replace(self.d, listen=listen)
        assert self.e is not None, f"{name} needs the files of a head"
        return dataclasses.replace(self.e, listen=listen, read_shared_features=name[0] == "e", metrics_listen=f"127.0.0.1:{free_port(0)}")


@contextlib.asynccontextmanager
async def serve_services(
    folder: Path, names: Sequence[str], sizes: Sizes, device: str, gpus: Sequence[str], *, is_tiny: bool, is_priced: bool
) -> AsyncIterator[Services]:
    """Processes with llama-8b's and llama-1b's shape, and that of a head, if one is named; v0 is always among them.

    They start side by side.

    Args:
        is_priced: their cost tables are wanted: of those that share a GPU one starts after the other, the verifier first, since measurements would
            disturb each other.
    """
    assert "v0" in names, f"{names} have no first verifier"
    configs = _Configs.make(folder, sizes, device, is_tiny=is_tiny, has_heads=any(name[0] in _HEADS for name in names))
    log = Log()
    vocab_size = (TINY if is_tiny else LLAMA_8B).vocab_size
    services = Services(Peers(folder, sizes, vocab_size, configs.v, configs.d, log), is_tiny)
    async with contextlib.AsyncExitStack() as resources:

        async def start(name: str) -> None:
            config = configs.of(folder, name)
            module = "verifier_svc" if name[0] == "v" else "drafter_svc"
            command = ("benchmarks.gpu.two_gpus_device", gpus[int(name[1:])], module)
            services.supervisors[name] = await resources.enter_async_context(running(config, log=log, command=command))
            services.addresses[name] = config.listen[0]
            if isinstance(config, DrafterConfig) and name[0] in _HEADS:
                services.metrics[name] = config.metrics_listen
            print(f"{name} is there after {log.seconds:.1f} s", flush=True)

        async def start_all(names: Sequence[str]) -> None:
            for name in names:
                try:
                    await start(name)
                except UnavailableError as error:
                    if name[0] == "v":
                        raise
                    services.failed[name] = str(error)
                    print(f"{name} could not be started: {error}", flush=True)

        async with asyncio.TaskGroup() as starting:
            by_gpu = {gpu: [name for name in names if gpus[int(name[1:])] == gpu] for gpu in gpus}
            for chain in by_gpu.values() if is_priced else ([name] for name in names):
                starting.create_task(start_all(sorted(chain, key=lambda name: name[0] != "v")))
        try:
            yield services
        finally:  # side by side: the machine is lent
            await asyncio.gather(*(supervisor.stop() for supervisor in services.supervisors.values()))
