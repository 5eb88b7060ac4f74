"""How much answers repeat their prompts, themselves and each other: what a lookup could draft, from the tokens alone. Pure."""

from collections.abc import Sequence
from dataclasses import dataclass

_CONTEXT = 3
"""Tokens that must have stood before a token for it to count as repeated."""
_SHORTEST, _LONGEST = 2, 4
"""Tokens that are looked up, as `ngram` does by default."""


@dataclass(frozen=True, slots=True)
class Repetition:
    """Shares of the answers' tokens that stood before behind the same three tokens.

    Args:
        in_prompt: in the prompt; in_answer: not there, but earlier in the answer; elsewhere: in neither, but in another answer.
        acceptance_length: tokens of a verification that a lookup would have drafts for, and tokens_per_step of any; as `ngram` would draft for greedy
            answers.
    """

    in_prompt: float = 0.0
    in_answer: float = 0.0
    elsewhere: float = 0.0
    acceptance_length: float = 1.0
    tokens_per_step: float = 1.0

    @property
    def share(self) -> float:
        """Of tokens that a lookup in the sequence itself may find."""
        return self.in_prompt + self.in_answer


def measure_repetition(answers: Sequence[tuple[Sequence[int], Sequence[int], float]], most: int) -> Repetition:
    """Of answers.

    Args:
        answers: (prompt, answer, weight).
        most: drafts a step.
    """
    counts = [0.0, 0.0, 0.0]
    total = tokens = steps = accepted = drafted = 0.0
    seen: dict[tuple[int, ...], int] = {}
    for number, (_, answer, _) in enumerate(answers):
        for gram in _grams(answer):
            seen[gram] = number if seen.get(gram, number) == number else -1  # -1: several answers have it
    for number, (prompt, answer, weight) in enumerate(answers):
        prompted, own = set(_grams(prompt)), set[tuple[int, ...]]()
        text = [*prompt, *answer]
        for end in range(len(prompt), len(text)):
            gram = tuple(text[max(0, end - _CONTEXT) : end + 1])
            places = gram in prompted, gram in own, seen.get(gram, number) != number
            if True in places:
                counts[places.index(True)] += weight
            own.add(gram)
        total += weight * len(answer)
        found = _walk(prompt, answer, most)
        tokens += weight * max(0, len(answer) - 1)
        steps, drafted, accepted = steps + weight * found[0], drafted + weight * found[1], accepted + weight * found[2]
    if not total:
        return Repetition()
    in_prompt, in_answer, elsewhere = [count / total for count in counts]
    return Repetition(in_prompt, in_answer, elsewhere, 1 + accepted / drafted if drafted else 1.0, tokens / steps if steps else 1.0)


def _grams(tokens: Sequence[int]) -> list[tuple[int, ...]]:
    return [tuple(tokens[start : start + _CONTEXT + 1]) for start in range(len(tokens) - _CONTEXT)]


def _walk(prompt: Sequence[int], answer: Sequence[int], most: int) -> tuple[int, int, int]:
    """(steps after the first token, those with drafts, accepted drafts): each drafts what followed the earliest place of the longest match."""
    text = [*prompt, *answer]
    places: dict[tuple[int, ...], int] = {}
    num_indexed = num_steps = num_drafted = num_accepted = 0
    end = len(prompt) + 1
    while end < len(text):
        for stop in range(num_indexed + 1, end):  # matches that a token follows
            for length in range(_SHORTEST, _LONGEST + 1):
                if length <= stop:
                    places.setdefault(tuple(text[stop - length : stop]), stop)
        num_indexed = end - 1
        start = next((places[key] for length in range(_LONGEST, _SHORTEST - 1, -1) if (key := tuple(text[end - length : end])) in places), None)
        accepted = 0
        if start is not None:
            num_drafted += 1
            draft = text[start : min(start + most, end)]
            while accepted < len(draft) and end + accepted < len(text) - 1 and draft[accepted] == text[end + accepted]:
                accepted += 1
        num_accepted += accepted
        num_steps += 1
        end += accepted + 1
    return num_steps, num_drafted, num_accepted
