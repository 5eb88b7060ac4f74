"""An engine over scripted services, inside one process or over real gRPC, with the books checked after every step."""

import asyncio
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any
from unittest import mock

from coordinator.engine import Engine, RequestHandle
from coordinator.lane import Lane
from coordinator.loop import step
from specwire.config import CoordinatorConfig
from specwire.errors import SpecwireError
from specwire.messages import GenerateRequest
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.scripted.collect import CollectingSink
from tests.scripted.drafter import DrafterScript, ScriptedDrafter
from tests.scripted.local import LocalNetwork
from tests.scripted.services import ScriptedService
from tests.scripted.verifier import ScriptedVerifier, VerifierScript


class Cluster:
    """Verifiers "v0", "v1", ..., drafters "d0", ... and the engine that drives them; `async with` starts and stops all.

    Args:
        verifiers, drafters: their scripts.
        grpc: real gRPC instead of the in-process transport.
        k: num_speculative_tokens; schedule: num_speculative_tokens_per_batch_size; adaptive: enable_adaptive_verification.
        absent: names of services that are not there at the start.
        discovered: the coordinator knows a name for all verifiers and one for all drafters; `list_verifiers` and `list_drafters` say what
            they stand for, at first everything; in process only.
        config: further fields of CoordinatorConfig.
    """

    def __init__(
        self,
        verifiers: Sequence[VerifierScript] = (VerifierScript(),),
        drafters: Sequence[DrafterScript] = (),
        *,
        grpc: bool = False,
        k: int = 5,
        schedule: Sequence[Sequence[int]] | None = None,
        adaptive: bool = False,
        absent: Sequence[str] = (),
        discovered: bool = False,
        **config: Any,
    ) -> None:
        self.verifiers = [ScriptedVerifier(dataclasses.replace(script)) for script in verifiers]
        self.drafters = [ScriptedDrafter(dataclasses.replace(script)) for script in drafters]
        self.num_steps = 0
        self.faults: list[Exception] = []
        self._progress = asyncio.Event()
        self._network: _Network = GrpcNetwork() if grpc else InProcessNetwork()
        self._speculative = SpeculativeConfig(
            num_speculative_tokens=k,
            num_speculative_tokens_per_batch_size=None if schedule is None else tuple(tuple(entry) for entry in schedule),
            enable_adaptive_verification=adaptive,
        )
        self._absent = absent
        self._is_discovered = discovered
        self._config_changes = config
        self._patch = mock.patch("coordinator.engine.step", self._checked_step)
        self.engine: Engine = None  # type: ignore[assignment]

    async def __aenter__(self) -> "Cluster":
        verifiers = [await self._network.put(f"v{i}", verifier) for i, verifier in enumerate(self.verifiers)]
        drafters = [await self._network.put(f"d{i}", drafter) for i, drafter in enumerate(self.drafters)]
        for name in self._absent:
            await self._network.kill(name)
        if self._is_discovered:
            self.list_verifiers(*range(len(verifiers)))
            self.list_drafters(*range(len(drafters)))
            verifiers, drafters = ["verifier:1"], ["drafter:1"]
        config = CoordinatorConfig(
            verifiers=tuple(verifiers), drafters=tuple(drafters), speculative_config=self._speculative, **self._config_changes
        )  # fmt: skip
        self.engine = self._network.make_engine(config)
        self._patch.start()
        try:
            await self.engine.start()
        except BaseException:
            self._patch.stop()
            await self._network.close()
            raise
        self._follower = asyncio.create_task(self._follow_readiness())
        return self

    async def __aexit__(self, *error: object) -> None:
        self._patch.stop()
        self._follower.cancel()
        await self.engine.stop(0)
        self.engine.check_integrity()
        await self._network.close()
        if self.faults:
            raise self.faults[0]  # the lane has survived it, so that nothing else need have noticed

    async def ready(self) -> "Cluster":
        while not self.engine.ready.is_ready:
            await self.engine.readiness_changed()
        return self

    async def all_there(self) -> "Cluster":
        """Every lane and every drafter is connected."""
        await self.until(lambda: all(lane.is_ready and all(link.is_connected for link in lane.links) for lane in self.engine.lanes))
        return self

    async def until(self, condition: Callable[[], bool]) -> None:
        """Returns once a condition holds; it is looked at after every step, delta and change of readiness."""
        while not condition():
            await self._progress.wait()

    async def settle(self) -> None:
        """Lets messages that are under way arrive; with the in-process transport only."""
        for _ in range(20):
            await asyncio.sleep(0)

    def advance(self) -> None:
        """Something has happened that a test may wait for."""
        self._progress.set()
        self._progress = asyncio.Event()

    def submit(self, prompt: Sequence[int], sink: CollectingSink | None = None, *, timeout_ms: int | None = None, **sampling: Any) -> "Running":
        params = SamplingParams(**sampling)
        sink = sink or CollectingSink(params.n, on_tokens=self.advance)
        handle = self.engine.submit(GenerateRequest(list(prompt), params, timeout_ms=timeout_ms), sink)
        return Running(self, list(prompt), params, sink, handle)

    async def kill_verifier(self, index: int) -> None:
        await self._network.kill(f"v{index}")

    async def restart_verifier(self, index: int, **changes: Any) -> None:
        """Kills it, if it runs, and starts one that knows nothing of the old one's sequences."""
        self.verifiers[index] = ScriptedVerifier(dataclasses.replace(self.verifiers[index].script, **changes))
        await self._network.put(f"v{index}", self.verifiers[index])

    async def add_verifier(self, **changes: Any) -> int:
        """Starts one more like the first; its index. Nobody knows of it yet."""
        self.verifiers.append(ScriptedVerifier(dataclasses.replace(self.verifiers[0].script, **changes)))
        await self._network.put(f"v{len(self.verifiers) - 1}", self.verifiers[-1])
        return len(self.verifiers) - 1

    async def add_drafter(self, **changes: Any) -> int:
        self.drafters.append(ScriptedDrafter(dataclasses.replace(self.drafters[0].script, **changes)))
        await self._network.put(f"d{len(self.drafters) - 1}", self.drafters[-1])
        return len(self.drafters) - 1

    def list_verifiers(self, *indices: int) -> None:
        """The verifiers' name stands for these from the next look-up on."""
        self.network.names["verifier"] = [f"v{index}" for index in indices]

    def list_drafters(self, *indices: int) -> None:
        self.network.names["drafter"] = [f"d{index}" for index in indices]

    @property
    def network(self) -> LocalNetwork:
        assert isinstance(self._network, InProcessNetwork), "over gRPC there are no names"
        return self._network.local

    async def kill_drafter(self, index: int) -> None:
        await self._network.kill(f"d{index}")

    async def restart_drafter(self, index: int, **changes: Any) -> None:
        self.drafters[index] = ScriptedDrafter(dataclasses.replace(self.drafters[index].script, **changes))
        await self._network.put(f"d{index}", self.drafters[index])

    async def _follow_readiness(self) -> None:
        while True:
            await self.engine.readiness_changed()
            self.advance()

    async def _checked_step(self, lane: Lane) -> None:
        try:
            await step(lane)
            self.num_steps += 1
            self.engine.check_integrity()
        except SpecwireError:
            raise  # a peer's doing
        except Exception as error:
            self.faults.append(error)
            raise
        self.advance()


