"""Small random heads, written as each published format has them."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

HIDDEN, INNER, HEADS, KV, VOCAB = 64, 96, 4, 2, 259
"""Of the target of these tests (`tests.engine.tiny_models`) and of its heads."""
NUM_LAYERS = 4
AUX = [1, 2, 4]
MASK = 258
SHAPE = {
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV,
    "num_hidden_layers": 1,
    "vocab_size": VOCAB,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "rope_theta": 10_000.0,
    "hidden_act": "silu",
}


@dataclass(frozen=True)
class Checkpoint:
    """What was written, for the reference: tensors by the names of the file, and the file's content."""

    folder: Path
    config: dict[str, Any]
    tensors: dict[str, torch.Tensor] = field(repr=False)


class Maker:
    """Random tensors, float32, from a seed."""

    def __init__(self, seed: int = 0) -> None:
        self._generator = torch.Generator().manual_seed(seed)
        self.tensors: dict[str, torch.Tensor] = {}

    def weight(self, name: str, *shape: int, std: float = 0.15) -> None:
        self.tensors[f"{name}.weight"] = torch.randn(shape, generator=self._generator) * std

    def bias(self, name: str, size: int) -> None:
        self.tensors[f"{name}.bias"] = torch.randn(size, generator=self._generator) * 0.15

    def norm(self, name: str, size: int = HIDDEN) -> None:
        self.tensors[f"{name}.weight"] = 1 + torch.randn(size, generator=self._generator) * 0.15

    def layer(self, prefix: str, *, in_features: int = HIDDEN, has_input_norm: bool = True, qk_norm: bool = False, bias: bool = False) -> None:
        head_dim = HIDDEN // HEADS
        for part, rows in (("q", HEADS), ("k", KV), ("v", KV)):
            self.weight(f"{prefix}.self_attn.{part}_proj", rows * head_dim, in_features)
            if bias:
                self.bias(f"{prefix}.self_attn.{part}_proj", rows * head_dim)
        self.weight(f"{prefix}.self_attn.o_proj", HIDDEN, HEADS * head_dim)
        if qk_norm:
            self.norm(f"{prefix}.self_attn.q_norm", head_dim)
            self.norm(f"{prefix}.self_attn.k_norm", head_dim)
        if has_input_norm:
            self.norm(f"{prefix}.input_layernorm")
        self.norm(f"{prefix}.post_attention_layernorm")
        for part in ("gate", "up"):
            self.weight(f"{prefix}.mlp.{part}_proj", INNER, HIDDEN)
        self.weight(f"{prefix}.mlp.down_proj", HIDDEN, INNER)

    def draft_vocabulary(self, target_ids: Sequence[int]) -> None:
        """d2t, t2d and an output layer for some of the target's ids."""
        ids = torch.tensor(target_ids)
        self.tensors["d2t"] = ids - torch.arange(len(ids))
        self.tensors["t2d"] = torch.zeros(VOCAB, dtype=torch.bool).index_fill_(0, ids, True)
        self.weight("lm_head", len(ids), HIDDEN)

    def save(self, folder: Path, config: Mapping[str, Any], *, pickled: bool = False) -> Checkpoint:
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "config.json").write_text(json.dumps(config))
        if pickled:
            torch.save(self.tensors, folder / "pytorch_model.bin")
        else:
            save_file(self.tensors, folder / "model.safetensors")
        return Checkpoint(folder, dict(config), self.tensors)


def speculators(kind: str, **keys: Any) -> dict[str, Any]:
    """A config.json of the library."""
    shape = {**SHAPE, "model_type": "llama", **keys.pop("layer", {})}
    return {
        "architectures": [f"{kind.capitalize()}Speculator"],
        "speculators_model_type": kind,
        "speculators_version": "0.3.0",
        "draft_vocab_size": VOCAB,
        "transformer_layer_config": shape,
        "speculators_config": {
            "algorithm": kind,
            "default_proposal_method": "greedy",
            "proposal_methods": [{"proposal_type": "greedy", "speculative_tokens": 5}],
            "verifier": {"name_or_path": "some/target", "architectures": ["LlamaForCausalLM"]},
        },
        **keys,
    }


SUBSET = [3 * i for i in range(80)]


