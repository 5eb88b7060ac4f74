"""Options of several commands that measure."""

from pathlib import Path
from typing import Annotated

import typer

Temperature = Annotated[float, typer.Option(help="0 always takes the most likely token.")]
TopP = Annotated[float, typer.Option(help="Probability mass that may be sampled from.")]
TopK = Annotated[int, typer.Option(help="Number of most likely tokens that may be sampled; 0 = all.")]
Seed = Annotated[int, typer.Option(help="Of everything that is drawn; request i samples with seed + i.")]
IgnoreEos = Annotated[bool, typer.Option("--ignore-eos", help="Answers have their full length.")]
MaxDraftTokens = Annotated[int | None, typer.Option(help="Most drafts verified a step; 0 = no speculation. [default: the server's K]")]
Chat = Annotated[bool, typer.Option("--chat", help="Ask the prompts as questions, in the model's chat template.")]
Timeout = Annotated[float | None, typer.Option(help="Seconds that a request may take. [default: no limit]")]
Retries = Annotated[
    int, typer.Option(help="How often a request is sent again that failed before its first token for want of a coordinator or of room.")
]
ReadyTimeout = Annotated[float, typer.Option(help="Seconds to wait for the coordinator to serve.")]
Output = Annotated[Path | None, typer.Option(help="File for the report as JSON.")]
AllowErrors = Annotated[bool, typer.Option("--allow-errors", help="Exit with status 0 in spite of failed requests.")]
PromptFile = Annotated[Path, typer.Option(help="JSONL file with `prompt` or `turns`, and optionally `category` and `weight`.")]
Categories = Annotated[str, typer.Option(help="Categories with commas between them. [default: all]")]
Weights = Annotated[str, typer.Option(help="How much each category counts, such as chat=3,coding=1. [default: by prompt]")]
PromptsPerCategory = Annotated[int | None, typer.Option(help="Most prompts of each category. [default: all]")]
OutputLen = Annotated[int, typer.Option(help="Most tokens of an answer.")]


def split_names(text: str) -> tuple[str, ...]:
    """From `chat,coding`."""
    return tuple(filter(None, (name.strip() for name in text.split(","))))
