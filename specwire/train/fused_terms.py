"""The loss of rows over the vocabulary and its gradient in one Triton kernel; `terms.loss_terms` says what it computes.

In torch a step of training moves the logits through memory some fifteen times, here three.
"""

import torch
import triton
import triton.language as tl

from specwire.train.terms import LossShape, Terms

BLOCK = 4096
"""Logits that a program looks at together."""


@triton.jit
def _loss_terms(
    logits, log_target, factors, gradient, sums, best, size, inv_temperature, kl_weight, tv_weight, ACCUMULATE: tl.constexpr, BLOCK: tl.constexpr
):
    """Grid (rows); sums is [3, rows]."""
    row, num_rows = tl.program_id(0), tl.num_programs(0)
    base = row.to(tl.int64) * size
    columns = tl.arange(0, BLOCK)

    highest = tl.full([], float("-inf"), tl.float32)
    total = tl.full([], 0.0, tl.float32)
    best_column = tl.full([], 0, tl.int32)
    for start in range(0, size, BLOCK):
        z = tl.load(logits + base + start + columns, start + columns < size, float("-inf")) * inv_temperature
        block_highest = tl.max(z, 0)
        best_column = tl.where(block_highest > highest, start + tl.argmax(z, 0), best_column)
        now = tl.maximum(highest, block_highest)
        total = total * tl.exp(highest - now) + tl.sum(tl.exp(z - now), 0)
        highest = now
    log_total = highest + tl.log(total)

    kl = tl.zeros([BLOCK], tl.float32)
    overlap = tl.zeros([BLOCK], tl.float32)
    mass = tl.zeros([BLOCK], tl.float32)
    side = tl.zeros([BLOCK], tl.float32)
    for start in range(0, size, BLOCK):
        here = start + columns < size
        z = tl.load(logits + base + start + columns, here, 0.0) * inv_temperature - log_total
        log_p = tl.load(log_target + base + start + columns, here, 0.0)
        q, p = tl.where(here, tl.exp(z), 0.0), tl.where(here, tl.exp(log_p), 0.0)
        kl += p * (log_p - z)
        overlap += tl.minimum(p, q)
        mass += p
        side += tl.where(q > p, q, tl.where(q < p, -q, 0.0))
    row_mass, row_side = tl.sum(mass, 0), tl.sum(side, 0)
    row_kl, row_overlap = tl.sum(kl, 0), tl.sum(overlap, 0)
    tl.store(sums + row, kl_weight * row_kl + tv_weight * (1.0 - row_overlap))
    tl.store(sums + num_rows + row, row_kl)
    tl.store(sums + 2 * num_rows + row, row_overlap)
    tl.store(best + row, best_column.to(tl.int64))

    factor = tl.load(factors + row) * inv_temperature
    for start in range(0, size, BLOCK):
        here = start + columns < size
        z = tl.load(logits + base + start + columns, here, 0.0) * inv_temperature - log_total
        q, p = tl.exp(z), tl.exp(tl.load(log_target + base + start + columns, here, 0.0))
        sign = tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0))
        value = factor * (kl_weight * (q * row_mass - p) + 0.5 * tv_weight * q * (sign - row_side))
        places = gradient + base + start + columns
        if ACCUMULATE:
            value += tl.load(places, here, 0.0)
        tl.store(places, value, here)


def loss_terms(
    logits: torch.Tensor, log_target: torch.Tensor, factors: torch.Tensor, shape: LossShape, gradient: torch.Tensor | None = None
) -> Terms:
    """See `specwire.train.terms.loss_terms`."""
    num_rows, size = logits.shape
    result = torch.empty_like(logits) if gradient is None else gradient
    sums = torch.empty((3, num_rows), device=logits.device)
    best = torch.empty(num_rows, dtype=torch.int64, device=logits.device)
    _loss_terms[(num_rows,)](
        logits.contiguous(),
        log_target.contiguous(),
        factors.contiguous(),
        result,
        sums,
        best,
        size,
        1 / shape.temperature,
        shape.kl,
        shape.tv,
        ACCUMULATE=gradient is not None,
        BLOCK=BLOCK,
        num_warps=8,
    )
    return Terms(sums[0], result, sums[1], sums[2], best)
