"""What a draft head reads of its target: which hidden states, and what is made of them before they travel."""

from dataclasses import dataclass

import torch

FINAL_LAYER = -1
"""Layer id of the hidden states behind the final norm: what the target's own output layer reads."""


@dataclass(frozen=True, slots=True, eq=False)
class FeatureSource:
    """A head's features: of each token the hidden states at some layers of the target, side by side, projected if the head says so.

    feature = [norm_0(h_0), ..., norm_n(h_n)] projection^T, with h_i rounded to the target's dtype as it stands in the residual stream.

    Layer ids count as in `eagle_aux_hidden_state_layer_ids`: i is the residual stream that enters layer i, with everything added, so that 0 is
    the embedding and num_layers what leaves the last layer, before the final norm. `target_layer_ids` of DFlash and DSpark name the layer that
    the same stream leaves, i - 1. FINAL_LAYER is the last hidden state of EAGLE and MTP, behind the final norm.

    Args:
        name: of the head, for messages.
        layer_ids: which hidden states, in the order in which they stand side by side.
        projection: [width, len(layer_ids) * hidden_size]; None: they stay as they are, and width is len(layer_ids) * hidden_size.
        width: numbers of a feature.
        dtype: that the verifier keeps them in and drafters get.
        hash: of everything here (hex); drafters and verifiers that agree on it agree on the features.
        norms: weights of root-mean-square norms in front of the projection: one [hidden_size] for each layer id, or a single one
            [len(layer_ids) * hidden_size] over all of them side by side (`norm_before_fc`); None = none.
        norm_eps: of the norms.
    """

    name: str
    layer_ids: tuple[int, ...]
    projection: torch.Tensor | None
    width: int
    dtype: torch.dtype
    hash: str
    norms: tuple[torch.Tensor, ...] | None = None
    norm_eps: float = 1e-6
