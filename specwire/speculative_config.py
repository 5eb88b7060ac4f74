"""Speculation as one validated object: which drafter, how many drafts, how they are accepted (docs/design.md sections 3 and 4)."""

import dataclasses
import difflib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from specwire.errors import InvalidArgumentError
from specwire.policy.schedule import validate_schedule
from specwire.speculative_acceptance import (
    MEAN_RATE,
    REJECTION_ALIASES,
    check_acceptance,
    check_int,
    is_number,
    length_of_mean_rate,
    synthetic_rates,
)
from specwire.speculative_keys import FOREIGN_KEYS, check_foreign_key
from specwire.speculative_method import METHOD_ALIASES, MODEL_METHODS, check_method, check_options, inferred_method, unread_options

_DEFAULT_NUM_TOKENS = 5
_MOST_SHOWN = 200
MAX_NUM_TOKENS = 128
"""Largest K that may be configured."""
MAX_TREE_DEPTH = 256
"""Largest suffix_decoding_max_tree_depth."""
MIN_SHARPNESS, MAX_SHARPNESS = 0.1, 10.0
"""Bounds of draft_sharpness."""


@dataclass(frozen=True, slots=True)
class SpeculativeConfig:
    """The speculative configuration that all services share.

    Args:
        method: ngram looks drafts up in the text so far, suffix in earlier answers, too; draft_model runs a smaller model; eagle3, eagle, mtp,
            dflash and dspark are heads over the target's hidden states; null drafts nothing. Of a list of ngram, suffix and at most one with a
            model, each sequence gets in each step the draft of which more is expected.
        model: the draft model or head: a folder, a hub id or a GGUF file; mtp without one takes the target's own layer.
        num_speculative_tokens: most drafts of a sequence in a step (K), the ceiling of every later decision.
        num_speculative_tokens_per_batch_size: [[start, end, K], ...]: K by the number of sequences that sample in the step; 0 drafts nothing.
        enable_adaptive_verification: choose from measured costs and the drafts' scores how many to ask for and which to verify; a schedule is then
            a ceiling.
        prompt_lookup_min: shortest suffix that ngram looks up, in tokens.
        prompt_lookup_max: longest suffix that ngram looks up.
        suffix_decoding_max_tree_depth: suffix: most tokens of a match and its draft together.
        suffix_decoding_max_cached_requests: suffix: most past answers that a drafter keeps, the oldest go first; 0 = the sequence's own text only.
        suffix_decoding_max_spec_factor: suffix: most draft tokens for each token of the match.
        suffix_decoding_min_token_prob: suffix: a draft ends where less than this share of the match's occurrences go on like it.
        suffix_decoding_corpus_tokens: suffix: most tokens of the past answers, over all tenants.
        rejection_sample_method: strict emits the target's own samples, whatever is drafted; probabilistic, the ratio test, emits others of the same
            distribution; synthetic accepts by configured rates, for benchmarks.
        synthetic_acceptance_rates: synthetic: probability that the first i drafts are all accepted, for i = 1..K, non-increasing.
        synthetic_acceptance_length: synthetic: mean tokens of a step, from 1 to K + 1, instead of rates.
        draft_sample_method: probabilistic samples drafts with the request's own noise and temperature; greedy takes the most likely token.
        draft_sharpness: a draft model's or head's logits are multiplied by it before noise is added: above 1, sampled drafts keep closer to the most
            likely token. It never changes the text. By default as the head's folder says, else 1.
        max_model_len: longest sequence that the drafter takes; by default what draft model and target both allow.
        use_heterogeneous_vocab: draft_model: its tokenizer is another one than the target's; the tokens that both have are drafted.
        parallel_drafting: draft_model: all drafts in one pass over mask tokens, for models trained for that (PARD). dflash and dspark always do.
        dspark_draft_topk: dspark: draft only so many ids of the highest logits; by default as the head says.

    Raises:
        InvalidArgumentError, UnsupportedError: naming the key, its value, the limit and the remedy.
    """

    method: str | tuple[str, ...] | None = "ngram"
    model: str | None = None
    num_speculative_tokens: int = _DEFAULT_NUM_TOKENS
    num_speculative_tokens_per_batch_size: tuple[tuple[int, int, int], ...] | None = None
    enable_adaptive_verification: bool = False
    prompt_lookup_min: int = 2
    prompt_lookup_max: int = 4
    suffix_decoding_max_tree_depth: int = 24
    suffix_decoding_max_cached_requests: int = 10_000
    suffix_decoding_max_spec_factor: float = 1.0
    suffix_decoding_min_token_prob: float = 0.1
    suffix_decoding_corpus_tokens: int = 1_000_000
    rejection_sample_method: str = "strict"
    synthetic_acceptance_rates: tuple[float, ...] | None = None
    synthetic_acceptance_length: float | None = None
    draft_sample_method: str = "probabilistic"
    draft_sharpness: float | None = None
    max_model_len: int | None = None
    use_heterogeneous_vocab: bool = False
    parallel_drafting: bool = False
    dspark_draft_topk: int | None = None

    def __post_init__(self) -> None:
        check_method(self.method, self.model)
        check_options(
            self.method,
            use_heterogeneous_vocab=self.use_heterogeneous_vocab,
            parallel_drafting=self.parallel_drafting,
            dspark_draft_topk=self.dspark_draft_topk,
        )
        check_int("num_speculative_tokens", self.num_speculative_tokens, 1, MAX_NUM_TOKENS)
        check_int("prompt_lookup_min", self.prompt_lookup_min, 1, 1 << 20)
        check_int("prompt_lookup_max", self.prompt_lookup_max, 1, 1 << 20)
        if self.prompt_lookup_min > self.prompt_lookup_max:
            raise InvalidArgumentError(
                f"prompt_lookup_min is {self.prompt_lookup_min}, but prompt_lookup_max is {self.prompt_lookup_max}; "
                "lower the first or raise the second"
            )
        self._check_suffix()
        if self.num_speculative_tokens_per_batch_size is not None:
            validate_schedule(self.num_speculative_tokens_per_batch_size)
        if not isinstance(self.enable_adaptive_verification, bool):
            raise InvalidArgumentError(f"enable_adaptive_verification is {self.enable_adaptive_verification!r}, but must be true or false")
        if self.draft_sample_method not in ("probabilistic", "greedy"):
            raise InvalidArgumentError(f"draft_sample_method is {self.draft_sample_method!r}, but must be probabilistic or greedy")
        if self.draft_sharpness is not None and not is_number(self.draft_sharpness, MIN_SHARPNESS, MAX_SHARPNESS):
            raise InvalidArgumentError(f"draft_sharpness is {self.draft_sharpness!r}, but must be a number from {MIN_SHARPNESS} to {MAX_SHARPNESS}")
        if self.max_model_len is not None:
            check_int("max_model_len", self.max_model_len, 1, 1 << 30)
        check_acceptance(
            self.rejection_sample_method,
            self.synthetic_acceptance_rates,
            self.synthetic_acceptance_length,
            self.num_speculative_tokens,
            self.methods,
            is_adaptive=self.enable_adaptive_verification,
        )

    @classmethod
    def from_dict(cls, values: Mapping[str, Any]) -> "SpeculativeConfig":
        """Builds from a mapping as users write it; unknown keys are refused with the nearest valid name.

        Keys may use dashes, and null stands for the default (for method: no drafting). Without a method, a model means draft_model, unless its
        folder holds the checkpoint of something else. One lookup bound alone sets both. rejection_sample_method standard is strict.
        synthetic_acceptance_rate r, the mean rate over the K positions, stands for synthetic_acceptance_length 1 + r x K.
        """
        normal = _normal_keys(values)
        normal = {key: value for key, value in normal.items() if value is not None or key == "method"}
        for key in ("method", "num_speculative_tokens_per_batch_size", "synthetic_acceptance_rates"):
            if isinstance(normal.get(key), list):
                normal[key] = tuple(tuple(item) if isinstance(item, list) else item for item in normal[key])
        if normal.get("rejection_sample_method") in list(REJECTION_ALIASES):
            normal["rejection_sample_method"] = REJECTION_ALIASES[normal["rejection_sample_method"]]
        if normal.get("method") in list(METHOD_ALIASES):
            normal["method"] = METHOD_ALIASES[normal["method"]]
        if isinstance(normal.get("method"), tuple):
            normal["method"] = tuple(METHOD_ALIASES.get(name, name) if isinstance(name, str) else name for name in normal["method"])
        if isinstance(normal.get("model"), str) and normal["model"] and "method" not in normal:
            normal["method"] = inferred_method(normal["model"])
        lookup = [normal[key] for key in ("prompt_lookup_min", "prompt_lookup_max") if key in normal]
        if len(lookup) == 1:
            normal |= {"prompt_lookup_min": lookup[0], "prompt_lookup_max": lookup[0]}
        if MEAN_RATE in normal:
            num_tokens = normal.get("num_speculative_tokens", _DEFAULT_NUM_TOKENS)
            check_int("num_speculative_tokens", num_tokens, 1, MAX_NUM_TOKENS)
            given = [key for key in ("synthetic_acceptance_rates", "synthetic_acceptance_length") if key in normal]
            normal["synthetic_acceptance_length"] = length_of_mean_rate(normal.pop(MEAN_RATE), num_tokens, given)
        return cls(**normal)

    @classmethod
    def from_json(cls, text: str) -> "SpeculativeConfig":
        return cls.from_dict(read_keys(text))

    def to_json(self) -> str:
        return json.dumps({field.name: getattr(self, field.name) for field in dataclasses.fields(self)})

    @property
    def methods(self) -> tuple[str, ...]:
        """The method or those of the list; none = no drafting."""
        if self.method is None:
            return ()
        return (self.method,) if isinstance(self.method, str) else self.method

    @property
    def has_model(self) -> bool:
        """Whether a drafter runs a model: a draft model or a head."""
        return self.model_method is not None

    @property
    def model_method(self) -> str | None:
        """That one of the methods which has a model."""
        return next((name for name in self.methods if name in MODEL_METHODS), None)

    @property
    def unread(self) -> list[str]:
        """Options that were set, but that the method does not read: a line about each."""
        fields = dataclasses.fields(self)
        values = {field.name: getattr(self, field.name) for field in fields}
        return unread_options(self.methods, values, {field.name: field.default for field in fields})

    def acceptance_rates(self) -> tuple[float, ...]:
        """Unconditional synthetic rates p_1..p_K: as given, or of least variance for the given length L = 1 + sum of p_i."""
        return synthetic_rates(self.synthetic_acceptance_rates, self.synthetic_acceptance_length, self.num_speculative_tokens)

    def _check_suffix(self) -> None:
        check_int("suffix_decoding_max_tree_depth", self.suffix_decoding_max_tree_depth, 1, MAX_TREE_DEPTH)
        check_int("suffix_decoding_max_cached_requests", self.suffix_decoding_max_cached_requests, 0, 1 << 30)
        check_int("suffix_decoding_corpus_tokens", self.suffix_decoding_corpus_tokens, 1, 1 << 30)
        for name, value, high in (
            ("suffix_decoding_max_spec_factor", self.suffix_decoding_max_spec_factor, MAX_TREE_DEPTH),
            ("suffix_decoding_min_token_prob", self.suffix_decoding_min_token_prob, 1),
        ):
            if not is_number(value, 0, high):
                raise InvalidArgumentError(f"{name} is {value!r}, but must be a number from 0 to {high}")


