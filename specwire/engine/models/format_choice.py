"""Which format of the weights a model is loaded in, and which is the fastest here."""

import json
import logging
import os
import time
from collections.abc import Sequence
from pathlib import Path

import torch

from specwire.engine.cache_dir import remembered
from specwire.engine.kernels.linear import Linear
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.weights import FORMAT_DTYPES, WeightsRequest, check_weights, make_linear, uses_tiles, why_no_half_tiles

logger = logging.getLogger(__name__)

_DENSE = {torch.bfloat16: "bf16", torch.float32: "fp32"}
_NUM_REPEATS = 9
_MAX_NUMBERS = 16_000_000
"""Of the weights that are timed: enough not to stay in a core's own cache, few enough to be made in a moment."""
_MAX_LAYERS = 8
_MAX_FEATURES = 4096
_CLEARLY_FASTER = 0.75
"""Share of the first candidate's time that another must stay below to be taken: the first takes the least memory, and noise must not decide."""


def choose_format(request: WeightsRequest, config: ModelConfig, device: str, *, has_q4: bool, may_measure: bool) -> str:
    """The format that a model is loaded in, a name of `FORMAT_DTYPES`.

    What is asked for is taken. Auto takes the fastest of those that hold the checkpoint's numbers without rounding them further than
    bfloat16 does: 4 bits are a candidate only if the checkpoint has them.

    Args:
        has_q4: the checkpoint has its linear layers in 4 bits.
        may_measure: false takes bf16 for auto.
    """
    check_weights(request, device)
    if request.weights != "auto":
        return request.weights
    if request.dtype is not None:
        return _DENSE[request.dtype]
    if torch.device(device).type != "cpu" or not may_measure:
        return "bf16"
    if has_q4 and uses_tiles("int4"):
        return "int4"  # a tenth to a third of any other's time
    if not has_q4 and not why_no_half_tiles(config):
        return "bf16"  # half of float32's bytes, and twice its multiplications
    return fastest_format(("int4", "bf16") if has_q4 else ("bf16", "fp32"), config, request.num_rows)


def fastest_format(candidates: Sequence[str], config: ModelConfig, num_rows: int) -> str:
    """The candidate that takes the least time for a step of one row and one of num_rows together; the first unless another is clearly
    faster. Measured once per kind of machine, number of threads and model shape: replicas that share a cache directory choose alike, and
    others will hardly differ by chance."""
    shapes = _layer_shapes(config)
    key = (candidates, shapes, num_rows, torch.get_num_threads(), torch.__version__, torch.backends.cpu.get_cpu_capability(), _cpu_name())
    decision = json.loads(remembered("weights", json.dumps(key), lambda: json.dumps(_measure(candidates, shapes, num_rows))))
    logger.info(
        "weights in %s, as was measured here on %d threads (ms for 1 and %d rows of %.1f million weights: %s); "
        "replicas on other machines may choose otherwise: give all of them the same --weights",
        decision["chosen"], torch.get_num_threads(), num_rows, decision["num_weights"] / 1e6,
        ", ".join(f"{name} {one:.2f} and {many:.2f}" for name, (one, many) in decision["ms"].items()),
    )  # fmt: skip
    return str(decision["chosen"])


def _measure(candidates: Sequence[str], shapes: list[tuple[int, int]], num_rows: int) -> dict[str, object]:
    """Interleaved runs of as many layers as `_MAX_NUMBERS` allows, by format: {"chosen", "num_weights", "ms": {format: (one row, more)}}."""
    num_weights = sum(out_features * in_features for out_features, in_features in shapes)
    num_layers = min(max(1, _MAX_NUMBERS // num_weights), _MAX_LAYERS)
    generator = torch.Generator().manual_seed(0)
    weights = [torch.empty(shape).normal_(generator=generator) for shape in shapes]
    layers = {name: [_timed_linear(name, weight) for _ in range(num_layers) for weight in weights] for name in candidates}
    times: dict[str, dict[int, list[float]]] = {name: {1: [], num_rows: []} for name in candidates}
    for repeat in range(_NUM_REPEATS + 1):
        for rows in dict.fromkeys((1, num_rows)):
            for name in candidates:
                inputs = {width: torch.ones(rows, width, dtype=FORMAT_DTYPES[name]) for _, width in shapes}
                started = time.perf_counter()
                for linear, (_, width) in zip(layers[name], shapes * num_layers, strict=True):
                    linear(inputs[width])
                if repeat:  # the first pays first-call costs
                    times[name][rows].append((time.perf_counter() - started) * 1e3)
    # What else runs on the machine only ever adds time.
    ms = {name: (min(times[name][1]), min(times[name][num_rows])) for name in candidates}
    first, *others = candidates
    fastest = min(others, key=lambda name: sum(ms[name]))
    chosen = fastest if sum(ms[fastest]) < _CLEARLY_FASTER * sum(ms[first]) else first
    return {"chosen": chosen, "num_weights": num_weights * num_layers, "ms": ms}


def _timed_linear(name: str, weight: torch.Tensor) -> Linear:
    return make_linear(name, lambda: None, lambda: weight.to(FORMAT_DTYPES[name]), None)


def _layer_shapes(config: ModelConfig) -> list[tuple[int, int]]:
    """(out_features, in_features) of a layer's products, no larger than what can be timed in a moment."""
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    hidden, inner = config.hidden_size, config.intermediate_size
    shapes = ((heads + 2 * kv, hidden), (hidden, heads), (2 * inner, hidden), (hidden, inner))
    return [(min(rows, _MAX_FEATURES), min(columns, _MAX_FEATURES)) for rows, columns in shapes]


def _cpu_name() -> str:
    path = Path("/proc/cpuinfo")
    lines = path.read_text(encoding="utf-8").splitlines() if path.is_file() else []
    return next((line for line in lines if line.startswith("model name")), os.uname().machine)
