"""The blocking client: the same results from any thread, and nothing left behind however it ends."""

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from specwire import Client, SamplingParams
from specwire.client import TokenStream
from specwire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError, UnsupportedError
from tests.coordinator.byte_tokenizer import ids_of, make_spec
from tests.coordinator.scripted_engine import ScriptedEngine, expected_tokens
from tests.coordinator.serving import serving


class Serving:
    """A coordinator's front on a loop of its own."""

    def __init__(self, socket_dir: Path, *, has_tokenizer: bool = True) -> None:
        self.address = ""
        self.engine: ScriptedEngine
        self._socket_dir = socket_dir
        self._has_tokenizer = has_tokenizer
        self._loop = asyncio.new_event_loop()
        self._stop = asyncio.Event()
        self._started = threading.Event()
        self._thread = threading.Thread(target=self._loop.run_until_complete, args=(self._serve(),))
        self._thread.start()
        assert self._started.wait(60)

    async def _serve(self) -> None:
        self.engine = ScriptedEngine(make_spec() if self._has_tokenizer else None)
        async with serving(self.engine, self._socket_dir) as server:
            self.address = server.bound_addresses[0]
            self._started.set()
            await self._stop.wait()

    def pause(self) -> None:
        self.engine.is_paused = True

    def stop(self) -> None:
        if self._thread.is_alive():
            self._loop.call_soon_threadsafe(self._stop.set)
            self._thread.join()
            self._loop.close()


@pytest.fixture
def server(socket_dir: Path) -> Iterator[Serving]:
    server = Serving(socket_dir)
    yield server
    server.stop()


@pytest.fixture
def client(server: Serving) -> Iterator[Client]:
    with Client(server.address) as client:
        yield client


def until(condition: Callable[[], bool]) -> None:
    end = time.monotonic() + 10
    while not condition():
        assert time.monotonic() < end
        time.sleep(0.002)


def test_generate_and_stream(client: Client) -> None:
    client.wait_ready(10)
    assert client.generate("@", max_tokens=6).text == "ABCDEF"
    assert client.generate(ids_of("@"), SamplingParams(max_tokens=3), seed=0).token_ids == ids_of("ABC")
    assert "".join(event.text for event in client.stream("@", max_tokens=20)) == "ABCDEFGHIJKLMNOPQRST"
    assert client.get_tokenizer().encode("é") == ids_of("é")


def test_errors_are_typed_and_immediate(client: Client) -> None:
    with pytest.raises(InvalidArgumentError, match="did you mean temperature"):
        client.generate("@", temprature=1)
    with pytest.raises(InvalidArgumentError, match="did you mean temperature"):
        client.stream("@", temprature=1)
    with pytest.raises(InvalidArgumentError, match="token id 100000"):
        client.generate([100_000])
    with pytest.raises(InvalidArgumentError, match="character 0"):
        client.generate("\ud800")


def test_text_needs_a_tokenizer(socket_dir: Path) -> None:
    server = Serving(socket_dir, has_tokenizer=False)
    try:
        with Client(server.address) as client:
            assert client.generate([1, 0], max_tokens=3).token_ids == [1, 2, 3]
            with pytest.raises(UnsupportedError):
                client.generate("text")
    finally:
        server.stop()


def fail_inside(stream: TokenStream) -> None:
    with stream:
        next(stream)
        raise ZeroDivisionError


@pytest.mark.parametrize("way", ["break", "close", "with", "exception", "forgotten"])
def test_leaving_a_stream_cancels_it(server: Serving, client: Client, way: str) -> None:
    stream = client.stream(ids_of("@"), max_tokens=200, stop_token_ids=[])
    server.engine.max_stream_backlog = 8
    server.engine.on_step = lambda: time.sleep(0.001)
    if way == "break":
        for _ in stream:
            break
    elif way == "with":
        with stream:
            next(stream)
    elif way == "exception":
        with pytest.raises(ZeroDivisionError):
            fail_inside(stream)
    else:
        next(stream)
    if way == "close":
        stream.close()
        stream.close()
        assert list(stream) == []
    del stream
    gc.collect()
    until(lambda: not server.engine.live)
    assert server.engine.requests[0].is_cancelled


def test_threads_share_a_client(client: Client) -> None:
    def work(i: int) -> list[int]:
        if i % 2:
            return client.generate([1, i], max_tokens=30).token_ids
        return [token_id for event in client.stream([1, i], max_tokens=30) for token_id in event.token_ids]

    with ThreadPoolExecutor(16) as pool:
        assert list(pool.map(work, range(64))) == [expected_tokens([i], 0, 30, 1000) for i in range(64)]


def test_a_batch_of_prompts_that_the_client_itself_makes(client: Client) -> None:
    def prompts() -> Iterator[list[int]]:
        token_ids = [1]
        for _ in range(3):
            token_ids = client.generate(token_ids, max_tokens=1).token_ids
            yield token_ids

    outcomes = dict(client.generate_batch(prompts(), max_tokens=1))
    assert [outcomes[index].token_ids for index in range(3)] == [[3], [4], [5]]  # type: ignore[union-attr]