def read_keys(text: str) -> dict[str, Any]:
    """The keys of a JSON object, with underscores, and their values as they are.

    Raises:
        InvalidArgumentError: no JSON object, an unknown key, or one that is there twice.
    """
    try:
        values = json.loads(text)
    except (ValueError, RecursionError) as error:  # also numbers of thousands of digits, and what is nested too deeply
        shown = text if len(text) <= _MOST_SHOWN else f"{text[:_MOST_SHOWN]}..."
        raise InvalidArgumentError(f'speculative_config {shown!r} is no JSON ({error}); write it as in {{"method": "ngram"}}') from error
    return _normal_keys(values)


def _normal_keys(values: Any) -> dict[str, Any]:
    """The values with underscores in their keys; unknown keys and keys given twice are refused."""
    if not isinstance(values, Mapping):
        raise InvalidArgumentError(f"speculative_config is {values!r}, but must be a mapping such as {{'method': 'ngram'}}")
    known = [field.name for field in dataclasses.fields(SpeculativeConfig)]
    normal: dict[str, Any] = {}
    for given, value in values.items():
        key = str(given).replace("-", "_")
        if key in normal:
            raise InvalidArgumentError(f"speculative_config has the key {key!r} twice, with dashes and with underscores; remove one")
        if key in FOREIGN_KEYS:
            check_foreign_key(key, value)
            continue
        if key not in known and key != MEAN_RATE:
            near = difflib.get_close_matches(key, known, n=1)
            remedy = f"did you mean {near[0]!r}?" if near else f"known keys are {', '.join(known)}"
            raise InvalidArgumentError(f"speculative_config has the unknown key {key!r}; {remedy}")
        normal[key] = value
    return normal
