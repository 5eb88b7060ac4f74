"""Rotary position embeddings: frequencies of each scaling type and the table of cos and sin."""

import math

import torch

from specwire.engine.models.config import RopeConfig


def inverse_frequencies(rope: RopeConfig, head_dim: int) -> tuple[torch.Tensor, float]:
    """Returns (inverse frequencies [head_dim / 2] float32, factor on cos and sin).

    Llama 3's and YaRN's formulas follow the models' reference code and https://arxiv.org/abs/2309.00071 (sections 3.2 to 3.4).
    """
    exponent = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    inv_freq = 1.0 / (rope.theta**exponent)
    match rope.rope_type:
        case "linear":
            return inv_freq / rope.factor, 1.0
        case "llama3":
            return _llama3(inv_freq, rope), 1.0
        case "yarn":
            return _yarn(inv_freq, rope, head_dim), _yarn_attention_factor(rope)
        case _:
            return inv_freq, 1.0


def rope_table(rope: RopeConfig, head_dim: int, num_positions: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns float32 (cos, signed_sin), each [num_positions, head_dim].

    The first half of signed_sin is negated, so that a rotation is `x * cos + roll(x, head_dim / 2) * signed_sin`.
    """
    inv_freq, factor = inverse_frequencies(rope, head_dim)
    angles = torch.arange(num_positions, dtype=torch.float32)[:, None] * inv_freq  # [num_positions, head_dim / 2]
    cos, sin = angles.cos() * factor, angles.sin() * factor
    return torch.cat((cos, cos), -1), torch.cat((-sin, sin), -1)


def _llama3(inv_freq: torch.Tensor, rope: RopeConfig) -> torch.Tensor:
    wavelength = 2 * math.pi / inv_freq
    original = rope.original_max_position_embeddings
    # 0 where the wavelength is scaled fully, 1 where it is kept, linear in the frequency between.
    smooth = ((original / wavelength - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)).clamp(0.0, 1.0)
    return (1 - smooth) * inv_freq / rope.factor + smooth * inv_freq


def _yarn(inv_freq: torch.Tensor, rope: RopeConfig, head_dim: int) -> torch.Tensor:
    def correction_dim(num_rotations: float) -> float:
        return head_dim * math.log(rope.original_max_position_embeddings / (num_rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = correction_dim(rope.beta_fast), correction_dim(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, head_dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(head_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    return inv_freq / rope.factor * ramp + inv_freq * (1 - ramp)


def _yarn_attention_factor(rope: RopeConfig) -> float:
    if rope.attention_factor is not None:
        return float(rope.attention_factor)

    def scale(multiplier: float) -> float:
        return 1.0 if rope.factor <= 1 else 0.1 * multiplier * math.log(rope.factor) + 1.0

    if rope.mscale and rope.mscale_all_dim:
        return scale(rope.mscale) / scale(rope.mscale_all_dim)
    return scale(1.0)
