"""Everything that a row may ask of the sampler, on the device, against the sampler on the host: over rounds, so that counts grow."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from specwire.engine.graphs import round_ops, round_ops_torch, row_ops, row_ops_torch
from specwire.engine.graphs.slot_tables import write_slot_tables
from specwire.engine.graphs.tensors import RoundInputs, RoundLimits, SlotState
from specwire.engine.graphs.upload import RoundRow, Uploads
from specwire.engine.sampling.segments import SegmentRows, SegmentTokens, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = RoundLimits(max_num_seqs=12, max_num_draft_tokens=4, max_num_batched_tokens=200, max_model_len=300)
SCRATCH = 1000
BACKENDS = {"triton": (round_ops, row_ops), "torch": (round_ops_torch, row_ops_torch)}
OPS = pytest.mark.parametrize("backend", BACKENDS)


@dataclass
class Device:
    """The kernels of a round around the model, whose logits are given."""

    backend: str
    vocab_size: int
    limits: RoundLimits = LIMITS
    slots: dict[int, SlotSampling] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rounds, self.rows = BACKENDS[self.backend]
        max_blocks = -(-self.limits.max_model_len // 16)
        self.uploads = Uploads(self.limits, max_blocks, 1, DEVICE)
        self.state = SlotState.allocate(self.limits, 16, DEVICE, self.vocab_size)
        self.state.adjustments.fill_(float("nan"))
        self.state.words.fill_(77)
        self.inputs = RoundInputs.allocate(self.limits, max_blocks, DEVICE)

    def open(self, slot: int, params: SamplingParams, tokens: list[int], num_prompt: int, rates: tuple[float, ...] | None = None, key: int = 7):
        sampling = SlotSampling(
            params, key=key, choice=slot % 3, vocab_size=self.vocab_size, token_ids=tokens, num_prompt_tokens=num_prompt,
            eos_token_ids=(2,), synthetic_rates=rates,
        )  # fmt: skip
        self.slots[slot], self.num_tokens[slot] = sampling, len(tokens)
        write_slot_tables(self.state, slot, sampling, self.uploads.open(slot, sampling))

    def sample(self, drafts: dict[int, list[int]], logits: torch.Tensor) -> None:
        """One round of a row a slot, of its last token and drafts; results are left in `inputs`."""
        rows = [
            RoundRow(slot, self.num_tokens[slot] - 1, [9, *ids], len(ids), list(range(19)), self.slots[slot], samples=True)
            for slot, ids in drafts.items()
        ]
        sent = self.uploads.send(rows, 0)
        inputs = self.inputs.first(len(rows) + 1, sent.num_tokens + 2, sent.num_logit_rows + 2)
        padded = torch.cat((logits, torch.full((2, self.vocab_size), float("nan")))).to(DEVICE)
        self.rounds.apply_changes(self.uploads.on_device, self.state)
        self.rounds.prepare(self.uploads.on_device, self.state, inputs, 16, SCRATCH)
        self.rows.find_cuts(padded, self.state, inputs)
        targets = self.rows.sample_targets(padded, self.state, inputs)
        self.rounds.accept(self.uploads.on_device, self.state, inputs, targets)
        self.rows.report_logprobs(padded, self.state, inputs)
        assert torch.equal(padded[:-2].cpu().nan_to_num(5), logits.nan_to_num(5)), "the kept logits changed"

    def round(self, drafts: dict[int, list[int]], logits: torch.Tensor) -> int:
        """Samples and compares with the host; returns how many near ties were excused. Their slots are dropped."""
        starts, segments = [0], []
        for slot, ids in drafts.items():
            segments.append(SegmentRows(self.slots[slot], self.num_tokens[slot], ids))
            starts.append(starts[-1] + 1 + len(ids))
        expected = sample_segments(logits, segments, margins=True)
        self.sample(drafts, logits)
        num_excused = 0
        for index, (slot, truth) in enumerate(zip(drafts, expected, strict=True)):
            if any(margins.is_near_tie for margins in truth.margins or ()):
                num_excused += 1
                del self.slots[slot]
                continue
            self.compare(index, slot, truth, starts[index])
            self.slots[slot].append(truth.token_ids)
            self.num_tokens[slot] += len(truth.token_ids)
        return num_excused

    def compare(self, index: int, slot: int, truth: SegmentTokens, start: int) -> None:
        """One row's results."""
        first, *tokens = self.inputs.results[index].tolist()
        assert first == (-1 - truth.num_accepted if truth.is_bad else truth.num_accepted), (slot, self.slots[slot].params)
        assert tokens[: len(truth.token_ids)] == list(truth.token_ids), (slot, self.slots[slot].params)
        assert self.state.last_tokens[slot] == (-1 if truth.is_bad else truth.token_ids[-1])
        for column, entry in enumerate(truth.logprobs or ()):
            num = len(entry.top)
            ours = self.inputs.logprobs[start + column].tolist()
            assert ours[: 1 + num] == pytest.approx([entry.sampled, *(value for _, value in entry.top)], abs=1e-5)
            assert self.inputs.logprob_ids[start + column, :num].tolist() == [token_id for token_id, _ in entry.top]


