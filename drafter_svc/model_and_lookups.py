"""A draft model or head and look-ups side by side: where a look-up is expected to do better than the model, the model is not asked."""

import dataclasses
import operator
from collections.abc import Sequence

from specwire.engine.counts import PassCounts
from specwire.messages import DraftOpen, ServiceDescription

from .judge import Judge, Judged, ModelRecord, Outcome, compare
from .method import MEASUREMENT_TENANT, Ask, Drafts, FeatureNotes, Method, open_all

_expected = operator.attrgetter("expected")
_PROBE_INTERVAL = 16
"""One in so many sequences that need no model is drafted for by it all the same: what it would do there may change."""


@dataclasses.dataclass(slots=True)
class _Sequence:
    """What is known of a sequence, and what was drafted for it since its last tokens: by look-ups, and by the model at a level of `ModelRecord`."""

    is_greedy: bool
    is_made_up: bool  # for a measurement: what the model costs is wanted, and its tokens teach nothing
    drafts: list[tuple[Drafts, int]] = dataclasses.field(default_factory=list)  # as they were scored, and their groups
    model_drafts: tuple[Drafts, int, int] | None = None  # group and level


class ModelAndLookups:
    """Each sequence gets in each step the draft of which more tokens are expected, by probabilities that are learned from the text: a draft counts as
    right where the text went on like it, also if another one was verified in its place. On ties a look-up goes first.

    A model that is not asked keeps its place in the text: tokens that it has not seen are computed when it is asked again, or as background work.

    Args:
        lookups: methods without a model.
        model: a draft model or head; it says which sequences can be drafted for.
        names: of all methods, as they were listed.
    """

    def __init__(self, lookups: Sequence[Method], model: Method, names: Sequence[str]) -> None:
        assert lookups, "a model without look-ups needs no choice"
        description = model.description
        self._lookups = lookups
        self._model = model
        self._methods = [model, *lookups]
        self._lookup_names = [lookup.description.method for lookup in lookups]
        self._model_name = description.method
        model_ids = "+".join(method.description.model_id for method in self._methods)
        self._description = dataclasses.replace(description, method="+".join(names), model_id=model_ids)
        self._judge = Judge(description.max_num_draft_tokens)
        self._record = ModelRecord(description.max_num_draft_tokens)
        self._sequences: dict[int, _Sequence] = {}
        self._outcomes: list[Outcome] = []  # learned from at the next call, all at once
        self._model_outcomes: list[tuple[int, Outcome]] = []
        self._num_confident = 0

    @property
    def description(self) -> ServiceDescription:
        return self._description

    @property
    def features(self) -> FeatureNotes | None:
        return self._model.features

    @property
    def counts(self) -> PassCounts:
        return self._model.counts

    @property
    def num_free_blocks(self) -> int:
        return self._model.num_free_blocks

    def open(self, seq_id: int, request: DraftOpen) -> None:
        open_all(self._methods, seq_id, request)
        self._sequences[seq_id] = _Sequence(request.sampling.is_greedy, request.tenant_cache_key == MEASUREMENT_TENANT)

    def append(self, seq_id: int, token_ids: Sequence[int]) -> None:
        for method in self._methods:
            method.append(seq_id, token_ids)
        sequence = self._sequences[seq_id]
        if not token_ids or sequence.is_made_up:
            return
        self._outcomes += [compare(drafts, group, token_ids) for drafts, group in sequence.drafts]
        if sequence.model_drafts is not None:
            drafts, group, level = sequence.model_drafts
            outcome = compare(drafts, group, token_ids)
            self._outcomes.append(outcome)
            self._model_outcomes.append((level, outcome))
        sequence.drafts, sequence.model_drafts = [], None

    def close(self, seq_id: int) -> None:
        for method in self._methods:
            method.close(seq_id)
        del self._sequences[seq_id]

    def propose(self, asks: Sequence[Ask]) -> list[Drafts]:
        self._learn()
        found = self._look_up(asks)
        levels = [
            self._record.level(one.expected, ask.num_drafts, is_greedy=self._sequences[ask.seq_id].is_greedy)
            for ask, one in zip(asks, found, strict=True)
        ]
        rivals = self._record.num_expected()
        wanted = [index for index, ask in enumerate(asks) if not self._is_spared(ask, found[index], rivals[levels[index]])]
        self.counts.num_spared_rows += len(asks) - len(wanted)
        answers = self._ask_model([asks[index] for index in wanted], [levels[index] for index in wanted]) if wanted else []
        for index, one in zip(wanted, answers, strict=True):
            # Of a model that is behind, its status stands where no look-up knows better.
            if one.expected > found[index].expected or not found[index].drafts.token_ids:
                found[index] = one
        return [one.drafts for one in found]

    def catch_up(self, budget: int) -> int:
        num_tokens = 0
        for method in self._methods:
            num_tokens += method.catch_up(budget - num_tokens)
            if num_tokens >= budget:
                break
        return num_tokens

    def _learn(self) -> None:
        self._judge.learn(self._outcomes)
        self._record.learn(self._model_outcomes)
        self._outcomes, self._model_outcomes = [], []

    def _look_up(self, asks: Sequence[Ask]) -> list[Judged]:
        """The best draft of the look-ups for each sequence, scored by probabilities."""
        for ask in asks:
            sequence = self._sequences[ask.seq_id]
            sequence.drafts, sequence.model_drafts = [], None
        columns: list[list[Judged]] = []
        for name, lookup in zip(self._lookup_names, self._lookups, strict=True):
            drafts = lookup.propose(asks)
            groups = self._note(name, asks, drafts)
            columns.append(self._judge.calibrate(drafts, groups))
        return columns[0] if len(columns) == 1 else [max(choices, key=_expected) for choices in zip(*columns, strict=True)]

    def _note(self, name: str, asks: Sequence[Ask], drafts: Sequence[Drafts]) -> list[int]:
        """Keeps a look-up's drafts until the text is known; their groups."""
        by_kind = [self._judge.group(name, is_greedy=False), self._judge.group(name, is_greedy=True)]
        sequences = [self._sequences[ask.seq_id] for ask in asks]
        groups = [by_kind[sequence.is_greedy] for sequence in sequences]
        for sequence, run, group in zip(sequences, drafts, groups, strict=True):
            if run.token_ids:
                sequence.drafts.append((run, group))
        return groups

    def _is_spared(self, ask: Ask, found: Judged, rival: Sequence[float]) -> bool:
        """Whether the model need not be asked for a sequence, of whose drafts so many accepted tokens are expected, by K - 1."""
        if not found.drafts.token_ids or self._sequences[ask.seq_id].is_made_up:
            return False
        if found.expected <= rival[min(ask.num_drafts, len(rival)) - 1]:
            return False
        self._num_confident += 1
        return self._num_confident % _PROBE_INTERVAL != 0

    def _ask_model(self, asks: Sequence[Ask], levels: Sequence[int]) -> list[Judged]:
        """The model's drafts, scored by probabilities."""
        by_kind = [self._judge.group(self._model_name, is_greedy=False), self._judge.group(self._model_name, is_greedy=True)]
        drafts, groups = self._model.propose(asks), []
        for ask, run, level in zip(asks, drafts, levels, strict=True):
            sequence = self._sequences[ask.seq_id]
            group = by_kind[sequence.is_greedy]
            groups.append(group)
            if run.token_ids:
                sequence.model_drafts = run, group, level
        return self._judge.calibrate(drafts, groups)
