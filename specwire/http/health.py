"""The standard gRPC health service, which everything that starts and watches Specwire's services asks."""

from specwire.rpc import Server


class HealthService:
    """NOT_SERVING until told otherwise; does nothing where no address is configured.

    Args:
        listen: `host:port` or `unix:path`; empty = none.
    """

    def __init__(self, listen: str) -> None:
        self._listen = listen
        self._server: Server | None = None

    async def start(self) -> None:
        """Binds and serves. Raises UnavailableError if the address can't be bound."""
        if self._listen:
            # Made here, since it starts threads: whoever starts processes does so before.
            self._server = Server([self._listen], [], lambda _: None)
            await self._server.start()

    async def set_serving(self, serves: bool) -> None:
        """What it answers from now on."""
        if self._server is not None:
            await self._server.set_serving(serves)

    async def stop(self) -> None:
        """NOT_SERVING, and gone."""
        if self._server is not None:
            await self._server.stop(0)
