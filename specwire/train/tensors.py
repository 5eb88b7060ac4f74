"""Named tensors of a model's folder."""

import json
from collections.abc import Sequence
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import load_file


def read_tensors(folder: Path, names: Sequence[str]) -> dict[str, torch.Tensor]:
    """Tensors of a folder that the engine has loaded already, so that its files and names are known to be there, on the CPU."""
    index = folder / "model.safetensors.index.json"
    files = json.loads(index.read_text(encoding="utf-8"))["weight_map"] if index.is_file() else dict.fromkeys(names, "model.safetensors")
    read: dict[str, torch.Tensor] = {}
    for file in sorted({files[name] for name in names}):
        with safe_open(folder / file, framework="pt") as handle:
            read |= {name: handle.get_tensor(name) for name in names if files[name] == file}
    return read


def read_all(folder: Path) -> dict[str, torch.Tensor]:
    """All tensors of a folder, on the CPU."""
    index = folder / "model.safetensors.index.json"
    files = set(json.loads(index.read_text(encoding="utf-8"))["weight_map"].values()) if index.is_file() else {"model.safetensors"}
    read: dict[str, torch.Tensor] = {}
    for file in sorted(files):
        read |= load_file(folder / file)
    return read
