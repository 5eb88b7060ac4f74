"""The sampling contract written out token by token in plain Python (float64): slow and obvious, for comparison."""

import math
from collections.abc import Sequence

from specwire.sampling_params import SamplingParams

NEVER = -math.inf


def philox(counter: Sequence[int], key: int) -> list[int]:
    """Philox4x32-10 on Python integers."""
    c, k = list(counter), [key % 2**32, key // 2**32]
    for _ in range(10):
        high0, low0 = divmod(0xD2511F53 * c[0], 2**32)
        high1, low1 = divmod(0xCD9E8D57 * c[2], 2**32)
        c = [high1 ^ c[1] ^ k[0], low1, high0 ^ c[3] ^ k[1], low0]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c


def noise(key: int, index: int, choice: int, token_id: int) -> float:
    """g of the target's stream."""
    word = philox([token_id // 4, index, choice, 0], key)[token_id % 4]
    x = min((word + 0.5) * 2.0**-32, 1 - 2.0**-24)
    return -math.log(-math.log1p(-x))


def process(
    raw: Sequence[float], params: SamplingParams, prompt: Sequence[int], output: Sequence[int], eos_token_ids: Sequence[int] = ()
) -> list[float]:
    """Raw logits of the next token after prompt + output -> logits to sample from."""
    z = [float(value) for value in raw]
    vocab = range(len(z))
    if params.allowed_token_ids is not None:
        z = [z[v] if v in params.allowed_token_ids else NEVER for v in vocab]
    if len(output) < params.min_tokens:
        enders = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        z = [NEVER if v in enders else z[v] for v in vocab]
    for v, bias in params.logit_bias.items():
        z[v] += bias
    for v in vocab:
        if params.repetition_penalty != 1.0 and (v in prompt or v in output):
            z[v] = z[v] / params.repetition_penalty if z[v] > 0 else z[v] * params.repetition_penalty
        count = list(output).count(v)
        z[v] -= params.frequency_penalty * count
        if count > 0:
            z[v] -= params.presence_penalty
    text = [*prompt, *output]
    for word in params.bad_words_token_ids:
        start = list(word[:-1])
        if not start or text[-len(start) :] == start:
            z[word[-1]] = NEVER
    return z


def support(z: Sequence[float], params: SamplingParams) -> list[int]:
    """Ids that may be sampled, likeliest first."""
    order = sorted((v for v in range(len(z)) if z[v] > NEVER), key=lambda v: (-z[v], v))
    weights = {v: math.exp((z[v] - z[order[0]]) / params.temperature) for v in order}
    order = [v for v in order if weights[v] >= params.min_p]
    if params.top_k > 0:
        order = order[: params.top_k]
    if params.top_p < 1:
        total = math.fsum(weights[v] for v in order)
        kept: list[int] = []
        while math.fsum(weights[v] for v in kept) < params.top_p * total:
            kept.append(order[len(kept)])
        order = kept
    return order


def distribution(z: Sequence[float], params: SamplingParams) -> list[float]:
    """Probability of each token."""
    if params.is_greedy:
        return [1.0 if v == z.index(max(z)) else 0.0 for v in range(len(z))]
    kept = support(z, params)
    weights = {v: math.exp((z[v] - z[kept[0]]) / params.temperature) for v in kept}
    total = math.fsum(weights.values())
    return [weights.get(v, 0.0) / total for v in range(len(z))]


def sample(z: Sequence[float], params: SamplingParams, key: int, index: int, choice: int) -> int:
    """The token at `index`, from processed logits."""
    if params.is_greedy:
        return min(range(len(z)), key=lambda v: (-z[v], v))
    scores = {v: z[v] + params.temperature * noise(key, index, choice, v) for v in support(z, params)}
    return min(scores, key=lambda v: (-scores[v], v))
