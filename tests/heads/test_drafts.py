"""Heads of every published format draft, token for token, what a plain reference drafts, whatever happened before."""

import random

import pytest

from drafter_svc.method import Ask
from specwire.engine.graphs.backends import TorchBackend, TritonBackend
from specwire.messages import RowStatus
from tests.heads.checkpoints import VOCAB, WRITERS, Checkpoint
from tests.heads.drafting import Bench, make_bench
from tests.heads.target import Target

GREEDY, SAMPLED = 0.0, 0.8


def text(seed: int, num_tokens: int = 120) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(VOCAB) for _ in range(num_tokens)]


_SLOW = ("eagle3_two_layers", "eagle_plain", "mtp_mimo")
ON_DEVICE = [f"{name}, on the device" for name in WRITERS]


@pytest.fixture(params=[*WRITERS, *ON_DEVICE])
def bench(request: pytest.FixtureRequest, target: Target, checkpoints: dict[str, Checkpoint]) -> Bench:
    name, _, is_on_device = request.param.partition(",")
    return make_bench(target, checkpoints[name], backend=TorchBackend if is_on_device else None)


def test_drafts_equal_the_reference_after_any_history(bench: Bench) -> None:
    """Prefill in chunks, partly accepted drafts, plain spells few and long, drafts that nobody used, reopening, features that come late."""
    for seq_id, (num_tokens, temperature) in enumerate([(2, SAMPLED), (17, GREEDY), (18, SAMPLED), (60, GREEDY), (61, SAMPLED)]):
        bench.begin(seq_id, text(seq_id), num_tokens, temperature)
    bench.catch_up(24)
    everyone = range(5)
    bench.check([Ask(seq_id, 4) for seq_id in everyone])
    for seq_id, num_accepted in enumerate([5, 1, 3, 2, 4]):
        bench.commit(seq_id, num_accepted)
    bench.check([Ask(seq_id, 1 + seq_id % 4) for seq_id in everyone])
    bench.check([Ask(seq_id, 4) for seq_id in (3, 1)])  # the same again, in another company
    for _ in range(12):
        bench.commit(1, 1)
    bench.commit(4, 30)
    bench.catch_up()
    bench.check([Ask(seq_id, 3) for seq_id in everyone])
    bench.method.close(3)
    bench.begin(3, text(3), 70)
    bench.catch_up()
    bench.check([Ask(3, 4), Ask(0, 2)])


