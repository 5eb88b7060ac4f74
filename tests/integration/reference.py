"""What a request must give: the target decoded one token a step, alone, by the engine without any service."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from specwire.engine.batch import Segment
from specwire.engine.kv_cache import BLOCK_SIZE, KVCache
from specwire.engine.models.loader import load_model
from specwire.engine.runner import ModelRunner
from specwire.engine.sampling.sampler import SampleMargins
from specwire.engine.sampling.segments import SegmentRows, sample_segments
from specwire.engine.sampling.slot import SlotSampling
from specwire.messages import TokenLogprobs
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Expected:
    """One choice. logprobs has an entry a token iff asked for; margins says how close each token was to being another one."""

    token_ids: list[int]
    text: str
    finish_reason: str
    logprobs: list[TokenLogprobs] | None
    margins: list[SampleMargins]


class OneTokenLoop:
    """Decodes with a model, without batches, drafts, prefix cache or lookahead.

    Args:
        folder: of the model and its tokenizer.
        max_model_len: most tokens of a sequence.
        num_threads: as the services have them, so that sums round alike.
    """

    def __init__(
        self, folder: Path, max_model_len: int, num_threads: int, *, dtype: torch.dtype = torch.float32, device: str = "cpu"
    ) -> None:  # fmt: skip
        self.tokenizer = Tokenizer.from_folder(folder)
        self.max_model_len = max_model_len
        self._num_threads = num_threads
        self._model = load_model(folder, dtype, device)
        num_blocks = -(-max_model_len // BLOCK_SIZE)
        self._runner = ModelRunner(self._model, KVCache(self._model.config, num_blocks, dtype, device))
        self._block_table = range(num_blocks)

    def generate(self, prompt: Sequence[int], params: SamplingParams, *, choice: int = 0) -> Expected:
        """Runs to EOS, a stop id, max_tokens or max_model_len. Stop strings are not known here; `params` has a seed unless it is greedy."""
        assert not params.stop, "the reference knows no stop strings"
        assert params.is_greedy or params.seed is not None, "a reference needs the noise's key"
        tokens = list(prompt)
        slot = SlotSampling(
            params, key=params.seed or 0, choice=choice, vocab_size=self._model.config.vocab_size, token_ids=tokens,
            num_prompt_tokens=len(tokens), eos_token_ids=self.tokenizer.eos_token_ids, device=self._model.device,
        )  # fmt: skip
        most = self.max_model_len if params.max_tokens is None else min(self.max_model_len, len(prompt) + params.max_tokens)
        stop_ids = {*params.stop_token_ids, *(() if params.ignore_eos else self.tokenizer.eos_token_ids)}
        logprobs: list[TokenLogprobs] = []
        margins: list[SampleMargins] = []
        num_computed = 0
        with num_threads(self._num_threads):
            while True:
                hidden = self._runner.forward(self._runner.batch([Segment(tokens[num_computed:], num_computed, self._block_table)]))
                logits = self._runner.logits(hidden, [len(hidden) - 1])
                [sampled] = sample_segments(logits, [SegmentRows(slot, len(tokens))], margins=True)
                assert not sampled.is_bad, f"bad logits after {len(tokens)} tokens"
                num_computed = len(tokens)
                tokens += sampled.token_ids
                slot.append(sampled.token_ids)
                logprobs += sampled.logprobs or ()
                margins += sampled.margins or ()
                if tokens[-1] in stop_ids and len(tokens) - len(prompt) >= params.min_tokens:
                    output = tokens[len(prompt) :]
                    return Expected(output, self.tokenizer.decode(output[:-1]), "stop", logprobs if params.logprobs is not None else None, margins)
                if len(tokens) == most:
                    output = tokens[len(prompt) :]
                    return Expected(output, self.tokenizer.decode(output), "length", logprobs if params.logprobs is not None else None, margins)


@contextmanager
def num_threads(count: int) -> Iterator[None]:
    """This thread's number of threads for operators, for a while."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)
