"""Contenders in turns: who begins changes, workers generate as many tokens as the first one did, and times are the turns' own."""

import asyncio

from benchmarks.cpu import Decoded, Services, Worker
from benchmarks.turns import compare_all, family_cpu_s
from specwire.sampling_params import SamplingParams


class Ours(Services):
    def __init__(self, name: str, calls: list[str]) -> None:
        self.name, self._calls = name, calls

    async def decode(self, prompt: list[int], params: SamplingParams) -> Decoded:
        assert (params.ignore_eos, params.max_tokens) == (False, 64)
        self._calls.append(self.name)
        return Decoded(prompt, len(prompt) - 1, 0.001 * len(prompt))


class Theirs(Worker):
    def __init__(self, calls: list[str]) -> None:
        self.name, self._calls = "theirs", calls

    async def decode(self, prompt: list[int], params: SamplingParams) -> Decoded:
        assert (params.ignore_eos, params.max_tokens) == (True, len(prompt))
        self._calls.append(self.name)
        return Decoded(prompt, len(prompt) - 1, 0.002 * len(prompt))


def test_contenders_take_turns():
    calls: list[str] = []
    contenders = [Ours("drafts", calls), Ours("plain", calls), Theirs(calls)]
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8]]
    timed = asyncio.run(compare_all(contenders, prompts, SamplingParams(max_tokens=64), 3))
    assert calls[:2] == ["drafts"] * 2  # how long the answers are
    turns = [calls[first : first + 3] for first in range(2, len(calls), 3)]
    assert len(turns) == 4 * 2
    assert all(sorted(turn) == ["drafts", "plain", "theirs"] for turn in turns)
    assert {turn[0] for turn in turns} == {"drafts", "plain", "theirs"}
    assert [one.contender.name for one in timed] == ["drafts", "plain", "theirs"]
    assert [one.contender.ms_per_token for one in timed] == [1e3 * 0.008 / 6, 1e3 * 0.008 / 6, 1e3 * 0.016 / 6]
    assert all(len(one.cpu_s) == 3 and one.cpu_ms_per_token >= 0 for one in timed)


def test_cpu_time_counts_processes_below_this_one():
    async def burn() -> tuple[float, float]:
        before_s = family_cpu_s()
        process = await asyncio.create_subprocess_exec(
            "python", "-c", "import time\nwhile time.process_time() < 0.3: pass\nprint(flush=True)\ninput()", stdin=-1, stdout=-1
        )
        assert process.stdout is not None
        await process.stdout.readline()
        during_s = family_cpu_s()
        await process.communicate(b"\n")
        return before_s, during_s

    before_s, during_s = asyncio.run(burn())
    assert during_s - before_s >= 0.25
