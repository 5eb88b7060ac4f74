"""The drafting method that a checkpoint is made for, by what its own config.json says; its path says nothing."""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

HEAD_METHODS = ("eagle", "eagle3", "mtp", "dflash", "dspark")
"""Those whose drafts are made of the target's hidden states."""
_HEADS = ("eagle3", "eagle", "dflash", "dspark", "medusa", "mlp_speculator")
"""The longer name before the one that it begins with."""


def infer_method(model: str) -> str:
    """ngram for "ngram" and "[ngram]", suffix for "suffix", a head's method for a folder with the checkpoint of a head, else draft_model."""
    if model in ("ngram", "[ngram]"):
        return "ngram"
    if model == "suffix":
        return "suffix"
    return method_of(_read_config(model))


def _read_config(model: str) -> Mapping[str, Any]:
    """Nothing where this is no local folder: who loads the model will see what it is."""
    try:
        config = json.loads((Path(model) / "config.json").read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return config if isinstance(config, dict) else {}


def method_of(config: Mapping[str, Any]) -> str:
    """The method that the content of a config.json is for."""
    architectures = config.get("architectures")
    names = [config.get("speculators_model_type"), config.get("model_type"), *(architectures if isinstance(architectures, list) else [])]
    plain = [name.lower().replace("-", "_") for name in names if isinstance(name, str)]
    for name in plain:
        for head in _HEADS:
            if head in name or head.replace("_", "") in name:
                return head
        if name.endswith(("_mtp", "mtpmodel", "mtpforcausallm")):
            return "mtp"
    return "draft_model"
