"""What a generation gives."""

from dataclasses import dataclass

from specwire.errors import InvalidArgumentError, SpecwireError, UnsupportedError
from specwire.messages import SpecStats, TokenLogprobs, TokenOrigin, Usage

_NO_TEXT = "the coordinator serves no tokenizer, so there are only token_ids; decode them yourself"


@dataclass(frozen=True, slots=True)
class StreamEvent:
    """The next tokens of one choice.

    Attributes:
        index: of the choice, from 0 to n - 1.
        token_ids: new tokens, at least one unless this is the choice's last event.
        origins: where each of them came from: accepted draft or one of the target's own.
        pieces: what each token added to the text (a last event without tokens may still have one); None without a tokenizer. With stop
            strings the server cuts the text, and the last piece holds all of this event's.
        logprobs: one entry a token, if asked for.
        finish_reason: stop, length, cancelled or error in the choice's last event, else None.
        stop_cause: the token id or stop string that fired, where finish_reason is stop.
        usage, spec: token counts and speculation of the choice, in its last event.
        error: why finish_reason is error.
    """

    index: int
    token_ids: list[int]
    origins: tuple[TokenOrigin, ...]
    pieces: tuple[str, ...] | None
    logprobs: list[TokenLogprobs] | None = None
    finish_reason: str | None = None
    stop_cause: int | str | None = None
    usage: Usage | None = None
    spec: SpecStats | None = None
    error: SpecwireError | None = None

    @property
    def text(self) -> str:
        """New text: whole characters. Raises UnsupportedError if the coordinator serves no tokenizer."""
        if self.pieces is None:
            raise UnsupportedError(_NO_TEXT)
        return "".join(self.pieces)


@dataclass(frozen=True, slots=True)
class Choice:
    """One generation for a prompt; attributes as in StreamEvent. finish_reason error comes with `error`."""

    index: int
    token_ids: list[int]
    origins: tuple[TokenOrigin, ...]
    finish_reason: str
    stop_cause: int | str | None
    logprobs: list[TokenLogprobs] | None
    usage: Usage
    spec: SpecStats
    decoded: str | None
    error: SpecwireError | None = None

    @property
    def text(self) -> str:
        """The text. Raises UnsupportedError if the coordinator serves no tokenizer."""
        if self.decoded is None:
            raise UnsupportedError(_NO_TEXT)
        return self.decoded


@dataclass(frozen=True, slots=True)
class GenerationResult:
    """All choices for a prompt. If there is only one, its text, token_ids, finish_reason, usage and spec can be read from the result itself."""

    prompt_token_ids: list[int]
    choices: list[Choice]

    @property
    def text(self) -> str:
        return self._only_choice().text

    @property
    def token_ids(self) -> list[int]:
        return self._only_choice().token_ids

    @property
    def finish_reason(self) -> str:
        return self._only_choice().finish_reason

    @property
    def usage(self) -> Usage:
        return self._only_choice().usage

    @property
    def spec(self) -> SpecStats:
        return self._only_choice().spec

    def _only_choice(self) -> Choice:
        if len(self.choices) != 1:
            raise InvalidArgumentError(f"there are {len(self.choices)} choices; read them from .choices")
        return self.choices[0]
