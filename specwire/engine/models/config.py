"""What distinguishes the models of the Llama family: one frozen configuration read from a Hugging Face folder."""

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.draft_checkpoint import HEAD_METHODS, method_of
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.json_files import read_json_object, token_ids

SUPPORTED_MODEL_TYPES = ("llama", "mistral", "qwen2", "qwen3", "mimo")
"""MiMo is Qwen2 with an MTP layer, which is a draft head (`specwire.engine.heads.mtp`)."""
SUPPORTED_ROPE_TYPES = ("default", "linear", "llama3", "yarn")
_QUANTIZATIONS = {
    "gptq": "GPTQ",
    "awq": "AWQ",
    "fp8": "FP8",
    "fbgemm_fp8": "FP8 (FBGEMM)",
    "compressed-tensors": "compressed-tensors (FP8, INT8 or INT4)",
    "bitsandbytes": "bitsandbytes",
    "mxfp4": "MXFP4",
    "modelopt": "ModelOpt (FP8 or FP4)",
}
"""What users call a quant_method."""
_MOST = {
    "vocab_size": 1 << 24,
    "hidden_size": 1 << 18,
    "intermediate_size": 1 << 20,
    "num_hidden_layers": 1 << 12,
    "num_attention_heads": 1 << 14,
    "num_key_value_heads": 1 << 14,
    "head_dim": 1 << 14,
    "max_position_embeddings": 1 << 24,
}
"""Far above every model that there is: what is larger comes of a damaged file, and whoever built it would take minutes and all memory to fail."""


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """Rotary position embedding, with the scaling parameters that its type uses (others keep their defaults).

    Args:
        rope_type: "default", "linear" (position interpolation), "llama3" or "yarn" (https://arxiv.org/abs/2309.00071).
        theta: base of the wavelengths.
        factor: context extension factor.
        original_max_position_embeddings: context length of pre-training.
        low_freq_factor, high_freq_factor: llama3's borders between scaled and kept wavelengths.
        attention_factor: yarn's factor on cos and sin; None = derived from factor (and mscale, mscale_all_dim).
        beta_fast, beta_slow, truncate: yarn's correction range.
    """

    rope_type: str = "default"
    theta: float = 10_000.0
    factor: float = 1.0
    original_max_position_embeddings: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float | None = None
    mscale: float | None = None
    mscale_all_dim: float | None = None
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """Shape of a decoder. `qkv_bias`, `o_bias`, `mlp_bias`, `qk_norm` and `tie_word_embeddings` are the family's differences."""

    model_type: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    max_position_embeddings: int
    rms_norm_eps: float
    rope: RopeConfig
    tie_word_embeddings: bool = False
    qkv_bias: bool = False
    o_bias: bool = False
    mlp_bias: bool = False
    qk_norm: bool = False
    bos_token_id: int | None = None
    eos_token_ids: tuple[int, ...] = ()

    @classmethod
    def from_folder(cls, folder: Path) -> "ModelConfig":
        """Reads `config.json` (and the EOS ids of `generation_config.json` where there is one).

        Raises:
            InvalidArgumentError: no config.json, or a key that is needed is missing.
            UnsupportedError: a draft head; a model type or a feature that this engine does not compute.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise InvalidArgumentError(f"{folder} has no config.json; give a Hugging Face model folder, a .gguf file or a hub id")
        raw = read_json_object(path)
        method = method_of(raw)
        if method in HEAD_METHODS:
            raise UnsupportedError(
                f"{folder} has a draft head ({method}), which is no model of its own; give it as `model` of the speculative configuration, "
                f"with method {method}, and the model that it drafts for as --model"
            )
        generation_path = folder / "generation_config.json"
        generation = read_json_object(generation_path) if generation_path.is_file() else {}
        return cls.from_dict(raw, generation)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], generation: Mapping[str, Any] | None = None) -> "ModelConfig":
        """Builds from the content of config.json and generation_config.json; see `from_folder` for errors."""
        model_type = raw.get("model_type")
        if model_type not in SUPPORTED_MODEL_TYPES:
            raise UnsupportedError(f"model_type {model_type!r} is not supported; supported: {', '.join(SUPPORTED_MODEL_TYPES)}")
        missing = [key for key in ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads") if key not in raw]
        if missing:
            raise InvalidArgumentError(f"config.json lacks {', '.join(missing)}")
        attention_bias = bool(raw.get("attention_bias", False)) and model_type in ("llama", "qwen3")
        num_heads, hidden_size = _count(raw, "num_attention_heads"), _count(raw, "hidden_size")
        max_position_embeddings = _count(raw, "max_position_embeddings", 2048)
        try:
            _refuse_unsupported(raw)
            rope, rms_norm_eps = _rope_from_dict(raw, max_position_embeddings), _number(raw, "rms_norm_eps", 1e-6)
        except (TypeError, AttributeError, ValueError, ZeroDivisionError, OverflowError) as error:
            if isinstance(error, InvalidArgumentError):
                raise
            raise InvalidArgumentError(f"config.json can't be understood ({type(error).__name__}: {error}); fetch or save it again") from error
        return cls(
            model_type=model_type,
            vocab_size=_count(raw, "vocab_size"),
            hidden_size=hidden_size,
            intermediate_size=_count(raw, "intermediate_size"),
            num_layers=_count(raw, "num_hidden_layers"),
            num_heads=num_heads,
            num_kv_heads=_count(raw, "num_key_value_heads", num_heads),
            head_dim=_count(raw, "head_dim", max(1, hidden_size // num_heads)),
            max_position_embeddings=max_position_embeddings,
            rms_norm_eps=rms_norm_eps,
            rope=rope,
            tie_word_embeddings=bool(raw.get("tie_word_embeddings", False)),
            qkv_bias=attention_bias or model_type in ("qwen2", "mimo"),
            o_bias=attention_bias,
            mlp_bias=bool(raw.get("mlp_bias", False)) and model_type == "llama",
            qk_norm=model_type == "qwen3",
            bos_token_id=next(iter(token_ids(raw, "bos_token_id")), None),
            eos_token_ids=_eos_ids(raw, generation or {}),
        )


def _count(raw: Mapping[str, Any], key: str, default: int | None = None) -> int:
    """A key that is an integer of 1 or more, and not absurdly large; the default where it is absent, null or 0."""
    value = raw.get(key) or default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= _MOST[key]:
        raise InvalidArgumentError(
            f"config.json has {key} {raw.get(key)!r}, but it must be an integer from 1 to {_MOST[key]}; fetch or save it again"
        )
    return value


def _number(values: Mapping[str, Any], key: str, default: float) -> float:
    """A key that is a positive number; the default where it is absent, null or 0. Raises TypeError and ValueError, too, where it is none."""
    given = values.get(key)
    value = float(default if given in (None, 0) else given)
    if not (math.isfinite(value) and value > 0):
        raise InvalidArgumentError(f"config.json has {key} {values.get(key)!r}, but it must be a number above 0; fetch or save it again")
    return value


def _refuse_unsupported(raw: Mapping[str, Any]) -> None:
    if raw.get("hidden_act", "silu") != "silu":
        raise UnsupportedError(f"hidden_act {raw['hidden_act']!r} is not supported; supported: 'silu'")
    if raw.get("quantization_config"):
        method = str(raw["quantization_config"].get("quant_method") or "unknown")
        raise UnsupportedError(
            f"the checkpoint is quantised with {_QUANTIZATIONS.get(method, method)} (quantization_config in config.json), which is not supported; "
            "use the checkpoint that it was made from, or the model as a .gguf file in Q8_0, Q4_1 or Q4_0"
        )
    # Qwen configurations carry a sliding_window that use_sliding_window switches off; Mistral's is on unless it is null.
    window = raw.get("sliding_window", 4096 if raw["model_type"] == "mistral" else None)
    if raw["model_type"] in ("qwen2", "qwen3", "mimo") and not raw.get("use_sliding_window", False):
        window = None
    if window is not None and window < raw.get("max_position_embeddings", 0):
        raise UnsupportedError(
            f"sliding_window {window} is not supported; use a model that attends to its whole context (or set it to null to ignore the window)"
        )
    kinds = sorted(set(raw.get("layer_types") or ()) - {"full_attention"})
    if kinds and window is not None:
        raise UnsupportedError(f"layer_types {kinds} are not supported; supported: 'full_attention'")


def _rope_from_dict(raw: Mapping[str, Any], max_position_embeddings: int) -> RopeConfig:
    """Accepts transformers' old keys (rope_theta, rope_scaling with type or rope_type) and the new one (rope_parameters)."""
    parameters = dict(raw.get("rope_scaling") or raw.get("rope_parameters") or {})
    rope_type = parameters.get("rope_type") or parameters.get("type") or "default"
    if rope_type not in SUPPORTED_ROPE_TYPES:
        raise UnsupportedError(f"rope type {rope_type!r} is not supported; supported: {', '.join(SUPPORTED_ROPE_TYPES)}")
    partial = parameters.get("partial_rotary_factor") or raw.get("partial_rotary_factor") or 1.0
    if partial != 1.0:
        raise UnsupportedError(f"partial_rotary_factor {partial} is not supported; supported: 1.0")
    original = raw.get("original_max_position_embeddings") or parameters.get("original_max_position_embeddings") or max_position_embeddings
    if parameters.get("factor") is None and rope_type in ("linear", "llama3"):
        raise InvalidArgumentError(f"rope type {rope_type!r} needs a factor, and config.json gives none")
    rope = RopeConfig(
        rope_type=rope_type,
        theta=_number(parameters if parameters.get("rope_theta") else raw, "rope_theta", 10_000.0),
        factor=_number(parameters, "factor", max_position_embeddings / original if rope_type == "yarn" else 1.0),
        original_max_position_embeddings=int(original),
        low_freq_factor=_number(parameters, "low_freq_factor", 1.0),
        high_freq_factor=_number(parameters, "high_freq_factor", 4.0),
        attention_factor=_optional_number(parameters, "attention_factor"),
        mscale=_optional_number(parameters, "mscale"),
        mscale_all_dim=_optional_number(parameters, "mscale_all_dim"),
        beta_fast=_number(parameters, "beta_fast", 32.0),
        beta_slow=_number(parameters, "beta_slow", 1.0),
        truncate=bool(parameters.get("truncate", True)),
    )
    _check_rope(rope)
    return rope


