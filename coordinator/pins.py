"""The sequences of a lane that look for a drafter."""

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .link import DraftLink


class Pins:
    """Pins sequences to the drafters with the fewest sequences; the choice then stays.

    Args:
        links: of the lane, to its drafters; changes with the fleet.

    Attributes:
        looking: sequences without a drafter that may get one, in the order in which they began to look.
        may_pin: one of them may find one now.
    """

    def __init__(self, links: "list[DraftLink]") -> None:
        self.looking: dict[Sequence, None] = {}
        self.may_pin = False
        self._links = links

    def look(self, sequence: Sequence, *, soon: bool = True) -> None:
        """Lists a sequence; not soon: it can find one once something changes there, or for another sequence."""
        self.looking[sequence] = None
        self.may_pin = self.may_pin or soon

    def forget(self, sequence: Sequence) -> None:
        """It has left the lane."""
        self.looking.pop(sequence, None)

    def pin(self) -> None:
        """Gives a drafter to whom one can take."""
        self.may_pin = False
        for sequence in list(self.looking):
            links = [link for link in self._links if link.can_take(sequence)]
            if links:
                del self.looking[sequence]
                min(links, key=lambda link: link.drafter.num_open).take(sequence)
