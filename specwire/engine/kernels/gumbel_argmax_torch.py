"""The sampled token of rows without filters, in torch, for any device: what the parts in `gumbel_argmax` give together."""

import torch

from specwire.engine.sampling.ordering import row_max
from specwire.engine.sampling.philox import Stream, gumbel, noise_words


def gumbel_argmax(
    logits: torch.Tensor, temperatures: torch.Tensor, keys: torch.Tensor, indices: torch.Tensor, choices: torch.Tensor, stream: Stream
) -> torch.Tensor:
    """The token of each row: argmax of z + T * g, ties to the lowest id; of z alone where T is 0.

    Args:
        logits: [R, V] float32, processed; -inf where a token is not allowed.
        temperatures: [R] float32.
        keys, indices, choices: [R] int64, see `noise_words`.
        stream: what the noise is for.

    Returns:
        [R] int64; -1 for a bad row: a NaN, +inf, or no finite logit.
    """
    noise = gumbel(noise_words(keys, indices, choices, stream, logits.shape[1])).mul_(temperatures[:, None])
    noise[temperatures == 0] = 0.0
    best, token_ids = row_max(noise.add_(logits))
    return token_ids.masked_fill(~best.isfinite(), -1)
