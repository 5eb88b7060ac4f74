"""What is refused outright, who waits, and in which order sequences get in."""

from typing import Any

import pytest

from coordinator.admission import check_request
from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError, InvalidArgumentError, ResourceExhaustedError, SpecwireError, UnavailableError, UnsupportedError
from specwire.messages import GenerateRequest
from specwire.policy.capacity import describe_engine
from specwire.sampling_params import SamplingParams
from tests.scripted.cluster import Cluster, Running
from tests.scripted.verifier import ScriptedVerifier, VerifierScript

CONFIG = CoordinatorConfig(verifiers=("v:1",))


def check(request: GenerateRequest, has_tokenizer: bool = True, **script: Any) -> int:
    engine = describe_engine(CONFIG, [ScriptedVerifier(VerifierScript(**{"max_model_len": 100, **script})).describe()])
    return check_request(request, engine, has_tokenizer=has_tokenizer)


def request(num_prompt: int = 10, *, synthetic: tuple[float, ...] = (), variant: str = "", **sampling: Any) -> GenerateRequest:
    return GenerateRequest([5] * num_prompt, SamplingParams(**{"max_tokens": 5, **sampling}), synthetic_acceptance_rates=synthetic, variant=variant)


@pytest.mark.parametrize(
    ("message", "kind", "parts"),
    [
        (request(0), InvalidArgumentError, ["empty"]),
        (GenerateRequest([5, -1]), InvalidArgumentError, ["prompt_token_ids[1] is -1", "0 to 999"]),
        (GenerateRequest([1000]), InvalidArgumentError, ["prompt_token_ids[0] is 1000", "0 to 999"]),
        (request(100), InvalidArgumentError, ["100 tokens", "may have 100"]),
        (request(101, max_tokens=None), InvalidArgumentError, ["101 tokens", "may have 100"]),
        (request(99, max_tokens=2), InvalidArgumentError, ["99 tokens", "max_tokens is 2", "together 101", "100", "max_tokens to 1"]),
        (request(stop_token_ids=(1000,)), InvalidArgumentError, ["stop_token_ids", "1000", "999"]),
        (request(variant="x" * (16 << 20)), ResourceExhaustedError, ["parameters", "bytes, but may take", "max_message_mb"]),
        (request(variant="lora"), UnsupportedError, ["'lora'"]),
        (request(synthetic=(0.5,)), FailedPreconditionError, ["synthetic_acceptance_rates", "strict"]),
    ],
)
def test_what_can_never_be_served(message: GenerateRequest, kind: type[SpecwireError], parts: list[str]) -> None:
    with pytest.raises(kind) as error:
        check(message)
    assert [part for part in parts if part not in str(error.value)] == []


def test_what_just_fits() -> None:
    assert check(request(99, max_tokens=1)) == 100
    assert check(request(99, max_tokens=None)) == 100
    assert check(request(10, max_tokens=90)) == 100
    assert check(request(10, max_tokens=20)) == 30


def test_kv_blocks_bound_a_sequence() -> None:
    assert check(request(30, max_tokens=10), num_blocks=10, block_size=4) == 40
    assert check(request(30, max_tokens=None), num_blocks=10, block_size=4) == 40
    with pytest.raises(InvalidArgumentError, match=r"together 41.*40"):
        check(request(30, max_tokens=11), num_blocks=10, block_size=4)


def test_stop_strings_need_a_tokenizer() -> None:
    assert check(request(stop=("x",), max_tokens=5)) == 15
    with pytest.raises(FailedPreconditionError, match="tokenizer"):
        check(request(stop=("x",), max_tokens=5), has_tokenizer=False)


def test_synthetic_rates_need_one_a_position() -> None:
    rates = (0.9,) * 8
    assert check(request(synthetic=rates, max_tokens=5), rejection_sample_method="synthetic") == 15
    with pytest.raises(InvalidArgumentError, match="7 entries"):
        check(request(synthetic=rates[:7], max_tokens=5), rejection_sample_method="synthetic")


