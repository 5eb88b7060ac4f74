"""Options of several commands that measure."""

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from specwire.sampling_params import SamplingParams

MaxDraftTokens = Annotated[int | None, typer.Option(help="Most drafts verified a step; 0 = no speculation. [default: the server's K]")]
Chat = Annotated[bool, typer.Option("--chat", help="Ask the prompts as questions, in the model's chat template.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds that a request may take. [default: no limit]")]
ReadyTimeout = Annotated[float, typer.Option(help="Seconds to wait for the coordinator to serve.")]
Output = Annotated[Path | None, typer.Option(help="File for the report as JSON.")]
AllowErrors = Annotated[bool, typer.Option("--allow-errors", help="Exit with status 0 in spite of failed requests.")]
OutputLen = Annotated[int, typer.Option(help="Most tokens of an answer.")]


@dataclass(frozen=True, slots=True)
class PromptChoice:
    """Prompts of a file that has categories."""

    prompts: Annotated[Path, typer.Option(help="JSONL file with `prompt` or `turns`, and optionally `category` and `weight`.")]
    chat: Chat = False
    categories: Annotated[str, typer.Option(help="Categories with commas between them. [default: all]")] = ""
    weights: Annotated[str, typer.Option(help="How much each category counts, such as chat=3,coding=1. [default: by prompt]")] = ""
    num_prompts: Annotated[int | None, typer.Option(help="Most prompts of each category. [default: all]")] = None


@dataclass(frozen=True, slots=True)
class Sampling:
    """How answers are sampled."""

    seed: Annotated[int, typer.Option(help="Of everything that is drawn; request i samples with seed + i.")] = 0
    temperature: Annotated[float, typer.Option(help="0 always takes the most likely token.")] = 0.0
    top_p: Annotated[float, typer.Option(help="Probability mass that may be sampled from.")] = 1.0
    top_k: Annotated[int, typer.Option(help="Number of most likely tokens that may be sampled; 0 = all.")] = 0
    ignore_eos: Annotated[bool, typer.Option("--ignore-eos", help="Answers have their full length.")] = False

    def params(self, max_draft_tokens: int | None = None) -> "SamplingParams":
        """Raises InvalidArgumentError for a value out of range."""
        from specwire.sampling_params import SamplingParams

        return SamplingParams(
            temperature=self.temperature,
            top_p=self.top_p,
            top_k=self.top_k,
            seed=self.seed,
            ignore_eos=self.ignore_eos,
            max_draft_tokens=max_draft_tokens,
        )


@dataclass(frozen=True, slots=True)
class Sending:
    """How requests are sent to a coordinator that may not be there yet."""

    timeout: Timeout = None
    retries: Annotated[
        int, typer.Option(help="How often a request is sent again that failed before its first token for want of a coordinator or of room.")
    ] = 0
    ready_timeout: ReadyTimeout = 10.0


def split_names(text: str) -> tuple[str, ...]:
    """From `chat,coding`."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))
