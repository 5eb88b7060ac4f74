"""The measurement at the start: which rounds are timed, what the table says of them, and both ways to time a round."""

import logging
import random
from collections.abc import Callable
from dataclasses import dataclass, field, replace

import pytest

from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.runner import ModelRunner
from specwire.policy.cost import verify_ms
from verifier_svc.profile import measure_verify_cost
from verifier_svc.profile_shapes import ProfileLimits, RoundShape, profile_shapes
from verifier_svc.profile_timers import ModelRunnerTimer, RoundRunnerTimer, profile_verifier
from verifier_svc.slots import VerifierLimits

PLAIN = ProfileLimits(
    max_num_seqs=8, max_row_tokens=6, max_num_batched_tokens=512, max_model_len=2048, context_len=1000, num_blocks=600, block_size=16
)
GRAPHS = replace(PLAIN, graph_sizes=(1, 2, 4, 8, 16, 24, 32, 40, 48))


@dataclass
class Machine:
    """Rounds that take what a formula says, on a clock of their own."""

    ms: Callable[[RoundShape], float]
    now_s: float = 0.0
    timed: list[RoundShape] = field(default_factory=list)

    def round_ms(self, shape: RoundShape) -> float:
        self.timed.append(shape)
        self.now_s += self.ms(shape) / 1e3
        return self.ms(shape)

    def clock(self) -> float:
        return self.now_s


def linear(shape: RoundShape) -> float:
    return 4.0 + 0.125 * shape.num_tokens + 0.02 * (shape.num_rows - 1) + 0.0005 * shape.num_kv_tokens


@pytest.mark.parametrize("limits", [PLAIN, GRAPHS])
def test_a_linear_machine_is_found_exactly(limits: ProfileLimits) -> None:
    machine = Machine(linear)
    cost = measure_verify_cost(machine, limits, budget_s=1e9, clock=machine.clock)
    assert (cost.ms_per_row, cost.ms_per_kv_token) == (pytest.approx(0.02), pytest.approx(0.0005))
    assert cost.step_ms == pytest.approx([4.0 + 0.125 * n for n in cost.num_tokens])
    for shape in (RoundShape(8, 4, 100), RoundShape(48, 8, 700)):
        assert verify_ms(cost, shape.num_tokens, shape.num_rows, shape.num_kv_tokens) == pytest.approx(linear(shape))
    assert set(map(machine.timed.count, machine.timed)) <= {5, 6}, "the first one has first-call costs"


def test_with_graphs_every_size_is_measured_behind_two_contexts_and_chunks_apart() -> None:
    machine = Machine(lambda shape: linear(shape) + (30.0 if shape.longest_row > GRAPHS.max_row_tokens else 0.0))
    cost = measure_verify_cost(machine, GRAPHS, budget_s=1e9, clock=machine.clock)
    for size in GRAPHS.graph_sizes:
        empty = GRAPHS.many_rows(size)
        assert {empty, GRAPHS.loaded(empty)} <= set(machine.timed)
    assert (cost.max_graph_tokens, cost.max_graph_row_tokens) == (48, 6)
    assert cost.chunk_num_tokens == (16, 32, 64, 128, 256, 512)
    assert cost.chunk_ms == pytest.approx([34.0 + 0.125 * n for n in cost.chunk_num_tokens])
    assert cost.num_tokens == (*GRAPHS.graph_sizes, 64, 128, 256, 512)
    assert cost.step_ms[-4:] == cost.chunk_ms[-4:], "beyond the graphs everything is eager"
    assert machine.timed == sorted(machine.timed, key=machine.timed.index), "another shape needs preparation, so that its repeats are together"


def test_without_graphs_repeats_are_spread_over_the_time() -> None:
    machine = Machine(linear)
    cost = measure_verify_cost(machine, PLAIN, budget_s=1e9, clock=machine.clock)
    assert (cost.num_tokens, cost.chunk_num_tokens) == ((1, 2, 3, 4, 5, 6, 8, 16, 32, 48), ())
    assert (cost.max_graph_tokens, cost.max_graph_row_tokens) == (0, 0)
    assert all(machine.timed[i] != machine.timed[i + 1] for i in range(1, len(machine.timed) - 1))


def test_without_graphs_slopes_are_seen_on_a_slow_machine_too() -> None:
    machine = Machine(lambda shape: 10 * linear(shape))
    cost = measure_verify_cost(machine, PLAIN, budget_s=1.0, clock=machine.clock)
    assert (cost.ms_per_row, cost.ms_per_kv_token) == (pytest.approx(0.2), pytest.approx(0.005))
    assert len(cost.num_tokens) > 3


def test_what_the_first_round_of_all_takes_is_not_of_the_budget() -> None:
    """Code is compiled for it, which may take longer than all that is measured."""
    machine = Machine(lambda shape: linear(shape) + (0.0 if machine.timed[1:] else 60_000.0))
    cost = measure_verify_cost(machine, PLAIN, budget_s=1.0, clock=machine.clock)
    assert cost.ms_per_row == pytest.approx(0.02)
    assert len(cost.num_tokens) > 3


