"""A coordinator with predictable output for the command line to talk to, and an environment in which services are fakes."""

import asyncio
import threading
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from specwire.messages import TokenizerSpec
from tests.cli.batch_calls import PROMPTS, lines
from tests.coordinator.byte_tokenizer import make_spec
from tests.coordinator.scripted_engine import ScriptedEngine
from tests.coordinator.serving import serving
from tests.waiting import until

FAKES = Path(__file__).parent / "fakes"
CHAT_TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"


@dataclass
class Coordinator:
    """A scripted coordinator on a thread of its own, for clients that block."""

    address: str
    engine: ScriptedEngine
    loop: asyncio.AbstractEventLoop

    def wait_for_ends(self, num_requests: int, timeout_s: float = 60.0) -> None:
        """Returns once so many requests have ended."""
        engine = self.engine
        ended = until(lambda: len(engine.requests) - len(engine.live) >= num_requests, timeout_s)
        asyncio.run_coroutine_threadsafe(ended, self.loop).result()


@pytest.fixture
def events(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Where the fake services note their starts and stops; child processes find them by the name of the real ones."""
    path = tmp_path / "events"
    path.touch()
    monkeypatch.setenv("PYTHONPATH", str(FAKES))
    monkeypatch.setenv("FAKE_EVENTS", str(path))
    return path


@pytest.fixture
def source(tmp_path: Path) -> Path:
    """A file of requests."""
    path = tmp_path / "requests.jsonl"
    path.write_text(lines(PROMPTS))
    return path


@pytest.fixture
def in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An empty folder is the working one, and no variable names a file or an address."""
    monkeypatch.chdir(tmp_path)
    for name in ("SPECWIRE_CONFIG", "SPECWIRE_ADDRESS"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def hasty(monkeypatch: pytest.MonkeyPatch) -> None:
    """Clients in this process try again without a pause."""
    monkeypatch.setattr("specwire.client.generation._FIRST_PAUSE_S", 0.001)


@pytest.fixture
def coordinator(socket_dir: Path) -> Iterator[Coordinator]:
    """Serves a byte-level tokenizer with a chat template; each token follows the one before it in the vocabulary."""
    yield from _serve_in_thread(socket_dir, replace(make_spec(), chat_template=CHAT_TEMPLATE))


@pytest.fixture
def bare_coordinator(socket_dir: Path) -> Iterator[Coordinator]:
    """Serves no tokenizer."""
    yield from _serve_in_thread(socket_dir, None)


def _serve_in_thread(socket_dir: Path, tokenizer: TokenizerSpec | None) -> Iterator[Coordinator]:
    started: list[Coordinator] = []
    ready, loop = threading.Event(), asyncio.new_event_loop()
    stop = asyncio.Event()

    async def main() -> None:
        engine = ScriptedEngine(tokenizer)
        async with serving(engine, socket_dir) as server:
            started.append(Coordinator(server.bound_addresses[0], engine, loop))
            ready.set()
            await stop.wait()

    thread = threading.Thread(target=lambda: loop.run_until_complete(main()))
    thread.start()
    assert ready.wait(60)
    yield started[0]
    loop.call_soon_threadsafe(stop.set)
    thread.join(60)
    assert not thread.is_alive()
    loop.close()
