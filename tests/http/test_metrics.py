"""Numbers for Prometheus: sums over processes, and vLLM's names."""

import asyncio
import subprocess
import sys
from pathlib import Path

import pytest

from specwire.config import HttpConfig
from specwire.http.board import Board
from specwire.http.metrics import GENERATED_TOKENS, LAYOUT, METRICS, REQUESTS, RUNNING, TIME_TO_FIRST_TOKEN
from specwire.metrics import Histogram
from tests.http.serving import Served, front, http_served
from tests.metrics.scrape import Series, by_name, check_growth, parse, value


async def scrape(served: Served) -> Series:
    return parse((await served.get("/metrics")).body.decode())


async def test_what_a_generation_counts(served: Served) -> None:
    before = await scrape(served)
    await served.post("/v1/completions", {"prompt": ["ab", "c"], "n": 2, "max_tokens": 10})
    await served.post("/v1/completions", {"prompt": "ab", "n": 2, "max_tokens": 10, "stream": True})
    await served.post("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 10})
    await served.post("/v1/completions", {"prompt": "ab", "n": 0})
    await served.get("/v1/nothing")
    await served.until_idle()
    now = await scrape(served)
    check_growth(METRICS, before, now)
    answered = {dict(labels)["endpoint"] + dict(labels)["code"]: n for labels, n in by_name(now, "specwire_http_requests_total").items() if n}
    assert answered == {"completions200": 2, "completions400": 1, "chat_completions200": 1, "other404": 1}
    assert value(now, "specwire_http_generated_tokens_total") == 70
    assert value(now, "specwire_http_prompt_tokens_total") == 3 + 2 + len("<user>a<assistant>")
    assert value(now, "specwire_http_choices_total", reason="length") == 7
    assert value(now, "specwire_http_time_to_first_token_seconds_count") == 2, "of the stream"
    first_tokens = value(now, "specwire_http_time_to_first_token_seconds_count")
    assert value(now, "specwire_http_inter_token_latency_seconds_count") <= 20 - first_tokens
    assert value(now, "specwire_http_generation_seconds_count") == 4, "the refused one, too"
    assert value(now, "specwire_http_request_prompt_tokens_sum") == value(now, "specwire_http_prompt_tokens_total")
    assert value(now, "specwire_http_choice_tokens_sum") == 70
    assert value(now, "specwire_http_looked_up_tokens_total") == 2 * 2 + 2 * 1 + 2 * 2 + len("<user>a<assistant>"), "each choice for itself"
    assert value(now, "specwire_http_decode_seconds_count") == value(now, "specwire_http_time_per_output_token_seconds_count") == 2
    decoded, a_token = (value(now, f"specwire_http_{name}_seconds_sum") for name in ("decode", "time_per_output_token"))
    assert a_token == pytest.approx(decoded / 9, abs=1e-8)
    assert value(now, "specwire_http_running_requests") == 0
    assert not [name for name, _ in now if name.startswith("vllm:")]


async def test_prefix_cache_hits(socket_dir: Path) -> None:
    prompt = "a" * 40  # two whole blocks of the scripted target, and some
    async with http_served(socket_dir, http={"vllm_metrics": True}, verifier={"block_size": 16, "prefix_caching": True}) as served:
        answers = [(await served.post("/v1/completions", {"prompt": prompt, "max_tokens": 2})).json for _ in range(2)]
        cached = [answer["usage"]["prompt_tokens_details"]["cached_tokens"] for answer in answers]
        now = await scrape(served)
    assert cached[0] == 0 < cached[1]
    for names in (("specwire_http_looked_up_tokens_total", "specwire_http_cached_tokens_total"),
                  ("vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total")):  # fmt: skip
        assert [sum(by_name(now, name).values()) for name in names] == [80, cached[1]]


async def test_vllm_names(socket_dir: Path) -> None:
    async with http_served(socket_dir, http={"vllm_metrics": True}) as served:
        await served.post("/v1/completions", {"prompt": "ab", "max_tokens": 30, "stream": True})
        await served.until_idle()
        now = await scrape(served)
        labels = {"model_name": "scripted", "engine": "0"}
        assert value(now, "vllm:generation_tokens_total", **labels) == 30
        assert value(now, "vllm:prompt_tokens_total", **labels) == 2
        assert value(now, "vllm:request_success_total", finished_reason="length", **labels) == 1
        assert value(now, "vllm:num_requests_running", **labels) == value(now, "vllm:num_requests_waiting", **labels) == 0
        assert value(now, "vllm:kv_cache_usage_perc", **labels) == 0
        assert value(now, "vllm:time_to_first_token_seconds_count", **labels) == 1
        assert value(now, "vllm:request_decode_time_seconds_count", **labels) == 1
        assert value(now, "vllm:request_time_per_output_token_seconds_count", **labels) == 1
        assert value(now, "vllm:e2e_request_latency_seconds_count", **labels) == 1
        status = await served.upstream.own.get_status()
        for name, expected in (
            ("num_drafts", status.num_drafts), ("num_draft_tokens", status.num_draft_tokens), ("num_accepted_tokens", status.num_accepted_tokens),
        ):  # fmt: skip
            assert value(now, f"vllm:spec_decode_{name}_total", **labels) == expected
        assert sum(by_name(now, "vllm:spec_decode_num_accepted_tokens_per_pos_total").values()) == status.num_accepted_tokens
        address = f"unix:{socket_dir}/coordinator.sock"
        config = HttpConfig(listen=("127.0.0.1:0",), coordinator=address, vllm_metrics=True, served_model_name=("mine", "other"))
        async with front(config) as renamed:
            series = parse((await renamed.get("/metrics")).body.decode())
            assert value(series, "vllm:generation_tokens_total", model_name="mine", engine="0") == 30
            assert [model["id"] for model in (await renamed.get("/v1/models")).json["data"]] == ["mine", "other"]
            assert (await renamed.post("/v1/completions", {"model": "other", "prompt": "a"})).json["model"] == "other"
            assert (await renamed.post("/v1/completions", {"prompt": "a"})).json["model"] == "mine"
            assert (await renamed.post("/v1/completions", {"model": "scripted", "prompt": "a"})).status == 404


def test_processes_add_up(tmp_path: Path) -> None:
    path = tmp_path / "counts"
    Board.make(LAYOUT, path, 2)
    boards = [Board(LAYOUT, path, column, 2) for column in range(2)]
    for column, board in enumerate(boards):
        board.add(GENERATED_TOKENS, amount=10 * (column + 1))
        board.add(RUNNING)
        board.observe(TIME_TO_FIRST_TOKEN, 2_000_000 * (column + 1))
    boards[1].add(REQUESTS, ("completions", "200"))

    def sums(board: Board) -> dict[str, object]:
        return {sample.metric.name: sample.value for sample in board.samples() if sample.label_values in ((), ("completions", "200"))}

    for board in boards:
        found = sums(board)
        assert found[GENERATED_TOKENS.name] == 30
        assert found[RUNNING.name] == 2
        assert found[REQUESTS.name] == 1
        times = found[TIME_TO_FIRST_TOKEN.name]
        assert isinstance(times, Histogram)
        assert (times.count, times.sum) == (2, 0.006)
    # One in the place of another goes on counting where it was, but runs nothing.
    program = f"""
from pathlib import Path
from specwire.http.board import Board
from specwire.http.metrics import GENERATED_TOKENS, LAYOUT
Board(LAYOUT, Path({str(path)!r}), 1, 2).add(GENERATED_TOKENS)
"""
    subprocess.run([sys.executable, "-c", program], check=True)
    assert (sums(boards[0])[GENERATED_TOKENS.name], sums(boards[0])[RUNNING.name]) == (31, 1)


async def test_a_scrape_while_requests_run(socket_dir: Path) -> None:
    async with http_served(socket_dir, verifier={"delay_s": 0.002}) as served:
        running = [asyncio.create_task(served.post("/v1/completions", {"prompt": "a", "max_tokens": 100, "stream": True})) for _ in range(3)]
        before = await scrape(served)
        while not all(task.done() for task in running):
            now = await scrape(served)
            check_growth(METRICS, before, now)
            before = now
        assert value(await scrape(served), "specwire_http_generated_tokens_total") == 300
