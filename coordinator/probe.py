"""The look at all peers before the start: those that can be reached must match."""

import asyncio
from collections.abc import Mapping

from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError, SpecwireError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription, check_match, describe_engine

from .limits import check_drafter
from .peers import DrafterPeer, VerifierPeer

_PROBE_S = 2.0
"""How long peers that are not there yet are waited for."""


async def probe_peers(
    config: CoordinatorConfig, verifiers: Mapping[str, VerifierPeer], drafters: Mapping[str, DrafterPeer]
) -> EngineDescription | None:
    """The capacities of the verifiers that can be reached; None if none can.

    Raises:
        FailedPreconditionError: a reachable verifier or drafter, configured by its own address, does not match the others.
    """
    found_verifiers, found_drafters = await asyncio.gather(_probe(verifiers), _probe(drafters))
    if not found_verifiers:
        return None
    names = ", ".join(found_verifiers)
    try:
        engine = describe_engine(config, _matching(config, found_verifiers))
    except FailedPreconditionError as error:
        raise FailedPreconditionError(f"verifiers {names}: {error}") from error
    for address, description in found_drafters.items():
        try:
            if address in config.drafters:
                check_drafter(engine, description)
        except FailedPreconditionError as error:
            raise FailedPreconditionError(f"drafter {address} can't draft for {names}: {error}") from error
    return engine


def _matching(config: CoordinatorConfig, found: Mapping[str, ServiceDescription]) -> list[ServiceDescription]:
    """Verifiers that are configured by their own address, and those found by a host name that match the first of all: others are refused
    when they connect, so that a replica of another version keeps nobody from starting."""
    descriptions = [description for address, description in found.items() if address in config.verifiers]
    for address, description in found.items():
        if address not in config.verifiers:
            try:
                check_match(descriptions[0] if descriptions else description, description)
            except FailedPreconditionError:
                continue
            descriptions.append(description)
    return descriptions


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