def eagle3_speculators(folder: Path) -> Checkpoint:
    """The library's: everything in the file, a part of the vocabulary."""
    maker = Maker(1)
    maker.weight("embed_tokens", VOCAB, HIDDEN)
    maker.weight("fc", HIDDEN, 3 * HIDDEN)
    maker.layer("layers.0", in_features=2 * HIDDEN)
    maker.norm("layers.0.hidden_norm")
    maker.norm("norm")
    maker.draft_vocabulary(SUBSET)
    config = speculators(
        "eagle3", draft_vocab_size=len(SUBSET), norm_before_residual=True, norm_before_fc=False, eagle_aux_hidden_state_layer_ids=AUX
    )
    return maker.save(folder, config)


def eagle3_plain(folder: Path) -> Checkpoint:
    """As the paper's authors publish them: `midlayer`, a pickle, no embedding, no layer numbers."""
    maker = Maker(2)
    maker.weight("fc", HIDDEN, 3 * HIDDEN)
    maker.layer("midlayer", in_features=2 * HIDDEN)
    maker.norm("midlayer.hidden_norm")
    maker.norm("norm")
    maker.draft_vocabulary(SUBSET)
    return maker.save(
        folder, {**SHAPE, "architectures": ["LlamaForCausalLMEagle3"], "model_type": "llama", "draft_vocab_size": len(SUBSET)}, pickled=True
    )


