"""`python -m tests.engine.older_cpu FOLDER`: loads a model in every format, as on a CPU without the instructions that this
one may have, and prints {format: [class of the layers' products, largest difference to float32's probabilities]} as JSON."""

import json
import logging
import sys
from pathlib import Path
from unittest import mock

import torch

from specwire.engine.batch import Segment
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.format_choice import choose_format
from specwire.engine.models.loader import load_model
from specwire.engine.models.weights import FORMAT_DTYPES, WeightsRequest
from specwire.engine.runner import ModelRunner

TOKENS = [7, 200, 31, 64, 100, 3, 3, 90, 12, 255, 0, 41]


def main() -> None:
    logging.basicConfig(level=logging.INFO, stream=sys.stderr)
    torch.set_num_threads(1)
    folder = Path(sys.argv[1])
    # The rest is told by environment variables of torch and oneDNN; these two it asks the CPU itself.
    with mock.patch.object(torch.cpu, "get_capabilities", dict), mock.patch.object(torch.cpu, "_is_vnni_supported", return_value=False):
        found: dict[str, list[object]] = {}
        config = ModelConfig.from_folder(folder)
        for has_q4 in (False, True):
            chosen = choose_format(WeightsRequest(), config, "cpu", has_q4=has_q4, may_measure=True)
            found[f"auto, {'4 bits' if has_q4 else 'bfloat16'}"] = [chosen]
        probs = {}
        for weights in ("fp32", "bf16", "int8", "int4"):
            model = load_model(folder, FORMAT_DTYPES[weights], weights=weights)
            runner = ModelRunner(model, KVCache(model.config, 4, model.dtype))
            batch = runner.batch([Segment(TOKENS, 0, range(4))])
            probs[weights] = runner.logits(runner.forward(batch), range(len(TOKENS))).softmax(-1)
            found[weights] = [type(model.weights.layers[0].qkv).__name__, (probs[weights] - probs["fp32"]).abs().max().item()]
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
