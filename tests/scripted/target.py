"""The scripted target: the next token is a pseudo-random function of (noise key, choice, all tokens before it)."""

from collections.abc import Iterable, Sequence

from specwire.messages import TokenLogprobs


class Target:
    """A target model without a model.

    Args:
        alphabet: the token ids that it can sample.
    """

    def __init__(self, alphabet: Sequence[int]) -> None:
        self._alphabet = tuple(alphabet)

    def sample(self, state: int) -> int:
        """The next token after the prefix that `state` stands for."""
        return self._alphabet[hash((state, 1)) % len(self._alphabet)]

    def generate(self, prompt: Sequence[int], num_tokens: int, key: int = 0, choice: int = 0) -> list[int]:
        """The one-token-a-step reference: what any schedule of steps and drafts must give."""
        prefix = Prefix(key, choice, prompt)
        for _ in range(num_tokens):
            prefix.append(self.sample(prefix.state))
        return prefix.token_ids[len(prompt) :]


class Prefix:
    """Tokens with the state after each of them: states[t] decides the token at index t."""

    def __init__(self, key: int, choice: int, token_ids: Iterable[int]) -> None:
        self.token_ids: list[int] = []
        self.states = [hash((key, choice))]
        for token_id in token_ids:
            self.append(token_id)

    @property
    def state(self) -> int:
        return self.states[-1]

    def append(self, token_id: int) -> None:
        self.token_ids.append(token_id)
        self.states.append(hash((self.states[-1], token_id)))

    def truncate(self, length: int) -> None:
        del self.token_ids[length:], self.states[length + 1 :]

    def __len__(self) -> int:
        return len(self.token_ids)


def scripted_logprobs(state: int, token: int, num_top: int) -> TokenLogprobs:
    """Made-up values that depend on the prefix alone, exact in float32."""
    return TokenLogprobs(-(state % 64) / 64, [((token + i) % 1000, -i / 8) for i in range(num_top)])
