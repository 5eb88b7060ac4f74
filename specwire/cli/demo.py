"""The answer to a prompt that repeats part of itself, with what speculation did to it."""

import logging
import time

from rich.console import Console

from specwire.client import AsyncClient, StreamEvent
from specwire.errors import FailedPreconditionError
from specwire.messages import SpecStats, TokenOrigin
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

DEMO_PROMPT = """\
Repeat this Python class and write nothing else.

```python
class Stack:
    def __init__(self):
        self.items = []

    def push(self, item):
        self.items.append(item)

    def pop(self):
        return self.items.pop()

    def is_empty(self):
        return len(self.items) == 0
```"""
DEMO_SAMPLING = SamplingParams(max_tokens=160, temperature=0.0)

_STYLES = {TokenOrigin.ACCEPTED: "green", TokenOrigin.RECOVERED: "bold yellow", TokenOrigin.BONUS: "", TokenOrigin.PLAIN: ""}


async def run_demo(console: Console, address: str) -> StreamEvent:
    """Streams the answer to the console and sums it up; returns the generation's last event.

    Raises:
        SpecwireError: the coordinator refuses or fails the request.
    """
    async with AsyncClient(address) as client:
        prompt = encode_question(await client.get_tokenizer(), DEMO_PROMPT)
        console.print("\nprompt:", style="bold")
        console.print(DEMO_PROMPT, style="dim", markup=False, soft_wrap=True)
        console.print("\nanswer:", style="bold")
        if console.is_terminal:
            console.print("([green]accepted draft[/green], [bold yellow]corrected[/bold yellow], the target's own)")
        started = time.monotonic()
        num_tokens = 0
        last: StreamEvent | None = None
        async with client.stream(prompt, DEMO_SAMPLING, request_id="demo") as stream:
            async for event in stream:
                num_tokens += len(event.token_ids)
                _print_tokens(console, event)
                last = event
        elapsed_s = time.monotonic() - started
    assert last is not None, "the stream ended without an event"
    assert last.spec is not None, f"the stream ended without statistics: {last}"
    console.print(f"\n\n{summarize(num_tokens, elapsed_s, last.spec)}\n", markup=False, soft_wrap=True)
    return last


def encode_question(tokenizer: Tokenizer, question: str) -> list[int]:
    """The question in the model's chat template; as it is where the model has none."""
    try:
        return tokenizer.encode_chat([{"role": "user", "content": question}])
    except FailedPreconditionError as error:
        logger.warning("the question is sent as plain text: %s", error)
        return tokenizer.encode(question)


def summarize(num_tokens: int, elapsed_s: float, spec: SpecStats) -> str:
    """Speed and acceptance in a few words."""
    parts = [f"{num_tokens} tokens in {elapsed_s:.2f} s: {num_tokens / elapsed_s:.1f} tokens/s"]
    if spec.num_drafts:
        positions = " ".join(map(str, spec.accepted_per_position))
        parts.append(f"acceptance length {spec.acceptance_length:.2f}")
        parts.append(f"{spec.num_accepted_tokens} of {spec.num_draft_tokens} draft tokens accepted (by position: {positions})")
        parts.append(f"{spec.num_steps} steps of the target instead of {num_tokens}")
    else:
        parts.append("nothing was drafted")
    return "; ".join(parts)


def _print_tokens(console: Console, event: StreamEvent) -> None:
    pieces = event.pieces or ()
    for index, piece in enumerate(pieces):
        # A last event may have text without a token: what was held back of a character.
        style = _STYLES[event.origins[index]] if index < len(event.origins) else ""
        console.print(piece, style=style, end="", markup=False, emoji=False, soft_wrap=True)
