"""Probes: asking for drafts though it does not pay, so that what is known of them stays true, at a bounded cost (docs/design.md section 4).

Each step earns probe_share of its time as credit, each probe costs its loss: its time less that of the step without drafts (where some are drafted
anyway: less what its tokens are worth). A probe is due once the credit covers its loss, every loss / (probe_share x step) steps. One that has shown
drafts that seem to pay is followed by others at once, on at most `_MAX_LOANS` losses of credit that later steps must earn first. Where a probe was
wrong, so that drafting went on for some steps at a loss, that is taken from the credit, too, down to -`_MAX_LOANS` losses, so that the next probe is
never far off. So over T milliseconds, probes lose at most

    probe_share x T + (_NUM_FREE_PROBES + 1 + _MAX_LOANS) x loss,

and what they lead to by mistake is made up for by fewer of them, as far as that limit allows.

The other way round, a lane that always drafts would never know what steps without drafts take: it makes some now and then, a few in a row, since what
a step that runs ahead takes is the time between two of them.
"""

_NUM_FREE_PROBES = 8
"""The first probes cost no credit: nothing is known yet."""
MIN_PROBE_LOSS = 0.2
"""Share of a step that a probe is taken to cost at least: even one that seems to cost nothing must not be every other step."""
_MAX_LOANS = 4
_LOSS_DECAY = 1 / 64
"""Of the loss that probes are taken to have, each step, where they seem to lose less."""
PLAIN_STEPS = 3
"""Of a spell: the first one fills the pipeline, and there are two periods behind it."""
SPELL_STEPS = 64
"""Steps between two spells, even where nothing is known."""
_STRIDE = 16
_MIN_ROWS = 4


class Probes:
    """When one lane's next probe is due.

    Args:
        share: most of the time that probes may lose (0.01 = 1%); 0 = no probes.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_ms = 0.0
        self._loss_ms = 0.0
        self._num_free = _NUM_FREE_PROBES
        self._is_promising = False

    def is_due(self, step_ms: float, loss_ms: float) -> bool:
        """Called once a step: True for those that are to be probes, whose cost is taken then.

        Args:
            step_ms: of the step that is no probe.
            loss_ms: what one costs.
        """
        if not self._share:
            return False
        # A probe that seems to cost nothing for once forgives no debt.
        self._loss_ms = loss_ms = max(loss_ms, (1 - _LOSS_DECAY) * self._loss_ms)
        self._credit_ms = min(max(self._credit_ms, -_MAX_LOANS * loss_ms) + self._share * step_ms, loss_ms)
        if self._num_free:
            self._num_free -= 1
            self._credit_ms = 0.0
            return True
        if self._credit_ms < (-(_MAX_LOANS - 1) if self._is_promising else 1) * loss_ms:
            return False
        self._credit_ms -= loss_ms
        self._is_promising = False
        return True

    def charge(self, loss_ms: float) -> None:
        """Drafting has lost so much, since it began upon a probe."""
        self._credit_ms -= loss_ms

    def observe(self, *, is_promising: bool) -> None:
        """What the last probe has shown."""
        self._is_promising = is_promising


class PlainSpells:
    """When a lane that drafts makes a few steps without drafts, to measure them.

    Args:
        share: most of the time that they may lose where it is not in doubt that drafting pays.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_ms = 0.0
        self._num_left = 0
        self._num_since = SPELL_STEPS

    def note_plain(self) -> None:
        """A step that would not draft."""
        self._num_left = self._num_since = 0

    def is_due(self, step_ms: float, loss_ms: float, *, is_in_doubt: bool) -> bool:
        """Called once a step that would draft: True for those that are to be without drafts.

        Args:
            step_ms: of the step with drafts.
            loss_ms: what all steps of a spell lose.
            is_in_doubt: whether drafting pays can't be said without it.
        """
        if self._num_left:
            self._num_left -= 1
            return True
        self._num_since += 1
        loss_ms = max(loss_ms, MIN_PROBE_LOSS * step_ms)
        self._credit_ms = min(self._credit_ms + self._share * step_ms, loss_ms)
        if not (is_in_doubt and self._num_since >= SPELL_STEPS) and (not self._share or self._credit_ms < loss_ms):
            return False
        self._credit_ms = max(0.0, self._credit_ms - loss_ms)
        self._num_left, self._num_since = PLAIN_STEPS - 1, 0
        return True


def num_probed_rows(num_rows: int) -> int:
    """Of which a probe verifies all drafts: one in 16, four at least where there are as many."""
    return max(-(-num_rows // _STRIDE), min(num_rows, _MIN_ROWS))


def probed_rows(num_rows: int, probe: int) -> slice:
    """These rows, in turn from probe to probe."""
    stride = -(-num_rows // max(1, num_probed_rows(num_rows))) or 1
    return slice(probe % stride, None, stride)
