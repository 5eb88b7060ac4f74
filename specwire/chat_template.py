"""Chat templates: a model's Jinja program that turns messages into a prompt, run in a sandbox."""

import datetime
import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.meta
from jinja2.ext import Extension
from jinja2.sandbox import ImmutableSandboxedEnvironment

from specwire.errors import InvalidArgumentError


class _Generation(Extension):
    """`{% generation %} ... {% endgeneration %}` marks the assistant's text for training; here it only renders its body."""

    tags = {"generation"}  # noqa: RUF012 (the base class's interface)

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """A compiled template. It sees its variables and nothing else of this process.

    Args:
        source: the Jinja text.

    Attributes:
        variables: names that it reads; what else `render` is given has no effect.

    Raises:
        InvalidArgumentError: it is no Jinja.
    """

    def __init__(self, source: str) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True, extensions=[_Generation, "jinja2.ext.loopcontrols"])
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        environment.globals["strftime_now"] = _strftime_now
        try:
            self._template = environment.from_string(source)
            self.variables = frozenset(jinja2.meta.find_undeclared_variables(environment.parse(source)))
        except jinja2.TemplateError as error:
            raise InvalidArgumentError(f"the chat template can't be compiled: {error}") from error

    def render(self, **variables: Any) -> str:
        """The prompt text.

        Raises:
            InvalidArgumentError: the template refuses its input (raise_exception), or needs a variable that is not there.
        """
        try:
            return self._template.render(**variables)
        except jinja2.UndefinedError as error:
            text = _lack(str(error), variables.get("messages", ()))
            raise InvalidArgumentError(f"the chat template refuses the messages: {text}") from error
        except (jinja2.TemplateError, TypeError, ValueError, LookupError, AttributeError, RecursionError) as error:
            raise InvalidArgumentError(f"the chat template refuses the messages: {error}; check roles, order and content") from error


def _lack(details: str, messages: Sequence[Mapping[str, Any]]) -> str:
    """What the template did not find, and what to do about it."""
    if details.endswith("no attribute 'content'"):
        for position, message in enumerate(messages):
            if "content" not in message:
                return f"the one at position {position} ({message.get('role')}) has no key 'content'; add it"
    return f"{details}; check roles, order and content"


def _to_json(
    value: Any, ensure_ascii: bool = False, indent: int | None = None, separators: tuple[str, str] | None = None, sort_keys: bool = False
) -> str:
    # Jinja's own filter escapes HTML characters, which models have not seen in training.
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(pattern: str) -> str:
    return datetime.datetime.now().strftime(pattern)
