"""What the sampler keeps of one sequence: its parameters as tensors, and as much of its history as they look at."""

from collections import Counter
from collections.abc import Collection, Sequence

import torch
from torch import Tensor

from specwire.engine.sampling.acceptance import conditional_rates
from specwire.engine.sampling.penalties import TokenCounts
from specwire.sampling_params import SamplingParams


class SlotSampling:
    """Sampling state of one sequence. Its history grows by `append` alone; everything else is fixed.

    Args:
        params: the request's parameters.
        key: unsigned 64-bit key of the noise: the seed, or the random one fixed at admission.
        choice: which of the request's n.
        vocab_size: columns of the logits.
        token_ids: prompt and the tokens generated so far.
        num_prompt_tokens: how many of them are the prompt.
        eos_token_ids: masked, like params.stop_token_ids, below min_tokens; not if params.ignore_eos.
        synthetic_rates: None = strict acceptance; else P(first i drafts accepted) for i = 1, 2, ..., checked by the caller.
        tests_ratio: drafts are accepted by the ratio test, unless the sequence is greedy: that stays strict.
        device: where the logits will be.

    Raises:
        InvalidArgumentError: a token id outside the vocabulary, or parameters that leave nothing to sample.
    """

    def __init__(
        self,
        params: SamplingParams,
        *,
        key: int,
        choice: int = 0,
        vocab_size: int,
        token_ids: Sequence[int],
        num_prompt_tokens: int,
        eos_token_ids: Sequence[int] = (),
        synthetic_rates: Sequence[float] | None = None,
        tests_ratio: bool = False,
        device: torch.device | str = "cpu",
    ) -> None:
        params.check_vocab(vocab_size)
        assert 0 <= num_prompt_tokens <= len(token_ids), f"{num_prompt_tokens} prompt tokens of {len(token_ids)}"
        self.params = params
        self.device = torch.device(device)
        self.key = key
        self.choice = choice
        self.vocab_size = vocab_size
        self.num_prompt_tokens = num_prompt_tokens
        self.conditional_rates = None if synthetic_rates is None else conditional_rates(synthetic_rates)
        self.tests_ratio = tests_ratio and not params.is_greedy

        stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        banned_ids = {word[0] for word in params.bad_words_token_ids if len(word) == 1}
        params.check_samplable(vocab_size, eos_token_ids)

        self.stop_ids = _id_tensor(stop_ids if params.min_tokens else (), device)  # [n] int64, masked below min_tokens
        self.allowed_ids = _id_tensor(params.allowed_token_ids or (), device)  # [n] int64; None = all
        self.bias_ids = _id_tensor(params.logit_bias, device)  # [n] int64
        self.bias = torch.tensor([params.logit_bias[i] for i in sorted(params.logit_bias)], dtype=torch.float32, device=device)  # [n]
        self.banned_ids = _id_tensor(banned_ids, device)  # [n] int64, bad words of one token
        self.phrases = tuple((tuple(word[:-1]), word[-1]) for word in params.bad_words_token_ids if len(word) > 1)

        self._tail_length = max((len(prefix) for prefix, _ in self.phrases), default=0)
        self.tail: list[int] = []
        """Last tokens of the sequence, as many as the longest bad word can match."""
        self.seen: TokenCounts | None = None
        """Counts for the penalties; the prompt is among them under a repetition penalty alone."""
        if params.has_penalties:
            prompt_ids = token_ids[:num_prompt_tokens] if params.repetition_penalty != 1.0 else ()
            self.seen = TokenCounts({**dict.fromkeys(prompt_ids, 0), **Counter(token_ids[num_prompt_tokens:])}, device)
        self._remember(token_ids)

    def append(self, token_ids: Sequence[int]) -> None:
        """Add generated tokens."""
        self._remember(token_ids)
        if self.seen is not None:
            self.seen.add(token_ids)

    def processes_at(self, first_index: int) -> bool:
        """Whether logits of rows from token index `first_index` on are changed before sampling."""
        return (
            self.num_below_min_tokens(first_index) > 0
            or self.allowed_ids is not None
            or self.bias_ids is not None
            or self.seen is not None
            or bool(self.params.bad_words_token_ids)
        )

    def num_below_min_tokens(self, first_index: int) -> int:
        """How many rows from token index `first_index` on may not end the sequence."""
        if self.stop_ids is None:
            return 0
        return max(0, self.params.min_tokens - (first_index - self.num_prompt_tokens))

    def _remember(self, token_ids: Sequence[int]) -> None:
        if self._tail_length:
            self.tail = [*self.tail, *token_ids][-self._tail_length :]


def _id_tensor(token_ids: Collection[int], device: torch.device | str) -> Tensor | None:
    """Distinct ids, rising, or None if there are none."""
    return torch.tensor(sorted(set(token_ids)), dtype=torch.int64, device=device) if token_ids else None
