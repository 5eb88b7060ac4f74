"""One prompt, one answer, and what speculation did for it."""

import argparse

from specwire import Client


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    arguments = parser.parse_args()

    with Client(arguments.address) as client:
        result = client.generate(arguments.prompt, max_tokens=32)

    print(result.text)
    print(f"{result.usage.num_generated_tokens} tokens, then {result.finish_reason}", end="; ")
    print(f"{result.spec.num_steps} steps of the target; acceptance length {result.spec.acceptance_length:.2f}")


if __name__ == "__main__":
    main()
