"""The draft model: it drafts what a target of equal weights emits, whatever happened before, and loses no block."""

import dataclasses
import random
from collections.abc import Sequence
from dataclasses import dataclass

import pytest

from drafter_svc.draft_model import DraftModel
from drafter_svc.method import Ask, Drafts
from specwire.errors import InvalidArgumentError
from specwire.messages import DraftOpen, RowStatus
from tests.drafter.draft_models import GREEDY, HOT, MODEL, SAMPLED, Make, catch_up, tokens
from tests.drafter.helpers import open_request
from tests.drafter.target import VOCAB_SIZE, target_texts, tiny_model


@dataclass
class Life:
    """One sequence: what it was opened with, and how many tokens of `text` are committed."""

    seq_id: int
    request: DraftOpen
    text: list[int]
    num_tokens: int

    def reopen(self, method: DraftModel) -> None:
        method.open(self.seq_id, dataclasses.replace(self.request, token_ids=self.text[: self.num_tokens]))

    def commit(self, method: DraftModel, num_tokens: int) -> None:
        """The next tokens of the text."""
        method.append(self.seq_id, self.text[self.num_tokens : self.num_tokens + num_tokens])
        self.num_tokens += num_tokens


REQUESTS = [
    open_request(tokens(count, seed=slot), slot=slot, sampling=sampling, noise_key=2**63 + slot, choice=slot % 3)
    for slot, (count, sampling) in enumerate([(1, GREEDY), (16, SAMPLED), (17, HOT), (33, GREEDY), (50, SAMPLED)])
]


@pytest.fixture(scope="module")
def texts() -> list[list[int]]:
    """The target's text for each of REQUESTS."""
    texts = target_texts(MODEL, REQUESTS, 270)
    windows = {tuple(text[i : i + 8]) for text in texts for i in range(60, 200, 8)}
    assert len(windows) > 80, "the texts repeat themselves or each other, so that mix-ups would not show"
    return texts


def begin_all(method: DraftModel, texts: list[list[int]]) -> list[Life]:
    lives = [Life(request.slot, request, text, len(request.token_ids)) for request, text in zip(REQUESTS, texts, strict=True)]
    for life in lives:
        life.reopen(method)
    catch_up(method)
    return lives


def step(method: DraftModel, lives: Sequence[Life], k: int) -> None:
    """One step of a coordinator over all sequences; asserts that the target would accept every draft."""
    for life, drafts in zip(lives, method.propose([Ask(life.seq_id, k) for life in lives]), strict=True):
        assert drafts.status is RowStatus.OK
        assert drafts.token_ids == life.text[life.num_tokens : life.num_tokens + k], f"sequence {life.seq_id} at {life.num_tokens} tokens"
        assert len(drafts.scores) == k
        life.commit(method, k + 1)


def decode_plainly(method: DraftModel, lives: Sequence[Life], num_steps: int, *, in_one_commit: bool) -> None:
    """Steps without drafts; commits arrive one by one, or buffered."""
    for life in lives:
        for _ in range(1 if in_one_commit else num_steps):
            life.commit(method, num_steps if in_one_commit else 1)


@pytest.mark.parametrize("k", [1, 2, 4, 8])
def test_equal_weights_accept_every_draft(make: Make, k: int, texts: list[list[int]]) -> None:
    method = make()
    initial = method.num_free_blocks
    lives = begin_all(method, texts)
    for _ in range(6):
        step(method, lives, k)
        method.check_integrity()
    # Twenty steps at K = 0, buffered or not, and back.
    for in_one_commit in (True, False):
        decode_plainly(method, lives, 20, in_one_commit=in_one_commit)
        catch_up(method)
        step(method, lives, k)
        step(method, lives, k)
    # All are closed and opened again with all their tokens; then so in a new process.
    for life in lives:
        method.close(life.seq_id)
    for restarted in (method, make()):
        method = restarted
        for life in lives:
            life.reopen(method)
        catch_up(method)
        step(method, lives, k)
        step(method, lives, k)
    # Timed-out rounds: drafts that nobody used, then plain steps, then drafts again.
    for num_plain_steps in (1, 2, k, k + 1, 2 * k + 3):
        method.propose([Ask(life.seq_id, k) for life in lives])
        decode_plainly(method, lives, num_plain_steps, in_one_commit=True)
        catch_up(method)
        step(method, lives, k)
    for life in lives:
        method.close(life.seq_id)
    assert method.num_free_blocks == initial


def test_small_gaps_are_closed_in_the_round_itself(make: Make, texts: list[list[int]]) -> None:
    method = make()
    lives = begin_all(method, texts)
    step(method, lives, 3)
    # The last draft and the token after it have no KV yet either: 32 are missing.
    decode_plainly(method, lives, 30, in_one_commit=True)
    step(method, lives, 3)
    decode_plainly(method, lives, 31, in_one_commit=True)
    assert {drafts.status for drafts in method.propose([Ask(life.seq_id, 3) for life in lives])} == {RowStatus.CATCHING_UP}


