"""What a draft head's config.json says: the speculators format and the plain folders of EAGLE, EAGLE-3, DFlash, DSpark and MTP."""

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from specwire.draft_checkpoint import HEAD_METHODS, method_of
from specwire.engine.heads.source import FINAL_LAYER
from specwire.engine.models.config import ModelConfig
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.json_files import read_json_object

_LIBRARY_KEY = "speculators_model_type"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """What all heads have; `options` holds the rest for the method's own module.

    Args:
        name: the folder, for messages.
        method: "eagle", "eagle3", "mtp", "dflash" or "dspark"; "draft_model" where the file does not tell (an ordinary model's).
        is_speculators: the folder is in the format of the speculators library.
        layers: shape of the head's own layers; vocab_size is the target's.
        target_hidden_size: of the target that it was made for.
        draft_vocab_size: ids that it can draft.
        layer_ids: the hidden states that it reads, as `FeatureSource` counts them; None = the usual three of the target (EAGLE-3).
        num_draft_tokens: that it was made for; None = the file does not say.
        target: the target's name in the file; empty = it has none.
        options: all keys of the file, those of eagle_config and dflash_config among them.
    """

    name: str
    method: str
    is_speculators: bool
    layers: ModelConfig
    target_hidden_size: int
    draft_vocab_size: int
    layer_ids: tuple[int, ...] | None
    num_draft_tokens: int | None
    target: str
    options: Mapping[str, Any]
    layer_types: tuple[str, ...] = ()
    """Of the head's layers, as far as the file says them."""

    @classmethod
    def from_folder(cls, folder: Path, method: str = "") -> "HeadConfig":
        """Reads `config.json`.

        Args:
            method: what the weights say, where the file does not tell.

        Raises:
            InvalidArgumentError: there is none, it is no JSON object, or lacks what the method needs.
            UnsupportedError: layers or a method that are not computed here.
        """
        path = folder / "config.json"
        if not path.is_file():
            raise InvalidArgumentError(f"{folder} has no config.json; give the folder of a draft head")
        return cls.from_dict(read_json_object(path), str(folder), method)

    @classmethod
    def from_dict(cls, raw: Mapping[str, Any], name: str, method: str = "") -> "HeadConfig":
        """Builds from the content of config.json; see `from_folder`."""
        is_speculators = _LIBRARY_KEY in raw
        told = _method(raw, name)
        method = method or told if told == "draft_model" else told
        shape = _shape(raw, name) if is_speculators else dict(raw)
        layers = ModelConfig.from_dict(shape)
        if method == "mtp":
            layers = dataclasses.replace(layers, num_layers=1)  # the file is the target's own
        options = {**raw, **_nested(raw, "eagle_config"), **_nested(raw, "dflash_config")}
        return cls(
            name=name,
            method=method,
            is_speculators=is_speculators,
            layers=layers,
            target_hidden_size=options.get("target_hidden_size") or layers.hidden_size,
            draft_vocab_size=options.get("draft_vocab_size") or layers.vocab_size,
            layer_ids=(FINAL_LAYER,) if method in ("eagle", "mtp") else _layer_ids(options),
            num_draft_tokens=_num_draft_tokens(raw),
            target=str(_nested(_nested(raw, "speculators_config"), "verifier").get("name_or_path") or ""),
            options=options,
            layer_types=tuple(shape.get("layer_types") or ()) if method != "mtp" else (),
        )

    def flag(self, name: str, default: bool = False) -> bool:
        """A boolean key."""
        value = self.options.get(name)
        if value is not None and not isinstance(value, bool):
            raise InvalidArgumentError(f"{self.name}: {name} is {value!r}, but must be true or false")
        return default if value is None else value

    def number(self, name: str, default: int | None = None) -> int:
        """A key that is an integer of 0 or more.

        Raises:
            InvalidArgumentError: it is not, or it is missing and has no default.
        """
        value = self.options.get(name, default)
        if isinstance(value, bool) or not isinstance(value, int) or value < 0:
            raise InvalidArgumentError(f"{self.name}: config.json has {name} {value!r}, but {self.method} needs an integer of 0 or more")
        return value

    def layer_ids_of(self, target: ModelConfig | None) -> tuple[int, ...]:
        """Which hidden states of the target the head reads.

        Raises:
            InvalidArgumentError: the file does not say it, and the target is not known; or the target has no such layers.
        """
        if self.layer_ids is not None:
            ids = self.layer_ids
        elif target is None:
            raise InvalidArgumentError(f"{self.name}: config.json names no layers of the target; add eagle_aux_hidden_state_layer_ids")
        else:
            ids = (2, target.num_layers // 2, target.num_layers - 3)
        wrong = [i for i in ids if i != FINAL_LAYER and (i < 0 or (target is not None and i > target.num_layers))]
        if wrong:
            raise InvalidArgumentError(
                f"{self.name} reads hidden states of layer {wrong[0]}, but the target has "
                f"{'layers from 0 on' if target is None else f'{target.num_layers} layers'}; use a head that was made for this target"
            )
        return ids

    def check_target(self, target: ModelConfig) -> None:
        """Raise InvalidArgumentError, naming both, unless the head was made for a model of this size and vocabulary."""
        for what, mine, its in (
            ("hidden size", self.target_hidden_size, target.hidden_size),
            ("vocabulary", self.layers.vocab_size, target.vocab_size),
        ):
            if mine != its:
                raise InvalidArgumentError(
                    f"{self.name} is made for a target with {what} {mine}, but this target's is {its}; use a head that was made for this target"
                )
        self.layer_ids_of(target)


def _method(raw: Mapping[str, Any], name: str) -> str:
    kind = raw.get(_LIBRARY_KEY)
    if kind is not None and kind not in ("eagle3", "dflash", "dspark", "mtp"):
        raise UnsupportedError(f"{name}: {_LIBRARY_KEY} is {kind!r}, which is not built; use a head of {', '.join(HEAD_METHODS)}")
    if raw.get("model_type") == "mimo":
        return "mtp"
    return method_of(raw)


def _shape(raw: Mapping[str, Any], name: str) -> dict[str, Any]:
    shape = raw.get("transformer_layer_config")
    if not isinstance(shape, dict):
        raise InvalidArgumentError(f"{name}: config.json has no transformer_layer_config, which the speculators format needs")
    return dict(shape)


def _nested(raw: Mapping[str, Any], name: str) -> Mapping[str, Any]:
    value = raw.get(name)
    return value if isinstance(value, dict) else {}


def _layer_ids(options: Mapping[str, Any]) -> tuple[int, ...] | None:
    """In the order in which other engines look; ids of layers that are left count one less than ids of layers that are entered."""
    for key, offset in (
        ("eagle_aux_hidden_state_layer_ids", 0),
        ("aux_hidden_state_layer_ids", 0),
        ("dspark_target_layer_ids", 1),
        ("target_layer_ids", 1),
        ("layer_ids", 0),
    ):
        ids = options.get(key)
        if ids is None:
            continue
        if not isinstance(ids, list) or not ids or not all(type(i) is int for i in ids):
            raise InvalidArgumentError(f"config.json has {key} {ids!r}, but it must be a list of layer numbers")
        return tuple(i + offset for i in ids)
    return None


def _num_draft_tokens(raw: Mapping[str, Any]) -> int | None:
    proposals = _nested(raw, "speculators_config").get("proposal_methods")
    if not isinstance(proposals, list) or not proposals or not isinstance(proposals[0], dict):
        return None
    tokens = proposals[0].get("speculative_tokens")
    return tokens if type(tokens) is int and tokens > 0 else None
