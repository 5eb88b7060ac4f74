"""Step 2: the drafters that are there, and which one is the best for these prompts."""

from collections.abc import Sequence
from dataclasses import dataclass

from specwire.advise.lookup import Repetition

_LOOKUPS = ("ngram", "suffix")


@dataclass(frozen=True, slots=True)
class Candidate:
    """The drafters of one coordinator, measured with these prompts; or a method that is not there.

    Args:
        method: as the drafters say, with commas between several.
        address: of the coordinator; empty = it is not there.
        acceptance_length: mean tokens of a verification with drafts; None = not known. tokens_per_step: of any.
        num_speculative_tokens: K that was asked for.
        draft_ms: for so many drafts of one sequence, by the drafters' tables; None where they have none.
        gain: tokens a millisecond over plain decoding, minus 1, of the best K for one sequence, by the services' tables; without tables None.
        note: what else there is to know.
    """

    method: str
    address: str = ""
    acceptance_length: float | None = None
    tokens_per_step: float | None = None
    num_speculative_tokens: int = 0
    draft_ms: float | None = None
    gain: float | None = None
    note: str = ""

    @property
    def value(self) -> float:
        """What they are ordered by: the gain, or the most that it could be if drafts cost nothing."""
        return self.gain if self.gain is not None else (self.tokens_per_step or 1.0) - 1


def choose(candidates: Sequence[Candidate]) -> Candidate:
    """The best one of those that are there; on ties the one that is named first."""
    return max((candidate for candidate in candidates if candidate.address), key=lambda candidate: candidate.value)


def absent(candidates: Sequence[Candidate], repetition: Repetition, most: int) -> list[Candidate]:
    """Methods that need no checkpoint and are not there, with what the text says of them; and what else could be tried."""
    there = {method for candidate in candidates for method in candidate.method.replace("+", ", ").split(", ")}
    found = []
    if "ngram" not in there:
        note = "from the answers' tokens, as if they were greedy"
        found.append(Candidate("ngram", "", repetition.acceptance_length, repetition.tokens_per_step, most, note=note))
    if "suffix" not in there:
        note = f"beside what stands in the sequence, it finds past answers: {repetition.elsewhere:.0%} of the tokens stand in another one only"
        found.append(Candidate("suffix", note=note))
    if there <= set(_LOOKUPS):
        found.append(Candidate("draft_model or a head", note="needs a checkpoint; start a coordinator with one and name it with --candidate"))
    return found


def sentences(candidates: Sequence[Candidate], chosen: Candidate) -> list[str]:
    """The choice in words."""
    there = [candidate for candidate in candidates if candidate.address]
    by = "expected gain for one sequence" if chosen.gain is not None else "tokens a step, since costs are not known"
    figure = f"{chosen.value:+.1%}" if chosen.gain is not None else f"{chosen.tokens_per_step or 1.0:.2f}"
    if len(there) == 1:
        return [f"{chosen.method} is the only drafter that is there; {by}: {figure}"]
    others = ", ".join(f"{other.method} at {other.address} {other.value:+.1%}" for other in there if other is not chosen)
    return [f"{chosen.method} at {chosen.address} is the best of {len(there)} by {by}: {figure}, against {others}"]
