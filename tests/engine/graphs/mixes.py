"""Parameters that ask for much of the sampler."""

import random

from specwire.sampling_params import SamplingParams

ALL = SamplingParams(
    temperature=1.0, top_k=20, top_p=0.8, min_p=0.01, repetition_penalty=1.3, frequency_penalty=0.4, presence_penalty=-0.3,
    logit_bias={7: 3.0, 8: -4.0}, bad_words_token_ids=((5,),), min_tokens=6, stop_token_ids=(4, 9), logprobs=3, max_tokens=None,
)  # fmt: skip
MIXES = [
    ALL,
    ALL.replace(temperature=0.0),
    SamplingParams(temperature=1.2, top_p=0.9, max_tokens=None),
    SamplingParams(temperature=0.5, allowed_token_ids=(3, 7, 9, 40, 41), min_tokens=3, stop_token_ids=(7,), max_tokens=None),
    SamplingParams(temperature=0.8, repetition_penalty=0.8, top_k=3, max_tokens=None),
    SamplingParams(temperature=1.0, max_tokens=None),
]


def params_of(rng: random.Random, vocab_size: int) -> SamplingParams:
    """A random mix; greedy, plain and filtered ones among them."""

    def maybe(share: float, value):
        return value if rng.random() < share else None

    ids = range(3, vocab_size)
    wanted = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": maybe(0.4, rng.choice([1, 2, 5, 40, vocab_size])),
        "top_p": maybe(0.4, rng.choice([0.05, 0.5, 0.9, 0.999])),
        "min_p": maybe(0.3, rng.choice([0.001, 0.1, 1.0])),
        "repetition_penalty": maybe(0.3, rng.choice([0.7, 1.4])),
        "frequency_penalty": maybe(0.3, rng.choice([-0.5, 0.8])),
        "presence_penalty": maybe(0.2, rng.choice([-0.4, 1.1])),
        "logit_bias": maybe(0.3, {i: rng.uniform(-8, 8) for i in rng.sample(ids, 5)}),
        "allowed_token_ids": maybe(0.2, tuple(rng.sample(ids, rng.choice([3, vocab_size // 2])))),
        "bad_words_token_ids": maybe(0.2, tuple((i,) for i in rng.sample(ids, 2))),
        "min_tokens": maybe(0.3, rng.choice([1, 4, 9])),
        "stop_token_ids": maybe(0.5, tuple(rng.sample(ids, 2))),
        "logprobs": maybe(0.3, rng.choice([0, 1, 5, 20])),
    }
    return SamplingParams(max_tokens=None, **{name: value for name, value in wanted.items() if value is not None})
