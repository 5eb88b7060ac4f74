"""Lookups side by side: the draft of which more is expected, for each sequence by itself."""

import pytest

from drafter_svc.combined import Combined
from drafter_svc.judge import num_expected
from drafter_svc.method import Ask, Drafts, build_method
from drafter_svc.ngram import Ngram
from drafter_svc.suffix import Suffix
from drafter_svc.suffix_match import Limits
from specwire.config import DrafterConfig
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.helpers import ScriptedMethod, open_request


def test_what_is_expected_of_a_draft() -> None:
    assert num_expected(Drafts(RowStatus.OK, [1, 2, 3], [0.5, 0.5, 1.0])) == pytest.approx(0.5 + 0.25 + 0.25)
    assert num_expected(Drafts(RowStatus.OK)) == 0


def test_each_sequence_gets_the_draft_of_which_more_is_expected() -> None:
    spec = SpeculativeConfig.from_dict({"method": ["ngram", "suffix"], "num_speculative_tokens": 4})
    method = build_method(DrafterConfig(speculative_config=spec))
    assert (method.description.method, method.description.model_id) == ("ngram+suffix", "ngram-2-4+suffix-24")
    method.open(0, DraftOpen(0, 1, [1], 1, SamplingParams(), 7))
    method.append(0, [60, 61, 62, 63, 64, 65, 66])
    method.close(0)
    while method.catch_up(4):
        pass
    contexts = {
        0: [1, 2, 8, 9, 3, 1, 2],  # a lookup goes on past the length of its match
        1: [60, 61, 62],  # only an earlier answer knows
        2: [7, 7],  # too short for the lookup
        3: [1, 2, 8, 1, 2, 9, 1, 2, 9, 1, 2],  # both know it, one by its frequency
        4: [1, 2, 3],
    }
    for seq_id, context in contexts.items():
        method.open(seq_id, open_request(context))
    drafts = method.propose([Ask(seq_id, 4) for seq_id in contexts])
    assert [run.token_ids for run in drafts] == [[8, 9, 3, 1], [63, 64, 65], [7], [9, 1, 2], []]
    assert drafts[3].scores[0] > 4 / 5  # the lookup's


def test_a_sequence_that_one_of_them_refuses_is_open_in_none() -> None:
    first = ScriptedMethod()
    method = Combined([first, Suffix(Limits(24, 1.0, 0.1), max_num_drafts=4), Ngram(1, 2, max_num_drafts=4)])
    with pytest.raises(InvalidArgumentError, match="token id is -7"):
        method.open(0, open_request([1, -7]))
    assert first.sequences == {}
    method.open(0, open_request([1, 7, 1]))
    assert method.propose([Ask(0, 1)])[0].token_ids == [2]
