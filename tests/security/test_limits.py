"""What an API key may ask for, what becomes of it while its file changes, and whose cache it finds."""

import asyncio
import logging

import grpc
import pytest

from coordinator.api_keys import Budget, KeyRing, tenant_cache_key
from coordinator.server import CoordinatorServer
from specwire.channel import bearer
from specwire.errors import InvalidArgumentError, ResourceExhaustedError, UnauthenticatedError
from specwire.messages import GenerateRequest, SessionStart
from specwire.rpc import open_channel
from specwire.sampling_params import SamplingParams
from specwire.statuses import error_from_rpc
from specwire.v1 import coordinator_pb2 as pb
from specwire.v1.coordinator_pb2_grpc import CoordinatorServiceStub
from specwire.wire import generate
from tests.scripted.cluster import Cluster
from tests.scripted.verifier import VerifierScript
from tests.security.key_file import KEY, OTHER_KEY, File, client, entry, look_at_once
from tests.security.serving import serving
from tests.waiting import until
from tests.wire.responses import unpack_batch_response

# --- budgets ---


def test_a_budget_refills_evenly() -> None:
    budget = Budget()
    for _ in range(6):
        assert budget.wait_s(6, 100.0) == 0
        budget.take(1, 6, 100.0)
    assert budget.wait_s(6, 100.0) == pytest.approx(10)
    assert budget.wait_s(6, 104.0) == pytest.approx(6)
    assert budget.wait_s(6, 110.0) == 0
    budget.take(1, 6, 110.0)
    assert budget.wait_s(6, 110.0) == pytest.approx(10)
    assert budget.wait_s(6, 1000.0) == 0
    budget.take(6, 6, 1000.0)
    assert budget.wait_s(6, 1000.0) == pytest.approx(10), "no more than a minute is saved up"


def test_a_budget_may_be_overdrawn_and_makes_up_for_it() -> None:
    budget = Budget()
    budget.take(180, 60, 0.0)
    assert budget.wait_s(60, 0.0) == pytest.approx(121)
    assert budget.wait_s(60, 120.0) == pytest.approx(1)
    assert budget.wait_s(120, 120.0) == 0, "a limit that was raised counts at once"


# --- limits ---


async def test_concurrent_requests(file: File) -> None:
    file.write(entry(max_concurrent_requests=3), entry("red", OTHER_KEY))
    async with serving(VerifierScript(delay_s=0.002), api_keys=file.path) as (server, _), client(server) as blue, client(server, OTHER_KEY) as red:
        first, second = blue.stream([5, 6], max_tokens=400, n=2, seed=1), blue.stream([5, 7], max_tokens=400, seed=1)
        async with first, second:
            await anext(first)
            await anext(second)
            with pytest.raises(ResourceExhaustedError) as caught:
                await blue.generate([5, 8], max_tokens=1)
            assert "3 requests of the API key 'blue' are not done, and max_concurrent_requests is 3" in str(caught.value)
            assert caught.value.retry_after_ms == 1000
            assert len((await red.generate([5, 8], max_tokens=1)).choices) == 1
            await first.aclose()
            async with asyncio.timeout(30):
                while True:  # the cancel is on its way
                    try:
                        await blue.generate([5, 8], max_tokens=1)
                        break
                    except ResourceExhaustedError:
                        continue
        with pytest.raises(ResourceExhaustedError, match="n is 4, but max_concurrent_requests of the API key 'blue' is 3") as caught:
            await blue.generate([5, 8], max_tokens=1, n=4)
        assert caught.value.retry_after_ms is None, "waiting does not help"
        keys = server.keys
        assert keys is not None
        await until(lambda: keys.usage("blue").num_choices == 0)


async def test_a_batch_keeps_to_the_concurrency_of_its_key(file: File) -> None:
    file.write(entry(max_concurrent_requests=2))
    async with serving(api_keys=file.path) as (server, _), open_channel(server.bound_addresses[0], metadata=bearer(KEY)) as channel:
        message = pb.GenerateBatchRequest(requests=[generate.pack_request(GenerateRequest([5, i], SamplingParams(max_tokens=3))) for i in range(9)])
        results = [unpack_batch_response(response) async for response in CoordinatorServiceStub(channel).GenerateBatch(message)]
        assert sorted(index for index, _, error in results if error is None) == list(range(9))


async def test_tokens_of_a_request(file: File) -> None:
    file.write(entry(max_tokens_per_request=10))
    async with serving(api_keys=file.path) as (server, _), client(server) as blue:
        assert len((await blue.generate([5, 6], max_tokens=8)).choices[0].token_ids) == 8
        for params in ({"max_tokens": 9}, {"max_tokens": 5, "n": 2}, {"max_tokens": None}):
            with pytest.raises(ResourceExhaustedError, match="max_tokens_per_request of the API key 'blue' is 10; set max_tokens lower"):
                await blue.generate([5, 6], **params)


