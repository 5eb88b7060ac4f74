"""Suffix decoding: what followed the latest tokens most often, in the sequence itself and in earlier outputs of its tenant."""

import logging
from collections.abc import Sequence
from typing import Protocol

from specwire.config import DrafterConfig
from specwire.engine.counts import PassCounts
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, RowStatus

from .method import UNLIMITED_MODEL_LEN, Ask, Drafts, describe_lookup
from .suffix_corpus import ANCHORS, PastOutputs
from .suffix_match import NO_CONTEXT, NO_TOKEN, ArraySearch, Ends, Limits, Path
from .tokens import PaddedTokens, TokenArray, to_array

logger = logging.getLogger(__name__)


class Search(Protocol):
    """See `ArraySearch`."""

    def own(self, text: PaddedTokens, most: int) -> Path: ...

    def among(self, text: PaddedTokens, ends: Ends, latest: PaddedTokens, most: int, least: float) -> Path: ...


def find_search(limits: Limits, max_num_drafts: int, pad: int) -> Search:
    """The compiled search, or that of whole arrays where Numba is not installed."""
    try:
        from .suffix_compiled import CompiledSearch
    except ModuleNotFoundError as error:
        logger.warning("suffix drafts are found several times slower without %s; install specwire[engine] for the compiled search", error.name)
        return ArraySearch(limits, max_num_drafts)
    return CompiledSearch(limits, max_num_drafts, pad)


class Suffix:
    """Drafts as long as the match and as its frequencies allow. What it drafts depends on a sequence's tokens and on the tenant's past outputs.

    Args:
        limits: how far a match is trusted.
        max_num_drafts: most drafts at once (K).
        max_cached_requests: most past outputs kept; 0 = drafts come from the sequence alone.
        max_cached_tokens: most tokens of them.
        max_model_len: drafts never pass this length.
        max_num_seqs: for the description.
        search: finds drafts; by default the fastest one that is installed.
    """

    features = None
    num_free_blocks = 0

    def __init__(
        self,
        limits: Limits,
        *,
        max_num_drafts: int,
        max_cached_requests: int = 10_000,
        max_cached_tokens: int = 1_000_000,
        max_model_len: int = UNLIMITED_MODEL_LEN,
        max_num_seqs: int = 64,
        search: Search | None = None,
    ) -> None:
        self._limits = limits
        pad = max(limits.max_depth, max_num_drafts)
        self._pad = pad
        self._search = search or find_search(limits, max_num_drafts, pad)
        self._max_num_drafts = max_num_drafts
        self._max_model_len = max_model_len
        self._sequences: dict[int, _Sequence] = {}
        self.past = PastOutputs(max_cached_requests, max_cached_tokens, pad)
        self.counts = PassCounts()
        self.description = describe_lookup(
            "suffix", f"suffix-{limits.max_depth}", max_num_drafts=max_num_drafts, max_model_len=max_model_len, max_num_seqs=max_num_seqs
        )

    @classmethod
    def from_config(cls, config: DrafterConfig) -> "Suffix":
        spec = config.speculative_config
        return cls(
            Limits(spec.suffix_decoding_max_tree_depth, spec.suffix_decoding_max_spec_factor, spec.suffix_decoding_min_token_prob),
            max_num_drafts=spec.num_speculative_tokens,
            max_cached_requests=spec.suffix_decoding_max_cached_requests,
            max_cached_tokens=spec.suffix_decoding_corpus_tokens,
            max_model_len=spec.max_model_len or UNLIMITED_MODEL_LEN,
            max_num_seqs=config.max_num_seqs,
        )

    def open(self, seq_id: int, request: DraftOpen) -> None:
        assert seq_id not in self._sequences, f"sequence {seq_id} is open already"
        text = PaddedTokens(self._pad, NO_CONTEXT, NO_TOKEN)
        text.append(_checked(request.token_ids))
        self._sequences[seq_id] = _Sequence(text, request.num_prompt_tokens, request.tenant_cache_key)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        self._sequences[seq_id].text.append(_checked(token_ids))

    def close(self, seq_id: int) -> None:
        sequence = self._sequences.pop(seq_id)
        self.past.add(sequence.tenant, sequence.text.tokens[sequence.num_prompt_tokens :])

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        return [self._propose(self._sequences[ask.seq_id], ask.num_drafts) for ask in asks]

    def catch_up(self, budget: int) -> int:
        """Indexes outputs that have ended: sequences themselves are ready as soon as they are open."""
        return self.past.work(budget)

    def _propose(self, sequence: "_Sequence", num_drafts: int) -> Drafts:
        text = sequence.text
        num_drafts = min(num_drafts, self._max_num_drafts, self._max_model_len - text.num_tokens)
        if num_drafts <= 0 or not text.num_tokens:
            return Drafts(RowStatus.OK)
        path = self._search.own(text, num_drafts)
        corpus = self.past.corpus(sequence.tenant)
        if corpus is not None and num_drafts > path.total:
            num_latest = min(max(ANCHORS), self._limits.max_depth - 1, text.num_tokens)
            ends = corpus.occurrences(text.tokens[text.num_tokens - num_latest :].tolist())
            past = self._search.among(corpus.text, ends, text, num_drafts, path.total)
            path = past if past.token_ids else path
        return Drafts(RowStatus.OK, path.token_ids, path.scores)


class _Sequence:
    __slots__ = ("num_prompt_tokens", "tenant", "text")

    def __init__(self, text: PaddedTokens, num_prompt_tokens: int, tenant: bytes) -> None:
        self.text = text
        self.num_prompt_tokens = num_prompt_tokens
        self.tenant = tenant


def _checked(token_ids: Sequence[int]) -> TokenArray:
    tokens = to_array(token_ids)
    if len(tokens) and tokens.min() < 0:
        raise InvalidArgumentError(f"a token id is {tokens.min()}, but must be 0 or more; send ids of the served tokenizer")
    return tokens
