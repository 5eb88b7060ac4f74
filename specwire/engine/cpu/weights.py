"""Weights of few bits as the tiles of `tiles` read them: 16 features after another, each one stream of memory."""

import torch

from specwire.engine.cpu.tiles import GROUP
from specwire.engine.kernels.packed_linear import Q4Weight

FEATURES = 16
"""Of a block."""
_PARTS = (4, 2, 4)
"""Of a group's 32 codes: vectors, halves of a byte, bytes of a lane."""


def pack_q4(weight: Q4Weight) -> torch.Tensor:
    """uint8 [out_features / 16, in_features / 32, 320]: 256 bytes of codes, 16 scales and 16 minimums in float16."""
    blocks, groups = weight.codes.shape[0] // FEATURES, weight.codes.shape[1] // GROUP
    codes = weight.codes.view(blocks, FEATURES, groups, *_PARTS)  # [blocks, lane, group, vector, half, byte]
    packed = (codes[:, :, :, :, 0] | codes[:, :, :, :, 1] << 4).permute(0, 2, 3, 1, 4).reshape(blocks, groups, 256)
    numbers = [
        part.to(torch.float16).view(blocks, FEATURES, groups).transpose(1, 2).contiguous().view(torch.uint8)
        for part in (weight.scale, weight.minimum)
    ]
    return torch.cat((packed, *numbers), 2)


def pack_q8(codes: torch.Tensor, scale: torch.Tensor, exact: torch.Tensor) -> torch.Tensor:
    """uint8 [out_features / 16, 16 * in_features + 64 + 64 * num_exact].

    Args:
        codes: int8 [out_features, in_features].
        scale: float32 [out_features].
        exact: float32 [out_features, num_exact], columns that are multiplied as they are.
    """
    blocks = len(codes) // FEATURES
    packed = (codes.view(blocks, FEATURES, -1, 4).transpose(1, 2).to(torch.int16) + 128).to(torch.uint8).reshape(blocks, -1)
    columns = exact.view(blocks, FEATURES, -1).transpose(1, 2).contiguous().view(torch.uint8).reshape(blocks, -1)
    return torch.cat((packed, scale.view(blocks, -1).contiguous().view(torch.uint8), columns), 1)
