"""What a caller may ask of sampling, validated in one place (docs/design.md section 3)."""

import dataclasses
import math
import reprlib
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import cast

from specwire.errors import InvalidArgumentError

GREEDY_EPSILON = 1e-5
"""Temperatures below this are greedy (temperature 0)."""
MAX_LOGPROBS = 20
MAX_STOP_STRINGS = 16
MAX_STOP_CHARACTERS = 4096
"""In all."""
MAX_BIAS = 100.0
MAX_BAD_WORDS = 2048
MAX_BAD_WORD_IDS = 16_384
"""In all; each word is looked for at every token of the sequence."""
_MAX_SHOWN = 100
"""Characters of a value in a message."""


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """Sampling parameters of one request.

    Args:
        n: number of independent choices for the prompt.
        max_tokens: most tokens to generate per choice; None = up to the model's context.
        min_tokens: EOS and stop ids are masked, and stop rules ignored, before this many tokens.
        temperature: 0 (or < 1e-5) is greedy.
        top_p: nucleus mass in (0, 1].
        top_k: number of most likely tokens kept; 0 or -1 = all.
        min_p: tokens below min_p x the largest probability are dropped, in [0, 1].
        seed: 64-bit key of the noise; None = a random key fixed at admission.
        presence_penalty, frequency_penalty: in [-2, 2], over generated tokens.
        repetition_penalty: > 0, over prompt and generated tokens; 1 = off.
        stop: strings that end the text (cut off from it unless include_stop_str_in_output).
        stop_token_ids: ids that end the sequence.
        ignore_eos: EOS does not end the sequence.
        logit_bias: token id -> value added to its logit, in [-100, 100].
        allowed_token_ids: only these ids may be sampled; None = all.
        bad_words_token_ids: token-id sequences that must not be completed.
        logprobs: None = none; k >= 0 = the emitted token's log-probability and the k best, k <= 20.
        max_draft_tokens: most drafts verified per step for this request; 0 = no speculation, None = the server's K.
        priority: lower runs first.

    Raises:
        InvalidArgumentError: naming the parameter, its value and the accepted range.
    """

    n: int = 1
    max_tokens: int | None = 128
    min_tokens: int = 0
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    min_p: float = 0.0
    seed: int | None = None
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    stop: tuple[str, ...] = ()
    include_stop_str_in_output: bool = False
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    allowed_token_ids: tuple[int, ...] | None = None
    bad_words_token_ids: tuple[tuple[int, ...], ...] = ()
    logprobs: int | None = None
    max_draft_tokens: int | None = None
    priority: int = 0

    def __post_init__(self) -> None:
        _check_int("n", self.n, 1, 128)
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, 1, 2**31 - 1)
        _check_int("min_tokens", self.min_tokens, 0, 2**31 - 1)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise InvalidArgumentError(f"min_tokens is {self.min_tokens}, but max_tokens is {self.max_tokens}; lower min_tokens or raise max_tokens")
        _check_float("temperature", self.temperature, 0.0, 100.0)
        _check_float("top_p", self.top_p, 0.0, 1.0)
        if self.top_p == 0.0:
            raise InvalidArgumentError("top_p is 0, but must be in (0, 1]; for greedy sampling set temperature=0")
        _check_int("top_k", self.top_k, -1, 2**31 - 1)
        _check_float("min_p", self.min_p, 0.0, 1.0)
        if self.seed is not None:
            _check_int("seed", self.seed, 0, 2**64 - 1)
        _check_float("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _check_float("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _check_float("repetition_penalty", self.repetition_penalty, 1e-6, 1e6)
        _check_bool("include_stop_str_in_output", self.include_stop_str_in_output)
        _check_bool("ignore_eos", self.ignore_eos)
        _check_stop(self.stop)
        _check_token_ids("stop_token_ids", self.stop_token_ids)
        if not isinstance(self.logit_bias, Mapping):
            raise InvalidArgumentError(f"logit_bias is {_show(self.logit_bias)}, but must map token ids to numbers; send {{id: bias}}")
        _check_token_ids("logit_bias", tuple(self.logit_bias))
        if not _are_biases(self.logit_bias.values()):
            for token_id, bias in self.logit_bias.items():
                _check_float(f"logit_bias[{token_id}]", bias, -MAX_BIAS, MAX_BIAS)
        if self.allowed_token_ids is not None:
            _check_token_ids("allowed_token_ids", self.allowed_token_ids)
            if not self.allowed_token_ids:
                raise InvalidArgumentError("allowed_token_ids is empty, so that nothing could be sampled; leave it out to allow every token")
        _check_sequence("bad_words_token_ids", self.bad_words_token_ids, "token-id lists")
        if len(self.bad_words_token_ids) > MAX_BAD_WORDS:
            text = f"bad_words_token_ids has {len(self.bad_words_token_ids)} words, but at most {MAX_BAD_WORDS} are taken"
            raise InvalidArgumentError(f"{text}; send fewer; single tokens are better banned by logit_bias = -100")
        num_ids = 0
        for i, word in enumerate(self.bad_words_token_ids):
            _check_token_ids(f"bad_words_token_ids[{i}]", word)
            if not word:
                raise InvalidArgumentError(f"bad_words_token_ids[{i}] is empty, but a bad word has at least one token id; remove it")
            num_ids += len(word)
        if num_ids > MAX_BAD_WORD_IDS:
            raise InvalidArgumentError(f"bad_words_token_ids has {num_ids} ids in all, but may have {MAX_BAD_WORD_IDS}; send fewer or shorter words")
        if self.logprobs is not None:
            _check_int("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if self.max_draft_tokens is not None:
            _check_int("max_draft_tokens", self.max_draft_tokens, 0, 2**31 - 1)
        _check_int("priority", self.priority, -(2**31), 2**31 - 1)

    @property
    def is_greedy(self) -> bool:
        return self.temperature < GREEDY_EPSILON

    @property
    def has_penalties(self) -> bool:
        return self.presence_penalty != 0.0 or self.frequency_penalty != 0.0 or self.repetition_penalty != 1.0

    @property
    def runs_ahead(self) -> bool:
        """Whether a token may be sampled before the host knows the one ahead of it: not with bad words of several tokens."""
        return all(len(word) < 2 for word in self.bad_words_token_ids)

    def check_samplable(self, vocab_size: int, eos_token_ids: Collection[int]) -> None:
        """Raise InvalidArgumentError if no token could be sampled even at the start."""
        if not self._leaves_some(vocab_size, eos_token_ids, banned={word[0] for word in self.bad_words_token_ids if len(word) == 1}):
            others = f"min_tokens = {self.min_tokens} (which forbids EOS and stop ids)"
            if self.allowed_token_ids is None:
                text = f"bad_words_token_ids and {others} exclude all of the model's {vocab_size} ids"
            else:
                text = f"allowed_token_ids leaves {len(set(self.allowed_token_ids))} ids, and bad words or {others} exclude them all"
            raise InvalidArgumentError(f"{text}, so that no token is left to sample; allow more ids or lower min_tokens")

    def may_run_dry(self, vocab_size: int, eos_token_ids: Collection[int]) -> bool:
        """Whether bad words of several tokens can leave no token to sample later on."""
        return not self._leaves_some(vocab_size, eos_token_ids, banned={word[-1] for word in self.bad_words_token_ids})

    def _leaves_some(self, vocab_size: int, eos_token_ids: Collection[int], banned: set[int]) -> bool:
        forbidden = set(banned)
        if self.min_tokens:
            forbidden.update(self.stop_token_ids)
            forbidden.update(() if self.ignore_eos else eos_token_ids)
        if self.allowed_token_ids is None:
            return len(forbidden) < vocab_size
        return not forbidden.issuperset(self.allowed_token_ids)

    def replace(self, **changes: object) -> "SamplingParams":
        """A copy with some parameters changed, validated again."""
        return dataclasses.replace(self, **changes)  # type: ignore[arg-type]

    def check_vocab(self, vocab_size: int) -> None:
        """Raise InvalidArgumentError if a token id named here is not in [0, vocab_size)."""
        named = {
            "stop_token_ids": self.stop_token_ids,
            "logit_bias": tuple(self.logit_bias),
            "allowed_token_ids": self.allowed_token_ids or (),
            "bad_words_token_ids": tuple(i for word in self.bad_words_token_ids for i in word),
        }
        for name in ("stop_token_ids", "allowed_token_ids"):
            if len(named[name]) > vocab_size:
                raise InvalidArgumentError(f"{name} has {len(named[name])} ids, but the model has only {vocab_size}; send each of them once")
        for name, token_ids in named.items():
            for token_id in token_ids:
                if token_id >= vocab_size:
                    raise InvalidArgumentError(
                        f"{name} names token id {token_id}, but the model's ids end at {vocab_size - 1}; use ids of the served tokenizer"
                    )


def check_choice(choice: int) -> None:
    """Raise InvalidArgumentError unless it is a choice's number that a device's int32 holds; those of requests are below n."""
    _check_int("choice", choice, 0, 2**31 - 1)


def _show(value: object) -> str:
    """A value in a message: not all of what is long."""
    try:
        shown = repr(value) if isinstance(value, int | float) else reprlib.repr(value)
    except ValueError:  # Python writes no integers of that size
        return "an integer of thousands of digits"
    return shown if len(shown) <= _MAX_SHOWN else f"{shown[:_MAX_SHOWN]}..."


def _check_int(name: str, value: object, low: int, high: int) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise InvalidArgumentError(f"{name} is {_show(value)}, but must be an integer from {low} to {high}; send one")
    if not low <= value <= high:
        raise InvalidArgumentError(f"{name} is {_show(value)}, but must be from {low} to {high}; choose a value in that range")


def _check_float(name: str, value: object, low: float, high: float) -> None:
    # An integer may be too large for a float.
    if isinstance(value, bool) or not isinstance(value, int | float) or not -math.inf < value < math.inf:
        raise InvalidArgumentError(f"{name} is {_show(value)}, but must be a finite number from {low:g} to {high:g}; send one")
    if not low <= value <= high:
        shown = f"{value:g}" if isinstance(value, float) else _show(value)
        raise InvalidArgumentError(f"{name} is {shown}, but must be from {low:g} to {high:g}; choose a value in that range")


def _are_biases(values: Collection[object]) -> bool:
    """Whether all are numbers in the range; there may be one for each token of the vocabulary."""
    if not set(map(type, values)) <= {int, float}:
        return False
    numbers = cast(Collection[float], values)
    return all(map((-MAX_BIAS).__le__, numbers)) and all(map(MAX_BIAS.__ge__, numbers))  # false for what is no number


def _check_bool(name: str, value: object) -> None:
    if not isinstance(value, bool):
        raise InvalidArgumentError(f"{name} is {_show(value)}, but must be true or false; send one of them")


def _check_sequence(name: str, value: object, items: str) -> None:
    if isinstance(value, str | bytes) or not isinstance(value, Sequence):
        raise InvalidArgumentError(f"{name} is {_show(value)}, but must be a list of {items}; wrap a single one in a list")


def _check_token_ids(name: str, token_ids: object) -> None:
    _check_sequence(name, token_ids, "token ids")
    values = cast(Sequence[int], token_ids)
    # There may be one for each token of the vocabulary: what is right is seen at once, what is wrong is looked for.
    if not values or (set(map(type, values)) == {int} and min(values) >= 0 and max(values) < 2**31):
        return
    for token_id in cast(Sequence[object], token_ids):
        _check_int(f"a token id in {name}", token_id, 0, 2**31 - 1)


def _check_stop(stop: object) -> None:
    if isinstance(stop, str | bytes) or not isinstance(stop, Sequence) or not all(isinstance(text, str) and text for text in stop):
        shown = list(stop) if isinstance(stop, tuple) else stop  # as callers wrote it
        raise InvalidArgumentError(f"stop is {reprlib.repr(shown)}, but must be a list of strings that are not empty; send one such as ['END']")
    if len(stop) > MAX_STOP_STRINGS:
        raise InvalidArgumentError(f"stop has {len(stop)} strings, but at most {MAX_STOP_STRINGS} are taken; send fewer")
    num_characters = sum(map(len, stop))
    if num_characters > MAX_STOP_CHARACTERS:
        raise InvalidArgumentError(f"stop has {num_characters} characters in all, but may have {MAX_STOP_CHARACTERS}; send fewer or shorter strings")
    for text in stop:
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            raise InvalidArgumentError(f"stop holds {_show(text)}, which is not valid UTF-8 at character {error.start}; send valid text") from error