def test_asking_again_at_the_same_length_gives_the_same_drafts(make: Make, texts: list[list[int]]) -> None:
    method = make()
    lives = begin_all(method, texts)
    first = method.propose([Ask(life.seq_id, 8) for life in lives])
    for k in (8, 3, 1, 8):
        again = method.propose([Ask(life.seq_id, k) for life in lives])
        assert [drafts.token_ids for drafts in again] == [drafts.token_ids[:k] for drafts in first]
        for left, right in zip(again, first, strict=True):
            assert left.scores == pytest.approx(right.scores[:k], abs=1e-5)


@pytest.mark.parametrize("seed", range(12))
def test_drafts_after_any_history_equal_those_of_a_fresh_drafter(make: Make, seed: int) -> None:
    """Random histories of three sequences: steps that accept any part of the drafts, rounds whose drafts were not used, plain tokens few
    or many, background work of any size, reopening with any part of the tokens."""
    rng = random.Random(seed)
    method = make(num_blocks=200, max_num_drafts=6)
    requests = [open_request(tokens(5 + 12 * slot, slot), sampling=(GREEDY, SAMPLED, HOT)[slot], noise_key=slot) for slot in range(3)]
    known = [list(request.token_ids) for request in requests]
    for seq_id, request in enumerate(requests):
        method.open(seq_id, request)
    num_partly_accepted = 0
    for _ in range(40):
        seq_id, action = rng.randrange(3), rng.choice(("step", "step", "step", "timeout", "plain", "catch_up", "catch_up", "reopen"))
        if action == "catch_up":
            method.catch_up(rng.randrange(1, 40))
        elif action == "reopen":
            method.close(seq_id)
            known[seq_id] = known[seq_id][: rng.randrange(len(known[seq_id]) // 2, len(known[seq_id]) + 1)]
            method.open(seq_id, dataclasses.replace(requests[seq_id], token_ids=known[seq_id]))
        else:
            drafts = [] if action == "plain" else method.propose([Ask(seq_id, rng.randrange(1, 7))])[0].token_ids
            accepted = drafts[: rng.randrange(len(drafts) + 1)] if action == "step" else []
            num_partly_accepted += len(accepted) < len(drafts) - 1
            new = [*accepted, *tokens(rng.choice((1, 2, 8, 30)) if action == "plain" else 1, seed=rng.randrange(1000))]
            method.append(seq_id, new)
            known[seq_id] += new
        method.check_integrity()
    assert num_partly_accepted
    catch_up(method)
    found = method.propose([Ask(seq_id, 6) for seq_id in range(3)])
    fresh = make()
    for seq_id, request in enumerate(requests):
        fresh.open(seq_id, dataclasses.replace(request, token_ids=known[seq_id]))
    catch_up(fresh, 1000)
    for drafts, expected in zip(found, fresh.propose([Ask(seq_id, 6) for seq_id in range(3)]), strict=True):
        assert (drafts.status, drafts.token_ids) == (RowStatus.OK, expected.token_ids)
        assert drafts.scores == pytest.approx(expected.scores, abs=1e-5)


def test_a_thousand_random_operations_lose_no_block(make: Make) -> None:
    rng = random.Random(11)
    method = make(num_blocks=12, max_num_drafts=5)
    lengths: dict[int, int] = {}
    seen: set[RowStatus] = set()
    drafted: dict[int, Drafts] = {}
    for _ in range(1000):
        seq_id, action = rng.randrange(8), rng.choice(("open", "close", "commit", "propose", "propose", "catch_up", "catch_up"))
        if action == "open" and seq_id not in lengths:
            lengths[seq_id] = rng.randrange(0, 120)
            sampling = rng.choice((GREEDY, SAMPLED))
            method.open(seq_id, open_request(tokens(lengths[seq_id], seed=rng.randrange(3)), sampling=sampling, noise_key=seq_id))
        elif action == "close" and seq_id in lengths:
            method.close(seq_id)
            del lengths[seq_id]
            drafted.pop(seq_id, None)
        elif action == "commit" and seq_id in lengths:
            run = drafted.pop(seq_id, Drafts(RowStatus.OK)).token_ids
            new = [*run[: rng.randrange(6)], *tokens(rng.randrange(1, 4), seed=rng.randrange(99))]
            method.append(seq_id, new)
            lengths[seq_id] += len(new)
        elif action == "propose":
            asks = [Ask(other, rng.randrange(7)) for other in rng.sample(sorted(lengths), rng.randrange(len(lengths) + 1))]
            for ask, drafts in zip(asks, method.propose(asks), strict=True):
                seen.add(drafts.status)
                drafted[ask.seq_id] = drafts
                assert len(drafts.token_ids) == len(drafts.scores) <= min(ask.num_drafts, 5)
                assert all(0 <= token_id < VOCAB_SIZE for token_id in drafts.token_ids)
                assert all(0 <= score <= 1 for score in drafts.scores), drafts
        elif action == "catch_up":
            budget = rng.randrange(1, 50)
            assert 0 <= method.catch_up(budget) <= budget
        method.check_integrity()
    assert seen == {RowStatus.OK, RowStatus.OUT_OF_BLOCKS, RowStatus.CATCHING_UP}
    for seq_id in lengths:
        method.close(seq_id)
    method.check_integrity()
    assert method.num_free_blocks == 12


def test_out_of_blocks_is_one_sequences_trouble_and_passes(make: Make, texts: list[list[int]]) -> None:
    method = make(num_blocks=5)
    method.open(9, open_request(tokens(60, seed=9)))
    small, late = (Life(request.slot, request, texts[request.slot], len(request.token_ids)) for request in REQUESTS[1:4:2])
    small.reopen(method)
    late.reopen(method)
    catch_up(method)
    step(method, [small], 1)
    small.commit(method, 15)
    answers = method.propose([Ask(9, 4), Ask(small.seq_id, 4), Ask(late.seq_id, 4)])
    assert [drafts.status for drafts in answers] == [RowStatus.OK, RowStatus.OUT_OF_BLOCKS, RowStatus.OUT_OF_BLOCKS]
    assert [len(drafts.token_ids) for drafts in answers] == [4, 0, 0]
    method.close(9)
    catch_up(method)
    late.commit(method, 5)
    small.commit(method, 1)
    for life in (late, small):
        catch_up(method)
        step(method, [life], 4)
        method.close(life.seq_id)
    assert method.num_free_blocks == 5


@pytest.mark.parametrize(("length", "expected"), [(58, 5), (59, 5), (60, 4), (63, 1), (64, 0), (65, 0), (90, 0)])
def test_never_drafts_past_its_window(make: Make, length: int, expected: int) -> None:
    model = tiny_model(max_position_embeddings=64)
    method = make(model, max_num_drafts=5)
    assert method.description.max_model_len == 64
    method.open(0, open_request(tokens(length)))
    method.open(1, open_request(tokens(20)))
    catch_up(method)
    first, second = method.propose([Ask(0, 9), Ask(1, 9)])
    assert (first.status, len(first.token_ids)) == (RowStatus.OK, expected)
    assert (second.status, len(second.token_ids)) == (RowStatus.OK, 5)
    method.append(0, tokens(9, seed=1))
    assert method.catch_up(99) == 0 or length + 9 < 64
    assert method.propose([Ask(0, 9)])[0].status is RowStatus.OK


def test_window_of_the_configuration(make: Make) -> None:
    assert make(max_model_len=100).description.max_model_len == 100
    assert make(max_model_len=100_000).description.max_model_len == 512


def test_a_choice_that_no_device_can_hold_is_refused(make: Make) -> None:
    method = make()
    with pytest.raises(InvalidArgumentError, match="choice is 4294967295, but must be from 0 to 2147483647"):
        method.open(0, open_request([1, 2], choice=2**32 - 1))
    method.open(0, open_request([1, 2], choice=2**31 - 1))
    assert method.propose([Ask(0, 2)])[0].status is RowStatus.OK


@pytest.mark.parametrize("wrong", [-1, VOCAB_SIZE, 2**31 - 1])
def test_ids_outside_the_vocabulary_are_refused(make: Make, wrong: int) -> None:
    method = make()
    with pytest.raises(InvalidArgumentError, match=f"token id {wrong} is not in the draft model's vocabulary, 0 to {VOCAB_SIZE - 1}"):
        method.open(0, open_request([1, wrong, 2]))
    method.open(0, open_request([1, 2]))
    with pytest.raises(InvalidArgumentError, match=f"token id {wrong}"):
        method.append(0, [3, wrong])
    method.check_integrity()
    method.close(0)
    assert method.num_free_blocks == 256


def test_an_empty_sequence_gets_no_drafts_until_it_has_a_token(make: Make) -> None:
    method = make()
    method.open(0, open_request([]))
    assert method.propose([Ask(0, 3)]) == [Drafts(RowStatus.OK)]
    method.append(0, [5])
    assert len(method.propose([Ask(0, 3)])[0].token_ids) == 3


def test_one_forward_pass_a_draft_position_over_all_sequences(make: Make, texts: list[list[int]]) -> None:
    method = make()
    lives = begin_all(method, texts)
    before = dataclasses.replace(method.counts)
    method.propose([Ask(life.seq_id, k) for life, k in zip(lives, (1, 2, 3, 5, 5), strict=True)])
    counts = method.counts
    num_passes = counts.num_graph_passes + counts.num_eager_passes - before.num_graph_passes - before.num_eager_passes
    first = len(lives)  # the first pass computes what has no KV: the last token of each
    assert counts.num_tokens - before.num_tokens == first + 4 + 3 + 2 + 2
    if counts.num_graph_passes:
        assert num_passes == 5
        assert counts.num_eager_passes == before.num_eager_passes
        assert counts.num_padded_tokens - before.num_padded_tokens == 8 + 4 + 4 + 2 + 2
    else:
        assert num_passes == 5
        assert counts.num_padded_tokens == counts.num_tokens
