"""How many drafts: plain decoding, fixed K, the advised schedule and adaptive verification, at every load, for two drafters and two mixes.

llama-8b's shape with made-up weights. Drafters: `block`, one pass of one layer and the head over K + 1 tokens a sequence (any ids), and `model`, of
llama-1b's shape. Each request has a rate at which its drafts are accepted, whatever they are: 0.8 (uniform), or 0.9 and 0.3 in turn (mixed);
confidences are that rate behind noise (sigma, in log-odds). Policies switch while verifier, drafter and coordinator run. A window is decoding
alone: the same prompts come from the prefix cache, and it is as many tokens long for every policy, so that contexts are equal.
`python -m benchmarks.gpu.pareto_picture` draws the figures.
"""

import contextlib
import statistics
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import uvloop

from benchmarks.gpu import pareto_bars
from benchmarks.gpu.draft import read_cost
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, TINY_DRAFT, save_shape
from benchmarks.gpu.engine_models import TINY as TINY_TARGET
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.known_rates import make_request
from benchmarks.gpu.load import random_prompts
from benchmarks.gpu.pareto_cells import FIXED, FULL, MIXES, NUM_DRAFT_TOKENS, SIGMA, TINY, ParetoSizes, Points, Policy, known_rates
from benchmarks.gpu.processes import Log, running
from benchmarks.gpu.schedule import predicted_ms
from benchmarks.gpu.slices import Slice, Slices, make_parser, show_rows
from benchmarks.gpu.stack import UNIX, Peers, Served, drafter_config, serve_coordinator, verifier_config
from benchmarks.gpu.switching import switch_policy
from benchmarks.gpu.window import Window, measure_window
from specwire.messages import GenerateRequest
from specwire.policy.cost import StepCost
from specwire.speculative_config import SpeculativeConfig

SLICES = SECONDS["pareto"]
"""The first one of a drafter also pays for its start, and the very first for the verifier's."""
_COMPARED = 0.92
"""A fixed K that was below this share of the best one's throughput is not measured again: it can't be the best."""
_DRAFT_KV_BYTES, _TINY_KV_BYTES = 12 << 30, 16 << 20
_WARM_NUMBER = 900_000
"""Requests that warm up are none that are measured."""
_MAX_FILLS = 20
"""Batches after which a drafter has computed all prompts: those it has not get no drafts."""


@dataclass(slots=True)
class Bench:
    """One drafter's coordinator, and what is known of its steps.

    Args:
        cost: by the services' own tables.
        prompts: the same for all batches.
    """

    served: Served
    switch: str
    scale: ParetoSizes
    cost: StepCost
    prompts: list[list[int]]
    points: Points = field(default_factory=Points)
    num_warm: int = 0

    def requests(self, mix: str, sigma: float, number: int, lengths: Sequence[int]) -> list[GenerateRequest]:
        """A batch of such lengths, from request `number` on."""
        rates = known_rates(mix, sigma, len(lengths))
        return [make_request(self.prompts[index], number + index, rates[index], NUM_DRAFT_TOKENS, length) for index, length in enumerate(lengths)]

    async def window(self, mix: str, sigma: float, count: int, number: int, num_measured: int) -> Window:
        """With the policy as it is."""
        requests = self.requests(mix, sigma, number, [self.scale.sizes.num_steps] * count)
        return await measure_window(self.served, requests, self.scale.num_settle, num_measured)

    async def set_policy(self, policy: Policy) -> dict[str, Any]:
        """What adaptive verification believes, see `switching.beliefs`."""
        return await switch_policy(self.switch, policy.schedule, is_adaptive=policy.is_adaptive)

    async def measure(self, policy: Policy, mix: str, sigma: float, count: int, repeat: int) -> Window:
        """One window. Requests of a repeat have the same seeds for all policies."""
        await self.set_policy(policy)
        return await self.window(mix, sigma, count, repeat * 1000, self.scale.measured(count))

    async def warm_up(self, policy: Policy, mix: str, sigma: float, count: int, share: float = 1.0) -> None:
        """Lets a policy learn what such batches are like, for a share of the time that there is for that."""
        until_s = time.perf_counter() + share * self.scale.warm_s
        await self.set_policy(policy)
        while time.perf_counter() < until_s:
            self.num_warm += 1
            await self.window(mix, sigma, count, _WARM_NUMBER + 1000 * self.num_warm, self.scale.measured(count))

    async def fill_caches(self) -> None:
        """Every prompt is known to verifier and drafter, and each number of sequences has run."""
        for k in (0, NUM_DRAFT_TOKENS):
            await self.set_policy(Policy.fixed(k, self.max_num_seqs))
            for count in sorted(self.scale.sizes.concurrency, reverse=True):
                for _ in range(_MAX_FILLS):
                    window = await self.window("uniform", SIGMA, count, _WARM_NUMBER, self.scale.num_settle)
                    if not window.num_fallbacks:
                        break

    @property
    def max_num_seqs(self) -> int:
        return self.scale.sizes.max_num_seqs

    def context_len(self, count: int) -> int:
        """Tokens of a sequence in the middle of a window."""
        return self.scale.sizes.num_prompt_tokens + self.scale.num_settle + self.scale.measured(count) // 2

    def restore(self, rows: Sequence[dict[str, Any]]) -> None:
        """Takes the steps of windows that an earlier run has measured."""
        steps = {f"K={k}" if k else "none": k for k in (0, *FIXED)}
        for row in rows:
            if (k := steps.get(row["policy"])) is not None:
                self.points.add_step(k, row["c"], row["step_ms"], self.context_len(row["c"]))

    def advise(self, mix: str) -> Policy:
        """The schedule for such requests, from the steps of all windows so far."""
        schedule = self.points.advise(self.cost, MIXES[mix], self.max_num_seqs, self.context_len(self.max_num_seqs))
        return Policy("dynamic", schedule)


