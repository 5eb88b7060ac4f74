"""The sequences of a lane that look for a drafter."""

from typing import TYPE_CHECKING

from .sequence import Sequence

if TYPE_CHECKING:
    from .lane import Lane
    from .link import DraftLink


class Pins:
    """Pins a lane's sequences to its own drafters, evenly; the choice then stays.

    Lanes and drafters are shared out among each other in the order in which they are known, so that a lane has as few drafters as can be: a step
    waits for all that it asks, a drafter answers the rounds of several lanes one after the other, and where it has a verifier's GPU, too, it should
    work while that verifier waits for it.

    Args:
        lane: whose sequences they are.

    Attributes:
        looking: sequences without a drafter that may get one, in the order in which they began to look.
        may_pin: one of them may find one now.
    """

    def __init__(self, lane: "Lane") -> None:
        self.looking: dict[Sequence, None] = {}
        self.may_pin = False
        self._lane = lane

    def look(self, sequence: Sequence, *, soon: bool = True) -> None:
        """Lists a sequence; not soon: it can find one once something changes there, or for another sequence."""
        self.looking[sequence] = None
        self.may_pin = self.may_pin or soon

    def forget(self, sequence: Sequence) -> None:
        """It has left the lane."""
        self.looking.pop(sequence, None)

    def pin(self) -> None:
        """Gives a drafter to whom one can take: one of the lane's own, or else the one with the fewest sequences."""
        self.may_pin = False
        shares = self.shares()
        for sequence in list(self.looking):
            links = [link for link in self._lane.links if link.can_take(sequence)]
            if links:
                del self.looking[sequence]
                own = [link for link in links if shares.get(link)]
                if own:
                    link = min(own, key=lambda link: ((len(link.slots) + 1) / shares[link], link.drafter.num_open))
                else:
                    link = min(links, key=lambda link: link.drafter.num_open)
                link.take(sequence)

    def shares(self) -> "dict[DraftLink, int]":
        """By drafter that is there, how much of this lane's sequences it should have, up to a common factor; 0 = it is other lanes' own."""
        lanes = [lane for lane in self._lane.admission.lanes if lane.is_ready]
        links = [link for link in self._lane.links if link.is_connected and not link.is_draining]
        if self._lane not in lanes:
            return {}
        lane = lanes.index(self._lane)
        return {link: overlap(lane, len(lanes), drafter, len(links)) for drafter, link in enumerate(links)}


def overlap(lane: int, num_lanes: int, drafter: int, num_drafters: int) -> int:
    """What two parts of one line have in common, which all lanes divide among themselves evenly, and all drafters likewise."""
    first, last = max(lane * num_drafters, drafter * num_lanes), min((lane + 1) * num_drafters, (drafter + 1) * num_lanes)
    return max(0, last - first)
