"""In which numbers a CPU keeps the weights of the linear layers, and which of them is the fastest here."""

import hashlib
import json
import logging
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from specwire import number_formats
from specwire.engine.cache_dir import remembered
from specwire.engine.kernels.linear import DenseLinear, Linear
from specwire.engine.kernels.packed_linear import DigitLinear, Int4Linear, Int8Linear, Q4Weight
from specwire.engine.models.config import ModelConfig
from specwire.number_formats import check_formats

logger = logging.getLogger(__name__)

FORMAT_DTYPES: dict[str, torch.dtype] = {weights: getattr(torch, dtype) for weights, dtype in number_formats.FORMAT_DTYPES.items()}
"""Format of the weights -> dtype of all that is computed with them, and of keys and values."""
_DENSE = {torch.bfloat16: "bf16", torch.float32: "fp32"}

_NUM_REPEATS = 9
_MAX_NUMBERS = 16_000_000
"""Of the weights that are timed: enough not to stay in a core's own cache, few enough to be made in a moment."""
_MAX_LAYERS = 8
_MAX_FEATURES = 4096
_CLEARLY_FASTER = 0.75
"""Share of the first candidate's time that another must stay below to be taken: the first takes the least memory, and noise must not decide."""


@dataclass(frozen=True, slots=True)
class WeightsRequest:
    """What a configuration asks for.

    Args:
        weights: a name of `FORMAT_DTYPES`, or auto.
        dtype: of the model, or None for auto.
        num_rows: the greatest number of rows that auto is chosen for, beside one.
    """

    weights: str = "auto"
    dtype: torch.dtype | None = None
    num_rows: int = 6


def check_weights(request: WeightsRequest, device: str) -> None:
    """Raises InvalidArgumentError for formats on CUDA, and for a dtype that does not go with the format."""
    dtype = "auto" if request.dtype is None else str(request.dtype).removeprefix("torch.")
    check_formats(request.weights, dtype, torch.device(device).type)


def format_hash(digest: str, weights: str, *, is_stored: bool) -> str:
    """The identity of weights that are kept in a format: where it rounds them, not the checkpoint's own.

    Args:
        digest: of the checkpoint.
        weights: the format; dense ones (and the empty one) are told apart by their dtype.
        is_stored: the checkpoint itself has 4 bits.
    """
    if weights not in ("int4", "int8"):
        return digest
    origin = "stored" if weights == "int4" and is_stored else "rounded"
    head = "int8" if has_8_bit_head(weights) else "fp32"
    if uses_tiles(weights):
        head += ", tiles"
    return hashlib.sha256(f"{digest} {weights} {origin} head {head}".encode()).hexdigest()


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


def make_linear(
    weights: str,
    read_q4: Callable[[], Q4Weight | None],
    read: Callable[[], torch.Tensor],
    bias: torch.Tensor | None,
    *,
    in_half_tiles: bool = False,
) -> Linear:
    """A linear layer in a format.

    Args:
        read_q4: the weight in 4 bits if the checkpoint has it so; otherwise it is rounded to them.
        read: the weight [out_features, in_features].
        in_half_tiles: as `uses_half_tiles` says.
    """
    if in_half_tiles:
        return _half_linear(read(), bias)
    if weights == "int4":
        weight = read_q4() or Q4Weight.rounded(read())
        return _tiled_linear(weight, bias) if uses_tiles(weights) else Int4Linear(weight, bias)
    return Int8Linear(read(), bias) if weights == "int8" else DenseLinear(read(), bias)


def make_head_linear(weights: str, weight: torch.Tensor, *, in_half_tiles: bool = False) -> Linear | None:
    """What multiplies with the vocabulary's weight: where the layers have few bits 8 bits, if this CPU is made for them; in_half_tiles, what
    multiplies the layers, too; None = float32."""
    if in_half_tiles:
        return _half_linear(weight, None)
    if uses_tiles(weights):
        from specwire.engine.cpu.linear import TiledHead  # brings a compiler

        return TiledHead(weight)
    return DigitLinear(weight) if has_8_bit_head(weights) else None


def uses_tiles(weights: str) -> bool:
    """Whether models in this format are computed by `specwire.engine.cpu` here: 4 bits, on CPUs with 512-bit integer dot products."""
    return weights == "int4" and DigitLinear.is_fast()


def log_missing_tiles(weights: str) -> None:
    """Says what takes longer in 4 or 8 bits on a CPU that is not made for them."""
    if weights in ("int4", "int8") and not DigitLinear.is_fast():
        layers = "; torch multiplies the layers, not compiled passes" if weights == "int4" else ""
        logger.info("this CPU has no 512-bit integer dot products (AVX-512 VNNI): the output layer of weights %s is float32%s", weights, layers)


def uses_half_tiles(weights: str, config: ModelConfig, device: torch.device | str) -> bool:
    """Whether a model in this format is computed by `specwire.engine.cpu` in float16 tiles: bf16, on CPUs with AVX512-FP16 and no AMX for
    bfloat16, whose own products torch has. Logs why not, where the format is bf16."""
    if weights != "bf16" or torch.device(device).type != "cpu":
        return False
    reason = why_no_half_tiles(config)
    if reason:
        logger.info("weights bf16 are multiplied by torch, not in float16 tiles: %s", reason)
    return not reason


def why_no_half_tiles(config: ModelConfig) -> str:
    """Empty = nothing speaks against them."""
    capabilities = torch.cpu.get_capabilities()
    if capabilities.get("amx_bf16"):
        return "this CPU has AMX"
    if not capabilities.get("avx512_fp16"):
        return "this CPU has no AVX512-FP16"
    widths = (config.hidden_size, config.intermediate_size, config.num_heads * config.head_dim)
    if config.head_dim % 16 or any(width % 32 for width in widths):
        return f"they need a head_dim that is a multiple of 16, here {config.head_dim}, and rows of multiples of 32 numbers, here {widths}"
    return ""


def _half_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> Linear:
    from specwire.engine.cpu.half_linear import HalfLinear  # brings a compiler

    return HalfLinear(weight, bias)


def _tiled_linear(weight: Q4Weight, bias: torch.Tensor | None) -> Linear:
    from specwire.engine.cpu.linear import TiledLinear  # brings a compiler

    return TiledLinear(weight, bias)


def has_8_bit_head(weights: str) -> bool:
    """Whether the head of a model in this format is rounded to 8 bits here."""
    return weights in ("int4", "int8") and DigitLinear.is_fast()


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
