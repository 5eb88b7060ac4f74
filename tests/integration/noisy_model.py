"""A draft model that agrees with its target most of the time: the target's own weights with gaussian noise added."""

import os
import shutil
import tempfile
from pathlib import Path

import torch
from safetensors import safe_open
from safetensors.torch import save_file

from specwire.engine.cache_dir import cache_dir

NOISE_SCALE = 0.08
"""Noise over the spread of a weight matrix with which the default model's noisy twin has about 7 of 10 first drafts accepted."""
ACCEPTANCE_RANGE = (0.55, 0.85)
"""Where the share of accepted first drafts must be measured, over all samplings of the matrix."""
_SEED = 0


def noisy_twin(folder: Path, scale: float = NOISE_SCALE) -> Path:
    """A copy of a model's folder, in bfloat16, whose matrices have noise; made once and kept in the user's cache.

    Embedding, head and norms stay as they are, so that what changes is how well the model predicts and not what its ids mean.
    """
    path = cache_dir() / "noisy" / f"{folder.name}-{scale}-{_SEED}"
    if path.is_dir():
        return path
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=path.parent) as scratch:
        copy = Path(scratch) / path.name
        save_noisy(folder, copy, scale)
        try:
            os.rename(copy, path)
        except OSError:
            if not path.is_dir():  # unless another process was faster
                raise
    return path


def save_noisy(folder: Path, copy: Path, scale: float) -> None:
    """Writes the copy to a folder that is not there yet."""
    shutil.copytree(folder, copy, ignore=shutil.ignore_patterns("*.safetensors"))
    save_file(_noisy_tensors(folder / "model.safetensors", scale), copy / "model.safetensors", metadata={"format": "pt"})


def _noisy_tensors(file: Path, scale: float) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(_SEED)
    tensors = {}
    with safe_open(file, framework="pt") as source:
        for name in sorted(source.keys()):
            tensor = source.get_tensor(name).float()
            if tensor.dim() == 2 and "embed" not in name and "lm_head" not in name:
                tensor += scale * tensor.std() * torch.randn(tensor.shape, generator=generator)
            tensors[name] = tensor.bfloat16()
    return tensors