async def measure_mix(part: Slice, bench: Bench, name: str) -> None:
    """One drafter and one mix: what bars compare first, then what is only shown."""
    drafter, _, mix = name.partition("-")
    adaptive = Policy("adaptive", Policy.fixed(NUM_DRAFT_TOKENS, bench.max_num_seqs).schedule, is_adaptive=True)
    counts = sorted(bench.scale.sizes.concurrency, reverse=True)  # large batches teach sooner what scores are worth
    bench.restore(part.rows)
    predicted = {count: [predicted_ms(bench.cost, k, count, bench.context_len(count)) for k in range(NUM_DRAFT_TOKENS + 1)] for count in counts}
    part.note(predicted_ms_by_k=predicted)
    for count in counts:
        if not part.has(policy=adaptive.name, sigma=SIGMA, c=count):
            await _measure_compared(part, bench, name, adaptive, count)
    advised = bench.advise(mix)
    part.note(advised=advised.schedule)
    for policy, sigma in ((advised, SIGMA), (adaptive, 0.0)):
        for count in (count for count in counts if not part.has(policy=policy.name, sigma=sigma, c=count)):
            if policy.is_adaptive:
                await bench.warm_up(policy, mix, sigma, count, 0.5)
            windows = [await bench.measure(policy, mix, sigma, count, 0)]
            part.add(_row(drafter, mix, policy, sigma, windows) | ({"beliefs": await bench.set_policy(policy)} if policy.is_adaptive else {}))
    bars = pareto_bars.evaluate(name, part.rows, SIGMA)
    part.note(bars=bars)
    show_rows(bars)


async def _measure_compared(part: Slice, bench: Bench, name: str, adaptive: Policy, count: int) -> None:
    """All policies but the advised one at one number of sequences; again, forth and back, those that can decide a bar."""
    drafter, _, mix = name.partition("-")
    fixed = {Policy.fixed(k, bench.max_num_seqs): k for k in (0, *FIXED)}
    windows: dict[Policy, list[Window]] = {policy: [] for policy in fixed}
    for policy, k in fixed.items():
        windows[policy].append(await bench.measure(policy, mix, SIGMA, count, 0))
        bench.points.add(k, windows[policy][0], bench.context_len(count))
    await bench.warm_up(adaptive, mix, SIGMA, count)
    windows[adaptive] = [await bench.measure(adaptive, mix, SIGMA, count, 0)]
    none, *drafting = fixed
    best_tok_s = max(windows[policy][0].tok_s for policy in drafting)
    close = [policy for policy in drafting if windows[policy][0].tok_s >= _COMPARED * best_tok_s] if pareto_bars.compares_fixed(name, count) else []
    compared = [none, *close, adaptive]
    for repeat in range(1, bench.scale.sizes.num_repeats):
        for policy in compared[::-1] if repeat % 2 else compared:
            windows[policy].append(await bench.measure(policy, mix, SIGMA, count, repeat))
    believed = await bench.set_policy(adaptive)
    for policy, found in windows.items():
        part.add(_row(drafter, mix, policy, SIGMA, found) | ({"beliefs": believed} if policy.is_adaptive else {}))


