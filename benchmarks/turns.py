"""Any number of contenders over the same prompts in turns, with the CPU time of each: on a busy machine that is steadier than its clock time."""

import os
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from benchmarks.cpu import Contender, Services, Worker, ms_per_token
from specwire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class Timed:
    """A contender, and the CPU seconds that this process and all below it took for each of its rounds."""

    contender: Contender
    cpu_s: list[float] = field(default_factory=list)

    @property
    def cpu_ms_per_token(self) -> float:
        """Median over the rounds, prompts included."""
        rounds = zip(self.cpu_s, self.contender.rounds, strict=True)
        return round(statistics.median(1e3 * seconds / sum(len(one.token_ids) for one in decoded) for seconds, decoded in rounds), 3)


async def compare_all(contenders: Sequence[Services | Worker], prompts: Sequence[list[int]], params: SamplingParams, num_rounds: int) -> list[Timed]:
    """Every prompt once to warm up, then in each round once with all, who begins being swapped. Workers, which don't end where the model does,
    generate as many tokens as the first contender did."""
    timed = [Timed(Contender(one.name, one.decode, [])) for one in contenders]
    lengths = [len((await contenders[0].decode(prompt, params)).token_ids) for prompt in prompts]
    for number in range(-1, num_rounds):
        done = [([], 0.0) for _ in timed]
        for index, prompt in enumerate(prompts):
            for turn in range(len(timed)):
                place = (turn + number + index) % len(timed)
                own = replace(params, max_tokens=lengths[index], ignore_eos=True) if isinstance(contenders[place], Worker) else params
                before_s = family_cpu_s()
                decoded = await contenders[place].decode(prompt, own)
                done[place] = [*done[place][0], decoded], done[place][1] + family_cpu_s() - before_s
        if number >= 0:
            for one, (decoded, cpu_s) in zip(timed, done, strict=True):
                one.contender.rounds.append(decoded)
                one.cpu_s.append(cpu_s)
            print(", ".join(f"{one.contender.name} {ms_per_token(one.contender.rounds[-1]):.2f} ms a token" for one in timed), flush=True)
    return timed


def family_cpu_s() -> float:
    """CPU seconds of this process and of those below it that run."""
    ticks = 0
    waiting = [os.getpid()]
    while waiting:
        process = Path("/proc", str(waiting.pop()))
        try:
            fields = (process / "stat").read_text().rpartition(")")[2].split()
            for task in (process / "task").iterdir():
                waiting += map(int, (task / "children").read_text().split())
        except FileNotFoundError:  # it has ended
            continue
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")
