"""The target of these tests and its true hidden states, by transformers."""

from dataclasses import dataclass
from pathlib import Path

import torch
import torch.nn.functional as F

from specwire.engine.heads.source import FINAL_LAYER
from tests.engine.tiny_models import save_tiny_model
from tests.heads.checkpoints import AUX, NUM_LAYERS, Checkpoint
from tests.heads.reference import norm


@dataclass(frozen=True)
class Target:
    """folder: with weights and tokenizer; tensors: by transformers' names; states: of a text, [n, hidden_size] by layer id."""

    folder: Path
    tensors: dict[str, torch.Tensor]
    model: torch.nn.Module

    def states(self, token_ids: list[int]) -> dict[int, torch.Tensor]:
        """Hidden states of all positions: entering layer i, behind the last one, and behind the final norm."""
        found: dict[int, torch.Tensor] = {}
        inner = self.model.model
        modules = [*inner.layers, inner.norm]
        hooks = [
            module.register_forward_pre_hook(lambda _, args, kwargs, i=i: found.update({i: (args or tuple(kwargs.values()))[0][0]}), with_kwargs=True)
            for i, module in enumerate(modules)
        ]
        hooks.append(inner.norm.register_forward_hook(lambda _, args, output: found.update({FINAL_LAYER: output[0]})))
        with torch.no_grad():
            self.model(torch.tensor([token_ids]))
        for hook in hooks:
            hook.remove()
        return found


def make_target(folder: Path) -> Target:
    model = save_tiny_model(folder, num_hidden_layers=NUM_LAYERS)
    return Target(folder, {name: tensor.detach() for name, tensor in model.state_dict().items()}, model)


def true_features(target: Target, checkpoint: Checkpoint, token_ids: list[int]) -> torch.Tensor:
    """[n, width]: what the head was made to read, from the tensors of its file."""
    tensors, states = checkpoint.tensors, target.states(token_ids)
    if not {"fc.weight", "d2t", "hidden_norm.weight"} & set(tensors) or "fc.bias" in tensors:
        return states[FINAL_LAYER]
    # Without layer numbers in the file: 2, half of them, all but 3.
    layer_ids = [2, 2, 1] if checkpoint.folder.name == "eagle3_plain" else AUX
    rows = [states[i] for i in layer_ids]
    if "fc_norm.0.weight" in tensors:
        rows = [norm(row, tensors[f"fc_norm.{i}.weight"]) for i, row in enumerate(rows)]
    joined = torch.cat(rows, -1)
    if "input_norm.weight" in tensors:
        joined = norm(joined, tensors["input_norm.weight"])
    return F.linear(joined, tensors["fc.weight"])
