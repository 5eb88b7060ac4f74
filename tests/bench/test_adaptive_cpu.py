"""Windows, turns and figures of the benchmark of adaptive verification on a CPU; the services are stand-ins."""

import asyncio
import json
from dataclasses import dataclass, field
from pathlib import Path
from types import SimpleNamespace
from typing import Any

from benchmarks.adaptive_cpu import LEAST, Bench, Policy, Window, compare, row_of
from benchmarks.cpu import Decoded
from specwire.sampling_params import SamplingParams

POLICIES = Policy("none", 0), Policy("fixed", 5), Policy("adaptive", 8, is_adaptive=True)


@dataclass
class StandIn:
    """Answers a prompt of n tokens with n tokens, a turn of the event loop each; counts requests at once."""

    num_running: int = 0
    most_running: int = 0
    prompts: list[list[int]] = field(default_factory=list)

    async def decode(self, prompt: list[int], params: SamplingParams) -> Decoded:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        self.prompts.append(prompt)
        for _ in prompt:
            await asyncio.sleep(0)
        self.num_running -= 1
        return Decoded(prompt[::-1], len(prompt) - 1, 0.1, num_drafts=1, num_draft_tokens=5, num_accepted_tokens=2, num_steps=4)

    async def get_status(self) -> Any:
        learned = SimpleNamespace(cost_error=0.03, verify_factor=1.1, hop_factor=0.9, num_offered_tokens=32 * len(self.prompts))
        return SimpleNamespace(lanes=[SimpleNamespace(policy=learned)])


async def test_policies_take_turns_and_requests_share_the_window(tmp_path: Path) -> None:
    switches: list[dict[str, Any]] = []

    async def answer(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        switches.append(json.loads(await reader.readline()))
        number = len(switches)
        believed = {"requested": [number, number // 6], "verify_factors": {"1": 1.25}}
        writer.write(json.dumps({"done": True} | believed).encode() + b"\n")
        await writer.drain()
        writer.close()

    server = await asyncio.start_unix_server(answer, tmp_path / "switch")
    services = StandIn()
    bench = Bench(services, services, str(tmp_path / "switch"), 16, SamplingParams(temperature=0.0))  # type: ignore[arg-type]
    prompts = [[1, 2], [3, 4, 5], [6], [7, 8, 9, 10]]
    rows = await compare(bench, POLICIES, "copy", prompts, 3, num_rounds=2, least=LEAST["copy"])
    server.close()

    ks = [switch["schedule"][0] for switch in switches]
    assert ks == [[1, 16, k] for k in (8, 0, 0, 5, 0, 5, 8, 0, 5, 8, 0, 0)]
    assert [switch["is_adaptive"] for switch in switches] == [k == 8 for _, _, k in ks]
    assert services.most_running == 3
    assert sorted(services.prompts) == sorted(prompts * 9)
    assert [(row["policy"], row["c"], len(row["tok_s_of_rounds"])) for row in rows] == [("none", 3, 2), ("fixed", 3, 2), ("adaptive", 3, 2)]
    assert all(row["same_texts"] == 1.0 and row["tokens_per_row"] == 10 / 16 and row["acceptance_length"] == 3.0 for row in rows)
    assert rows[2]["prediction_error"] == 0.03
    assert rows[2]["tokens_per_row_of_rounds"] == [0.625, 0.625]
    assert rows[2]["requested_of_rounds"] == [[6, 1], [3, 0]], "by what a switch after each of its windows says"
    assert rows[2]["verify_factors"] == {"1": 1.25}


def window(seconds: float, *token_ids: int) -> Window:
    return Window([Decoded(list(token_ids), len(token_ids) - 1, seconds, num_steps=len(token_ids))], seconds, 2 * seconds)


def test_ratios_are_medians_of_the_rounds() -> None:
    none = [window(seconds, 1, 2, 3, 4) for seconds in (2.0, 4.0, 8.0)]
    found = [window(1.0, 1, 2, 3, 4), window(3.2, 1, 2, 3, 4), window(8.0, 1, 2, 3, 5)]
    row = row_of("copy", 1, "adaptive", found, none, none, LEAST["copy"])
    assert (row["beside_none"], row["is_met"]) == (1.25, False)
    assert row["tok_s"] == 1.25
    assert row["same_texts"] == 2 / 3
    assert row_of("chat", 1, "adaptive", found, none, none, LEAST["chat"])["is_met"]
    assert row["cpu_ms_per_token"] == 1600.0
