"""A draft model in a service of its own on the verifier's GPU: llama-8b and llama-1b with made-up weights, drafts accepted at given rates.

Plain decoding and fixed K take turns at the same verifier, behind the same prompts; then plain decoding and the batch-size schedule that `specwire
advise` makes of those steps. Tokens a second = sequences x steps / (time of all tokens - time of 1 token), the slowest sequence included;
the best of the repeats. `alone` times the draft model without services.
"""

import tempfile
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import uvloop

from benchmarks.gpu import peer
from benchmarks.gpu.draft_alone import measure_alone
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, TINY, TINY_DRAFT, save_shape
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.load import random_prompts, run_batch
from benchmarks.gpu.schedule import Schedule, advised_schedule, measured_steps, predicted_ms
from benchmarks.gpu.sizes import Sizes, add_sizes, chosen_sizes
from benchmarks.gpu.slices import Slice, Slices, make_parser
from benchmarks.gpu.stack import UNIX, Peers, drafter_config, serve_coordinator, serve_peers, verifier_config
from specwire import rpc
from specwire.policy.cost import StepCost
from specwire.speculative_config import SpeculativeConfig

SLICES = SECONDS["draft"]
"""Of the last two, the first one also pays for the start."""
AIMS = {"fixed": {1: 420, 8: 2800, 32: 8800, 128: 14000, 256: 16000}, "schedule": {32: 9000, 128: 16500}}
"""Tokens a second."""
MIN_X_PLAIN = 0.98
"""Of the schedule, at every number of sequences."""
_DRAFT_KV_BYTES = 8 << 30
_TINY_KV_BYTES = 16 << 20
_PREFILL_CHUNK = 1024
"""At most: the drafter takes smaller ones if replies would have to wait too long for the end of one."""


async def measure(slices: Slices, names: list[str], sizes: Sizes, device: str, *, is_tiny: bool) -> None:
    """The slices behind one verifier and one drafter."""
    target, draft = (TINY, TINY_DRAFT) if is_tiny else (LLAMA_8B, LLAMA_1B)
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        speculative = SpeculativeConfig(
            method="draft_model",
            model=str(save_shape(draft, folder / "draft")),
            num_speculative_tokens=sizes.num_draft_tokens,
            rejection_sample_method="synthetic",
            synthetic_acceptance_rates=_rates(sizes),
            max_model_len=sizes.max_model_len,
        )
        verifier = verifier_config(folder, save_shape(target, folder / "target"), sizes, device, speculative)
        verifier = replace(verifier, enable_prefix_caching=True, num_kv_blocks=2 * verifier.num_kv_blocks)
        prompts = random_prompts(target.vocab_size, sizes.max_num_seqs, sizes.num_prompt_tokens)
        drafter = replace(
            drafter_config(folder, sizes, device, speculative),
            kv_cache_memory=_TINY_KV_BYTES if is_tiny else _DRAFT_KV_BYTES,
            prefill_chunk=min(_PREFILL_CHUNK, sizes.max_num_batched_tokens),
        )
        async with serve_peers(folder, sizes, target.vocab_size, verifier, drafter) as peers:
            cost, draft_costs = await read_cost(peers), await read_draft_costs(peers)
            every = (1, sizes.max_num_seqs)
            schedules: dict[str, Schedule] = {"plain": ((*every, 0),), "fixed": ((*every, sizes.num_draft_tokens),)}
            rows = slices.rows("fixed")
            if "schedule" in names and not rows:
                names = ["fixed", "schedule"]  # one is made from the other
            for name in names:
                if name == "schedule":
                    steps = measured_steps(rows, _context(sizes))
                    schedules[name] = advised_schedule(cost, _rates(sizes), steps, sizes.max_num_seqs, _context(sizes))
                with slices.open(name, keep=lambda row: True) as part:
                    part.note(schedule=schedules[name], draft_costs=draft_costs)
                    for count in (count for count in sizes.concurrency if not part.has(c=count)):
                        await compare(
                            name, part, peers, speculative, schedules, cost, prompts[:count], min_draft_wait_ms=10_000.0 if is_tiny else 5.0
                        )
                rows = part.rows if name == "fixed" else rows