async def test_how_important_requests_may_be(file: File) -> None:
    file.write(entry(min_priority=0), entry("red", OTHER_KEY))
    async with serving(api_keys=file.path) as (server, _), client(server) as blue, client(server, OTHER_KEY) as red:
        for caller, priority in ((blue, 0), (blue, 3), (red, -7)):
            await caller.generate([5, 6], max_tokens=1, priority=priority)
        with pytest.raises(ResourceExhaustedError, match=r"priority is -1, but min_priority of the API key 'blue' is 0.*send 0 or more"):
            await blue.generate([5, 6], max_tokens=1, priority=-1)


async def test_requests_and_tokens_of_a_minute(file: File) -> None:
    file.write(entry(requests_per_minute=6), entry("red", OTHER_KEY, tokens_per_minute=60))
    async with serving(api_keys=file.path) as (server, _), client(server) as blue, client(server, OTHER_KEY) as red:
        now = [1000.0]
        keys = look_at_once(server)
        keys.clock = lambda: now[0]
        with pytest.raises(InvalidArgumentError):
            await blue.generate([], max_tokens=1)  # costs nothing
        for _ in range(6):
            await blue.generate([5, 6], max_tokens=1)
        with pytest.raises(
            ResourceExhaustedError, match="requests_per_minute of the API key 'blue' is 6, and that is used up; try again in 10 s"
        ) as caught:
            await blue.generate([5, 6], max_tokens=1)
        assert caught.value.retry_after_ms == 10_000
        now[0] += 10
        await blue.generate([5, 6], max_tokens=1)
        # 2 tokens of the prompt and 100 of the output, which are known only at its end: 42 too many.
        await red.generate([5, 6], max_tokens=100)
        with pytest.raises(ResourceExhaustedError, match="tokens_per_minute of the API key 'red' is 60") as caught:
            await red.generate([5, 6], max_tokens=1)
        assert caught.value.retry_after_ms == 43_000
        now[0] += 43
        await red.generate([5, 6], max_tokens=1)
        assert keys.num_refused["over_limit"] == 2


async def test_a_call_that_fails_as_a_whole_says_when_to_come_back(file: File) -> None:
    file.write(entry(requests_per_minute=1))
    async with serving(api_keys=file.path) as (server, _), open_channel(server.bound_addresses[0], metadata=bearer(KEY)) as channel:
        message = generate.pack_request(GenerateRequest([5, 6], SamplingParams(max_tokens=1)))
        stub = CoordinatorServiceStub(channel)
        assert [_ async for _ in stub.Generate(message)]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            [_ async for _ in stub.Generate(message)]
        assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        trailing = dict(caught.value.trailing_metadata())
        assert 0 < int(trailing["retry-after-ms"]) <= 60_000
        assert error_from_rpc(caught.value).retry_after_ms == int(trailing["retry-after-ms"])


# --- changes of the file ---


async def test_a_revoked_key_ends_nothing_that_runs(file: File, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "coordinator.api_keys")
    file.write(entry())
    async with serving(VerifierScript(delay_s=0.002), api_keys=file.path) as (server, cluster), client(server) as blue:
        keys = look_at_once(server)
        async with blue.stream([5, 6], max_tokens=100, seed=1) as stream:
            token_ids = (await anext(stream)).token_ids
            file.break_()
            await blue.generate([5, 6], max_tokens=1)
            await blue.generate([5, 6], max_tokens=1)
            assert keys.num_failed_reloads == 1
            assert "the changed API keys are not used" in caplog.text
            file.write(entry("red", OTHER_KEY))
            with pytest.raises(UnauthenticatedError, match="is not known here, or was revoked"):
                await blue.generate([5, 6], max_tokens=1)
            async for event in stream:
                token_ids += event.token_ids
        assert token_ids == cluster.verifiers[0].target.generate([5, 6], 100, 1)
        file.write(entry(), entry("red", OTHER_KEY))
        await blue.generate([5, 6], max_tokens=1)


async def test_limits_change_while_a_session_is_open(file: File) -> None:
    file.write(entry())
    async with serving(api_keys=file.path) as (server, _), client(server) as blue:
        look_at_once(server)
        await blue.generate([5, 6], max_tokens=20)
        file.write(entry(max_tokens_per_request=10))
        with pytest.raises(ResourceExhaustedError):
            await blue.generate([5, 6], max_tokens=20)
        file.write(entry(expires="2020-01-01"))
        with pytest.raises(UnauthenticatedError, match="the API key 'blue' has expired"):
            await blue.generate([5, 6], max_tokens=1)