def params_of(rng: random.Random, vocab_size: int) -> SamplingParams:
    """A random mix; greedy, plain and filtered ones among them."""

    def maybe(share: float, value):
        return value if rng.random() < share else None

    ids = range(3, vocab_size)
    wanted = {
        "temperature": rng.choice([0.0, 0.3, 1.0, 1.7]),
        "top_k": maybe(0.4, rng.choice([1, 2, 5, 40, vocab_size])),
        "top_p": maybe(0.4, rng.choice([0.05, 0.5, 0.9, 0.999])),
        "min_p": maybe(0.3, rng.choice([0.001, 0.1, 1.0])),
        "repetition_penalty": maybe(0.3, rng.choice([0.7, 1.4])),
        "frequency_penalty": maybe(0.3, rng.choice([-0.5, 0.8])),
        "presence_penalty": maybe(0.2, rng.choice([-0.4, 1.1])),
        "logit_bias": maybe(0.3, {i: rng.uniform(-8, 8) for i in rng.sample(ids, 5)}),
        "allowed_token_ids": maybe(0.2, tuple(rng.sample(ids, rng.choice([3, vocab_size // 2])))),
        "bad_words_token_ids": maybe(0.2, tuple((i,) for i in rng.sample(ids, 2))),
        "min_tokens": maybe(0.3, rng.choice([1, 4, 9])),
        "stop_token_ids": maybe(0.5, tuple(rng.sample(ids, 2))),
        "logprobs": maybe(0.3, rng.choice([0, 1, 5, 20])),
    }
    return SamplingParams(max_tokens=None, **{name: value for name, value in wanted.items() if value is not None})


@OPS
@pytest.mark.parametrize(("vocab_size", "num_rounds"), [(61, 12), (5003, 3)])
def test_random_mixes_equal_the_host(backend, vocab_size, num_rounds):
    rng, generator = random.Random(vocab_size), torch.Generator().manual_seed(vocab_size)
    device = Device(backend, vocab_size)
    num_excused = num_rows = 0
    for _ in range(num_rounds):
        for slot in range(12):
            if slot not in device.slots or device.num_tokens[slot] > 60 or rng.random() < 0.1:
                tokens = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 30))]
                rates = rng.choice([None, None, (0.9, 0.5, 0.4), (1.0, 1.0, 1.0, 0.0), (0.0,)])
                try:
                    device.open(slot, params_of(rng, vocab_size), tokens, rng.randint(1, len(tokens)), rates, rng.getrandbits(64))
                except ValueError:
                    device.open(slot, SamplingParams(max_tokens=None), tokens, 1)
        drafts = {slot: [rng.randrange(12) for _ in range(rng.choice([0, 0, 1, 2, 4]))] for slot in rng.sample(range(12), 8)}
        logits = torch.randn(sum(1 + len(ids) for ids in drafts.values()), vocab_size, generator=generator) * 2
        logits[:, :12] += 3  # drafts are accepted now and then
        num_excused += device.round(drafts, logits)
        num_rows += len(drafts)
    assert num_excused <= num_rows // 8