async def compare(
    name: str,
    part: Slice,
    peers: Peers,
    speculative: SpeculativeConfig,
    schedules: Mapping[str, Schedule],
    cost: StepCost,
    prompts: list[list[int]],
    **fields: Any,
) -> None:
    """One number of sequences plainly and with a schedule, forth and back: what is compared must not be a matter of when it ran."""
    count = len(prompts)
    order = ["plain", name]
    rows: dict[str, dict[str, Any]] = {}
    for policy in [*order, *reversed(order)] if peers.sizes.num_repeats > 1 else order:
        config = replace(speculative, num_speculative_tokens_per_batch_size=schedules[policy])
        row = await measure_batch(peers, config, prompts, **fields)
        if policy not in rows or row["tok_s"] > rows[policy]["tok_s"]:
            rows[policy] = row
    plain_tok_s, context = rows["plain"]["tok_s"], _context(peers.sizes)
    k = next(k for first, last, k in schedules[name] if first <= count <= last)
    tok_s, aim = rows[name]["tok_s"], AIMS[name].get(count)
    assert not k or rows[name]["acceptance_length"] > 1, f"{count} sequences with K = {k}: no draft was accepted"
    part.add(
        {
            "c": count,
            "k": k,
            "tok_s": tok_s,
            "aim_tok_s": aim,
            "plain_tok_s": plain_tok_s,
            "x_plain": tok_s / plain_tok_s,
            "is_met": tok_s >= (aim or 0) and (name == "fixed" or tok_s >= MIN_X_PLAIN * plain_tok_s),
            "peer_tok_s": peer.DRAFT_TOK_S.get(count),
            "peer_plain_tok_s": peer.PLAIN_TOK_S["llama-8b"].get(count),
            "predicted_ms": predicted_ms(cost, k, count, context),
            **rows[name],
            "plain": rows["plain"],
        }
    )


async def measure_batch(peers: Peers, speculative: SpeculativeConfig, prompts: list[list[int]], **fields: Any) -> dict[str, Any]:
    """One number of sequences through a coordinator of its own, warmed up. The prompts are in the prefix caches from then on."""
    sizes, count = peers.sizes, len(prompts)
    async with serve_coordinator(peers, UNIX, speculative, **fields) as served:
        await run_batch(served.channel, prompts, sizes.num_steps + 1)
        firsts, totals = [], []
        for _ in range(max(1, sizes.num_repeats - 1)):  # each is measured twice
            firsts.append((await run_batch(served.channel, prompts, 1)).seconds)
            totals.append(await run_batch(served.channel, prompts, sizes.num_steps + 1))
        status = await served.status()
    best = min(totals, key=lambda generated: generated.seconds)
    spec = best.spec
    return {
        "tok_s": count * sizes.num_steps / (best.seconds - min(firsts)),
        "acceptance_length": spec.acceptance_length,
        "drafted_share": spec.num_drafts / spec.num_steps,
        "fallbacks": dict(status.fallbacks_by_cause),
        "coordinator_step": asdict(status.lanes[0].times),
        "draft_reply_ms": status.drafters[0].reply_ms,
        "first_token_s_of_repeats": firsts,
        "total_s_of_repeats": [generated.seconds for generated in totals],
    }


async def read_cost(peers: Peers) -> StepCost:
    """The tables that verifier and drafter measured at their start."""
    async with rpc.open_channel(peers.address("verifier", UNIX)) as verifier, rpc.open_channel(peers.address("drafter", UNIX)) as drafter:
        target, draft = await rpc.describe_verifier(verifier), await rpc.describe_drafter(drafter)
    cost = StepCost.from_tables(target.verify_cost, draft.draft_cost, draft.draft_ms_per_kv_token)
    if cost.unknown or not draft.draft_cost:
        raise SystemExit(f"no schedule can be chosen: {cost.unknown or 'the drafter has measured nothing'}")
    return cost


async def read_draft_costs(peers: Peers) -> dict[str, dict[int, float]]:
    """The drafter's table: milliseconds by sequences and K. Prices beyond what was measured are a guess."""
    async with rpc.open_channel(peers.address("drafter", UNIX)) as drafter:
        description = await rpc.describe_drafter(drafter)
    table: dict[str, dict[int, float]] = {}
    for k, num_sequences, ms in description.draft_cost:
        table.setdefault(f"{num_sequences} sequences", {})[k] = ms
    return table


def _context(sizes: Sizes) -> int:
    """Tokens of a sequence half-way."""
    return sizes.num_prompt_tokens + sizes.num_steps // 2


def _rates(sizes: Sizes) -> tuple[float, ...]:
    known = peer.SYNTHETIC_RATES
    return known[: sizes.num_draft_tokens] + (0.0,) * (sizes.num_draft_tokens - len(known))


def main(arguments: list[str] | None = None) -> None:
    """Measures the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    add_sizes(parser)
    slices, options = Slices.parse("draft", parser, arguments)
    names, sizes = slices.pending(), chosen_sizes(options)
    if "alone" in names:
        names.remove("alone")
        with slices.open("alone") as part:
            for row in measure_alone(TINY_DRAFT if options.tiny else LLAMA_1B, sizes, options.device):
                part.add(row)
        if options.device != "cpu":
            torch.cuda.empty_cache()  # the services need it
    if names:
        uvloop.run(measure(slices, names, sizes, options.device, is_tiny=options.tiny))


if __name__ == "__main__":
    main()
