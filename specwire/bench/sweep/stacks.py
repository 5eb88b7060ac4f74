"""What is swept over: a stack of our own, whose coordinator is started anew for each policy, or a running one, which is asked for less."""

import contextlib
import dataclasses
import json
import logging
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import Protocol, Self

from specwire.bench.sweep.policies import ADAPTIVE, DYNAMIC, NONE, Policy, Schedule, speculation_of
from specwire.client import AsyncClient
from specwire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError
from specwire.launch import ServiceSpec, Supervisor
from specwire.socket_folder import socket_folder
from specwire.stack.plan import StackOptions, plan_private_stack

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Place:
    """Where a policy's requests go, and the most drafts that they ask for; None = whatever is served there."""

    address: str
    make_client: Callable[[], AsyncClient]
    max_draft_tokens: int | None = None


class SweptStack(Protocol):
    """A stack, in `async with`.

    Attributes:
        configured: K of the stack.
        schedule: that of its configuration, if it has one.
        num_lanes: its verifiers.
    """

    configured: int
    schedule: Schedule | None
    num_lanes: int

    async def __aenter__(self) -> Self: ...

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None: ...

    def check(self, policies: Sequence[str]) -> tuple[str, ...]:
        """The kinds of policies that it can have, all or of those. Raises InvalidArgumentError for one that it can't have."""

    def place(self, policy: Policy, schedule: Schedule | None) -> AbstractAsyncContextManager[Place]:
        """Makes the policy what is served. Raises UnavailableError if that fails."""


class OwnStack:
    """Verifiers and drafters that are started once, and a coordinator for each policy."""

    def __init__(self, options: StackOptions) -> None:
        self._options = options
        self._speculation = options.coordinator.speculative_config
        self.configured = self._speculation.num_speculative_tokens if options.drafters else 0
        self.schedule = self._speculation.num_speculative_tokens_per_batch_size
        self.num_lanes = options.up.verifiers
        self._resources = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Self:
        folder = self._resources.enter_context(socket_folder("specwire-"))
        self._stack = plan_private_stack(self._options, Path(folder))
        await self._resources.enter_async_context(self._running(self._stack.groups()[:-1]))
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        await self._resources.aclose()

    def check(self, policies: Sequence[str]) -> tuple[str, ...]:
        possible = ("none", "fixed", "dynamic", "adaptive") if self.configured else ("none",)
        for policy in policies:
            if policy not in possible:
                raise InvalidArgumentError(f"--policies has {policy}, but the stack has no drafter; give it one")
        return tuple(policy for policy in possible if policy in policies or not policies)

    @contextlib.asynccontextmanager
    async def place(self, policy: Policy, schedule: Schedule | None) -> AsyncIterator[Place]:
        coordinator = self._stack.coordinator
        speculation = speculation_of(policy, self._speculation, schedule)
        drafters = () if policy is NONE else coordinator.drafters
        stack = dataclasses.replace(self._stack, coordinator=dataclasses.replace(coordinator, drafters=drafters, speculative_config=speculation))
        address = stack.private_address
        async with self._running(stack.groups()[-1:]):
            yield Place(address, lambda: AsyncClient(address, api_key=""))

    @contextlib.asynccontextmanager
    async def _running(self, groups: Sequence[Sequence[ServiceSpec]]) -> AsyncIterator[None]:
        """Services that must not end: one that is started again would be measured cold."""
        lines: list[str] = []

        def take(name: str, line: str) -> None:
            logger.debug("%s | %s", name, line)
            lines.append(f"{name} | {line}")
            del lines[:-8]

        supervisor = Supervisor(groups, take, startup_timeout_s=self._options.up.startup_timeout_s)
        try:
            await supervisor.start()
            yield
            for service in (service for group in supervisor.groups for service in group):
                if service.pid is None:
                    raise UnavailableError(f"{service.spec.name} ended while it was measured")
        except UnavailableError as error:
            raise UnavailableError("\n  ".join((str(error), *lines))) from error
        finally:
            await supervisor.stop()


class RunningStack:
    """A coordinator that somebody else has started. Requests ask for fewer drafts; what it chooses itself can't be changed from outside."""

    def __init__(self, address: str, make_client: Callable[[], AsyncClient], ready_timeout_s: float) -> None:
        self._address = address
        self._make_client = make_client
        self._ready_timeout_s = ready_timeout_s
        self.configured = 0
        self.schedule: Schedule | None = None
        self.num_lanes = 1
        self._served = NONE

    async def __aenter__(self) -> Self:
        async with self._make_client() as client:
            await client.wait_ready(self._ready_timeout_s)
            status = await client.get_status()
        settings = {setting.key: json.loads(setting.value) for setting in status.speculation}
        has_drafter = any(drafter.is_connected for drafter in status.drafters)
        self.configured = status.num_speculative_tokens if has_drafter else 0
        self.num_lanes = max(1, sum(lane.is_ready for lane in status.lanes))
        entries = settings.get("num_speculative_tokens_per_batch_size") or ()
        if len({k for _, _, k in entries}) > 1:
            self.schedule = tuple((start, end, k) for start, end, k in entries)
        if self.configured and settings.get("enable_adaptive_verification"):
            self._served = ADAPTIVE
        elif self.configured:
            self._served = DYNAMIC if self.schedule else Policy.fixed(self.configured)
        return self

    async def __aexit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        return None

    def check(self, policies: Sequence[str]) -> tuple[str, ...]:
        possible = tuple(dict.fromkeys(("none", self._served.name.partition("-")[0])))
        for policy in policies:
            if policy not in possible:
                raise FailedPreconditionError(
                    f"--policies has {policy}, but the running coordinator chooses {self._served.name} itself; leave --address out to sweep over a "
                    "stack of its own, or start the coordinator with that policy"
                )
        return tuple(policy for policy in possible if policy in policies or not policies)

    @contextlib.asynccontextmanager
    async def place(self, policy: Policy, schedule: Schedule | None) -> AsyncIterator[Place]:
        yield Place(self._address, self._make_client, policy.k)
