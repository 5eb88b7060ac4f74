"""`specwire generate`: one prompt to a running coordinator."""

import dataclasses
import json
import sys
from typing import Any

import typer

from specwire.cli.connection import ConnectionOptions, hint_at_up, make_client
from specwire.client import Chat, Choice
from specwire.client.generation import Deadline
from specwire.client.prompts import check_label
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


def check_call(timeout: float | None, request_id: str) -> None:
    """Raises InvalidArgumentError for what no call may have."""
    Deadline(timeout)
    check_label("request_id", request_id)


def run_generate(
    connection: ConnectionOptions, prompt: str, params: SamplingParams, *, timeout: float | None, request_id: str, as_chat: bool, as_json: bool
) -> None:
    """Prints the text as it comes, several choices at the end, one below the other; or one JSON object.

    Raises:
        SpecwireError: there is no coordinator, or it refuses or fails the request, or a choice of it.
    """
    with hint_at_up(), make_client(connection) as client:
        request = Chat([{"role": "user", "content": prompt}]) if as_chat else prompt
        if not as_json and params.n == 1:
            for event in client.stream(request, params, timeout=timeout, request_id=request_id):
                typer.echo(event.text, nl=False)
            typer.echo()
            return
        choices = client.generate(request, params, timeout=timeout, request_id=request_id).choices
    if as_json:
        objects = [result_object(choice) for choice in choices]
        typer.echo(json.dumps(objects[0] if len(objects) == 1 else {"choices": objects}, ensure_ascii=False))
    else:
        for choice in choices:
            typer.echo(f"--- choice {choice.index}\n{choice.text}")
    for choice in choices:
        if choice.error is not None:
            raise choice.error


def result_object(choice: Choice) -> dict[str, Any]:
    """What `--json` prints of a choice; text is null where no tokenizer is served, logprobs are there if they were asked for."""
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
