"""In which numbers a CPU keeps the weights of the linear layers, and what multiplies with them."""

import hashlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import torch

from specwire import number_formats
from specwire.engine.kernels.linear import DenseLinear, Linear
from specwire.engine.kernels.packed_linear import DigitLinear, Int4Linear, Int8Linear, Q4Weight
from specwire.engine.models.config import ModelConfig
from specwire.number_formats import check_formats

logger = logging.getLogger(__name__)

FORMAT_DTYPES: dict[str, torch.dtype] = {weights: getattr(torch, dtype) for weights, dtype in number_formats.FORMAT_DTYPES.items()}
"""Format of the weights -> dtype of all that is computed with them, and of keys and values."""


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
