"""The benchmark that sets `bench serve` beside another load generator: what it compares, and what both are asked for."""

import asyncio
import json
import sys
from pathlib import Path

import pytest

from benchmarks import load_generators
from tests.http.serving import http_served

AT_ONCE, A_SECOND = load_generators.loads(2, 50.0)
REPORT = {
    "benchmarks": [
        {
            "metrics": {
                "request_totals": {"successful": 4},
                "output_tokens_per_second": {"successful": {"mean": 100.0}},
                "inter_token_latency_ms": {"successful": {"mean": 3.0}},
                "request_latency": {"successful": {"mean": 0.5}},
                "time_to_first_token_ms": {"successful": {"mean": 20.0, "median": 19.0}},
            }
        }
    ]
}


def test_medians_are_compared() -> None:
    theirs = [{"completed": 4, "mean_ttft_ms": value, "mean_tpot_ms": 2.0} for value in (10.0, 50.0, 11.0)]
    ours = [{"completed": 4, "mean_ttft_ms": value, "mean_tpot_ms": 1.9} for value in (12.1, 12.1, 1.0)]
    for load, judges in ((AT_ONCE, False), (A_SECOND, True)):
        ttft, tpot = load_generators.compare(load, theirs, ours)
        assert (ttft["difference"], ttft["is_judged"], ttft["guidellm"]) == (0.1, judges, [10.0, 50.0, 11.0])
        assert (tpot["difference"], tpot["is_judged"]) == (0.0526, True)


async def test_what_ours_measures(socket_dir: Path, tmp_path: Path) -> None:
    prompts = tmp_path / "prompts.jsonl"
    load_generators.write_prompts(prompts, 4)
    async with http_served(socket_dir, verifier={"delay_s": 0.001}) as served:
        found = await asyncio.to_thread(load_generators.run_ours, served.url, A_SECOND, prompts, 4)
        status = await served.upstream.own.get_status()
    assert found["completed"] == 4
    assert 0 < found["mean_ttft_ms"] < found["mean_e2el_ms"]
    assert status.num_generated_tokens == 4 * load_generators.OUTPUT_LEN


def test_what_the_other_one_is_asked(tmp_path: Path) -> None:
    """A program in its place keeps its arguments and writes a report as GuideLLM does."""
    program = tmp_path / "guidellm"
    program.write_text(
        f"#!{sys.executable}\nimport json, sys\nopen(r'{tmp_path}/arguments', 'w').write(json.dumps(sys.argv[1:]))\n"
        f"open(sys.argv[-1].partition('path=')[2], 'w').write('''{json.dumps(REPORT)}''')\n"
    )
    program.chmod(0o755)
    found = load_generators.run_guidellm(program, "http://127.0.0.1:1", AT_ONCE, tmp_path / "prompts.jsonl", 4)
    assert found == {
        "completed": 4, "output_tokens_per_s": 100.0, "mean_tpot_ms": 3.0, "mean_e2el_ms": 500.0, "mean_ttft_ms": 20.0, "median_ttft_ms": 19.0,
    }  # fmt: skip
    words = " ".join(json.loads((tmp_path / "arguments").read_text()))
    for part in ("target=http://127.0.0.1:1", "request_format=/v1/completions", "max_tokens=128", "kind=concurrent,streams=2", "count=4"):
        assert part in words
    program.write_text(f"#!{sys.executable}\nraise SystemExit('no such thing')\n")
    with pytest.raises(SystemExit, match="no such thing"):
        load_generators.run_guidellm(program, "http://127.0.0.1:1", AT_ONCE, tmp_path / "prompts.jsonl", 4)
