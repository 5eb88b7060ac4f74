"""Prompt files for `specwire advise` and `specwire sweep`, chosen from one JSONL file with `category`, `id` and `turns`: chat, copy-heavy summaries,
code, and all three in turn (`mixed`).

python -m benchmarks.advise_workloads prompts_bench.jsonl.gz --output prompts
"""

import argparse
import gzip
import json
from pathlib import Path
from typing import Any

CHAT = ("writing", "roleplay", "humanities", "stem")
MAX_CHARACTERS = 2400
"""Of a prompt: longer ones take a small CPU too long."""
_COPY = "Copy the most important sentences of this article word for word, in their order.\n\n"


def workloads(lines: list[dict[str, Any]], number: int) -> dict[str, list[dict[str, Any]]]:
    """`number` prompts of each workload, spread evenly over its categories and over the file."""
    short = [line for line in lines if len(line["turns"][0]) <= MAX_CHARACTERS]
    chat = [line for name in CHAT for line in _spread([each for each in short if each["category"] == name], -(-number // len(CHAT)))]
    summaries = _spread([line for line in short if line["category"] == "summarization"], number)
    code = _spread([line for line in short if line["category"] == "coding"], number)
    return {
        "chat": chat[:number],
        "summaries": [{**line, "turns": [_COPY + line["turns"][0].removeprefix("Summarize: ")]} for line in summaries],
        "code": code,
    }


def mixed(chosen: dict[str, list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """One of each workload after the other, as many as there are of all."""
    return [line for lines in zip(*chosen.values(), strict=False) for line in lines]


def read_lines(path: Path) -> list[dict[str, Any]]:
    """Of a gzipped file."""
    with gzip.open(path, "rt", encoding="utf-8") as file:
        return [json.loads(line) for line in file]


def write_prompts(chosen: dict[str, list[dict[str, Any]]], folder: Path) -> None:
    """One file a workload."""
    folder.mkdir(parents=True, exist_ok=True)
    for name, lines in chosen.items():
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")


def _spread(lines: list[dict[str, Any]], number: int) -> list[dict[str, Any]]:
    return [lines[index * len(lines) // number] for index in range(min(number, len(lines)))]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("prompts", type=Path)
    parser.add_argument("--number", type=int, default=16, help="prompts of each workload")
    parser.add_argument("--output", type=Path, default=Path("prompts"))
    arguments = parser.parse_args()
    chosen = workloads(read_lines(arguments.prompts), arguments.number)
    write_prompts(chosen | {"mixed": mixed(chosen)}, arguments.output)


if __name__ == "__main__":
    main()
