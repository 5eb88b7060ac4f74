"""`specwire chat`: a conversation with a running coordinator."""

import contextlib
import signal
import sys
from collections.abc import Callable, Iterator

import typer

from specwire.cli.connection import hint_at_up
from specwire.client import Client
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.sampling_params import SamplingParams

_HELP = "/reset forgets the conversation, /quit ends it; Ctrl-C ends an answer, Ctrl-D the program"


class Interrupts:
    """Ctrl-C where it means something. Elsewhere, such as right behind another one, it is ignored: it ends what runs, but never the program."""

    def __init__(self) -> None:
        self._is_allowed = False

    @contextlib.contextmanager
    def handled(self) -> Iterator[None]:
        """Nothing but `allowed` is interrupted meanwhile. In the main thread."""
        before = signal.signal(signal.SIGINT, self._interrupt)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, before)

    @contextlib.contextmanager
    def allowed(self) -> Iterator[None]:
        """The first Ctrl-C raises KeyboardInterrupt."""
        self._is_allowed = True
        try:
            yield
        finally:
            self._is_allowed = False

    def _interrupt(self, number: int, frame: object) -> None:
        if self._is_allowed:
            self._is_allowed = False
            raise KeyboardInterrupt


class Conversation:
    """The messages so far, the system message included.

    Args:
        system: the system message; empty = none.
    """

    def __init__(self, client: Client, params: SamplingParams, system: str = "", interrupts: Interrupts | None = None) -> None:
        self._client = client
        self._interrupts = interrupts or Interrupts()
        self._params = params
        self._first = [{"role": "system", "content": system}] if system else []
        self.messages = list(self._first)

    def reset(self) -> None:
        """Forgets all turns; the system message stays."""
        self.messages = list(self._first)

    def ask(self, question: str) -> None:
        """Prints the answer as it comes. Ctrl-C ends it, and the conversation goes on from what there is of it.

        Raises:
            SpecwireError: the coordinator refuses or fails it; the turn is forgotten.
        """
        asked = [*self.messages, {"role": "user", "content": question}]
        answer = ""
        try:
            with self._interrupts.allowed(), self._client.chat_stream(asked, self._params) as stream:
                for event in stream:
                    answer += event.text
                    typer.echo(event.text, nl=False)
        except KeyboardInterrupt:
            typer.echo(" [ended]", nl=False, err=True)
        finally:
            typer.echo()
        self.messages = [*asked, {"role": "assistant", "content": answer}]


def run_chat(client: Client, params: SamplingParams, system: str) -> bool:
    """Reads questions from standard input until its end or /quit; returns whether all were answered.

    Raises:
        SpecwireError: there is no coordinator, or it serves no tokenizer.
    """
    with hint_at_up():
        client.get_tokenizer()
    interrupts = Interrupts()
    conversation = Conversation(client, params, system, interrupts)
    if sys.stdin is None or not sys.stdin.isatty():
        return _answer_all(conversation, _read_line)
    typer.echo(_HELP, err=True)
    with interrupts.handled():
        return _answer_all(conversation, lambda: _ask_user(interrupts))


def _answer_all(conversation: Conversation, ask: Callable[[], str | None]) -> bool:
    """Until there is no further question."""
    all_answered = True
    while True:
        try:
            question = ask()
            if question is None or question == "/quit":
                return all_answered
            if question == "/reset":
                conversation.reset()
            elif question.startswith("/"):
                typer.echo(f"{question.split()[0]} is no command: {_HELP}", err=True)
            elif question:
                conversation.ask(question)
        except SpecwireError as error:
            all_answered = False
            typer.echo(f"specwire: {error}", err=True)


def _ask_user(interrupts: Interrupts) -> str | None:
    """A line that is typed; None at its end by Ctrl-D. Ctrl-C begins another one."""
    import readline  # noqa: F401 - gives `input` a line to edit, and those before it

    while True:
        try:
            with interrupts.allowed():
                return input("> ").strip()
        except KeyboardInterrupt:
            typer.echo(err=True)
        except EOFError:
            typer.echo(err=True)
            return None


def _read_line() -> str | None:
    """The next line of standard input; None at its end.

    Raises:
        InvalidArgumentError: it is not valid UTF-8, or standard input is closed.
    """
    line = sys.stdin.buffer.readline() if sys.stdin is not None else b""
    try:
        return line.decode("utf-8").strip() if line else None
    except UnicodeDecodeError as error:
        raise InvalidArgumentError(f"the question is not valid UTF-8 (byte {error.start}); convert it (iconv -t UTF-8)") from error