def _optional_number(values: Mapping[str, Any], key: str) -> float | None:
    return _number(values, key, 0.0) if values.get(key) else None


def _check_rope(rope: RopeConfig) -> None:
    """Raises InvalidArgumentError for values that give no frequencies."""
    if rope.theta <= 1:
        raise InvalidArgumentError(f"config.json has rope_theta {rope.theta:g}, but it must be above 1; fetch or save it again")
    if not 1 <= rope.original_max_position_embeddings <= _MOST["max_position_embeddings"]:
        raise InvalidArgumentError(
            f"config.json has original_max_position_embeddings {rope.original_max_position_embeddings}, but it must be from 1 to "
            f"{_MOST['max_position_embeddings']}; fetch or save it again"
        )
    if rope.rope_type == "llama3" and rope.low_freq_factor >= rope.high_freq_factor:
        raise InvalidArgumentError(
            f"config.json has low_freq_factor {rope.low_freq_factor:g} and high_freq_factor {rope.high_freq_factor:g}, but the first must be below "
            "the second; fetch or save it again"
        )


def _eos_ids(raw: Mapping[str, Any], generation: Mapping[str, Any]) -> tuple[int, ...]:
    """EOS ids in order of appearance: those of generation_config.json first, as generation uses them."""
    return tuple(dict.fromkeys(token_ids(generation, "eos_token_id") + token_ids(raw, "eos_token_id")))
