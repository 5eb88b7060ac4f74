"""How much a benchmark asks for: as the peer was asked, or just enough to try the code."""

import argparse
from collections.abc import Sequence
from dataclasses import dataclass, replace

from benchmarks.gpu import peer

BLOCK_SIZE = 16
_MAX_OUTSTANDING_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class Sizes:
    """Of a batch.

    Args:
        concurrency: numbers of sequences, each a batch.
        num_prompt_tokens: of each sequence.
        num_steps: decode steps behind the first token.
        max_num_batched_tokens: of one round.
        num_draft_tokens: K_max, also of the graphs.
        num_repeats: of which the best counts.
    """

    concurrency: tuple[int, ...]
    num_prompt_tokens: int
    num_steps: int
    max_num_batched_tokens: int
    num_draft_tokens: int
    num_repeats: int

    @property
    def max_num_seqs(self) -> int:
        return max(self.concurrency)

    @property
    def num_blocks(self) -> int:
        """KV blocks of a sequence, with those that rounds in flight may need."""
        num_ahead = _MAX_OUTSTANDING_ROUNDS * (self.num_draft_tokens + 1)
        return -(-(self.num_prompt_tokens + self.num_steps + 1 + num_ahead) // BLOCK_SIZE)

    @property
    def max_model_len(self) -> int:
        return self.num_blocks * BLOCK_SIZE


FULL = Sizes((1, 8, 32, 128, 256), peer.NUM_PROMPT_TOKENS, peer.NUM_STEPS, 16384, 5, 3)
TINY = Sizes((1, 3), 20, 12, 64, 5, 1)


def add_sizes(parser: argparse.ArgumentParser) -> None:
    """Options that change them."""
    parser.add_argument("--concurrency", nargs="+", type=int, help="numbers of sequences")
    parser.add_argument("--num-draft-tokens", type=int, help="K_max that the graphs are made for")


def chosen_sizes(options: argparse.Namespace) -> Sizes:
    """As the options have them."""
    sizes = TINY if options.tiny else FULL
    concurrency: Sequence[int] = options.concurrency or sizes.concurrency
    num_draft_tokens = options.num_draft_tokens or sizes.num_draft_tokens
    most = max(sizes.max_num_batched_tokens, max(concurrency) * (num_draft_tokens + 1))
    return replace(sizes, concurrency=tuple(concurrency), num_draft_tokens=num_draft_tokens, max_num_batched_tokens=most)
