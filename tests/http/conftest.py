"""The HTTP service over scripted peers."""

from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.http.serving import Served, http_served


@pytest.fixture
async def served(socket_dir: Path) -> AsyncIterator[Served]:
    async with http_served(socket_dir) as served:
        yield served
