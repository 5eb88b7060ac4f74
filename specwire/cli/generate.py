"""`specwire generate`: one prompt to a running coordinator."""

import dataclasses
import json
import sys
from typing import Any

import typer

from specwire.cli.connection import ConnectionOptions, hint_at_up, make_client
from specwire.client import Chat, Choice
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams


def read_prompt(argument: str) -> str:
    """The argument, or standard input for "-".

    Raises:
        InvalidArgumentError: it is not valid UTF-8, or standard input is closed.
    """
    if argument == "-" and sys.stdin is None:
        raise InvalidArgumentError("the prompt is to come from standard input, which is closed; pipe it in, or give it as the argument")
    # Arguments that are no UTF-8 reach Python as lone surrogates.
    content = sys.stdin.buffer.read() if argument == "-" else argument.encode("utf-8", errors="surrogateescape")
    try:
        return content.decode("utf-8")
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(
            f"the prompt is not valid UTF-8: byte {error.start} is 0x{content[error.start]:02x}; convert it (iconv -t UTF-8), or remove it"
        ) from error


def run_generate(connection: ConnectionOptions, prompt: str, params: SamplingParams, *, as_chat: bool, as_json: bool) -> None:
    """Prints the text as it comes, or one JSON object at the end.

    Raises:
        SpecwireError: there is no coordinator, or it refuses or fails the request.
    """
    with hint_at_up(), make_client(connection) as client:
        request = Chat([{"role": "user", "content": prompt}]) if as_chat else prompt
        if as_json:
            typer.echo(json.dumps(result_object(client.generate(request, params).choices[0]), ensure_ascii=False))
            return
        for event in client.stream(request, params):
            typer.echo(event.text, nl=False)
        typer.echo()


def result_object(choice: Choice) -> dict[str, Any]:
    """What `--json` prints; text is null where no tokenizer is served, logprobs are there if they were asked for."""
    logprobs = {} if choice.logprobs is None else {"logprobs": [each._asdict() for each in choice.logprobs]}
    return {
        "text": choice.decoded,
        "token_ids": choice.token_ids,
        "finish_reason": choice.finish_reason,
        "stop_cause": choice.stop_cause,
        "usage": dataclasses.asdict(choice.usage),
        "spec": {**dataclasses.asdict(choice.spec), "acceptance_length": choice.spec.acceptance_length},
        **logprobs,
    }
