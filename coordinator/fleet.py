"""Lanes and drafters come and go: there is one for each address that the configured ones stand for."""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import Hello
from specwire.policy.capacity import EngineDescription

from .admission import Admission
from .discovery import Discovery, Resolver
from .drafters import Drafter
from .lane import Lane
from .lane_runner import LaneRunner
from .limits import check_drafter
from .link import DraftLink
from .peers import DrafterFactory, VerifierFactory, VerifierPeer
from .probe import probe_peers

logger = logging.getLogger(__name__)

_LOOK_UP_S = 2.0
"""What the look-ups of one turn may take."""


class Fleet:
    """All peers of a coordinator. Lanes are in `admission.lanes`; their numbers ascend and are never used twice.

    Args:
        config: addresses and limits.
        admission: gets the lanes.
        connect_verifier, connect_drafter: make a peer.
        resolve: looks host names up.
        run_lane: what a lane does until it is cancelled.
    """

    def __init__(
        self,
        config: CoordinatorConfig,
        admission: Admission,
        connect_verifier: VerifierFactory,
        connect_drafter: DrafterFactory,
        resolve: Resolver,
        run_lane: Callable[[LaneRunner], Coroutine[None, None, None]],
    ) -> None:
        self._config = config
        self._admission = admission
        self._connect_verifier = connect_verifier
        self._connect_drafter = connect_drafter
        self._run_lane = run_lane
        self._hello = Hello(config.coordinator_id, time.time_ns(), config.max_outstanding_rounds)
        self._max_message_bytes = config.max_message_mb << 20
        self._verifiers = Discovery(config.verifiers, resolve, admission.counters)
        self._drafters = Discovery(config.drafters, resolve, admission.counters)
        self._shared: dict[str, Drafter] = {}
        self._num_lanes = 0
        self._running: dict[Lane | DraftLink, asyncio.Task[None]] = {}
        self._tasks: set[asyncio.Task[None]] = set()

    @property
    def problem(self) -> str:
        """Why there is no lane."""
        return f"no verifier is known: {self._verifiers.problem}" if self._verifiers.problem else "not started"

    @property
    def absent_drafters(self) -> list[str]:
        """What is wrong with each drafter that no lane is connected to, and with names that stand for none."""
        absent = [] if self._drafters.addresses or not self._drafters.problem else [f"no drafter is known: {self._drafters.problem}"]
        links = self._admission.lanes[0].links if self._admission.lanes else []
        return [*absent, *(f"drafter {link.drafter.address}: {link.reason}" for link in links if not link.drafter.is_connected)]

    async def start(self) -> EngineDescription | None:
        """Makes lanes and drafters of what is known now; the capacities of the verifiers that can be reached, None if none can.

        Raises:
            FailedPreconditionError: a peer that is configured by its own address can be reached and does not match the others.
        """
        await self._look_up()
        verifiers = {address: self._verifier(address) for address in self._verifiers.addresses}
        drafters = {
            address: self._connect_drafter(address, self._max_message_bytes, self._drafters.server_names[address])
            for address in self._drafters.addresses
        }  # fmt: skip
        try:
            engine = await probe_peers(self._config, verifiers, drafters)
        except BaseException:
            await asyncio.gather(*(peer.close() for peer in verifiers.values()))
            raise
        finally:
            await asyncio.gather(*(peer.close() for peer in drafters.values()))
        for address in drafters:
            self._add_drafter(address)
        for address, peer in verifiers.items():
            self._add_lane(address, peer)
        if self._verifiers.has_names or self._drafters.has_names:
            self._spawn(self._follow())
        return engine

    def connect_drafters(self) -> None:
        """Connects what is not connected yet, once a verifier is known: drafters must match it."""
        if self._admission.description is not None:
            for lane in self._admission.lanes:
                for link in lane.links:
                    if link not in self._running:
                        self._running[link] = self._spawn(link.run())

    def check_drafters(self) -> None:
        """Hangs up on drafters that do not match what is served any more."""
        engine = self._admission.description
        assert engine is not None, "drafters are connected once a verifier is known"
        for link in [link for lane in self._admission.lanes for link in lane.links]:
            try:
                if link.is_connected and link.drafter.description is not None:
                    check_drafter(engine, link.drafter.description)
            except FailedPreconditionError as error:
                link.refuse(error)

    async def stop(self) -> None:
        """Disconnects from all peers."""
        self._verifiers.close()
        self._drafters.close()
        for task in self._tasks:
            task.cancel()
        await asyncio.gather(*self._tasks, return_exceptions=True)

    async def _follow(self) -> None:
        while True:
            await asyncio.sleep(self._config.discovery_interval_s)
            try:
                await self._look_up()
                self._update()
            except Exception:
                logger.exception("a fault in discovery; it goes on with the next look-up")

    async def _look_up(self) -> None:
        await asyncio.gather(self._verifiers.look_up(_LOOK_UP_S), self._drafters.look_up(_LOOK_UP_S))

    def _update(self) -> None:
        """Adds what is new; forgets what has no address any more, unless it is connected: a name server may be wrong for a while."""
        verifiers, drafters = self._verifiers.addresses, self._drafters.addresses
        lanes = {lane.address: lane for lane in self._admission.lanes}
        for address in drafters:
            if address not in self._shared:
                self._add_drafter(address)
        for address in verifiers:
            if address not in lanes:
                self._add_lane(address, self._verifier(address))
        for address, lane in lanes.items():
            if address not in verifiers and not lane.is_connected:
                self._forget_lane(lane)
        for address, drafter in list(self._shared.items()):
            if address not in drafters and not drafter.is_connected:
                self._forget_drafter(drafter)
        self._admission.lane_changed()

    def _add_lane(self, address: str, peer: VerifierPeer) -> None:
        lane = Lane(self._num_lanes, address, self._admission, self._verifiers.server_names[address])
        self._num_lanes += 1
        lane.links += [self._link(drafter, lane) for drafter in self._shared.values()]
        self._admission.lanes.append(lane)
        self._running[lane] = self._spawn(self._run_lane(LaneRunner(lane, peer, self._hello)))
        self.connect_drafters()
        logger.info("lane %d: verifier %s", lane.index, address)

    def _add_drafter(self, address: str) -> None:
        drafter = self._shared[address] = Drafter(address, self._config, self._drafters.server_names[address])
        for lane in self._admission.lanes:
            lane.links.append(self._link(drafter, lane))
        self.connect_drafters()
        logger.info("drafter %s", address)

    def _forget_lane(self, lane: Lane) -> None:
        assert not lane.running, f"lane {lane.index} is forgotten, but runs {len(lane.running)} sequences"
        self._admission.lanes.remove(lane)
        self._end(lane)
        for link in lane.links:
            link.drafter.links.discard(link)
            self._end(link)
        logger.info("lane %d: verifier %s is gone", lane.index, lane.address)

    def _forget_drafter(self, drafter: Drafter) -> None:
        del self._shared[drafter.address]
        for lane in self._admission.lanes:
            for link in [link for link in lane.links if link.drafter is drafter]:
                assert not link.slots, f"drafter {drafter.address} is forgotten, but lane {lane.index} has {len(link.slots)} slots there"
                lane.links.remove(link)
                self._end(link)
        logger.info("drafter %s is gone", drafter.address)

    def _verifier(self, address: str) -> VerifierPeer:
        return self._connect_verifier(address, self._max_message_bytes, self._verifiers.server_names[address])

    def _link(self, drafter: Drafter, lane: Lane) -> DraftLink:
        return DraftLink(drafter, lane, self._connect_drafter, self._max_message_bytes, self._hello)

    def _spawn(self, coroutine: Coroutine[None, None, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(coroutine)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _end(self, peer: Lane | DraftLink) -> None:
        if peer in self._running:
            self._running.pop(peer).cancel()
