"""What the bodies of requests may have: the fields that are understood, those that are refused by name, and how wrong ones are reported."""

import difflib
import json
import reprlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Annotated, Any, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from specwire.http.failures import Refusal

Body = TypeVar("Body", bound="Fields")
Item = TypeVar("Item")
ListOf = Annotated[list[Item], Field(fail_fast=True)]
"""A list that is read up to its first wrong element: one error is shown, and millions of them would take gigabytes."""

_NO_GRAMMARS = "answers can't be held to a grammar or schema; leave it out, and ask for the form in the prompt"
_NO_CALLS = "calls of tools are not read from the answer; leave it out and read them from the text"
_NO_VARIANTS = "answers are text only; leave it out"
UNSUPPORTED = {
    "audio": _NO_VARIANTS,
    "best_of": "choices are not ranked; ask for n choices and choose from them",
    "cache_salt": "requests of one API key share cached prefixes; give each tenant a key of its own",
    "chat_template": "the model's own chat template is used; render the prompt yourself and send it to /v1/completions",
    "continue_final_message": "an answer begins a new message; render the prompt yourself and send it to /v1/completions",
    "documents": "the prompt is all that the model sees; put them into a message",
    "function_call": _NO_CALLS,
    "functions": "it was replaced by tools; send those",
    "guided_choice": _NO_GRAMMARS,
    "guided_grammar": _NO_GRAMMARS,
    "guided_json": _NO_GRAMMARS,
    "guided_regex": _NO_GRAMMARS,
    "length_penalty": "there is no beam search; leave it out",
    "logits_processors": "no code of clients is run; use logit_bias",
    "metadata": "nothing is stored; leave it out",
    "modalities": _NO_VARIANTS,
    "parallel_tool_calls": _NO_CALLS,
    "prediction": "drafts come from the server's drafters; leave it out",
    "prompt_cache_key": "cached prefixes are found by themselves; leave it out",
    "prompt_embeds": "prompts are text or token ids; send one of those",
    "prompt_logprobs": "only generated tokens have log-probabilities; leave it out",
    "reasoning_effort": "use chat_template_kwargs, if the model's template has such a variable",
    "response_format": _NO_GRAMMARS,
    "safety_identifier": "use user",
    "service_tier": "use priority",
    "skip_special_tokens": "special tokens are no part of the text; use return_token_ids to see them",
    "spaces_between_special_tokens": "special tokens are no part of the text; leave it out",
    "store": "nothing is stored; leave it out",
    "structured_outputs": _NO_GRAMMARS,
    "suffix": "text can only be continued; leave it out",
    "tool_choice": _NO_CALLS,
    "truncate_prompt_tokens": "a prompt is used whole or refused; shorten it yourself",
    "use_beam_search": "there is no beam search; leave it out",
    "verbosity": "ask for it in the prompt",
    "web_search_options": "nothing is searched; leave it out",
}
"""Parameters of other servers, and what to do instead."""
# What is done anyway. Some clients send it always.
_NEUTRAL: Mapping[str, Sequence[Any]] = {
    "length_penalty": (1, 1.0),
    "metadata": ({},),
    "modalities": (["text"],),
    "parallel_tool_calls": (True,),
    "response_format": ({"type": "text"},),
    "service_tier": ("auto", "default"),
    "skip_special_tokens": (True,),
    "spaces_between_special_tokens": (True,),
    "store": (False,),
    "suffix": ("",),
    "use_beam_search": (False,),
}
_MAX_SHOWN = 80
_EXPECTED = {
    "int_type": "an integer",
    "int_from_float": "an integer",
    "float_type": "a number",
    "bool_type": "true or false",
    "string_type": "text",
    "list_type": "a list",
    "dict_type": "an object",
    "model_type": "an object",
    "model_attributes_type": "an object",
}


class Fields(BaseModel):
    """An object of known fields, each of its own type: no number is read from text. A field that is null is one that was left out."""

    model_config = ConfigDict(strict=True, extra="forbid", frozen=True)

    @property
    def names(self) -> dict[str, str]:
        """What messages about a value call it, and what the request calls it. Those that begin with the model speak of the served one."""
        return {name: name for name in type(self).model_fields if name != "model"}


def read_fields(kind: type[Body], data: object) -> Body:
    """A request's body, or an object in it.

    Raises:
        Refusal: it is no object, or has a field that is unknown, not supported, or of a wrong type.
    """
    if not isinstance(data, dict):
        raise Refusal(f"the body is {_show(data)}, but must be a JSON object; see docs/http.md")
    given = {name: value for name, value in data.items() if value is not None}
    for name, value in data.items():
        if name not in kind.model_fields:
            if value is not None:
                _refuse_unknown(kind, name, value, given)
            given.pop(name, None)
    try:
        return kind.model_validate(given)
    except ValidationError as error:
        raise _explain(error, kind) from None


def _refuse_unknown(kind: type[Fields], name: str, value: object, given: Mapping[str, Any]) -> None:
    """Raise a Refusal unless it asks for nothing but what is done anyway."""
    # 1 is no `True` here, and the other way round.
    if any(type(value) is type(neutral) and value == neutral for neutral in _NEUTRAL.get(name, ())) or (name, value) == (
        "best_of",
        given.get("n", 1),
    ):
        return
    if name in UNSUPPORTED:
        raise Refusal(f"{name} is {_show(value)}, which is not supported: {UNSUPPORTED[name]}", param=name, code="unsupported_parameter")
    shown = name[:_MAX_SHOWN]
    nearest = difflib.get_close_matches(shown, kind.model_fields, 1)
    remedy = f"did you mean {nearest[0]}?" if nearest else "remove it; docs/http.md lists what is known"
    raise Refusal(f"{shown} is not known here; {remedy}", param=shown, code="unknown_parameter")


def _explain(error: ValidationError, kind: type[Fields]) -> Refusal:
    """The first field that is wrong. Where it may have one of several types, all that pydantic says is that it has none of them."""
    details = error.errors(include_url=False, include_context=False)[0]
    name = str(details["loc"][0])
    if details["type"] == "missing":
        return Refusal(f"{_path(details['loc'])} is missing; send it", param=name, code="missing_parameter")
    expected = (kind.model_fields[name].description if name in kind.model_fields else None) or _EXPECTED.get(details["type"], details["msg"])
    is_whole = len(details["loc"]) == 1 or bool(kind.model_fields[name].description)
    return Refusal(f"{name if is_whole else _path(details['loc'])} is {_show(details['input'])}, but must be {expected}; send one", param=name)


def _path(location: Iterable[int | str]) -> str:
    """`stream_options.include_usage`, `messages[2].role`."""
    return "".join(f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_SHOWN]}" for part in location).removeprefix(".")


def _show(value: object) -> str:
    """As JSON has it; lists and objects shortened."""
    return reprlib.repr(value) if isinstance(value, list | dict) else json.dumps(value)[:_MAX_SHOWN]
