"""Sampling with noise that a row's key and the token's index determine, as when serving: target and drafts of a request share it."""

from dataclasses import dataclass, replace

import torch

from specwire.engine.sampling.philox import Stream, gumbel, noise_words_at


@dataclass(frozen=True, slots=True)
class Noise:
    """Of B sequences.

    Args:
        temperatures: [B] float32, 0 = the most likely token.
        keys: [B] int64, one a request.
    """

    temperatures: torch.Tensor
    keys: torch.Tensor

    def of(self, rows: torch.Tensor) -> "Noise":
        """Of some of the sequences."""
        return Noise(self.temperatures[rows], self.keys[rows])

    def sharpened(self, factor: float) -> "Noise":
        """For drafts whose logits z are multiplied by s: s * z + T * g is greatest where z + T / s * g is."""
        return replace(self, temperatures=self.temperatures / factor)

    def choose(self, logits: torch.Tensor, rows: torch.Tensor, indices: torch.Tensor, candidates: torch.Tensor | None = None) -> torch.Tensor:
        """The columns [R] of what is drawn: the argmax of logits + temperature x noise.

        Args:
            logits: [R, C] float32.
            rows: [R] int64, which sequence each is of.
            indices: [R] int64, absolute index of the token that is drawn.
            candidates: [R, C] int64, token ids of the columns; None = all ids in their order.
        """
        temperatures, keys, choices = self.temperatures[rows], self.keys[rows], torch.zeros_like(indices)
        if candidates is None:
            return _draft_sample(logits, temperatures, keys, indices, choices)
        noise = gumbel(noise_words_at(keys, indices, choices, Stream.TARGET, candidates)) * temperatures[:, None]
        return (logits + torch.where(temperatures[:, None] > 0, noise, 0.0)).argmax(-1)

    def log_probs(self, logits: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        """[R, C], at the temperature of each row; at 1 where it is 0."""
        temperatures = self.temperatures[rows]
        return (logits / torch.where(temperatures > 0, temperatures, 1.0)[:, None]).log_softmax(-1)


def _draft_sample(*arguments: torch.Tensor) -> torch.Tensor:
    if arguments[0].device.type == "cuda":
        from specwire.engine.kernels.draft_sample import draft_sample
    else:
        from specwire.engine.kernels.draft_sample_torch import draft_sample
    return draft_sample(*arguments)[0]
