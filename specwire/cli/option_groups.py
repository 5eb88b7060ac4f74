"""Options that commands share, as one parameter: a dataclass whose fields are options."""

import dataclasses
import functools
import inspect
from collections.abc import Callable
from typing import Any, get_type_hints

from specwire.cli.app import exit_on_error


def grouped(command: Callable[..., None]) -> Callable[..., None]:
    """Lets parameters of a command be dataclasses: each stands for its fields, which have the types of options.

    What the user gave comes as one object of the dataclass; where that refuses it, the program ends with status 2.
    """
    signature = inspect.signature(command, eval_str=True)
    groups: dict[str, type[Any]] = {}
    options: list[inspect.Parameter] = []
    for parameter in signature.parameters.values():
        kind = parameter.annotation
        if dataclasses.is_dataclass(kind) and isinstance(kind, type):
            groups[parameter.name] = kind
            options += _options(kind)
        else:
            options.append(parameter.replace(kind=inspect.Parameter.KEYWORD_ONLY))

    @functools.wraps(command)
    def run(**values: Any) -> None:
        with exit_on_error(2):
            made = {name: kind(**{field.name: values.pop(field.name) for field in dataclasses.fields(kind)}) for name, kind in groups.items()}
        command(**made, **values)

    del run.__wrapped__  # its parameters are not the options
    run.__signature__ = signature.replace(parameters=options)  # type: ignore[attr-defined]
    run.__annotations__ = {option.name: option.annotation for option in options}
    return run


def _options(kind: type[Any]) -> list[inspect.Parameter]:
    hints, options = get_type_hints(kind, include_extras=True), []
    for field in dataclasses.fields(kind):
        default = inspect.Parameter.empty if field.default is dataclasses.MISSING else field.default
        options.append(inspect.Parameter(field.name, inspect.Parameter.KEYWORD_ONLY, default=default, annotation=hints[field.name]))
    return options
