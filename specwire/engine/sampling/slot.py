"""What the sampler keeps of one sequence: its parameters as tensors, and as much of its history as they look at."""

from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from specwire.engine.sampling.acceptance import conditional_rates
from specwire.engine.sampling.penalties import TokenCounts
from specwire.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class _IdLists:
    """The ids that a request's parameters name, the same for all of its choices: [n] int64, None = none. bias: [n] float32, of `biased`."""

    stops: Tensor | None
    allowed: Tensor | None
    biased: Tensor | None
    bias: Tensor
    banned: Tensor | None

    @classmethod
    def of(cls, params: SamplingParams, vocab_size: int, eos_token_ids: Sequence[int], device: torch.device) -> "_IdLists":
        """Raises InvalidArgumentError as SlotSampling."""
        params.check_vocab(vocab_size)
        params.check_samplable(vocab_size, eos_token_ids)
        stops = set(params.stop_token_ids) | (set() if params.ignore_eos else set(eos_token_ids))
        biased, order = torch.tensor(list(params.logit_bias), dtype=torch.int64).sort()
        bias = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)[order]
        return cls(
            stops=_id_tensor(stops if params.min_tokens else (), device),
            allowed=_id_tensor(params.allowed_token_ids or (), device),
            biased=biased.to(device) if len(biased) else None,
            bias=bias.to(device),
            banned=_id_tensor({word[0] for word in params.bad_words_token_ids if len(word) == 1}, device),
        )


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
        like: an earlier sequence of the model; if it is of the same request, its lists of ids, which may be as long as the vocabulary, are shared.

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
        like: "SlotSampling | None" = None,
    ) -> None:
        assert 0 <= num_prompt_tokens <= len(token_ids), f"{num_prompt_tokens} prompt tokens of {len(token_ids)}"
        self.params = params
        self.device = torch.device(device)
        self.key = key
        self.choice = choice
        self.vocab_size = vocab_size
        self.num_prompt_tokens = num_prompt_tokens
        self.conditional_rates = None if synthetic_rates is None else conditional_rates(synthetic_rates)
        self.tests_ratio = tests_ratio and not params.is_greedy

        self.eos_token_ids = tuple(eos_token_ids)
        self.ids: _IdLists = _IdLists.of(params, vocab_size, self.eos_token_ids, self.device) if like is None or not self._is_like(like) else like.ids
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

    def _is_like(self, other: "SlotSampling") -> bool:
        equal = (self.vocab_size, self.eos_token_ids, self.device) == (other.vocab_size, other.eos_token_ids, other.device)
        return other.params is self.params and equal

    @property
    def stop_ids(self) -> Tensor | None:
        """[n] int64, masked below min_tokens."""
        return self.ids.stops

    @property
    def allowed_ids(self) -> Tensor | None:
        """[n] int64; None = all."""
        return self.ids.allowed

    @property
    def bias_ids(self) -> Tensor | None:
        """[n] int64, rising."""
        return self.ids.biased

    @property
    def bias(self) -> Tensor:
        """[n] float32, of bias_ids."""
        return self.ids.bias

    @property
    def banned_ids(self) -> Tensor | None:
        """[n] int64, bad words of one token."""
        return self.ids.banned

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
