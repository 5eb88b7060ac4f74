"""Specwire: speculative decoding split into services; this package is the shared library and the client SDK."""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from specwire.client import AsyncClient, Client
    from specwire.sampling_params import SamplingParams

__all__ = ["AsyncClient", "Client", "SamplingParams"]


def __getattr__(name: str) -> Any:
    """Loads the SDK when it is asked for: the services import this package without it."""
    if name in ("AsyncClient", "Client"):
        from specwire import client

        return getattr(client, name)
    if name == "SamplingParams":
        from specwire.sampling_params import SamplingParams

        return SamplingParams
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
