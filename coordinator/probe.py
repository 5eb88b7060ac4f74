"""The look at all peers before the start: those that can be reached must match."""

import asyncio
from collections.abc import Mapping

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError, SpecwireError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription, describe_engine

from .limits import check_drafter
from .peers import DrafterPeer, VerifierPeer

_PROBE_S = 2.0
"""How long peers that are not there yet are waited for."""


async def probe_peers(
    config: CoordinatorConfig, verifiers: Mapping[str, VerifierPeer], drafters: Mapping[str, DrafterPeer]
) -> EngineDescription | None:
    """The capacities of the verifiers that can be reached; None if none can.

    Raises:
        FailedPreconditionError: a reachable verifier or drafter does not match the others.
    """
    found_verifiers, found_drafters = await asyncio.gather(_probe(verifiers), _probe(drafters))
    if not found_verifiers:
        return None
    try:
        engine = describe_engine(config, list(found_verifiers.values()))
    except FailedPreconditionError as error:
        raise FailedPreconditionError(f"verifiers {', '.join(found_verifiers)}: {error}") from error
    for address, description in found_drafters.items():
        try:
            check_drafter(engine, description)
        except FailedPreconditionError as error:
            raise FailedPreconditionError(f"drafter {address} can't draft for {', '.join(found_verifiers)}: {error}") from error
    return engine


async def _probe(peers: Mapping[str, VerifierPeer] | Mapping[str, DrafterPeer]) -> dict[str, ServiceDescription]:
    """Descriptions of the peers that answer soon."""

    async def describe(peer: VerifierPeer | DrafterPeer) -> ServiceDescription | None:
        try:
            async with asyncio.timeout(_PROBE_S):
                return await peer.describe()
        except (SpecwireError, TimeoutError):
            return None

    found = await asyncio.gather(*(describe(peer) for peer in peers.values()))
    return {address: description for address, description in zip(peers, found, strict=True) if description is not None}
