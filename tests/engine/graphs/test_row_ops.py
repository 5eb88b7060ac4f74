"""Everything that a row may ask of the sampler, on the device, against the sampler on the host: over rounds, so that counts grow."""

import random
from dataclasses import dataclass, field

import pytest
import torch

from specwire.engine.graphs import filters, round_ops_torch, row_ops, row_ops_torch
from specwire.engine.graphs.asks import asked_numbers
from specwire.engine.graphs.slot_tables import write_slot_tables
from specwire.engine.graphs.tensors import RoundInputs, RoundLimits, SlotState
from specwire.engine.graphs.upload import RoundRow, Uploads
from specwire.engine.sampling.segments import SegmentRows, SegmentTokens, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.engine.sampling.support import Filters, filtered_support
from specwire.sampling_params import SamplingParams
from tests.engine.graphs.mixes import MIXES, params_of

DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
LIMITS = RoundLimits(max_num_seqs=12, max_num_draft_tokens=4, max_num_batched_tokens=200, max_model_len=300)
SCRATCH = 1000
ROWS = {"triton": row_ops, "torch": row_ops_torch}
BACKENDS = pytest.mark.parametrize("backend", ROWS)


@dataclass
class Device:
    """Sampling of rounds whose logits are given. What surrounds it is the twins' (`test_round_ops` has the kernels)."""

    backend: str
    vocab_size: int
    limits: RoundLimits = LIMITS
    slots: dict[int, SlotSampling] = field(default_factory=dict)
    num_tokens: dict[int, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.rows = ROWS[self.backend]
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
        round_ops_torch.apply_changes(self.uploads.on_device, self.state)
        round_ops_torch.prepare(self.uploads.on_device, self.state, inputs, 16, SCRATCH)
        self.rows.find_cuts(padded, self.state, inputs)
        targets = self.rows.sample_targets(padded, self.state, inputs)
        round_ops_torch.accept(self.uploads.on_device, self.state, inputs, targets)
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


def run_random_rounds(device: Device, params: list[SamplingParams | None], rng: random.Random, num_rounds: int, num_rows: int) -> None:
    """Rounds of random rows with 0 to 4 drafts. None stands for parameters of its own for each sequence."""
    generator = torch.Generator().manual_seed(rng.randrange(2**31))
    vocab_size = device.vocab_size
    num_excused = num_accepted = 0
    for _ in range(num_rounds):
        for slot, wanted in enumerate(params):
            if slot not in device.slots or device.num_tokens[slot] > 60:
                tokens = [rng.randrange(vocab_size) for _ in range(rng.randint(2, 30))]
                rates = rng.choice([None, None, (0.9, 0.5, 0.4), (1.0, 1.0, 1.0, 0.0), (0.0,)])
                device.open(slot, wanted or params_of(rng, vocab_size), tokens, rng.randint(1, len(tokens)), rates, rng.getrandbits(64))
        drafts = {slot: [rng.randrange(12) for _ in range(rng.choice([0, 0, 1, 2, 4]))] for slot in rng.sample(range(len(params)), num_rows)}
        logits = torch.randn(sum(1 + len(ids) for ids in drafts.values()), vocab_size, generator=generator) * 2
        logits[:, :12] += 5  # drafts are accepted now and then
        num_excused += device.round(drafts, logits)
        num_accepted += int(device.inputs.results[:num_rows, 0].clamp(min=0).sum())
    assert num_accepted > 0
    assert num_excused <= num_rounds * num_rows // 8


@pytest.mark.parametrize("vocab_size", [61, 5003])
def test_random_mixes_equal_the_host(vocab_size):
    run_random_rounds(Device("torch", vocab_size), [None] * 12, random.Random(vocab_size), 40 if vocab_size < 100 else 2, 8)


@pytest.mark.parametrize(("vocab_size", "num_rounds"), [(61, 2), (2503, 1), pytest.param(5003, 2, marks=pytest.mark.slow)])
def test_kernels_equal_the_host(vocab_size, num_rounds):
    run_random_rounds(Device("triton", vocab_size), MIXES, random.Random(6), num_rounds, 6)


def filtered(logits: torch.Tensor, asked: list[tuple[float, int, float, float]]) -> tuple[SlotState, RoundInputs]:
    """A state and inputs whose rows have these (temperature, top_k, top_p, min_p), each a request of its own."""
    limits = RoundLimits(len(asked), 0, len(asked), 16)
    state, inputs = SlotState.allocate(limits, 16, DEVICE, logits.shape[1]), RoundInputs.allocate(limits, 1, DEVICE)
    for row, (temperature, top_k, top_p, min_p) in enumerate(asked):
        params = SamplingParams(temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
        sampling = SlotSampling(params, key=1, vocab_size=logits.shape[1], token_ids=[1], num_prompt_tokens=1)
        state.asked[row] = torch.tensor(asked_numbers(sampling))
        inputs.temperatures[row] = temperature
    index = torch.arange(len(asked), dtype=torch.int32, device=DEVICE)
    inputs.slots.copy_(index)
    inputs.requests.copy_(index)
    inputs.asks.copy_(state.asked[:, 0])
    return state, inputs


@BACKENDS
@pytest.mark.parametrize("vocab_size", [37, 2503])
def test_cuts_among_ties(backend, vocab_size, monkeypatch):
    """Logits of few distinct values: cuts fall among equal ones, and the lowest ids stay. There are more rows than programs."""
    monkeypatch.setattr(filters, "_PROGRAMS", 4)
    asked = [
        (1.0, 5, 1.0, 0.0), (0.7, 0, 0.6, 0.0), (1.0, 0, 1.0, 1.0), (1.3, 9, 0.5, 0.02), (1.0, 1, 0.3, 0.0), (2.0, 0, 0.95, 0.3),
        (0.1, 30, 0.999, 0.0), (1.0, 20, 1.0, 0.0), (0.2, 20, 0.7, 0.0), (1.0, 30, 1.0, 0.001),
    ]  # fmt: skip
    generator = torch.Generator().manual_seed(vocab_size)
    logits = (torch.randn(len(asked), vocab_size, generator=generator) * 2).round()  # zeros of both signs among them
    logits[4] = 0.0
    logits[4, ::2] = -0.0
    logits[5, 3:] = -torch.inf
    logits[7:] *= 500  # the best 20 lie far apart
    logits[9, 5:] = -torch.inf  # fewer than top_k
    state, inputs = filtered(logits, asked)
    ROWS[backend].find_cuts(logits.to(DEVICE), state, inputs)
    temperatures, top_ks, top_ps, min_ps = (torch.tensor(column) for column in zip(*asked, strict=True))
    top_ks = torch.where(top_ks > 0, top_ks, 2**31)
    support = filtered_support(logits, Filters(temperatures, top_ks, top_ps.double(), min_ps.double()))
    for row, (cut, cut_id) in enumerate(zip(inputs.cut_values.tolist(), inputs.cut_ids.tolist(), strict=True)):
        kept = (logits[row] > cut) | ((logits[row] == cut) & (torch.arange(vocab_size) <= cut_id))
        assert set(kept.nonzero()[:, 0].tolist()) == set(support.token_ids[row, : support.sizes[row]].tolist()), asked[row]


@BACKENDS
@pytest.mark.parametrize("share", [0.02, 0.5, 0.97, 0.99999])
def test_masses_of_top_p_are_exact_to_1e_5(backend, share):
    """Of a nearly flat distribution, where the support is long."""
    logits = torch.randn(1, 9001, generator=torch.Generator().manual_seed(5)) * 0.2
    state, inputs = filtered(logits, [(1.0, 0, share, 0.0)])
    ROWS[backend].find_cuts(logits.to(DEVICE), state, inputs)
    probs = logits[0].double().softmax(0)
    kept = (logits[0] > inputs.cut_values[0].cpu()) | ((logits[0] == inputs.cut_values[0].cpu()) & (torch.arange(9001) <= inputs.cut_ids[0].cpu()))
    mass = float(probs[kept].sum())
    assert mass >= share - 1e-5
    assert mass - float(probs[kept].min()) <= share + 1e-5


@pytest.mark.filterwarnings("ignore::RuntimeWarning")  # infinity less infinity, in the interpreter
@BACKENDS
def test_bad_rows_stay_bad_behind_masks_and_filters(backend):
    """As on the host: a NaN or +inf anywhere, also where a mask hides it; nothing left to sample."""
    device = Device(backend, 61)
    mask = SamplingParams(temperature=1.0, allowed_token_ids=(5, 6), max_tokens=None)
    for slot in range(6):
        device.open(slot, mask if slot < 4 else SamplingParams(temperature=0.9, top_p=0.5, max_tokens=None), [3, 4], 2)
    logits = torch.zeros(6, 61)
    logits[0, 30] = float("nan")
    logits[1, 30] = float("inf")
    logits[2, [5, 6]] = -torch.inf
    logits[4, 60] = float("nan")
    logits[5] = -torch.inf
    device.round({slot: [] for slot in range(6)}, logits)
    assert device.state.last_tokens[:3].tolist() == [-1, -1, -1]
    assert device.state.last_tokens[3] in (5, 6)
    assert device.state.last_tokens[4:6].tolist() == [-1, -1]


@BACKENDS
@pytest.mark.parametrize("scale", [0.5, 40])
def test_logprobs_among_ties_and_far_apart(backend, scale):
    """The likeliest tokens by rising id where they are equal; also where few lie near the best one."""
    device = Device(backend, 300)
    for slot, num in enumerate([20, 3, 0]):
        device.open(slot, SamplingParams(logprobs=num, logit_bias={7: 5.0}, max_tokens=None), [3, 4], 2, (1.0, 0.0))
    logits = (torch.randn(5, 300, generator=torch.Generator().manual_seed(3)) * 3).round() * scale
    device.round({0: [5, 6], 1: [], 2: []}, logits)


def test_an_unasked_logprob_is_not_written():
    device = Device("torch", 61)
    device.inputs.logprobs.fill_(77)
    device.open(0, SamplingParams(logprobs=2), [3, 4], 2)
    device.open(1, SamplingParams(), [3, 4], 2)
    device.round({0: [5, 5], 1: [5]}, torch.randn(5, 61, generator=torch.Generator().manual_seed(1)))
    assert device.inputs.results[0, 0] == 0  # so that only the first of three rows emits
    assert (device.inputs.logprobs[0, :3] != 77).all()
    assert (device.inputs.logprobs[0, 3:] == 77).all()
    assert (device.inputs.logprobs[1:] == 77).all()


def test_table_memory():
    state = SlotState.allocate(LIMITS, 16, DEVICE, 1000)
    assert (state.words.dtype, state.num_table_bytes) == (torch.int16, 12 * 1000 * 6)
    longer = SlotState.allocate(RoundLimits(12, 4, 200, 2**13 + 1), 16, DEVICE, 1000)
    assert (longer.words.dtype, longer.num_table_bytes) == (torch.int32, 12 * 1000 * 8)
