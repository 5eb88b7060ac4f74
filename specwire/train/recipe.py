"""What is trained and how: one frozen dataclass, built-in recipes, and changes to them from a YAML file or `key=value` texts."""

import dataclasses
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from specwire.errors import InvalidArgumentError

METHODS = ("eagle3", "dspark")
DSPARK_FIELDS = ("markov_rank", "rerank", "anchor_stride", "base_weight")
"""Of `Recipe`, that say nothing of EAGLE-3."""
_KINDS = {int: "an integer", float: "a number", str: "text"}


def _check(name: str, value: object, is_good: bool, limit: str) -> None:
    if not is_good:
        raise InvalidArgumentError(f"recipe: {name} is {value}, but must be {limit}")


@dataclass(frozen=True, slots=True)
class Recipe:
    """How a head is made and trained. Times in seconds; a step is one update of the weights.

    Args:
        method: "eagle3" (drafts one by one) or "dspark" (a block in one pass).
        num_layers: decoder layers of the head.
        num_draft_tokens: eagle3: steps that training unrolls, as many as are drafted; dspark: size of the block.
        feature_layers: the target's residual stream entering these layers is the head's input; empty = 2, half of all, all but 3.
        draft_vocab_size: most frequent ids of the answers that can be drafted; 0 = the target's vocabulary.
        markov_rank: dspark: rank of the bias by the previous token.
        rerank: dspark: ids of highest base logit that the bias re-ranks.
        anchor_stride: dspark: tokens between two blocks of one sequence in training.
        kl_weight, tv_weight: of KL(target || draft) and of the total variation distance in the loss.
        base_weight: dspark: weight of the same loss on the logits without the bias.
        position_decay: weight of draft i + 1 relative to that of draft i.
        temperature: that both distributions have in the loss.
        learning_rate, warmup_steps, weight_decay, clip_norm: of AdamW; cosine to zero after the warm-up.
        num_steps: steps of the whole training.
        train_seconds: the rate falls to zero by then at the latest; 0 = no limit of time.
        tokens_per_step: tokens of a batch, padding included.
        train_share: share of the training sequences that is used.
        seed: of everything that is drawn.
    """

    method: str
    num_layers: int = 1
    num_draft_tokens: int = 5
    feature_layers: tuple[int, ...] = ()
    draft_vocab_size: int = 0
    markov_rank: int = 32
    rerank: int = 128
    anchor_stride: int = 4
    kl_weight: float = 1.0
    tv_weight: float = 1.0
    base_weight: float = 0.3
    position_decay: float = 0.9
    temperature: float = 1.0
    learning_rate: float = 1.5e-3
    warmup_steps: int = 60
    weight_decay: float = 0.01
    clip_norm: float = 1.0
    num_steps: int = 3000
    train_seconds: float = 0.0
    tokens_per_step: int = 16_384
    train_share: float = 1.0
    seed: int = 0

    def __post_init__(self) -> None:
        if self.method not in METHODS:
            raise InvalidArgumentError(f"recipe: method is {self.method!r}; choose one of {', '.join(METHODS)}")
        for name in ("num_layers", "num_draft_tokens", "markov_rank", "rerank", "anchor_stride", "num_steps", "tokens_per_step"):
            _check(name, getattr(self, name), getattr(self, name) >= 1, "at least 1")
        for name in ("kl_weight", "tv_weight", "base_weight", "train_seconds", "warmup_steps", "weight_decay", "draft_vocab_size"):
            _check(name, getattr(self, name), getattr(self, name) >= 0, "at least 0")
        for name in ("position_decay", "temperature", "learning_rate", "clip_norm", "train_share"):
            _check(name, getattr(self, name), getattr(self, name) > 0, "more than 0")
        _check("train_share", self.train_share, self.train_share <= 1, "at most 1")
        _check("kl_weight + tv_weight", 0, self.kl_weight + self.tv_weight > 0, "more than 0")

    def to_dict(self) -> dict[str, Any]:
        """As JSON holds it; `Recipe(**values)` with feature_layers as a tuple is the way back."""
        return dataclasses.asdict(self) | {"feature_layers": list(self.feature_layers)}


RECIPES: dict[str, Recipe] = {
    "eagle3": Recipe("eagle3"),
    "dspark": Recipe("dspark", num_layers=2, num_draft_tokens=7, position_decay=0.78),
}
"""Built-in recipes by name. DSpark's decay is exp(-1/4)."""


def load_recipe(name: str, changes: Iterable[str] = ()) -> Recipe:
    """A built-in recipe, or a YAML file of fields (`base: eagle3` begins with a built-in one), then changes of the form key=value.

    Raises:
        InvalidArgumentError: no such recipe, file or field, or a value that the field can't have.
    """
    values: dict[str, Any] = {}
    if name in RECIPES:
        values = RECIPES[name].to_dict()
    else:
        path = Path(name)
        if not path.is_file():
            raise InvalidArgumentError(f"recipe {name!r} is neither built in ({', '.join(RECIPES)}) nor a YAML file")
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
        if not isinstance(content, dict):
            raise InvalidArgumentError(f"{path} must hold a mapping of recipe fields, such as `method: eagle3`")
        base = content.pop("base", None)
        if base is not None and base not in RECIPES:
            raise InvalidArgumentError(f"{path}: base is {base!r}; built in are {', '.join(RECIPES)}")
        values = (RECIPES[base].to_dict() if base else {}) | content
    for change in changes:
        key, separator, text = change.partition("=")
        if not separator:
            raise InvalidArgumentError(f"{change!r} is no change of a recipe; write key=value, such as num_steps=500")
        values[key.strip()] = yaml.safe_load(text)
    return _from_values(values, name)


def _from_values(values: Mapping[str, Any], name: str) -> Recipe:
    types = get_type_hints(Recipe)
    unknown = sorted(set(values) - set(types))
    if unknown:
        raise InvalidArgumentError(f"recipe {name}: no field {', '.join(unknown)}; there are {', '.join(types)}")
    if "method" not in values:
        raise InvalidArgumentError(f"recipe {name} names no method; add one of {', '.join(METHODS)}, or a base")
    return Recipe(**{key: _convert(key, value, types[key]) for key, value in values.items()})


def _convert(key: str, value: Any, kind: Any) -> Any:
    if kind in (int, float) and isinstance(value, str | int | float) and not isinstance(value, bool):
        try:
            converted = kind(value)
        except ValueError:
            converted = None
        if converted is not None and (kind is float or converted == float(value)):
            return converted
    elif kind is str and isinstance(value, str):
        return value
    elif isinstance(value, list | tuple) and all(type(item) is int for item in value):
        return tuple(value)
    raise InvalidArgumentError(f"recipe: {key} is {value!r}, but must be {_KINDS.get(kind, 'a list of integers')}")
