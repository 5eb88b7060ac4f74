"""Fills a decoder with weights, on its device from the start: from safetensors files of a Hugging Face folder, or made-up ones."""

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open

from specwire.engine.kernels.linear import Linear, LogitsHead
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder
from specwire.engine.models.dummy import DummySource, dummy_digest
from specwire.engine.models.format_choice import choose_format
from specwire.engine.models.hashing import weights_hash
from specwire.engine.models.layer import LayerWeights
from specwire.engine.models.stored_q4 import StoredQ4
from specwire.engine.models.weights import (
    FORMAT_DTYPES,
    WeightsRequest,
    format_hash,
    log_missing_tiles,
    make_head_linear,
    make_linear,
    uses_half_tiles,
    uses_tiles,
)
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.json_files import read_shards

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}

CUDA_HEAD_DIMS = (16, 32, 64, 128)
"""Of models that the kernels on CUDA are for: powers of two, large enough for matrix units, with tiles that fit into a multiprocessor."""

TensorSource = Callable[[str], torch.Tensor]
"""Name of a tensor in transformers' naming -> its values, on the model's device where that costs no copy, in any dtype."""


def parse_dtype(name: str) -> torch.dtype:
    """Raises InvalidArgumentError where the name is none of `DTYPES`."""
    if name not in DTYPES:
        raise InvalidArgumentError(f"dtype {name!r} is not supported; choose one of {', '.join(DTYPES)}")
    return DTYPES[name]


def check_device(device: str) -> None:
    """Makes the device (`cpu`, `cuda` or `cuda:N`) this thread's current one, where kernels and graphs go.

    Raises:
        InvalidArgumentError: torch does not see it.
    """
    num_devices = torch.cuda.device_count() if torch.cuda.is_available() else 0
    if device != "cpu" and int(device.partition(":")[2] or 0) >= num_devices:
        found = f"{num_devices} CUDA devices" if num_devices else "no CUDA device"
        raise InvalidArgumentError(f"device is {device}, but torch {torch.__version__} sees {found}; use --device cpu, or one that is there")
    if device != "cpu":
        torch.cuda.set_device(torch.device(device).index or 0)


def open_model(folder: Path, *, load_format: str, dtype: str, device: str, weights: str = "auto", num_rows: int = 6) -> Decoder:
    """The model of a folder as a service's configuration asks for it.

    Args:
        load_format: auto, or dummy for seeded random weights of the model's shape.
        dtype: a name of `DTYPES`, or auto: bfloat16, or what goes with the weights.
        weights: how a CPU keeps them: a format of `specwire.engine.models.weights`, or auto for the fastest.
        num_rows: the number of rows that auto is chosen for, beside one.

    Raises:
        UnsupportedError: no kernels on CUDA for the model's head_dim.
        SpecwireError: as `load_model`, `parse_dtype` and `check_weights` do.
    """
    request = WeightsRequest(weights, None if dtype == "auto" else parse_dtype(dtype), num_rows)
    config = ModelConfig.from_folder(folder)
    if device != "cpu" and config.head_dim not in CUDA_HEAD_DIMS:
        built = ", ".join(map(str, CUDA_HEAD_DIMS))
        raise UnsupportedError(f"the model's head_dim is {config.head_dim}, but on CUDA only {built} are built; use device cpu, or another model")
    is_dummy = load_format == "dummy"
    chosen = choose_format(request, config, device, has_q4=not is_dummy and StoredQ4(folder).has_layers(config.num_layers), may_measure=not is_dummy)
    if is_dummy:
        return dummy_model(config, FORMAT_DTYPES[chosen], device, weights=chosen)
    return load_model(folder, FORMAT_DTYPES[chosen], device, weights=chosen)


def load_model(folder: Path, dtype: torch.dtype, device: torch.device | str = "cpu", weights: str = "") -> Decoder:
    """Loads a Hugging Face folder (as `resolve_model` gives it).

    Args:
        weights: a name of `FORMAT_DTYPES`; empty = as the dtype says.

    Raises:
        InvalidArgumentError: a file or a tensor is missing, or a tensor has another shape than config.json says.
        UnsupportedError: the model needs something that the decoder does not compute, or a shape that the format of the weights can't have.
    """
    config = ModelConfig.from_folder(folder)
    source, stored = _SafetensorsSource(folder, device), StoredQ4(folder)
    # A large model's hash takes longer than its loading; both read the same pages.
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="weights-hash") as pool:
        digest = pool.submit(lambda: format_hash(weights_hash(folder), weights, is_stored=stored.has_layers(config.num_layers)))
        return build_decoder(config, source.read, dtype, device, digest.result, weights, stored)


def dummy_model(
    config: ModelConfig, dtype: torch.dtype, device: torch.device | str = "cpu", seed: int = 0, std: float = 0.02, weights: str = ""
) -> Decoder:
    """A decoder with made-up weights: same config, seed and std, same weights and same hash, on every device and in every dtype (rounded)."""
    source = DummySource(tensor_shapes(config), dtype, device, seed, std)
    return build_decoder(config, source.read, dtype, device, lambda: format_hash(dummy_digest(config, seed, std), weights, is_stored=False), weights)