def test_context_is_capped_by_the_kv_blocks_and_the_longest_sequence() -> None:
    assert GRAPHS.loaded(RoundShape(1, 1)) == RoundShape(1, 1, 1000)
    assert GRAPHS.loaded(RoundShape(48, 24)).context == 600 // 24 * 16 - 2
    assert replace(GRAPHS, max_model_len=100).loaded(RoundShape(6, 1)).context == 94
    assert replace(GRAPHS, num_blocks=8).loaded(RoundShape(8, 8)).context == 15
    for limits in (GRAPHS, replace(GRAPHS, num_blocks=9), replace(PLAIN, num_blocks=3), replace(GRAPHS, max_model_len=3, num_blocks=20)):
        for shape in profile_shapes(limits).runs:
            assert shape.num_rows * -(-(shape.context + shape.longest_row) // 16) <= limits.num_blocks
            assert shape.context + shape.longest_row <= limits.max_model_len


def test_more_tokens_never_cost_less_and_nothing_is_free() -> None:
    rng = random.Random(5)
    machine = Machine(lambda shape: rng.uniform(0.001, 3.0))
    cost = measure_verify_cost(machine, GRAPHS, budget_s=1e9, clock=machine.clock)
    for times in (cost.step_ms, cost.chunk_ms):
        assert list(times) == sorted(times)
        assert times[0] > 0
    assert cost.ms_per_row >= 0 <= cost.ms_per_kv_token


def test_noise_is_averaged_over_all_sizes() -> None:
    rng = random.Random(6)
    machine = Machine(lambda shape: linear(shape) * rng.uniform(0.97, 1.03))
    cost = measure_verify_cost(machine, GRAPHS, budget_s=1e9, clock=machine.clock)
    assert cost.ms_per_kv_token == pytest.approx(0.0005, rel=0.1)
    for num_tokens, step_ms in zip(cost.num_tokens, cost.step_ms, strict=True):
        assert step_ms == pytest.approx(4.0 + 0.125 * num_tokens, rel=0.06)


def test_once_the_time_is_spent_the_rest_is_left_out_and_the_log_says_so(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    machine = Machine(lambda shape: 100.0 * shape.num_tokens)
    cost = measure_verify_cost(machine, GRAPHS, budget_s=4.0, clock=machine.clock)
    assert cost.num_tokens == (1, 2, 4, 8)
    assert (cost.ms_per_row, cost.ms_per_kv_token, cost.chunk_ms) == (0.0, 0.0, ())
    assert "left out for want of time" in caplog.text
    assert machine.now_s < 5.0


def test_without_any_time_there_is_one_size() -> None:
    machine = Machine(linear)
    cost = measure_verify_cost(machine, PLAIN, budget_s=0.0, clock=machine.clock)
    assert (cost.num_tokens, cost.step_ms) == ((1,), (4.125,))


# --- on models ------------------------------------------------------------------------------------------------------


def verifier_limits(model: Decoder) -> VerifierLimits:
    return VerifierLimits(model.config.vocab_size, max_model_len=64, max_num_seqs=3, max_num_draft_tokens=2, max_num_batched_tokens=24)


@pytest.mark.parametrize("on_rounds", [False, True])
def test_a_model_is_measured_and_leaves_no_trace(model: Decoder, on_rounds: bool) -> None:
    limits = verifier_limits(model)
    runner = ModelRunner(model, KVCache(model.config, 16, model.dtype))
    rounds = RoundRunner(model, runner.kv_cache, RoundLimits(3, 2, 24, 64)) if on_rounds else None
    cost = profile_verifier(runner, rounds, limits, context_len=40)
    assert cost.num_tokens == ((1, 2, 4, 8, 9, 16, 24) if on_rounds else (1, 2, 3, 4, 8, 9))
    assert cost.chunk_num_tokens == ((8, 16, 24) if on_rounds else ())
    assert min(cost.step_ms) > 0
    if rounds is not None:
        assert rounds.counts.num_tokens == rounds.counts.num_graph_rounds == rounds.counts.num_eager_rounds == 0


def test_both_timers_run_the_shape_that_they_are_asked_for(model: Decoder) -> None:
    cache = KVCache(model.config, 16, model.dtype)
    rounds = RoundRunner(model, cache, RoundLimits(3, 2, 24, 64))
    timer = RoundRunnerTimer(rounds, block_size=16, vocab_size=model.config.vocab_size, max_row_tokens=3)
    assert timer.round_ms(RoundShape(8, 3, 20)) > 0
    assert (rounds.counts.num_tokens, rounds.counts.num_graph_rounds) == (16, 2), "the first round of a shape is not timed"
    assert timer.round_ms(RoundShape(8, 3, 20)) > 0
    assert rounds.counts.num_graph_rounds == 3
    assert timer.round_ms(RoundShape(8, 1)) > 0
    assert rounds.counts.num_eager_rounds == 2
    written = [int((layer[:16].abs().sum(dim=(2, 3, 4)) > 0).sum()) for layer in cache.layers]
    assert written[0] >= 8
    plain = ModelRunner(model, KVCache(model.config, 16, model.dtype))
    assert ModelRunnerTimer(plain).round_ms(RoundShape(8, 3, 20)) > 0
    used = [int((layer.abs().sum(dim=(2, 3, 4)) > 0).sum()) for layer in plain.kv_cache.layers]
    assert used[0] == 8
