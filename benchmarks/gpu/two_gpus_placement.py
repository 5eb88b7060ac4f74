"""The slice `placement` of `two_gpus`: one verifier, its drafter on the other GPU or on its own, half batches, and no drafter at all."""

import asyncio
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from benchmarks.gpu.slices import Slice
from benchmarks.gpu.two_gpus_measure import Tracer, fill_caches, measure_batch
from benchmarks.gpu.two_gpus_services import HEAD_NUM_DRAFTS, Services, fixed
from specwire.errors import UnavailableError

MODEL, EAGLE3, NONE = "model", "eagle3", "none"
OWN, SHARED, HALVES, SHARED_HALVES, GRPC, PLAIN = "own", "shared", "halves", "shared, halves", "own, gRPC", "plain"
NUM_HALVES = 2
_MIN_HALVED = 32
"""Sequences from which on half batches are measured."""
_LEAST_DRAFTED = 0.1
"""Of the steps, or the drafter is not there."""
_TIMEOUT_S = 150.0
"""Of a placement, which takes half a minute at most."""


@dataclass(frozen=True, slots=True)
class Placement:
    """One way to use the two GPUs.

    Args:
        drafter: what drafts.
        name: how it is placed.
        service: the drafter's name; that of plain decoding is never asked.
        num_gpus: that are counted.
    """

    drafter: str
    name: str
    service: str
    num_gpus: int

    @property
    def is_halved(self) -> bool:
        return self.name in (HALVES, SHARED_HALVES)

    @property
    def shares_gpu(self) -> bool:
        """The drafter has the verifier's."""
        return self.name in (SHARED, SHARED_HALVES)

    def counts(self, concurrency: Sequence[int]) -> list[int]:
        """Numbers of sequences that are measured: half batches where there are some, gRPC for a few, which say what it costs."""
        if self.is_halved:
            return [count for count in concurrency if count >= _MIN_HALVED] or [count for count in concurrency if count > 1]
        if self.name == GRPC:
            return sorted({concurrency[0], concurrency[len(concurrency) // 2], concurrency[-1]})
        return list(concurrency)


PLACEMENTS = (
    Placement(MODEL, OWN, "d1", 2),
    Placement(MODEL, HALVES, "d1", 2),
    Placement(MODEL, SHARED, "d0", 1),
    Placement(EAGLE3, OWN, "e1", 2),
    Placement(EAGLE3, SHARED, "e0", 1),
    Placement(NONE, PLAIN, "d1", 1),
    Placement(EAGLE3, HALVES, "e1", 2),
    Placement(MODEL, SHARED_HALVES, "d0", 1),
    Placement(EAGLE3, SHARED_HALVES, "e0", 1),
    Placement(EAGLE3, GRPC, "g1", 2),
)
"""What tells most comes first: a run may be cut."""
VERIFIER = "v0"


def needed_services(part: Slice, concurrency: Sequence[int]) -> list[str]:
    """Those of placements that are not measured yet, the verifier first."""
    return [VERIFIER, *dict.fromkeys(placement.service for placement in PLACEMENTS if _left(part, placement, concurrency))]


def _left(part: Slice, placement: Placement, concurrency: Sequence[int]) -> list[int]:
    return [c for c in placement.counts(concurrency) if not part.has(c=c, drafter=placement.drafter, placement=placement.name)]


async def measure_placement(part: Slice, services: Services, prompts: list[list[int]]) -> None:
    """One placement after the other, and what one brings beside another. One that fails is left out, and keeps the slice from being complete."""
    failures: dict[str, str] = {}
    for placement in PLACEMENTS:
        try:
            async with asyncio.timeout(_TIMEOUT_S):
                await _measure(part, services, prompts, placement)
        except Exception as error:
            services.check()
            failures[f"{placement.drafter}, {placement.name}"] = f"{type(error).__name__}: {error}"
        part.note(**compare(part.rows), failures=failures)
    if failures:
        raise SystemExit(f"not measured: {failures}")


async def _measure(part: Slice, services: Services, prompts: list[list[int]], placement: Placement) -> None:
    """What is left of one."""
    sizes = services.peers.sizes
    counts = _left(part, placement, sizes.concurrency)
    if not counts:
        return
    k = {MODEL: sizes.num_draft_tokens, EAGLE3: HEAD_NUM_DRAFTS, NONE: 0}[placement.drafter]
    half_batches_from = 2 if placement.is_halved else 0
    async with services.coordinate(fixed(sizes, k), [VERIFIER], [placement.service], half_batches_from=half_batches_from) as served:
        await fill_caches(served, prompts[: max(counts)])
        metrics = services.metrics.get(placement.service, "") if k else ""
        tracer = Tracer(served, NUM_HALVES if placement.is_halved else 1, shares_gpu=placement.shares_gpu, metrics=metrics)
        for count in counts:
            row: dict[str, Any] = {"c": count, "drafter": placement.drafter, "placement": placement.name, "k": k}
            row |= await measure_batch(served, prompts[:count])
            if k and row["drafted_share"] < _LEAST_DRAFTED:
                raise UnavailableError(f"of the steps of {count} sequences {row['drafted_share']:.0%} had drafts; fallbacks: {row['fallbacks']}")
            row["tok_s_per_gpu"] = row["tok_s"] / placement.num_gpus
            await tracer.trace(row, prompts[:count])
            part.add(row)
        await tracer.finish()


def compare(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """What each placement gives beside others, by drafter and number of sequences, as far as both were measured.

    own_x_shared: tokens a second with a GPU for the drafter beside one GPU for both. halves_x_own, halves_x_shared: half batches beside whole ones.
    grpc_x_own: features over gRPC beside those read from GPU to GPU. own_x_best: the better of whole and half batches beside the most that one GPU
    gives, with a drafter or without one; own_x_best_per_gpu: the same with both GPUs counted; break_even_verifiers: see `break_even`.
    drafter_serves: verifiers that would keep the drafter's GPU busy all the time, by that row of own_x_best; no more than these can share it.
    halves_ms: the step of half batches, beside what half as many sequences let expect (halves_predicted_ms).
    """
    found: dict[str, dict[str, dict[str, Any]]] = {}
    for drafter in (MODEL, EAGLE3):
        for count in sorted({row["c"] for row in rows}):
            known = {row["placement"]: row["tok_s"] for row in rows if row["c"] == count and row["drafter"] in (drafter, NONE)}
            gains: dict[str, Any] = {}
            own = max((known[name] for name in (OWN, HALVES) if name in known), default=None)
            one_gpu = max((known[name] for name in (SHARED, SHARED_HALVES, PLAIN) if name in known), default=None)
            if OWN in known and SHARED in known:
                gains["own_x_shared"] = known[OWN] / known[SHARED]
            for halved, whole in ((HALVES, OWN), (SHARED_HALVES, SHARED)):
                if halved in known and whole in known:
                    gains[f"halves_x_{whole}"] = known[halved] / known[whole]
            if GRPC in known and OWN in known:
                gains["grpc_x_own"] = known[GRPC] / known[OWN]
            if own is not None and SHARED in known and PLAIN in known:
                gains |= {"own_x_best": own / one_gpu, "own_x_best_per_gpu": own / (2 * one_gpu), "break_even_verifiers": break_even(own, one_gpu)}
            cells = {(row["placement"], row["c"]): row for row in rows if row["drafter"] == drafter and "period_ms" in row}
            best = max((name for name in (OWN, HALVES) if (name, count) in cells), key=known.__getitem__, default=OWN)
            idle = cells[best, count]["drafter_gpu_idle"] if (best, count) in cells else 1.0
            gains |= {"drafter_serves": 1 / (1 - idle)} if idle < 1 else {}
            if (HALVES, count) in cells and (OWN, count // 2) in cells:
                gains |= {"halves_ms": cells[HALVES, count]["period_ms"], "halves_predicted_ms": halves_ms(cells[OWN, count // 2])}
            if gains:
                found.setdefault(drafter, {})[str(count)] = gains
    return {"gains": found}


def halves_ms(half: Mapping[str, Any]) -> float:
    """What both half batches take, by the parts of a step of one of them alone: the verifier is busy twice, the drafter is, or a half waits for its
    own drafts, messages and round.

    Args:
        half: the row of half as many sequences with whole batches.
    """
    return float(max(2 * half["forward_ms"], 2 * half["draft_ms"], half["period_ms"]))


def break_even(own_tok_s: float, one_gpu_tok_s: float) -> float | None:
    """Verifiers, a GPU each, that one drafter's GPU must serve for its keep: N own / (N + 1) = one_gpu. None: it never earns it.

    Args:
        own_tok_s: of a verifier whose drafter has a GPU of its own.
        one_gpu_tok_s: the most that one GPU gives.
    """
    return one_gpu_tok_s / (own_tok_s - one_gpu_tok_s) if own_tok_s > one_gpu_tok_s else None
