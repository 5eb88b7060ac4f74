"""Several choices for one prompt, side by side, while they are written."""

import argparse

from rich.columns import Columns
from rich.live import Live
from rich.panel import Panel
from rich.text import Text

from specwire import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="Once upon a time")
    parser.add_argument("-n", type=int, default=3, help="number of choices")
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    arguments = parser.parse_args()

    texts = [arguments.prompt] * arguments.n
    reasons = ["..."] * arguments.n
    # `with` around the stream: Ctrl-C or an error ends the generation at the coordinator too.
    with (
        Client(arguments.address) as client,
        client.stream(arguments.prompt, n=arguments.n, max_tokens=64, temperature=0.9) as stream,
        Live() as live,
    ):
        for event in stream:
            texts[event.index] += event.text
            reasons[event.index] = event.finish_reason or "..."
            live.update(Columns([Panel(Text(text), title=reason, width=36) for text, reason in zip(texts, reasons, strict=True)]))


if __name__ == "__main__":
    main()
