"""Times rounds on whatever will run them: the model runner, or the round runner with its graphs."""

import time
from collections.abc import Sequence

from specwire.engine.batch import Segment
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import VerifyCost
from specwire.sampling_params import SamplingParams

from .profile import measure_verify_cost
from .profile_shapes import ProfileLimits, RoundShape
from .slots import VerifierLimits

_PLAIN_BUDGET_S = 1.5
_GRAPH_BUDGET_S = 8.0


def profile_verifier(runner: ModelRunner, rounds: RoundRunner | None, limits: VerifierLimits, context_len: int) -> VerifyCost:
    """Measures the rounds of a verifier that has opened nothing yet.

    Args:
        runner: of its model and KV cache.
        rounds: what runs its rounds, captured; None = the model runner does.
        limits: of its rounds.
        context_len: tokens of context to measure behind, as far as they fit.
    """
    max_row_tokens, kv_cache, vocab_size = limits.max_num_draft_tokens + 1, runner.kv_cache, runner.model.config.vocab_size
    profiled = ProfileLimits(
        max_num_seqs=limits.max_num_seqs,
        max_row_tokens=max_row_tokens,
        max_num_batched_tokens=limits.max_num_batched_tokens,
        max_model_len=limits.max_model_len,
        context_len=context_len,
        num_blocks=kv_cache.num_blocks,
        block_size=kv_cache.block_size,
        graph_sizes=() if rounds is None else tuple(rounds.graph_sizes),
    )
    if rounds is None:
        return measure_verify_cost(ModelRunnerTimer(runner), profiled, budget_s=_PLAIN_BUDGET_S)
    timer = RoundRunnerTimer(rounds, block_size=kv_cache.block_size, vocab_size=vocab_size, max_row_tokens=max_row_tokens)
    cost = measure_verify_cost(timer, profiled, budget_s=_GRAPH_BUDGET_S)
    rounds.reset_counts()
    return cost


class ModelRunnerTimer:
    """See `RoundTimer`. A round is a forward pass with the logits of all its tokens."""

    def __init__(self, runner: ModelRunner) -> None:
        self._runner = runner
        self._vocab_size = runner.model.config.vocab_size

    def round_ms(self, shape: RoundShape) -> float:
        """See `RoundTimer.round_ms`."""
        runner, num_blocks = self._runner, shape.num_blocks(self._runner.kv_cache.block_size)
        segments = [
            Segment(token_ids, shape.context, range(row * num_blocks, (row + 1) * num_blocks))
            for row, token_ids in enumerate(_token_rows(shape, self._vocab_size))
        ]
        started = time.perf_counter()
        batch = runner.batch(segments)
        logits = runner.logits(runner.forward(batch), range(batch.num_tokens))
        logits.argmax(dim=1).tolist()  # waits for the device
        return (time.perf_counter() - started) * 1e3


class RoundRunnerTimer:
    """See `RoundTimer`. Rows are drafts behind one token, or prefill chunks where they are longer than graphs take; none is accepted but by chance.

    Args:
        runner: captured; its slots are opened, and must be opened anew by whoever takes them next.
        block_size: of its KV cache.
        vocab_size: of its model.
        max_row_tokens: most tokens of a row that graphs take.
    """

    def __init__(self, runner: RoundRunner, *, block_size: int, vocab_size: int, max_row_tokens: int) -> None:
        self._runner = runner
        self._block_size, self._vocab_size, self._max_row_tokens = block_size, vocab_size, max_row_tokens
        self._sampling = SlotSampling(SamplingParams(), key=0, vocab_size=vocab_size, token_ids=(0,), num_prompt_tokens=1)
        self._shape: RoundShape | None = None
        self._rows: Sequence[RoundRow] = ()

    def round_ms(self, shape: RoundShape) -> float:
        """See `RoundTimer.round_ms`. A first round of a shape brings its block tables, and is not timed."""
        if shape != self._shape:
            self._shape, self._rows = shape, self._open(shape)
            self._runner.launch(self._rows).results()
        started = time.perf_counter()
        self._runner.launch(self._rows).results()
        return (time.perf_counter() - started) * 1e3

    def _open(self, shape: RoundShape) -> list[RoundRow]:
        num_blocks, rows = shape.num_blocks(self._block_size), []
        for slot, token_ids in enumerate(_token_rows(shape, self._vocab_size)):
            self._runner.open(slot, self._sampling)
            num_drafts = len(token_ids) - 1 if len(token_ids) <= self._max_row_tokens else 0
            blocks = range(slot * num_blocks, (slot + 1) * num_blocks)
            rows.append(RoundRow(slot, shape.context, token_ids, num_drafts, blocks, self._sampling))
        return rows


def _token_rows(shape: RoundShape, vocab_size: int) -> list[list[int]]:
    """Token ids of each row, all different: what an operation takes may depend on the numbers in it."""
    least, num_longer = divmod(shape.num_tokens, shape.num_rows)
    return [[(row * 7919 + index * 104_729) % vocab_size for index in range(least + (row < num_longer))] for row in range(shape.num_rows)]