def build_decoder(
    config: ModelConfig,
    read: TensorSource,
    dtype: torch.dtype,
    device: torch.device | str,
    digest: Callable[[], str],
    weights: str = "",
    stored: StoredQ4 | None = None,
) -> Decoder:
    """Builds a decoder from named tensors. What is fused (q, k, v; gate, up) is filled part by part: beside the model there is never more
    than one tensor.

    Args:
        digest: gives the weights' hash; called last.
        weights: format of the linear layers; empty = dense, in the dtype.
        stored: the layers' weights in 4 bits, where the checkpoint has them.
    """
    shapes = tensor_shapes(config)
    in_half_tiles = uses_half_tiles(weights, config, device)
    log_missing_tiles(weights)

    def get(name: str) -> torch.Tensor:
        tensor = read(name)
        if tuple(tensor.shape) != shapes[name]:
            raise InvalidArgumentError(f"tensor {name} has shape {tuple(tensor.shape)}, config.json asks for {shapes[name]}")
        return tensor

    def single(name: str) -> torch.Tensor:
        # A copy on a CPU: what is read is the file itself, in memory, and who writes it anew would change the model that runs, or crash it.
        return get(name).to(device=device, dtype=dtype, copy=torch.device(device).type == "cpu")

    def fused(names: list[str]) -> torch.Tensor:
        if len(names) == 1:
            return single(names[0])
        counts = [shapes[name][0] for name in names]
        whole = torch.empty((sum(counts), *shapes[names[0]][1:]), dtype=dtype, device=device)
        for part, name in zip(whole.split(counts), names, strict=True):
            part.copy_(get(name))
        return whole

    def linear(prefix: str, *parts: str) -> Linear:
        bias = fused([f"{prefix}.{part}.bias" for part in parts]) if f"{prefix}.{parts[0]}.bias" in shapes else None
        names = [f"{prefix}.{part}.weight" for part in parts]
        return make_linear(
            weights, lambda: stored.read(names) if stored is not None else None, lambda: fused(names), bias, in_half_tiles=in_half_tiles
        )

    def layer(index: int) -> LayerWeights:
        prefix = f"model.layers.{index}"
        return LayerWeights(
            input_norm=single(f"{prefix}.input_layernorm.weight"),
            qkv=linear(f"{prefix}.self_attn", "q_proj", "k_proj", "v_proj"),
            q_norm=single(f"{prefix}.self_attn.q_norm.weight") if config.qk_norm else None,
            k_norm=single(f"{prefix}.self_attn.k_norm.weight") if config.qk_norm else None,
            o=linear(f"{prefix}.self_attn", "o_proj"),
            post_norm=single(f"{prefix}.post_attention_layernorm.weight"),
            gate_up=linear(f"{prefix}.mlp", "gate_proj", "up_proj"),
            down=linear(f"{prefix}.mlp", "down_proj"),
        )

    embedding = single("model.embed_tokens.weight")
    head_weight = embedding if config.tie_word_embeddings else single("lm_head.weight")
    return Decoder(
        config=config,
        embedding=embedding,
        layers=[layer(index) for index in range(config.num_layers)],
        final_norm=single("model.norm.weight"),
        head=LogitsHead(head_weight, make_head_linear(weights, head_weight, in_half_tiles=in_half_tiles)),
        weights_hash=digest(),
        weights_format=weights,
        is_tiled=in_half_tiles or uses_tiles(weights),
    )


def tensor_shapes(config: ModelConfig) -> dict[str, tuple[int, ...]]:
    """Name and shape of every tensor that the model has, in transformers' naming."""
    hidden, inner = config.hidden_size, config.intermediate_size
    heads, kv = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config.vocab_size, hidden), "model.norm.weight": (hidden,)}
    if not config.tie_word_embeddings:
        shapes["lm_head.weight"] = (config.vocab_size, hidden)
    linears = (
        ("self_attn.q_proj", heads, hidden, config.qkv_bias),
        ("self_attn.k_proj", kv, hidden, config.qkv_bias),
        ("self_attn.v_proj", kv, hidden, config.qkv_bias),
        ("self_attn.o_proj", hidden, heads, config.o_bias),
        ("mlp.gate_proj", inner, hidden, config.mlp_bias),
        ("mlp.up_proj", inner, hidden, config.mlp_bias),
        ("mlp.down_proj", hidden, inner, config.mlp_bias),
    )
    for index in range(config.num_layers):
        prefix = f"model.layers.{index}"
        shapes[f"{prefix}.input_layernorm.weight"] = shapes[f"{prefix}.post_attention_layernorm.weight"] = (hidden,)
        if config.qk_norm:
            shapes[f"{prefix}.self_attn.q_norm.weight"] = shapes[f"{prefix}.self_attn.k_norm.weight"] = (config.head_dim,)
        for name, rows, columns, bias in linears:
            shapes[f"{prefix}.{name}.weight"] = (rows, columns)
            if bias:
                shapes[f"{prefix}.{name}.bias"] = (rows,)
    return shapes


class _SafetensorsSource:
    """Reads tensors by name from model.safetensors or the shards that model.safetensors.index.json lists, straight to the device."""

    def __init__(self, folder: Path, device: torch.device | str) -> None:
        index, single = folder / "model.safetensors.index.json", folder / "model.safetensors"
        if index.is_file():
            files = read_shards(index)
        elif single.is_file():
            files = [single.name]
        else:
            raise InvalidArgumentError(f"{folder} has neither model.safetensors nor model.safetensors.index.json; save the model as safetensors")
        missing = [name for name in files if not (folder / name).is_file()]
        if missing:
            raise InvalidArgumentError(f"{folder} lacks {', '.join(missing)}, which model.safetensors.index.json lists")
        self._folder = folder
        try:
            self._handles = [safe_open(folder / name, framework="pt", device=str(device)) for name in files]
        except SafetensorError as error:
            raise InvalidArgumentError(
                f"{folder}: {', '.join(files)} can't be read as safetensors ({error}); fetch or save the model again"
            ) from error
        self._by_name = {name: handle for handle in self._handles for name in handle.keys()}  # noqa: SIM118 (not a dict)

    def read(self, name: str) -> torch.Tensor:
        if name not in self._by_name:
            raise InvalidArgumentError(f"{self._folder} has no tensor {name}, which its config.json asks for")
        return self._by_name[name].get_tensor(name)
