"""What LLM returns: shaped as vLLM's outputs are, so that programs written for those read these."""

import math
from collections.abc import Sequence
from dataclasses import dataclass

from specwire.bench.metrics import add_stats
from specwire.client import Choice, GenerationResult
from specwire.errors import SpecwireError
from specwire.messages import SpecStats, TokenLogprobs
from specwire.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of a token from the raw logits. rank: from 1 on; None where the token is not among those that were asked for."""

    logprob: float
    rank: int | None
    decoded_token: str | None


@dataclass(frozen=True, slots=True)
class CompletionOutput:
    """One choice of a prompt.

    Attributes:
        index: from 0 to n - 1.
        text: without a tokenizer empty.
        cumulative_logprob: sum over its tokens, where logprobs were asked for.
        logprobs: by token id, one mapping a token: its own and the best ones.
        finish_reason: stop, length, cancelled or error.
        stop_reason: the token id (also that of the end of text) or stop string that ended it, where finish_reason is stop.
        error: why finish_reason is error.
    """

    index: int
    text: str
    token_ids: list[int]
    cumulative_logprob: float | None
    logprobs: list[dict[int, Logprob]] | None
    finish_reason: str
    stop_reason: int | str | None
    error: SpecwireError | None = None


@dataclass(frozen=True, slots=True)
class RequestMetrics:
    """When a prompt was handed over and when its answer was there (seconds since the epoch), what it took, and speculation over all its choices."""

    arrival_time: float
    finished_time: float
    num_prompt_tokens: int
    num_cached_tokens: int
    num_generation_tokens: int
    spec: SpecStats


@dataclass(frozen=True, slots=True)
class RequestOutput:
    """What became of one prompt.

    Attributes:
        request_id: the label in logs and traces.
        prompt: its text, that of a conversation in the model's chat template; None if it was token ids.
        prompt_token_ids: empty if the prompt failed before it was encoded.
        metrics: None if the prompt failed.
        error: why there are no outputs.
        completions: the choices; what `outputs` gives, but empty if the prompt failed.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    metrics: RequestMetrics | None = None
    error: SpecwireError | None = None
    finished: bool = True
    completions: tuple[CompletionOutput, ...] = ()

    @property
    def outputs(self) -> list[CompletionOutput]:
        """The choices. Raises the prompt's own SpecwireError if it failed: `error` says so without raising."""
        if self.error is not None:
            raise self.error
        return list(self.completions)

    @property
    def num_cached_tokens(self) -> int | None:
        """Tokens of the prompt that came from the prefix cache; None if it failed."""
        return None if self.metrics is None else self.metrics.num_cached_tokens


def make_output(
    request_id: str, prompt: str | None, result: GenerationResult, tokenizer: Tokenizer | None, arrival_time: float, finished_time: float
) -> RequestOutput:
    """The output of a prompt that was answered."""
    choices = result.choices
    metrics = RequestMetrics(
        arrival_time,
        finished_time,
        len(result.prompt_token_ids),
        max(choice.usage.num_cached_tokens for choice in choices),
        sum(choice.usage.num_generated_tokens for choice in choices),
        add_stats([choice.spec for choice in choices]),
    )
    completions = tuple(_completion(choice, tokenizer) for choice in choices)
    return RequestOutput(request_id, prompt, result.prompt_token_ids, metrics, completions=completions)


def _completion(choice: Choice, tokenizer: Tokenizer | None) -> CompletionOutput:
    logprobs = None if choice.logprobs is None else _logprobs(choice.token_ids, choice.logprobs, tokenizer)
    return CompletionOutput(
        choice.index,
        choice.decoded or "",
        choice.token_ids,
        None if choice.logprobs is None else math.fsum(entry.sampled for entry in choice.logprobs),
        logprobs,
        choice.finish_reason,
        choice.stop_cause,
        choice.error,
    )


def _logprobs(token_ids: Sequence[int], entries: Sequence[TokenLogprobs], tokenizer: Tokenizer | None) -> list[dict[int, Logprob]]:
    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.decode([token_id], skip_special_tokens=False)

    shown = []
    for token_id, entry in zip(token_ids, entries, strict=True):
        best = {top_id: Logprob(logprob, rank, text(top_id)) for rank, (top_id, logprob) in enumerate(entry.top, start=1)}
        own = {} if token_id in best else {token_id: Logprob(entry.sampled, None, text(token_id))}
        shown.append(best | own)
    return shown