def eagle3_two_layers(folder: Path) -> Checkpoint:
    """Qwen3 layers, norms in front of fc, feedback behind the norm; embedding and output layer are the target's."""
    maker = Maker(3)
    maker.weight("fc", HIDDEN, 3 * HIDDEN)
    for i in range(3):
        maker.norm(f"fc_norm.{i}")
    maker.layer("layers.0", in_features=2 * HIDDEN, qk_norm=True)
    maker.layer("layers.1", qk_norm=True)
    maker.norm("layers.0.hidden_norm")
    maker.norm("norm")
    layer = {"model_type": "qwen3", "num_hidden_layers": 2, "head_dim": HIDDEN // HEADS}
    return maker.save(
        folder,
        speculators("eagle3", layer=layer, norm_before_residual=False, fc_norm=True, norm_output=True, eagle_aux_hidden_state_layer_ids=AUX),
    )


def eagle3_norm_before_fc(folder: Path) -> Checkpoint:
    """A plain folder with eagle_config; a part of the vocabulary, without an output layer of its own."""
    maker = Maker(4)
    maker.weight("fc", HIDDEN, 3 * HIDDEN)
    maker.norm("input_norm", 3 * HIDDEN)
    maker.layer("layers.0", in_features=2 * HIDDEN)
    maker.norm("layers.0.hidden_norm")
    maker.norm("norm")
    maker.draft_vocabulary(SUBSET)
    del maker.tensors["lm_head.weight"]
    config = {
        **SHAPE,
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "draft_vocab_size": len(SUBSET),
        "eagle_config": {"use_aux_hidden_state": True, "norm_before_fc": True, "eagle_aux_hidden_state_layer_ids": AUX},
    }
    return maker.save(folder, config)


def eagle_plain(folder: Path) -> Checkpoint:
    """An ordinary model's config.json: only the tensors tell."""
    maker = Maker(5)
    maker.weight("embed_tokens", VOCAB, HIDDEN)
    maker.weight("fc", HIDDEN, 2 * HIDDEN)
    maker.bias("fc", HIDDEN)
    maker.layer("layers.0", has_input_norm=False)
    maker.layer("layers.1")
    return maker.save(folder, {**SHAPE, "architectures": ["LlamaForCausalLM"], "model_type": "llama", "num_hidden_layers": 2}, pickled=True)


def mtp_mimo(folder: Path) -> Checkpoint:
    """The target's own folder: its MTP layer beside its layers (left out here), which the head never reads."""
    maker = Maker(6)
    maker.weight("model.embed_tokens", VOCAB, HIDDEN)
    maker.weight("lm_head", VOCAB, HIDDEN)
    _mtp_layer(maker, "model.mtp_layers.0", bias=True)
    config = {**SHAPE, "architectures": ["MiMoForCausalLM"], "model_type": "mimo", "num_hidden_layers": NUM_LAYERS, "num_nextn_predict_layers": 1}
    return maker.save(folder, config)


def mtp_speculators(folder: Path) -> Checkpoint:
    """The library's: the layer alone."""
    maker = Maker(7)
    _mtp_layer(maker, "mtp_layers.0", qk_norm=True)
    layer = {"model_type": "qwen3", "num_hidden_layers": NUM_LAYERS, "head_dim": HIDDEN // HEADS}
    return maker.save(folder, speculators("mtp", layer=layer, num_nextn_predict_layers=1))


def _mtp_layer(maker: Maker, prefix: str, **options: bool) -> None:
    maker.layer(prefix, **options)
    for name in ("token_layernorm", "hidden_layernorm", "final_layernorm"):
        maker.norm(f"{prefix}.{name}")
    maker.weight(f"{prefix}.input_proj", HIDDEN, 2 * HIDDEN)


def dflash_plain(folder: Path) -> Checkpoint:
    """Qwen3 layers, keys in dflash_config, an embedding of its own for the mask token."""
    maker = Maker(8)
    _block_layers(maker, 3)
    torch.save(
        {"mask_token_id": MASK, "embedding": torch.randn(HIDDEN, generator=torch.Generator().manual_seed(8)) * 0.15},
        _made(folder) / "mask_embedding.pt",
    )
    config = {
        **SHAPE,
        "architectures": ["DFlashDraftModel"],
        "model_type": "qwen3",
        "head_dim": HIDDEN // HEADS,
        "num_hidden_layers": 2,
        "block_size": 6,
        "dflash_config": {"mask_token_id": MASK, "target_layer_ids": [i - 1 for i in AUX]},
    }
    return maker.save(folder, config)


def dflash_speculators(folder: Path) -> Checkpoint:
    """A part of the vocabulary; causal blocks."""
    maker = Maker(9)
    _block_layers(maker, 3)
    maker.draft_vocabulary(SUBSET)
    return maker.save(
        folder,
        speculators(
            "dflash", layer=_QWEN3, draft_vocab_size=len(SUBSET), block_size=5, mask_token_id=MASK, aux_hidden_state_layer_ids=AUX,
            dflash_config={"causal": True},
        ),
    )  # fmt: skip


def dspark_native(folder: Path) -> Checkpoint:
    """As the paper's authors publish them: drafts from the anchor on, though no key says it."""
    maker = Maker(10)
    _block_layers(maker, 3)
    maker.weight("embed_tokens", VOCAB, HIDDEN)
    maker.weight("lm_head", VOCAB, HIDDEN)
    _markov(maker, VOCAB, 8, with_markov=True)
    config = {
        **SHAPE,
        "architectures": ["Qwen3DSparkModel"],
        "model_type": "qwen3",
        "head_dim": HIDDEN // HEADS,
        "num_hidden_layers": 2,
        "block_size": 5,
        "mask_token_id": MASK,
        "target_layer_ids": [i - 1 for i in AUX],
        "num_target_layers": NUM_LAYERS,
        "markov_rank": 8,
        "markov_head_type": "vanilla",
        "enable_confidence_head": True,
        "confidence_head_with_markov": True,
    }
    return maker.save(folder, config)


def dspark_speculators(folder: Path) -> Checkpoint:
    """A part of the vocabulary, drafts from the first mask on, the bias on the best few, confidences by position."""
    maker = Maker(11)
    _block_layers(maker, 3)
    maker.draft_vocabulary(SUBSET)
    _markov(maker, len(SUBSET), 6, with_markov=False)
    return maker.save(
        folder,
        speculators(
            "dspark", layer=_QWEN3, draft_vocab_size=len(SUBSET), block_size=5, mask_token_id=MASK, aux_hidden_state_layer_ids=AUX, markov_rank=6,
            markov_head_type="vanilla", enable_confidence_head=True, confidence_head_with_markov=False, sample_from_anchor=False,
            dspark_draft_topk=9, confidence_temperatures=[0.7, 1.5],
        ),
    )  # fmt: skip


_QWEN3 = {"model_type": "qwen3", "head_dim": HIDDEN // HEADS, "num_hidden_layers": 2}


def _block_layers(maker: Maker, num_states: int) -> None:
    maker.weight("fc", HIDDEN, num_states * HIDDEN)
    maker.norm("hidden_norm")
    maker.norm("norm")
    for i in range(2):
        maker.layer(f"layers.{i}", qk_norm=True)


def _markov(maker: Maker, num_drafts: int, rank: int, *, with_markov: bool) -> None:
    maker.weight("markov_head.markov_w1", VOCAB, rank, std=1.0)
    maker.weight("markov_head.markov_w2", num_drafts, rank, std=0.5)
    maker.weight("confidence_head.proj", 1, HIDDEN + (rank if with_markov else 0))
    maker.bias("confidence_head.proj", 1)


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder


WRITERS = {
    function.__name__: function
    for function in (
        eagle3_speculators, eagle3_plain, eagle3_two_layers, eagle3_norm_before_fc, eagle_plain, mtp_mimo, mtp_speculators,
        dflash_plain, dflash_speculators, dspark_native, dspark_speculators,
    )
}  # fmt: skip
"""By name; the method is what stands before the first underscore."""