async def test_full_queue() -> None:
    async with Cluster([VerifierScript(max_num_seqs=2)], max_queue=3) as cluster:
        await cluster.ready()
        running = [cluster.submit([5], seed=i, max_tokens=20) for i in range(3)]
        with pytest.raises(ResourceExhaustedError, match=r"3 sequences wait.*max_queue is 3"):
            cluster.submit([5], seed=3, max_tokens=20)
        await cluster.until(lambda: cluster.engine.lanes[0].running)
        running.append(cluster.submit([5], seed=4, max_tokens=20))
        for request_ in running:
            await request_.check()


async def test_every_choice_counts_in_the_queue() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)], max_queue=4) as cluster:
        await cluster.ready()
        running = [cluster.submit([5], seed=0, max_tokens=20, n=3)]
        with pytest.raises(ResourceExhaustedError, match=r"3 sequences wait.*max_queue is 4.*try again later") as full:
            cluster.submit([5], seed=1, max_tokens=20, n=2)
        assert full.value.retry_after_ms == 1000
        running.append(cluster.submit([5], seed=1, max_tokens=20))
        with pytest.raises(ResourceExhaustedError, match=r"n is 5, but max_queue is 4.*fewer choices") as never:
            cluster.submit([5], seed=2, max_tokens=20, n=5)
        assert never.value.retry_after_ms is None, "it will not fit later"
        for request_ in running:
            await request_.check()


async def test_refused_while_no_verifier_is_there() -> None:
    async with Cluster() as cluster:
        await cluster.ready()
        await cluster.kill_verifier(0)
        await cluster.engine.readiness_changed()
        with pytest.raises(UnavailableError, match="killed"):
            cluster.submit([5], seed=3, max_tokens=20)
        await cluster.restart_verifier(0)
        await (await cluster.ready()).submit([5], seed=3, max_tokens=20).check()


def order_of_first_tokens(requests: list[Running]) -> list[int]:
    """Fills a list with the index of each request as its first token comes."""
    order: list[int] = []
    for index, request_ in enumerate(requests):
        sink = request_.sink
        sink.on_tokens = lambda index=index: order.append(index) if index not in order else None  # type: ignore[misc]
    return order


async def test_first_come_first_served() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)]) as cluster:
        await cluster.ready()
        requests = [cluster.submit([5] * (1 + 7 * (i % 3)), seed=i, max_tokens=5) for i in range(6)]
        order = order_of_first_tokens(requests)
        for request_ in requests:
            await request_.check()
        assert order == [0, 1, 2, 3, 4, 5]


async def test_lower_priority_numbers_go_first() -> None:
    async with Cluster([VerifierScript(max_num_seqs=1)]) as cluster:
        await cluster.ready()
        requests = [cluster.submit([5], seed=i, max_tokens=5, priority=priority) for i, priority in enumerate([0, 5, 0, -3, 5, -3])]
        order = order_of_first_tokens(requests)
        for request_ in requests:
            await request_.check()
        assert order == [3, 5, 0, 2, 1, 4]


async def test_admission_waits_for_blocks() -> None:
    """Three long prompts where two fit: the third waits, nobody is preempted."""
    async with Cluster([VerifierScript(num_blocks=40, block_size=4, max_model_len=160)]) as cluster:
        await cluster.ready()
        requests = [cluster.submit([5 + i] * 60, seed=i, max_tokens=10) for i in range(3)]
        lane = cluster.engine.lanes[0]
        await cluster.until(lambda: bool(requests[0].sink.choices[0].token_ids and requests[1].sink.choices[0].token_ids))
        assert (len(lane.running), cluster.engine.lanes[0].admission.num_waiting) == (2, 1)
        for request_ in requests:
            await request_.check()
        assert cluster.engine.counters.num_preemptions == 0


async def test_requests_spread_over_lanes() -> None:
    async with Cluster([VerifierScript(), VerifierScript()]) as cluster:
        await cluster.all_there()
        requests = [cluster.submit([5, 6, 7], seed=i, max_tokens=40) for i in range(8)]
        await cluster.until(lambda: sum(len(lane.running) for lane in cluster.engine.lanes) == 8)
        assert [len(lane.running) for lane in cluster.engine.lanes] == [4, 4]
        for request_ in requests:
            await request_.check()