@dataclasses.dataclass
class Running:
    """A request that was submitted."""

    cluster: Cluster
    prompt: list[int]
    params: SamplingParams
    sink: CollectingSink
    handle: RequestHandle

    def expected(self, choice: int = 0, num_tokens: int | None = None) -> list[int]:
        """What the target alone would give, without stop rules; the request needs a seed."""
        assert self.params.seed is not None, "only seeded requests are predictable"
        count = num_tokens or self.params.max_tokens
        assert count is not None, "only bounded requests are predictable"
        return self.cluster.verifiers[0].target.generate(self.prompt, count, self.params.seed, choice)

    async def check(self) -> None:
        """Waits for the end and compares all choices with the target."""
        await self.sink.wait()
        assert self.sink.error is None, self.sink.error
        for index, choice in enumerate(self.sink.choices):
            assert choice.error is None, choice.error
            assert choice.token_ids == self.expected(index), f"choice {index} of seed {self.params.seed}"


class InProcessNetwork:
    """LocalNetwork with addresses by name."""

    def __init__(self) -> None:
        self.local = LocalNetwork()

    async def put(self, name: str, service: ScriptedVerifier | ScriptedDrafter) -> str:
        self.local.put(f"{name}:1", service)
        return f"{name}:1"

    async def kill(self, name: str, error: SpecwireError | None = None) -> None:
        self.local.kill(f"{name}:1", error)

    def make_engine(self, config: CoordinatorConfig) -> Engine:
        return Engine(config, self.local.connect_verifier, self.local.connect_drafter, self.local.resolve)

    async def close(self) -> None:
        pass


class GrpcNetwork:
    """Scripted services on ports of their own, which they keep when they are restarted."""

    def __init__(self) -> None:
        self._addresses: dict[str, str] = {}
        self._services: dict[str, ScriptedService] = {}

    async def put(self, name: str, service: ScriptedVerifier | ScriptedDrafter) -> str:
        await self.kill(name)
        self._services[name] = ScriptedService(service, self._addresses.get(name, "127.0.0.1:0"))
        self._addresses[name] = await self._services[name].start()
        return self._addresses[name]

    async def kill(self, name: str) -> None:
        if name in self._services:
            await self._services.pop(name).kill()

    def make_engine(self, config: CoordinatorConfig) -> Engine:
        return Engine(config)

    async def close(self) -> None:
        for name in list(self._services):
            await self.kill(name)


_Network = InProcessNetwork | GrpcNetwork
