"""Which method the checkpoint in a folder is for: by its config.json, and by its tensors where that is an ordinary model's."""

from pathlib import Path

from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.tensors import HeadTensors


def open_head(folder: Path) -> tuple[HeadConfig, HeadTensors]:
    """Configuration, with its method settled, and tensors.

    Raises:
        SpecwireError: see `HeadConfig.from_folder` and `HeadTensors`.
    """
    tensors = HeadTensors(folder)
    return HeadConfig.from_folder(folder, method_of_tensors(tensors)), tensors


def method_of_tensors(tensors: HeadTensors) -> str:
    """The method, or draft_model where they are those of a whole model."""
    names = set(tensors.names)
    if any(name.startswith("mtp_layers.") for name in names):
        return "mtp"
    if any(name.startswith(("markov_head.", "confidence_head.")) for name in names):
        return "dspark"
    if "fc.weight" not in names:
        return "draft_model"
    if "hidden_norm.weight" in names:
        return "dflash"
    return "eagle3" if "layers.0.hidden_norm.weight" in names else "eagle"
