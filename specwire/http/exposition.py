"""What /metrics answers: the process group's own numbers, and on request those of the coordinator under vLLM's names."""

import logging

from specwire.client import AsyncClient
from specwire.errors import SpecwireError
from specwire.http.board import Board
from specwire.http.metrics import METRICS, STATUS_FAILURES
from specwire.http.vllm_names import VLLM_METRICS, vllm_samples
from specwire.metrics.endpoint import Collector, render

logger = logging.getLogger(__name__)

_STATUS_TIMEOUT_S = 2.0


class Exposition:
    """Reads all numbers whenever somebody asks.

    Args:
        board: this process's counts, and those of the others beside it.
        client: for vLLM's names; None = without them.
        names: of the model, if it is not the coordinator's.
    """

    def __init__(self, board: Board, client: AsyncClient | None, names: tuple[str, ...]) -> None:
        self._board = board
        self._client = client
        self._names = names

    async def render(self) -> bytes:
        """The text format of Prometheus."""
        samples = list(self._board.samples())
        if self._client is None:
            return render(Collector(METRICS, lambda: samples))
        try:
            status = await self._client.get_status(_STATUS_TIMEOUT_S)
        except SpecwireError as error:
            # Numbers that are missing are seen as missing; old ones would be taken for new ones.
            self._board.add(STATUS_FAILURES)
            logger.warning("a scrape has no numbers of the coordinator: %s", error)
            return render(Collector(METRICS, lambda: samples))
        more = list(vllm_samples(status, samples, self._names[0] if self._names else status.model_id))
        return render(Collector((*METRICS, *VLLM_METRICS), lambda: [*samples, *more]))
