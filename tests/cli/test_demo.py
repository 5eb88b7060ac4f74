"""The demo's stream: as it is where nobody watches, coloured on a terminal."""

import io

from rich.console import Console

from specwire.cli.demo import DEMO_PROMPT, DEMO_SAMPLING, run_demo, summarize
from specwire.messages import SpecStats
from tests.cli.conftest import Coordinator
from tests.coordinator.scripted_engine import expected_tokens

ESCAPE = "\x1b"


async def run(coordinator: Coordinator, *, is_terminal: bool) -> str:
    colours = {"force_terminal": True, "color_system": "standard", "no_color": False} if is_terminal else {}
    console = Console(file=io.StringIO(), highlight=False, width=40, **colours)  # type: ignore[arg-type]
    last = await run_demo(console, coordinator.address)
    assert last.spec is not None
    assert last.spec.num_accepted_tokens > 0
    return console.file.getvalue()  # type: ignore[attr-defined]


async def test_plain_output_has_the_exact_text(coordinator: Coordinator) -> None:
    output = await run(coordinator, is_terminal=False)
    assert ESCAPE not in output
    assert f"<{DEMO_PROMPT}>".encode() == bytes(coordinator.engine.requests[-1].request.prompt_token_ids), "the chat template was not used"
    answer = bytes(token for token in expected_tokens(list(b">"), 0, DEMO_SAMPLING.max_tokens or 0, 257) if token < 256)
    assert answer[:60].decode("ascii") in output, "the text must not be wrapped at the console's width"
    assert "acceptance length 2.50; 3 of 6 draft tokens accepted (by position: 2 1 0)" in output
    assert "accepted draft" not in output, "a legend without colours says nothing"


async def test_terminal_output_is_coloured(coordinator: Coordinator) -> None:
    output = await run(coordinator, is_terminal=True)
    assert f"({ESCAPE}[32maccepted draft{ESCAPE}[0m" in output
    assert f"{ESCAPE}[32m?{ESCAPE}[0m" in output, "the first accepted token, '?', must be green"


def test_summary_of_plain_decoding() -> None:
    assert summarize(10, 2.0, SpecStats()) == "10 tokens in 2.00 s: 5.0 tokens/s; nothing was drafted"
