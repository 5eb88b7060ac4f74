"""What a drafting method offers, and which methods this build has."""

from collections.abc import Callable, Sequence
from typing import NamedTuple, Protocol

from specwire.config import DrafterConfig
from specwire.draft_checkpoint import HEAD_METHODS
from specwire.engine.counts import PassCounts
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.extras import check_engine
from specwire.messages import DraftOpen, FeatureHandle, RowStatus, ServiceDescription
from specwire.phases import Phases
from specwire.proposals import RowProposals
from specwire.speculative_method import LOOKUP_METHODS

from .feature_counts import FeatureCounts

UNLIMITED_MODEL_LEN = 2**31 - 1
"""max_model_len of a method that takes sequences of any length."""


MEASUREMENT_TENANT = b"measurement of draft costs"
"""Of sequences with made-up tokens: keeps them out of what is looked up for anyone's requests; their features are made up, too."""


class Ask(NamedTuple):
    """One sequence to draft for: at most num_drafts tokens, 0 or more."""

    seq_id: int
    num_drafts: int


class Drafts(NamedTuple):
    """The answer to one `Ask`: OK with 0 or more drafts, or CATCHING_UP or OUT_OF_BLOCKS with none.

    scores: one a draft token, in [0, 1]; the method's own measure of how likely the token is to be accepted once those before it
    are. Not yet a probability: whoever budgets by it calibrates it.
    proposals: what the drafts were drawn from, with private noise; None: without, or nothing was drawn.
    """

    status: RowStatus
    token_ids: list[int] = []  # noqa: RUF012 - never written
    scores: list[float] = []  # noqa: RUF012 - never written
    proposals: RowProposals | None = None


def open_all(methods: "Sequence[Method]", seq_id: int, request: DraftOpen) -> None:
    """Opens a sequence in all of them, or, where one refuses it, in none."""
    opened: list[Method] = []
    try:
        for method in methods:
            method.open(seq_id, request)
            opened.append(method)
    except InvalidArgumentError:
        for method in opened:
            method.close(seq_id)
        raise


def check_ids(token_ids: Sequence[int], vocab_size: int, model: str) -> None:
    """Raise InvalidArgumentError unless a model of this vocabulary can read all of the ids. model: what the message calls it."""
    if token_ids and not 0 <= min(token_ids) <= max(token_ids) < vocab_size:
        wrong = next(token_id for token_id in token_ids if not 0 <= token_id < vocab_size)
        raise InvalidArgumentError(
            f"token id {wrong} is not in the {model}'s vocabulary, 0 to {vocab_size - 1}; the sequence is decoded without drafts"
        )


def describe_lookup(method: str, model_id: str, *, max_num_drafts: int, max_model_len: int, max_num_seqs: int) -> ServiceDescription:
    """`Method.description` of one that looks tokens up: it takes any vocabulary and needs no device."""
    return ServiceDescription(
        model_id, "", 0, max_model_len=max_model_len, max_num_draft_tokens=max_num_drafts, max_num_seqs=max_num_seqs, method=method, device="cpu"
    )


class FeatureNotes(Protocol):
    """Hears where the target's features of sequences are, by the numbers of the method's own sequences."""

    @property
    def counts(self) -> FeatureCounts:
        """What reading them took."""
        ...

    def note(self, seq_id: int, handle: FeatureHandle) -> None:
        """What is new: blocks, and how many positions are there."""
        ...

    def grew(self, seq_id: int, num_positions: int) -> None:
        """So many positions are there now: a token was committed behind them."""
        ...

    def stop(self) -> None:
        """The drafter ends."""
        ...


class Method(Protocol):
    """Drafts for many sequences. One thread owns it, from its making on; a call never waits for anything but the work it does.

    Sequences are keyed by ints that the caller chooses. What a method drafts depends only on a sequence's tokens and sampling
    parameters, never on how they got there or on what it drafted before; `suffix` also looks at past outputs of the sequence's tenant, and lists with
    a model choose among drafts by how those before fared.
    """

    @property
    def description(self) -> ServiceDescription:
        """What the method knows of itself; the service fills in the rest (instance, build, measured costs)."""
        ...

    def open(self, seq_id: int, request: DraftOpen) -> None:
        """Starts a sequence with all its tokens so far; returns at once, computing them is `catch_up`'s work.

        Raises:
            InvalidArgumentError: this sequence can't be drafted for (ids outside the vocabulary); it is not open then.
        """
        ...

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        """Committed tokens follow those known.

        Raises:
            InvalidArgumentError: as `open`; nothing was appended, and the caller must close the sequence.
        """
        ...

    def close(self, seq_id: int) -> None:
        """Ends a sequence and frees what it held."""
        ...

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        """Drafts that follow the sequences' tokens, in the order of `asks` (no sequence twice)."""
        ...

    def catch_up(self, budget: int) -> int:
        """Background work on sequences that are too far behind to draft for: at most `budget` tokens. Returns how many it computed."""
        ...

    @property
    def features(self) -> FeatureNotes | None:
        """Who is to hear of the target's features; None: the method needs none."""
        ...

    @property
    def num_free_blocks(self) -> int:
        """KV blocks that sequences could take now; 0 for a method without KV."""
        ...

    @property
    def counts(self) -> PassCounts:
        """Forward passes of its model; all 0 for a method without one."""
        ...


def build_method(config: DrafterConfig) -> Method:
    """Makes the configured method; may load a model.

    Raises:
        SpecwireError: no method, one that is not built, or its model can't be loaded.
    """
    names = config.speculative_config.methods
    if not names:
        raise InvalidArgumentError(f"speculative_config.method is null, so that there is nothing to serve; choose one of {', '.join(METHODS)}")
    for name in names:
        if name not in METHODS:
            raise UnsupportedError(f"method {name!r} is not built; use one of {', '.join(METHODS)}")
    if len(names) == 1:
        return METHODS[names[0]](config)
    lookups = [METHODS[name](config) for name in names if name in LOOKUP_METHODS]
    model = config.speculative_config.model_method
    if model is None:
        from .combined import Combined

        return Combined(lookups)
    from .model_and_lookups import ModelAndLookups

    return ModelAndLookups(lookups, METHODS[model](config), names)


def _ngram(config: DrafterConfig) -> Method:
    from .ngram import Ngram

    return Ngram.from_config(config)


def _suffix(config: DrafterConfig) -> Method:
    from .suffix import Suffix

    return Suffix.from_config(config)


def _draft_model(config: DrafterConfig) -> Method:
    check_engine("torch", "safetensors")
    phases = Phases()
    with phases.phase("import"):
        from .load import load_draft_model  # brings torch, which takes seconds
    return load_draft_model(config, phases)


def _head(config: DrafterConfig) -> Method:
    check_engine("torch", "safetensors")
    phases = Phases()
    with phases.phase("import"):
        from .load_head import load_draft_head  # brings torch, which takes seconds
    return load_draft_head(config, phases)


METHODS: dict[str, Callable[[DrafterConfig], Method]] = {
    "ngram": _ngram,
    "draft_model": _draft_model,
    "suffix": _suffix,
    **dict.fromkeys(HEAD_METHODS, _head),
}
