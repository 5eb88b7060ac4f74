"""What generations look like in answers: completions and chats, whole or as parts of a stream."""

import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from specwire.client import Choice, StreamEvent
from specwire.http.logprobs import CompletionLogprobs, chat_logprobs
from specwire.http.origins import show_origins
from specwire.http.token_text import TokenTexts
from specwire.messages import TokenLogprobs, Usage
from specwire.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class AnswerHead:
    """What an answer, or each part of one, begins with."""

    id: str
    model: str
    created: int

    @classmethod
    def make(cls, answer_id: str, model: str) -> "AnswerHead":
        """As of now."""
        return cls(answer_id, model, int(time.time()))

    def answer(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        """The object around choices."""
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model, "choices": choices, **more}


class Format(Protocol):
    """One form of answers. Indices are those of the choices of all prompts."""

    kind: str
    stream_kind: str

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        """A whole choice."""

    def begin(self, index: int) -> dict[str, Any] | None:
        """What a choice's stream has before its first token, if anything."""

    def part(self, index: int, event: StreamEvent) -> dict[str, Any] | None:
        """The next part of a choice's stream; None for an event that shows nothing."""


class CompletionFormat:
    """Of /v1/completions.

    Args:
        tokenizer: the served one; None = answers have token ids only.
        texts: of its tokens; None = without log-probabilities.
        prompts: what answers begin with, of each prompt; None = nothing.
        prompt_token_ids: of each prompt, where answers have token ids.
        n: choices of each prompt.
        shows_origins: answers say where their tokens came from.
    """

    kind = stream_kind = "text_completion"

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        texts: TokenTexts | None,
        prompts: Sequence[str] | None,
        prompt_token_ids: Sequence[list[int]] | None,
        n: int,
        *,
        shows_origins: bool = False,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = texts
        self._prompts = prompts
        self._prompt_token_ids = prompt_token_ids
        self._n = n
        self._shows_origins = shows_origins
        self._logprobs: dict[int, CompletionLogprobs] = {}

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        shown = self._choice(index, self._echo(index) + (choice.decoded or ""), choice.token_ids, choice.logprobs)
        shown |= {"finish_reason": choice.finish_reason, "stop_reason": choice.stop_cause}
        if self._prompt_token_ids is not None:
            shown |= {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt_token_ids[index // self._n]}
        return shown | show_origins(choice) if self._shows_origins else shown

    def begin(self, index: int) -> dict[str, Any] | None:
        if self._prompts is None and self._prompt_token_ids is None:
            return None
        shown = self._choice(index, self._echo(index), [], None) | {"finish_reason": None, "stop_reason": None}
        if self._prompt_token_ids is not None:
            shown |= {"token_ids": [], "prompt_token_ids": self._prompt_token_ids[index // self._n]}
        return shown

    def part(self, index: int, event: StreamEvent) -> dict[str, Any] | None:
        text = "".join(event.pieces or ())
        if not text and event.finish_reason is None and self._texts is None and self._prompt_token_ids is None and not self._shows_origins:
            return None
        shown = self._choice(index, text, event.token_ids, event.logprobs)
        shown |= {"finish_reason": event.finish_reason, "stop_reason": event.stop_cause}
        if self._prompt_token_ids is not None:
            shown["token_ids"] = event.token_ids
        return shown | show_origins(event) if self._shows_origins else shown

    def _echo(self, index: int) -> str:
        return "" if self._prompts is None else self._prompts[index // self._n]

    def _choice(self, index: int, text: str, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": self._show_logprobs(index, token_ids, logprobs)}

    def _show_logprobs(self, index: int, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        if self._texts is None or self._tokenizer is None or logprobs is None:
            return None
        lists = self._logprobs.get(index)
        if lists is None:
            lists = self._logprobs[index] = CompletionLogprobs(self._tokenizer, self._texts)
        return lists.push(token_ids, logprobs)


class ChatFormat:
    """Of /v1/chat/completions; arguments as of CompletionFormat."""

    kind, stream_kind = "chat.completion", "chat.completion.chunk"

    def __init__(self, texts: TokenTexts | None, prompt_token_ids: Sequence[list[int]] | None, *, shows_origins: bool = False) -> None:
        self._texts = texts
        self._shows_origins = shows_origins
        self._prompt_token_ids = prompt_token_ids

    def choice(self, index: int, choice: Choice) -> dict[str, Any]:
        message = {"role": "assistant", "content": choice.decoded or "", "refusal": None}
        shown = {
            "index": index,
            "message": message,
            "logprobs": self._show_logprobs(choice.token_ids, choice.logprobs),
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_cause,
        }
        if self._prompt_token_ids is not None:
            shown |= {"token_ids": choice.token_ids, "prompt_token_ids": self._prompt_token_ids[0]}
        return shown | show_origins(choice) if self._shows_origins else shown

    def begin(self, index: int) -> dict[str, Any] | None:
        shown = self._part(index, {"role": "assistant", "content": ""})
        if self._prompt_token_ids is not None:
            shown |= {"token_ids": [], "prompt_token_ids": self._prompt_token_ids[0]}
        return shown

    def part(self, index: int, event: StreamEvent) -> dict[str, Any] | None:
        text = "".join(event.pieces or ())
        if not text and event.finish_reason is None and self._texts is None and self._prompt_token_ids is None and not self._shows_origins:
            return None
        shown = self._part(index, {"content": text} if text else {}, event.finish_reason, event.stop_cause)
        shown["logprobs"] = self._show_logprobs(event.token_ids, event.logprobs)
        if self._prompt_token_ids is not None:
            shown["token_ids"] = event.token_ids
        return shown | show_origins(event) if self._shows_origins else shown

    def _part(self, index: int, delta: dict[str, Any], finish_reason: str | None = None, cause: int | str | None = None) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": None, "finish_reason": finish_reason, "stop_reason": cause}

    def _show_logprobs(self, token_ids: list[int], logprobs: list[TokenLogprobs] | None) -> dict[str, Any] | None:
        return None if self._texts is None or logprobs is None or not token_ids else chat_logprobs(self._texts, token_ids, logprobs)


def usage_of(usages: Sequence[Sequence[Usage]]) -> dict[str, Any]:
    """Token counts over all choices of all prompts; a prompt counts once.

    Args:
        usages: by prompt, of its choices.
    """
    num_prompt = sum(choices[0].num_prompt_tokens for choices in usages if choices)
    num_generated = sum(usage.num_generated_tokens for choices in usages for usage in choices)
    num_cached = sum(max(usage.num_cached_tokens for usage in choices) for choices in usages if choices)
    return {
        "prompt_tokens": num_prompt,
        "completion_tokens": num_generated,
        "total_tokens": num_prompt + num_generated,
        "prompt_tokens_details": {"cached_tokens": num_cached},
    }
