"""What rows pay for what they ask of the sampler: all of a round's kernels between the logits and acceptance, and log-probabilities."""

from collections.abc import Mapping
from functools import partial
from types import ModuleType
from typing import Any

import torch

from benchmarks.gpu.timing import graph_us
from specwire.engine.graphs import round_ops_torch, row_ops, row_ops_torch
from specwire.engine.graphs.slot_tables import write_slot_tables
from specwire.engine.graphs.tensors import RoundInputs, RoundLimits, SlotState
from specwire.engine.graphs.upload import RoundRow, Uploads
from specwire.engine.sampling.slot import SlotSampling
from specwire.sampling_params import SamplingParams

_BLOCK_SIZE = 16
_NUM_CHECKED = 32
KINDS: Mapping[str, SamplingParams] = {
    "nothing": SamplingParams(temperature=1.0),
    "nothing, greedy": SamplingParams(temperature=0.0),
    "top_p 0.95": SamplingParams(temperature=1.0, top_p=0.95),
    "top_k 50": SamplingParams(temperature=1.0, top_k=50),
    "top_k 50, top_p 0.95": SamplingParams(temperature=1.0, top_k=50, top_p=0.95),
    "min_p 0.05": SamplingParams(temperature=1.0, min_p=0.05),
    "penalties": SamplingParams(temperature=1.0, repetition_penalty=1.1, frequency_penalty=0.2),
    "bias, min_tokens": SamplingParams(temperature=1.0, logit_bias={7: 5.0}, min_tokens=100, stop_token_ids=(9,)),
    "logprobs 5": SamplingParams(temperature=1.0, logprobs=5),
    "logprobs 20": SamplingParams(temperature=1.0, logprobs=20),
}


class Rows:
    """Rows of logits, each of a slot of its own with the same parameters.

    Args:
        params: of all rows.
        num_rows: of logits.
        vocab_size: their columns.
        device: where they are.
    """

    def __init__(self, params: SamplingParams, num_rows: int, vocab_size: int, device: torch.device) -> None:
        limits = RoundLimits(num_rows, 0, num_rows, 64)
        uploads = Uploads(limits, 64 // _BLOCK_SIZE, 1, device)
        self.state = SlotState.allocate(limits, _BLOCK_SIZE, device, vocab_size)
        self.inputs = RoundInputs.allocate(limits, 64 // _BLOCK_SIZE, device)
        self.logits = torch.randn(num_rows, vocab_size, device=device) * 3
        rows = []
        for slot in range(num_rows):
            prompt = torch.randint(0, vocab_size, (40,)).tolist()
            sampling = SlotSampling(params, key=slot, vocab_size=vocab_size, token_ids=prompt, num_prompt_tokens=30)
            write_slot_tables(self.state, slot, sampling, uploads.open(slot, sampling))
            rows.append(RoundRow(slot, len(prompt) - 1, prompt[-1:], 0, [0, 1, 2], sampling))
        uploads.send(rows, 0)
        round_ops_torch.apply_changes(uploads.on_device, self.state)
        round_ops_torch.prepare(uploads.on_device, self.state, self.inputs, _BLOCK_SIZE, 4)

    def first(self, num_rows: int) -> RoundInputs:
        """The inputs of the first rows."""
        return self.inputs.first(num_rows, num_rows, num_rows)


def sample(ops: ModuleType, logits: torch.Tensor, state: SlotState, inputs: RoundInputs) -> torch.Tensor:
    """The tokens of all rows; `inputs.results` says that each emits one."""
    ops.find_cuts(logits, state, inputs)
    token_ids = ops.sample_targets(logits, state, inputs)
    ops.report_logprobs(logits, state, inputs)
    return token_ids


def num_different(rows: Rows) -> int:
    """How many of the first rows have another token than the torch twin gives them: none but for near ties."""
    inputs = rows.first(min(_NUM_CHECKED, len(rows.logits)))
    logits = rows.logits[: len(inputs.asks)]
    return int((sample(row_ops, logits, rows.state, inputs) != sample(row_ops_torch, logits, rows.state, inputs)).sum())


def time_rows(bandwidth: float, vocab_size: int = 128256) -> list[dict[str, Any]]:
    """Each kind over some numbers of rows; the floor reads the logits once."""
    results = []
    for num_rows in (1, 32, 256, 2304):
        for kind, params in KINDS.items():
            if num_rows == 2304 and not kind.startswith("nothing"):
                continue
            rows = Rows(params, num_rows, vocab_size, torch.device("cuda"))
            different = num_different(rows)
            assert different <= 1, f"{different} of {_NUM_CHECKED} rows with {kind} have another token than the twin's"
            us = graph_us([partial(sample, row_ops, rows.logits, rows.state, rows.inputs)])
            floor = rows.logits.numel() * 4 / bandwidth * 1e6
            results.append({"case": f"{num_rows} rows ask for {kind}", "num_different": different, "us": us, "floor_us": floor})
    return results