def test_the_file_is_looked_at_once_a_second(file: File) -> None:
    file.write(entry())
    now = [0.0]
    keys = KeyRing(file.path, clock=lambda: now[0])
    file.write(entry("red", OTHER_KEY))
    metadata = (("authorization", f"Bearer {KEY}"),)
    now[0] = 0.9
    keys.authenticate(metadata)
    now[0] = 1.1
    with pytest.raises(UnauthenticatedError):
        keys.authenticate(metadata)


# --- caches ---


async def cached(server: CoordinatorServer, key: str, tenant: bytes = b"") -> int:
    async with client(server, key, tenant_cache_key=tenant) as caller:
        return (await caller.generate(list(range(3, 40)), max_tokens=1)).choices[0].usage.num_cached_tokens


async def test_no_key_reaches_the_cache_of_another(file: File) -> None:
    file.write(entry(), entry("red", OTHER_KEY))
    async with serving(api_keys=file.path) as (server, cluster):
        assert await cached(server, KEY) == 0
        assert await cached(server, KEY) > 0
        assert await cached(server, OTHER_KEY) == 0
        opens = [open_.tenant_cache_key for round_ in cluster.verifiers[0].received for open_ in round_.opens]
        assert await cached(server, OTHER_KEY, opens[0]) == 0, "not even with the very key that the other one's cache has"
        assert await cached(server, KEY, b"alice") == 0
        assert await cached(server, KEY, b"alice") > 0
        assert await cached(server, KEY, b"bob") == 0


async def test_without_api_keys_the_clients_key_decides() -> None:
    async with serving() as (server, _):
        assert await cached(server, "") == 0
        assert await cached(server, "") > 0
        assert await cached(server, "", b"alice") == 0


def test_cache_keys_of_different_names_differ() -> None:
    keys = [tenant_cache_key(name, own) for name in ("a", "a1", "b", "ä") for own in (b"", b"1", b"a", b":a", b"1:a:")]
    assert len(set(keys)) == len(keys)


# --- sizes ---


async def test_batches_and_sessions_are_bounded() -> None:
    async with serving(VerifierScript(delay_s=0.002), max_batch_requests=2, max_session_requests=2) as (server, cluster):
        await _check_batch(server)
        await _check_session(server, cluster)


async def _check_batch(server: CoordinatorServer) -> None:
    async with open_channel(server.bound_addresses[0]) as channel:
        stub = CoordinatorServiceStub(channel)
        one = generate.pack_request(GenerateRequest([5, 6], SamplingParams(max_tokens=1)))
        assert len([_ async for _ in stub.GenerateBatch(pb.GenerateBatchRequest(requests=[one] * 2))]) == 2
        with pytest.raises(grpc.aio.AioRpcError, match="the batch has 3 requests, but may have 2; send several") as caught:
            [_ async for _ in stub.GenerateBatch(pb.GenerateBatchRequest(requests=[one] * 3))]
        assert caught.value.code() is grpc.StatusCode.INVALID_ARGUMENT


async def _check_session(server: CoordinatorServer, cluster: Cluster) -> None:
    async with open_channel(server.bound_addresses[0]) as channel:
        call = CoordinatorServiceStub(channel).Session()
        request = GenerateRequest([5, 6], SamplingParams(max_tokens=100, seed=1))
        await call.write(generate.pack_command([generate.pack_start(SessionStart(i, request)) for i in (1, 2, 3)], []))
        tokens: dict[int, list[int]] = {1: [], 2: [], 3: []}
        done: set[int] = set()
        while len(done) < 3:
            update = generate.unpack_update(await call.read())
            for stream_id, _, token_ids, _ in update.deltas:
                tokens[stream_id] += token_ids
            for event in update.events:
                if event.choice is not None:
                    tokens[event.stream_id] += event.choice.token_ids
                if event.error is not None:
                    assert event.stream_id == 3
                    assert event.error.code == grpc.StatusCode.RESOURCE_EXHAUSTED.value[0]
                    assert "max_session_requests is 2" in event.error.message
                    assert event.error.retry_after_ms == 1000
                done |= {event.stream_id} if event.done else set()
        assert tokens == {1: (expected := cluster.verifiers[0].target.generate([5, 6], 100, 1)), 2: expected, 3: []}
        call.cancel()


async def test_headers_are_bounded() -> None:
    async with serving() as (server, _):
        async with open_channel(server.bound_addresses[0], metadata=(("x-padding", "x" * 4000),)) as channel:
            await CoordinatorServiceStub(channel).GetStatus(pb.GetStatusRequest())
        async with open_channel(server.bound_addresses[0], metadata=(("x-padding", "x" * 20_000),)) as channel:
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await CoordinatorServiceStub(channel).GetStatus(pb.GetStatusRequest())
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
