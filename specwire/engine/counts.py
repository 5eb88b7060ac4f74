"""What a model's forward passes are counted as; imports no torch, so that services without a model may name it."""

from dataclasses import dataclass


@dataclass(slots=True)
class PassCounts:
    """Forward passes since the start."""

    num_graph_passes: int = 0  # as captured graphs; where there are none, of a graph's size
    num_eager_passes: int = 0  # kernel by kernel: chunks of prompts, and everything where there are no padded sizes
    num_tokens: int = 0  # that went through the model
    num_padded_tokens: int = 0  # the same with padding
    num_spared_rows: int = 0  # sequences of rounds that it was not asked for, since a look-up was expected to do better

    def add_eager(self, num_tokens: int) -> None:
        """A pass of so many tokens ran kernel by kernel, without padding."""
        self.num_eager_passes += 1
        self.num_tokens += num_tokens
        self.num_padded_tokens += num_tokens

    def reset(self) -> None:
        """Begins to count anew: what was run to measure is not to be seen in what is served."""
        self.num_graph_passes = self.num_eager_passes = self.num_tokens = self.num_padded_tokens = self.num_spared_rows = 0
