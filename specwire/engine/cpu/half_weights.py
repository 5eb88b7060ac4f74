"""Weights in float16 as the tiles of `half_tiles` read them: 32 features after another, each one stream of memory."""

import torch
import torch.nn.functional as F

from specwire.engine.cpu.half_tiles import FEATURES, GROUP
from specwire.errors import UnsupportedError


def pack_half(weight: torch.Tensor) -> torch.Tensor:
    """uint8 [ceil(out_features / 32), `block_bytes`(in_features)].

    A feature's numbers are divided by a power of two, its scale, which brings the largest of them between 1 and 2: bfloat16 numbers are exact but
    below 2^-17 of that largest one, and there off by at most 2^-25 of it.

    Args:
        weight: [out_features, in_features], any dtype.

    Raises:
        UnsupportedError: in_features is no multiple of 32.
    """
    out_features, in_features = weight.shape
    if in_features % GROUP:
        raise UnsupportedError(
            f"a weight of shape {out_features} x {in_features} can't be multiplied in float16 tiles: these need multiples of {GROUP}"
        )
    blocks = -(-out_features // FEATURES)
    padded = F.pad(weight.float(), (0, 0, 0, blocks * FEATURES - out_features))
    exponent = torch.frexp(padded.abs().amax(1)).exponent.clamp(min=-100) - 1
    scale = torch.ldexp(torch.ones(len(exponent)), exponent)
    numbers = (padded / scale[:, None]).half().view(blocks, FEATURES, in_features).transpose(1, 2)
    parts = (numbers, scale.view(blocks, FEATURES))
    return torch.cat([part.contiguous().view(torch.uint8).reshape(blocks, -1) for part in parts], 1)
