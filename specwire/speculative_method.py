"""Which drafting methods there are, which of them have a model, and what goes with which."""

from collections.abc import Mapping, Sequence
from typing import Any

from specwire.draft_checkpoint import HEAD_METHODS, infer_method
from specwire.errors import InvalidArgumentError, UnsupportedError

METHODS = ("ngram", "draft_model", "suffix", *HEAD_METHODS)
LOOKUP_METHODS = ("ngram", "suffix")
"""Those that run no model."""
MODEL_METHODS = ("draft_model", *HEAD_METHODS)
"""Those with one, of which a list may have one."""
METHOD_ALIASES = {"mimo_mtp": "mtp"}
_LATER_METHODS = ("medusa", "mlp_speculator", "ngram_gpu", "custom_class", "extract_hidden_states")
_READERS = {"prompt_lookup_": ("ngram",), "suffix_decoding_": ("suffix",), "draft_sample_method": MODEL_METHODS, "draft_sharpness": MODEL_METHODS}
"""Methods that read options with these beginnings of a name, where not all do."""
_OWN_NAMES = {"ngram": ("ngram", "[ngram]"), "suffix": ("suffix",)}
"""What may stand as model of a method without one."""


def has_model(method: Any) -> bool:
    """Whether a method, or one of a list of methods, runs a model."""
    return any(name in MODEL_METHODS for name in (method if isinstance(method, (list, tuple)) else [method]))


def check_method(method: Any, model: Any) -> None:
    """Raise InvalidArgumentError or UnsupportedError unless there is such a method, or list of methods, and the model goes with it."""
    if method in _LATER_METHODS or (isinstance(method, str) and method.endswith("_mtp")):
        raise UnsupportedError(f"method {method!r} is not built; use one of {', '.join(METHODS)}")
    if isinstance(method, tuple):
        _check_list(method)
    elif method is not None and method not in METHODS:
        raise InvalidArgumentError(f"method is {method!r}, but must be one of {', '.join(METHODS)}, or null for no drafting")
    if model is not None and not isinstance(model, str):
        raise InvalidArgumentError(f"model is {model!r}, but must be a string: the draft model's folder, GGUF file or hub id")
    names = method if isinstance(method, tuple) else (method,)
    if "draft_model" in names and not model:
        raise InvalidArgumentError(f"method is {_named(method)}, but model is not set; name the draft model's folder, GGUF file or hub id")
    if not model and any(name in HEAD_METHODS and name != "mtp" for name in names):
        raise InvalidArgumentError(f"method is {_named(method)}, but model is not set; name the folder or hub id of the draft head")
    if method is not None and not has_model(method) and model not in (None, *_OWN_NAMES.get(str(method), ())):
        name = " and ".join(method) if isinstance(method, tuple) else method
        raise InvalidArgumentError(f"method is {name}, but model is {model!r}; {name} has no model: remove it, or use method draft_model")


def unread_options(methods: Sequence[str], values: Mapping[str, Any], defaults: Mapping[str, Any]) -> list[str]:
    """What says of each option that differs from its default, and that none of the methods reads, which methods do."""
    found = []
    for prefix, readers in _READERS.items():
        for name, value in values.items():
            if name.startswith(prefix) and value != defaults[name] and methods and set(methods).isdisjoint(readers):
                shown = f"{name} is {value}, but {' and '.join(methods)} does not read it"
                found.append(f"{shown}: leave it out, or use {readers[0] if len(readers) == 1 else 'a method with a model'}")
    return found


def check_options(method: Any, *, use_heterogeneous_vocab: Any, parallel_drafting: Any, dspark_draft_topk: Any) -> None:
    """Raise InvalidArgumentError unless these go with the method."""
    names = method if isinstance(method, tuple) else (method,)
    for name, value, methods in (
        ("use_heterogeneous_vocab", use_heterogeneous_vocab, ("draft_model",)),
        ("parallel_drafting", parallel_drafting, ("draft_model", "dflash", "dspark")),
    ):
        if not isinstance(value, bool):
            raise InvalidArgumentError(f"{name} is {value!r}, but must be true or false")
        if value and not any(name in methods for name in names):
            raise InvalidArgumentError(f"{name} is true, but method is {_named(method)}; it is for {' and '.join(methods)}: leave it out")
    if dspark_draft_topk is None:
        return
    if isinstance(dspark_draft_topk, bool) or not isinstance(dspark_draft_topk, int) or dspark_draft_topk < 1:
        raise InvalidArgumentError(f"dspark_draft_topk is {dspark_draft_topk!r}, but must be an integer of 1 or more")
    if "dspark" not in names:
        raise InvalidArgumentError(f"dspark_draft_topk is {dspark_draft_topk}, but method is {_named(method)}; it is for dspark: leave it out")


def inferred_method(model: str) -> str:
    """The method that a model is for.

    Raises:
        UnsupportedError: one that is not built.
    """
    method = infer_method(model)
    if method not in METHODS:
        raise UnsupportedError(
            f"model {model!r} is a checkpoint for drafting with {method}, by its config.json, which is not built; name another model, "
            "or the method that it shall run with"
        )
    return method


def _check_list(methods: Sequence[Any]) -> None:
    later = [name for name in methods if name in _LATER_METHODS or (isinstance(name, str) and name.endswith("_mtp"))]
    if later:
        raise UnsupportedError(f"method is {list(methods)}, but {later[0]!r} is not built; make lists of {', '.join(METHODS)}")
    if len(methods) < 2 or len(set(map(str, methods))) < len(methods) or not all(name in METHODS for name in methods):
        raise InvalidArgumentError(f"method is {list(methods)}, but a list must name two or more different ones of {', '.join(METHODS)}")
    with_model = [name for name in methods if name in MODEL_METHODS]
    if len(with_model) > 1:
        raise UnsupportedError(
            f"method is {list(methods)}, but {with_model[0]} and {with_model[1]} both have a model; a list has one of them at most, beside "
            f"{' and '.join(LOOKUP_METHODS)}"
        )


def _named(method: Any) -> str:
    return "null" if method is None else " and ".join(method) if isinstance(method, tuple) else str(method)
