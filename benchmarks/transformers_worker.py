"""Greedy generation with `transformers` in a process of its own: a JSON object a line in, one out.

python -m benchmarks.transformers_worker MODEL_FOLDER DTYPE NUM_THREADS

In: {"prompt": token ids, "num_tokens": n}. Out: {"token_ids": n ids, "times": n times in s}; first of all {"ready": true}.
"""

import json
import sys
import time

import torch
import transformers
from transformers.generation.streamers import BaseStreamer

from specwire.engine.models.loader import parse_dtype


class Clock(BaseStreamer):
    """When tokens come; the prompt comes first and does not count."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt_has_come = False

    def put(self, value: torch.Tensor) -> None:
        if self._prompt_has_come:
            self.times.append(time.perf_counter())
        self._prompt_has_come = True

    def end(self) -> None:
        pass


def main() -> None:
    folder, dtype, num_threads = sys.argv[1:]
    torch.set_num_threads(int(num_threads))
    transformers.utils.logging.disable_progress_bar()
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=parse_dtype(dtype)).eval()
    model.generation_config.eos_token_id = None  # all answers have the length that was asked for
    print(json.dumps({"ready": True}), flush=True)
    for line in sys.stdin:
        request = json.loads(line)
        ids, num_tokens, clock = torch.tensor([request["prompt"]]), request["num_tokens"], Clock()
        output = model.generate(ids, attention_mask=torch.ones_like(ids), do_sample=False, streamer=clock, max_new_tokens=num_tokens)
        print(json.dumps({"token_ids": output[0, ids.shape[1] :].tolist(), "times": clock.times}), flush=True)


if __name__ == "__main__":
    main()