def _row(drafter: str, mix: str, policy: Policy, sigma: float, windows: list[Window]) -> dict[str, Any]:
    """Medians over the windows."""

    def median(name: str) -> float:
        return statistics.median(getattr(window, name) for window in windows)

    acceptances = [window.acceptance for window in windows if window.acceptance is not None]
    last = windows[-1].after.lanes[0].policy
    tok_s, count = median("tok_s"), windows[0].count
    return {
        "drafter": drafter,
        "mix": mix,
        "policy": policy.name,
        "sigma": sigma,
        "c": count,
        "tok_s": tok_s,
        "user_tok_s": tok_s / count,
        "step_ms": median("step_ms"),
        "mean_k": median("drafts_per_step"),
        "mean_k_asked": median("asked_per_step") if policy.is_adaptive else median("drafts_per_step"),
        "acceptance": statistics.median(acceptances) if acceptances else None,
        "tokens_per_step": median("tokens_per_step"),
        "prediction_error": statistics.median(window.after.lanes[0].policy.cost_error for window in windows) if policy.is_adaptive else None,
        "cached_tokens": median("cached_tokens"),
        "num_fallbacks": sum(window.num_fallbacks for window in windows),
        "tok_s_of_repeats": [window.tok_s for window in windows],
        **({"verify_factor": last.verify_factor, "hop_factor": last.hop_factor} if policy.is_adaptive else {}),
    }


@contextlib.asynccontextmanager
async def serve_bench(peers: Peers, speculative: SpeculativeConfig, scale: ParetoSizes, **fields: Any) -> AsyncIterator[Bench]:
    """A coordinator in front of the peers, and all prompts in the prefix caches."""
    switch, cost = f"{peers.folder}/switch", await read_cost(peers)
    config = replace(speculative, enable_adaptive_verification=True)
    async with serve_coordinator(peers, UNIX, config, command=("benchmarks.gpu.switching", switch), **fields) as served:
        bench = Bench(served, switch, scale, cost, random_prompts(peers.vocab_size, scale.sizes.max_num_seqs, scale.sizes.num_prompt_tokens))
        await bench.fill_caches()
        yield bench


async def measure(slices: Slices, names: list[str], scale: ParetoSizes, device: str, *, is_tiny: bool) -> None:
    """The slices behind one verifier, drafter by drafter."""
    from benchmarks.gpu.rollout import measure_rollout

    target, draft = (TINY_TARGET, TINY_DRAFT) if is_tiny else (LLAMA_8B, LLAMA_1B)
    sizes = scale.sizes
    with tempfile.TemporaryDirectory(prefix="sw-") as folder_name:
        folder, log = Path(folder_name), Log()
        target_folder = save_shape(target, folder / "target")
        speculative = SpeculativeConfig(
            method="draft_model",
            model=str(save_shape(draft, folder / "draft")),
            num_speculative_tokens=NUM_DRAFT_TOKENS,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=tuple(MIXES["uniform"][0] ** position for position in range(1, NUM_DRAFT_TOKENS + 1)),
            max_model_len=sizes.max_model_len,
        )
        verifier = replace(verifier_config(folder, target_folder, sizes, device, speculative), enable_prefix_caching=True)
        async with running(verifier, log=log):
            for kind in ("block", "model"):
                wanted = [name for name in names if name.startswith(kind) or (name == "rollout" and kind == "block")]
                if not wanted:
                    continue
                shape = replace(speculative, model=str(target_folder)) if kind == "block" else speculative
                drafter = replace(drafter_config(folder, sizes, device, shape), kv_cache_memory=_TINY_KV_BYTES if is_tiny else _DRAFT_KV_BYTES)
                async with running(drafter, log=log, command=("benchmarks.gpu.known_drafter", kind)):
                    peers = Peers(folder, sizes, target.vocab_size, verifier, drafter, log)
                    async with serve_bench(peers, speculative, scale, min_draft_wait_ms=10_000.0 if is_tiny else 5.0) as bench:
                        for name in wanted:
                            with slices.open(name, keep=None if name == "rollout" else lambda row: True) as part:
                                part.note(scale=str(scale))
                                await (measure_rollout(part, bench) if name == "rollout" else measure_mix(part, bench, name))


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    parser.add_argument("--concurrency", nargs="+", type=int, help="numbers of sequences")
    parser.add_argument("--repeats", type=int, help="windows of what bars compare")
    slices, options = Slices.parse("pareto", parser, arguments)
    scale = TINY if options.tiny else FULL
    sizes = replace(
        scale.sizes, concurrency=tuple(options.concurrency or scale.sizes.concurrency), num_repeats=options.repeats or scale.sizes.num_repeats
    )
    most = max(sizes.max_num_batched_tokens, sizes.max_num_seqs * (NUM_DRAFT_TOKENS + 1))
    scale = replace(scale, sizes=replace(sizes, max_num_batched_tokens=most))
    if names := slices.pending():
        uvloop.run(measure(slices, names, scale, options.device, is_tiny=options.tiny))


if __name__ == "__main__":
    main()