@pytest.mark.parametrize("name", ["eagle3_speculators", "dspark_speculators"])
def test_sharpened_drafts_equal_the_reference(name: str, target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    """Sampled ones at T / s; greedy ones as ever."""
    benches = [make_bench(target, checkpoints[name], sharpness=sharpness) for sharpness in (1.0, 4.0)]
    drafts = []
    for bench in benches:
        for seq_id in range(4):
            bench.begin(seq_id, text(seq_id), 40, SAMPLED if seq_id else GREEDY)
        bench.catch_up()
        drafts.append([answer.token_ids for answer in bench.check([Ask(seq_id, 4) for seq_id in range(4)])])
    assert drafts[0][0] == drafts[1][0]
    assert drafts[0][1:] != drafts[1][1:]


def test_a_prefix_that_another_sequence_left_is_not_computed_again(bench: Bench) -> None:
    bench.begin(0, text(7), 64, SAMPLED)
    bench.catch_up()
    bench.check([Ask(0, 4)])
    bench.method.close(0)
    read = bench.features.num_read
    bench.begin(1, text(7)[:50] + text(8), 70, SAMPLED)
    bench.catch_up()
    bench.check([Ask(1, 4)])
    assert 0 < bench.features.num_read - read < 40, "69 rows, of which 3 blocks were there"
    read = bench.features.num_read
    bench.begin(2, text(7), 64, GREEDY, tenant=b"another")
    bench.catch_up()
    bench.check([Ask(2, 4)])
    assert bench.features.num_read - read >= 63, "nothing is shared between tenants"


@pytest.mark.parametrize("is_caught_up", [False, True])
def test_a_prompt_of_whole_blocks_that_is_cached_is_drafted_for_at_once(bench: Bench, is_caught_up: bool) -> None:
    """A block of it is computed again; before the first drafts are asked for, if there is time."""
    for seq_id in range(3):
        bench.begin(seq_id, text(seq_id), 65)
    bench.catch_up()
    for seq_id in range(3):
        bench.method.close(seq_id)
        bench.begin(seq_id, text(seq_id), 65)
    if is_caught_up:
        bench.catch_up()
    for seq_id in range(3):
        bench.commit(seq_id, 2)
    read = bench.features.num_read
    bench.check([Ask(seq_id, 1) for seq_id in range(3)])
    assert bench.features.num_read - read <= 3 * (2 if is_caught_up else 18)
    assert not bench.method.catch_up(64), "nothing is left to compute"


def test_what_is_computed_with_first_drafts_is_bounded_over_all_sequences(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("drafter_svc.backlog._MAX_INLINE_OF_ALL", 100)
    for seq_id, num_tokens in enumerate((33, 33, 2, 33, 33, 2)):
        bench.begin(seq_id, text(seq_id), num_tokens)
    asks = [Ask(seq_id, 1) for seq_id in range(6)]
    statuses = [drafts.status for drafts in bench.method.propose(asks)]
    assert statuses == [RowStatus.OK] * 4 + [RowStatus.CATCHING_UP, RowStatus.OK]
    bench.catch_up()
    bench.check(asks)


def test_rows_wait_for_their_features(bench: Bench) -> None:
    bench.begin(0, text(9), 50)
    bench.features.ready[0] = 20
    assert bench.catch_up() == 20
    assert bench.method.propose([Ask(0, 4)])[0].status is RowStatus.CATCHING_UP
    bench.features.ready[0] = 49
    bench.features.is_lost = True
    bench.catch_up()
    assert bench.method.propose([Ask(0, 4)])[0].status is RowStatus.CATCHING_UP
    bench.features.is_lost = False
    bench.catch_up()
    bench.check([Ask(0, 4)])
    bench.features.is_lost = True
    bench.commit(0, 3)
    assert bench.method.propose([Ask(0, 4)])[0].status is RowStatus.CATCHING_UP
    bench.features.is_lost, bench.features.ready = False, {}
    bench.check([Ask(0, 4)])


def test_no_block_is_lost(bench: Bench) -> None:
    free = bench.method.num_free_blocks
    for seq_id in range(4):
        bench.begin(seq_id, text(seq_id), 30 + seq_id)
    bench.catch_up()
    bench.check([Ask(seq_id, 4) for seq_id in range(4)])
    for seq_id in range(4):
        bench.method.close(seq_id)
    assert bench.method.num_free_blocks == free
    bench.method.check_integrity()


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # padding rows compute on memory that nobody wrote
@pytest.mark.parametrize("name", ["eagle3_speculators", "dspark_speculators", *(pytest.param(name, marks=pytest.mark.slow) for name in _SLOW)])
def test_kernels_draft_what_the_reference_drafts(target: Target, checkpoints: dict[str, Checkpoint], name: str) -> None:
    """Triton's kernels: on a GPU in captured graphs, elsewhere in Triton's interpreter, which is slow."""
    bench = make_bench(target, checkpoints[name], max_num_drafts=2, backend=lambda config, device, *_: TritonBackend(config, device))
    bench.begin(0, text(1), 5, SAMPLED)
    bench.begin(1, text(2), 20, GREEDY)
    bench.catch_up(24)
    bench.check([Ask(0, 2), Ask(1, 1)])
    bench.commit(0, 2)
    bench.check([Ask(1, 2), Ask(0, 2)])


@pytest.mark.parametrize("value", [float("nan"), 3e38])
@pytest.mark.parametrize(
    "name", ["eagle3_speculators", "eagle3_speculators, on the device", "dspark_speculators", "dspark_speculators, on the device"]
)
def test_features_that_are_no_numbers_harm_no_other_sequence(target: Target, checkpoints: dict[str, Checkpoint], name: str, value: float) -> None:
    """Of a broken target: that sequence's drafts are worth nothing, but are tokens; nobody else meets them, nor what they leave in blocks."""
    name, _, is_on_device = name.partition(",")
    bench = make_bench(target, checkpoints[name], backend=TorchBackend if is_on_device else None, num_blocks=12)
    for seq_id, (num_tokens, temperature) in enumerate([(20, GREEDY), (20, SAMPLED), (40, GREEDY), (22, SAMPLED)]):
        bench.begin(seq_id, text(seq_id), num_tokens, temperature)
    for seq_id in (0, 3):
        bench.features.rows[seq_id][7:] = value
    bench.catch_up(24)
    for _ in range(2):
        answers = bench.method.propose([Ask(0, 4), Ask(1, 4), Ask(3, 4)])
        assert all(0 <= token_id < VOCAB for drafts in answers for token_id in drafts.token_ids)
        assert [len(drafts.token_ids) for drafts in answers] == [4, 4, 4]
        bench.check([Ask(1, 4), Ask(2, 3)])
        for seq_id in range(4):
            bench.commit(seq_id, 3)
    for seq_id in (0, 3):
        bench.method.close(seq_id)
    bench.begin(5, text(5), 104)  # in all blocks that are free, those of the broken ones among them
    bench.catch_up()
    bench.check([Ask(5, 4), Ask(1, 4)])
