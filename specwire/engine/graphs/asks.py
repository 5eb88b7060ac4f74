"""What a sequence asks of the sampler beyond temperature and noise, as the numbers that the device keeps of its slot."""

import math
import struct
from collections.abc import Sequence

from specwire.engine.sampling.slot import SlotSampling

ADJUSTS = 1
"""Flag: the slot's row of `SlotState.adjustments` is added to its logits: bias, and -inf for ids that are never allowed."""
PENALISES = 2
"""Flag: penalties over the counts in the slot's row of `SlotState.words`."""
STOPS = 4
"""Flag: the ids marked in the slot's row of `SlotState.words` are masked below min_tokens."""
FILTERS = 8
"""Flag: min-p, top-k or top-p."""
REPORTS = 16
"""Flag: log-probabilities."""
SYNTHETIC = 32
"""Flag: drafts are accepted by chance."""
ON_HOST = 64
"""Flag: the host samples the slot's rows; no kernel looks at it."""
PROCESSES = ADJUSTS | PENALISES | STOPS

ASKED = 9
"""Numbers of a slot: flags, top_k, the bits of top_p, of log(min_p) and of the repetition, frequency and presence penalty, the first token index
that may end the sequence, and how many of the likeliest tokens are reported."""
_MAX_INT32 = 2**31 - 1


def asked_numbers(sampling: SlotSampling) -> tuple[int, ...]:
    """The ASKED numbers of a slot. Bad words of several tokens depend on the tokens before: the host samples such a slot, and the device nothing."""
    params = sampling.params
    if sampling.phrases:
        return (ON_HOST,) + (0,) * (ASKED - 1)
    has_top_k = 0 < params.top_k < sampling.vocab_size
    has_filter = not params.is_greedy and (params.top_p < 1.0 or params.min_p > 0.0 or has_top_k)
    adjusts = sampling.allowed_ids is not None or sampling.bias_ids is not None or sampling.banned_ids is not None
    flags = (
        ADJUSTS * adjusts
        | PENALISES * (sampling.seen is not None)
        | STOPS * (sampling.stop_ids is not None)
        | FILTERS * has_filter
        | REPORTS * (params.logprobs is not None)
        | SYNTHETIC * (sampling.conditional_rates is not None)
    )
    if not flags:
        return (0,) * ASKED
    return (
        flags,
        params.top_k if has_top_k else _MAX_INT32,
        _bits(params.top_p),
        _bits(math.log(params.min_p) if params.min_p > 0.0 else -math.inf),
        _bits(params.repetition_penalty),
        _bits(params.frequency_penalty),
        _bits(params.presence_penalty),
        min(sampling.num_prompt_tokens + params.min_tokens, _MAX_INT32),
        min(params.logprobs or 0, sampling.vocab_size),
    )


def acceptance_thresholds(rates: Sequence[float], num_drafts: int) -> list[int]:
    """For each draft position the number of noise words that accept: `word < threshold` is `(word + 0.5) * 2**-32 < rate`, with no rounding.

    Scaling by 2**32 is exact in float64, and so is the subtraction wherever it matters: a float32 uniform would accept words up to 2**7 too many.

    Args:
        rates: P(draft i accepted | those before it were), in [0, 1].
        num_drafts: length of the result; 0 behind the last rate.

    Returns:
        integers in [0, 2**32].
    """
    thresholds = [max(0, math.ceil(rate * 2.0**32 - 0.5)) for rate in rates[:num_drafts]]
    return thresholds + [0] * (num_drafts - len(thresholds))


def _bits(value: float) -> int:
    """Of a float32, as an int32."""
    (bits,) = struct.unpack("<i", struct.pack("<f", value))
    return bits
