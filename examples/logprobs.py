"""How sure the model was of each token, what else it might have said, and which tokens were accepted drafts."""

import argparse
import math

from specwire import Client, TokenOrigin


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("prompt", nargs="?", default="The capital of France is")
    parser.add_argument("--address", default="127.0.0.1:50050", help="the coordinator: host:port or unix:path")
    arguments = parser.parse_args()

    with Client(arguments.address) as client:
        tokenizer = client.get_tokenizer()
        choice = client.generate(arguments.prompt, max_tokens=16, logprobs=3).choices[0]

    for token_id, origin, entry in zip(choice.token_ids, choice.origins, choice.logprobs or [], strict=True):
        others = ", ".join(f"{tokenizer.decode([other])!r} {math.exp(logprob):.0%}" for other, logprob in entry.top if other != token_id)
        drafted = "draft" if origin is TokenOrigin.ACCEPTED else ""
        print(f"{tokenizer.decode([token_id])!r:12} {math.exp(entry.sampled):4.0%} {drafted:5}  else {others}")


if __name__ == "__main__":
    main()