def test_batches(server: Serving, client: Client) -> None:
    """From several threads at once; one is left early."""

    def work(i: int) -> bool:
        outcomes = dict(client.generate_batch([[1, i], [-1], f"{i}@"], max_tokens=3))
        assert isinstance(outcomes[1], InvalidArgumentError)
        return [outcomes[0].token_ids, outcomes[2].text] == [expected_tokens([i], 0, 3, 1000), "ABC"]  # type: ignore[union-attr]

    with ThreadPoolExecutor(8) as pool:
        assert all(pool.map(work, range(32)))
    params = [SamplingParams(max_tokens=1), *[SamplingParams(max_tokens=None, ignore_eos=True)] * 9]
    server.engine.on_step = lambda: time.sleep(0.001)
    for index, _ in client.generate_batch([[1]] * 10, params):
        assert index == 0
        break
    gc.collect()
    until(lambda: not server.engine.live)
    with client.generate_batch(["@"] * 3, max_tokens=1) as batch:
        next(batch)
        batch.close()
        assert list(batch) == []


def test_chat(client: Client) -> None:
    with pytest.raises(FailedPreconditionError, match="no chat template"):
        client.chat([{"role": "user", "content": "@"}])
    with pytest.raises(FailedPreconditionError, match="no chat template"):
        next(client.chat_stream([{"role": "user", "content": "@"}]))


def test_close_ends_calls_of_other_threads_and_is_idempotent(server: Serving) -> None:
    server.pause()
    client = Client(server.address)
    with ThreadPoolExecutor(2) as pool:
        running = pool.submit(client.generate, [1])
        until(lambda: len(server.engine.live) == 1)
        client.close()
        client.close()
        with pytest.raises(UnavailableError, match="closed"):
            running.result(10)
    until(lambda: not server.engine.live)
    with pytest.raises(FailedPreconditionError, match="the client is closed"):
        client.generate([1])
    with pytest.raises(FailedPreconditionError, match="the client is closed"):
        next(client.stream([1]))


def test_closing_before_any_use(socket_dir: Path) -> None:
    Client(f"unix:{socket_dir}/nobody.sock").close()


def test_a_stream_outlives_its_client(server: Serving) -> None:
    server.pause()
    client = Client(server.address)
    stream = client.stream("@")
    client.close()
    stream.close()
    with pytest.raises(FailedPreconditionError, match="closed"):
        next(stream)


def test_a_forgotten_client_ends_its_thread(server: Serving) -> None:
    client = Client(server.address)
    assert client.generate("@", max_tokens=2).text == "AB"
    thread = client._thread
    del client
    gc.collect()
    thread.join(60)
    assert not thread.is_alive()


def test_no_server() -> None:
    with Client("127.0.0.1:1", max_retries=0) as client:
        with pytest.raises(UnavailableError, match=r"127\.0\.0\.1:1 can't be reached"):
            client.generate("@")
        with pytest.raises(UnavailableError, match=r"does not serve after 0\.1 s"):
            client.wait_ready(0.1)


def test_after_a_fork(client: Client, monkeypatch: pytest.MonkeyPatch) -> None:
    assert client.generate("@", max_tokens=1).text == "A"
    pid = os.getpid()
    with monkeypatch.context() as patch:
        patch.setattr(os, "getpid", lambda: pid + 1)
        with pytest.raises(FailedPreconditionError, match="before a fork"):
            client.generate("@")


PROGRAM = """
import os, sys
from specwire import Client
client = Client(sys.argv[1])
if "fork" in sys.argv:
    child = os.fork()  # before gRPC's first use, which no fork survives for certain
    if child == 0:
        try:
            client.generate("@")
        except Exception as error:
            print(type(error).__name__, flush=True)
        client.close()
        with Client(sys.argv[1]) as client:
            print(client.generate("@", max_tokens=1).text, flush=True)
        sys.exit(0)
    assert os.waitpid(child, 0)[1] == 0
print(client.generate("@", max_tokens=3).text, flush=True)
if "hang" in sys.argv:
    for event in client.stream("@", max_tokens=None):
        print("event", flush=True)
"""


@pytest.mark.parametrize(("mode", "expected"), [("", "ABC\n"), ("fork", "FailedPreconditionError\nA\nABC\n")])
def test_a_program_that_never_closes_ends_cleanly(server: Serving, mode: str, expected: str) -> None:
    result = subprocess.run([sys.executable, "-c", PROGRAM, server.address, mode], capture_output=True, text=True, timeout=60, check=False)
    assert (result.returncode, result.stdout) == (0, expected), result.stderr
    assert "Traceback" not in result.stderr


def test_ctrl_c_ends_the_generation(server: Serving) -> None:
    server.engine.eos_token_ids = ()
    server.engine.max_stream_backlog = 4
    server.engine.on_step = lambda: time.sleep(0.001)
    program = subprocess.Popen([sys.executable, "-c", PROGRAM, server.address, "hang"], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
    assert program.stdout is not None
    assert [program.stdout.readline() for _ in range(3)] == ["ABC\n", "event\n", "event\n"]
    program.send_signal(signal.SIGINT)
    _, errors = program.communicate(timeout=60)
    assert errors.rstrip().endswith("KeyboardInterrupt")
    assert program.returncode == -signal.SIGINT
    until(lambda: not server.engine.live)
