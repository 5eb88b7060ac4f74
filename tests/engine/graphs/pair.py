"""The verifier and the round runner on the same weights, given the same rounds."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import pytest

from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.backends import Backend
from specwire.engine.graphs.results import Round
from specwire.engine.graphs.runner import RoundRunner
from specwire.engine.graphs.tensors import RoundLimits
from specwire.engine.graphs.upload import RoundRow
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.decoder import Decoder
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import RowStatus, SlotRef
from specwire.sampling_params import SamplingParams
from tests.verifier import harness
from tests.verifier.harness import EOS, Rounds, decode, make_verifier, open_message, prefill

LIMITS = RoundLimits(max_num_seqs=8, max_num_draft_tokens=8, max_num_batched_tokens=256, max_model_len=256)


@dataclass
class Known:
    """One sequence as both know it."""

    slot: int
    epoch: int
    tokens: list[int]
    sampling: SlotSampling
    num_opened: int
    num_computed: int = 0
    last_round: int = 0
    last_num_drafts: int = 0


@dataclass
class Pair:
    """Runs each row on both; results are compared when the runner's round is read, `num_in_flight` rounds later at most."""

    model: Decoder
    backend: Backend | None = None
    num_in_flight: int = 2
    num_blocks: int = 128
    limits: RoundLimits = LIMITS
    rates: tuple[float, ...] | None = None  # drafts are accepted by chance
    sequences: dict[int, Known] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds = Rounds(make_verifier(self.model, num_blocks=self.num_blocks, enable_prefix_cache=False, synthetic_rates=self.rates))
        self.cache = KVCache(self.model.config, self.num_blocks, self.model.dtype, self.model.device)
        for layer in self.cache.layers:
            layer.fill_(float("nan"))
        self.blocks = BlockManager(self.num_blocks, enable_prefix_cache=False)
        self.runner = RoundRunner(self.model, self.cache, self.limits, num_in_flight=self.num_in_flight, backend=self.backend)
        self.in_flight: list[tuple[Round, list]] = []
        self.opens, self.closes = [], []
        self.num_accepted = self.num_run_ahead = self.num_epochs = 0

    def open(self, slot: int, tokens: Sequence[int], params: SamplingParams, key: int = 7, choice: int = 0) -> None:
        """Both open the slot in the next round."""
        self.num_epochs += 1
        if slot in self.sequences:
            self.closes.append(SlotRef(slot, self.sequences[slot].epoch))
            self.blocks.close(slot)
        self.opens.append(open_message(slot, tokens, params, epoch=self.num_epochs, noise_key=key, choice=choice))
        vocab_size = self.model.config.vocab_size
        sampling = SlotSampling(
            params, key=key, choice=choice, vocab_size=vocab_size, token_ids=tokens, num_prompt_tokens=len(tokens), eos_token_ids=(EOS,),
            synthetic_rates=self.rates,
        )  # fmt: skip
        self.blocks.open(slot, tokens)
        self.runner.open(slot, sampling)
        self.sequences[slot] = Known(slot, self.num_epochs, list(tokens), sampling, len(tokens))

    def launch(self, work: dict[int, int | Sequence[int]], *, run_ahead: bool = True) -> None:
        """One round: slot -> prefill budget, or drafts."""
        expected_rows, rows = [], []
        for slot, what in work.items():
            sequence = self.sequences[slot]
            base = len(sequence.tokens)
            if isinstance(what, int):
                count = min(what, sequence.num_opened - sequence.num_computed)
                samples = sequence.num_computed + count == sequence.num_opened
                expected_rows.append(prefill(slot, what, epoch=sequence.epoch))
                start, tokens, drafts, ahead = sequence.num_computed, sequence.tokens[sequence.num_computed :][:count], [], False
            else:
                drafts, samples, start = list(what), True, base - 1
                ahead = run_ahead and not drafts and not sequence.last_num_drafts and sequence.last_round > 0 and sequence.sampling.params.runs_ahead
                if ahead:
                    expected_rows.append(harness.ahead(slot, base, sequence.last_round, epoch=sequence.epoch))
                else:
                    expected_rows.append(decode(slot, sequence.tokens, drafts, epoch=sequence.epoch))
                tokens = [0 if ahead else sequence.tokens[-1], *drafts]
                self.num_run_ahead += ahead
            assert self.blocks.reserve(slot, start + len(tokens))
            rows.append(
                RoundRow(slot, start, tokens, len(drafts), list(self.blocks.block_table(slot)), sequence.sampling, samples=samples, from_device=ahead)
            )
        result = self.rounds.launch(expected_rows, opens=self.opens, closes=self.closes)
        self.opens, self.closes = [], []
        if len(self.in_flight) == self.num_in_flight:
            self.read()
        self.in_flight.append((self.runner.launch(rows), result.rows))
        for row, answer in zip(rows, result.rows, strict=True):
            sequence = self.sequences[row.slot]
            if answer.status is RowStatus.OK:
                sequence.num_computed += len(row.token_ids) - row.num_drafts + answer.num_accepted
                sequence.tokens += answer.token_ids
                sequence.sampling.append(answer.token_ids)
                self.num_accepted += answer.num_accepted
            sequence.last_round, sequence.last_num_drafts = self.rounds.round, row.num_drafts

    def read(self) -> None:
        """Compares the oldest round in flight."""
        launched, answers = self.in_flight.pop(0)
        for ours, answer in zip(launched.results(), answers, strict=True):
            assert ours.is_bad == (answer.status is RowStatus.BAD), (ours, answer)
            if not ours.is_bad:
                assert (ours.num_accepted, list(ours.token_ids)) == (answer.num_accepted, answer.token_ids)
                assert (ours.logprobs is None) == (answer.logprobs is None)
                for entry, known in zip(ours.logprobs or (), answer.logprobs or (), strict=True):
                    assert [token_id for token_id, _ in entry.top] == [token_id for token_id, _ in known.top]
                    values, known_values = ([of.sampled, *(value for _, value in of.top)] for of in (entry, known))
                    assert values == pytest.approx(known_values, abs=1e-4)

    def finish(self) -> None:
        """Compares all rounds in flight."""
        while self.in_flight:
            self.read()


def continuations(model: Decoder, opened: Mapping[int, tuple[Sequence[int], SamplingParams, int]], count: int) -> dict[int, list[int]]:
    """What the verifier says after slots' tokens, with their parameters and keys, without drafts."""
    rounds = Rounds(make_verifier(model, enable_prefix_cache=False, num_blocks=128))
    opens = [open_message(slot, tokens, params, noise_key=key, choice=slot % 2) for slot, (tokens, params, key) in opened.items()]
    result = rounds.launch([prefill(slot, 200) for slot in opened], opens=opens)
    emitted = {slot: list(row.token_ids) for slot, row in zip(opened, result.rows, strict=True)}
    for _ in range(count - 1):
        result = rounds.launch([decode(slot, [*opened[slot][0], *emitted[slot]]) for slot in opened])
        for slot, row in zip(opened, result.rows, strict=True):
            emitted[slot] += row.token_ids
    return emitted


def spoilt(tokens: Sequence[int], rng: random.Random, vocab_size: int) -> list[int]:
    """Drafts of which some tail may be wrong."""
    return [token if rng.random() < 0.85 else rng.randrange(vocab_size) for token in tokens]
