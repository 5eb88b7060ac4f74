"""What comes of a batch."""

from typing import Any

from specwire import AsyncBatch


async def collect(batch: AsyncBatch) -> dict[int, Any]:
    outcomes: dict[int, Any] = {}
    async for index, outcome in batch:
        assert index not in outcomes
        outcomes[index] = outcome
    return outcomes
