"""JSON lines in ({"prompt": ...} or {"messages": [...]}), JSON lines out, in the order in which they end."""

import argparse
import json
import sys
from pathlib import Path

from specwire import Chat, Client, SamplingParams, SpecwireError


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("input", type=Path)
    parser.add_argument("output", type=Path)
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    arguments = parser.parse_args()

    lines = [json.loads(line) for line in arguments.input.read_text(encoding="utf-8").splitlines()]
    prompts = [Chat(line["messages"]) if "messages" in line else line["prompt"] for line in lines]
    num_failed = 0
    with Client(arguments.address) as client, arguments.output.open("w", encoding="utf-8") as output:
        for index, outcome in client.generate_batch(prompts, SamplingParams(max_tokens=64)):
            if isinstance(outcome, SpecwireError):
                num_failed += 1
                answer = {"index": index, "error": str(outcome)}
            else:
                answer = {"index": index, "text": outcome.text}
            print(json.dumps(answer, ensure_ascii=False), file=output, flush=True)
    print(f"{len(lines) - num_failed} answers, {num_failed} errors in {arguments.output}")
    sys.exit(num_failed > 0)


if __name__ == "__main__":
    main()
