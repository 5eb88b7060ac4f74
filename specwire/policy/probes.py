"""Probes: asking for drafts though it does not pay, so that what is known of them stays true, at a bounded cost (docs/design.md section 4).

Each step earns probe_share of its time as credit, each probe costs its loss: its time less that of the step without drafts (where some are drafted
anyway: less what its tokens are worth). A probe is due once the credit covers the loss that is expected of it, every loss / (probe_share x step)
steps; the first one, too, so that a short burst has none. Once it is over it costs what it took by the clock, and the next ones are expected to
cost as many times what tables say as the last ones did. As long as drafters have not answered a probe in time, the next one is expected to wait in
vain, too. Where not even drafts that are all accepted would pay by what steps are taken to cost, a step earns `_HOPELESS_SHARE` of that: tables may
be wrong.

A probe that has shown drafts that seem to pay is followed by others at once, on at most `_MAX_LOANS` losses of credit that later steps must earn
first. Where a probe was wrong, so that drafting went on for some steps at a loss, that is taken from the credit, too, down to what
`_MAX_DEBT_STEPS` steps take (or one loss), so that the next probe is never far off. So over T milliseconds, probes that cost what is expected lose
at most

    min((1 + _LOAN_SHARE) x probe_share x T, probe_share x T + _MAX_LOANS x loss),

and what they lead to by mistake is made up for by fewer of them, as far as that limit allows.

The other way round, a lane that always drafts would never know what steps without drafts take: it makes some now and then, a few in a row, since what
a step that runs ahead takes is the time between two of them.
"""

from collections.abc import Callable

_HOPELESS_SHARE = 1 / 8
"""Of what steps earn, where no drafts could pay."""
_NEAR_STEPS = 16
"""In which drafters can compute the prompts of those that a probe asks for."""
_MAX_SURCHARGE = 8.0
_SURCHARGE_BLEND = 0.5
_SURPRISE = 2.0
"""Times as dear as the last ones were that the next ones are expected to be at most: the first one may find peers that have never drafted, and one
hiccup must not end all probes."""
MIN_PROBE_LOSS = 0.2
"""Share of a step that a probe is taken to cost at least: even one that seems to cost nothing must not be every other step."""
_MIN_LOST = 0.2
"""Share of what was expected that it has lost at least, whatever the clock says of it."""
_MAX_LOANS = 4
_LOAN_SHARE = 0.5
"""Most loans, as a share of all credit that was ever earned: a lane that has not worked for long gets less."""
_MAX_DEBT_STEPS = 2
_LOSS_DECAY = 1 / 64
"""Of the loss that probes are taken to have, each step, where they seem to lose less."""
PLAIN_STEPS = 3
"""Of a spell: the first one fills the pipeline, and there are two periods behind it."""
SPELL_STEPS = 64
"""Steps between two spells, even where nothing is known, but for the first ones since drafting began."""
_FIRST_SPELL_STEPS = 24
"""Steps before the first of these (none on a lane that has never run ahead), twice as many before each later one. What steps without drafts took
just before says little of them."""
_STRIDE = 16
_MIN_ROWS = 4


class Probes:
    """When one lane's next probe is due.

    Args:
        share: most of the time that probes may lose (0.01 = 1%); 0 = no probes.

    Attributes:
        is_near: the next one is due within `_NEAR_STEPS`, or now.
    """

    def __init__(self, share: float) -> None:
        self._share = share
        self._credit_ms = 0.0
        self._loss_ms = self._step_ms = 0.0
        self._expected_ms = self._taken_ms = 0.0  # of the last probe: by tables, and what was taken for it
        self._surcharge = 1.0
        self._earned_ms = 0.0  # since the start
        self._is_promising = self._is_answered = False
        self.is_near = False

    def is_due(
        self, step_ms: float, loss_ms: float, wait_ms: float = 0.0, is_ready: Callable[[], bool] = lambda: True, *, is_hopeless: bool = False
    ) -> bool:
        """Called once a step: True for those that are to be probes, whose cost is taken then.

        Args:
            step_ms: of the step that is no probe.
            loss_ms: what one costs, by tables.
            wait_ms: how much longer it may wait for drafters than they should take.
            is_ready: whether it could show anything now; else it comes later.
            is_hopeless: no drafts could pay, however good they were.
        """
        if not self._share:
            return False
        expected_ms = loss_ms
        loss_ms = self._surcharge * loss_ms + (0.0 if self._is_answered else wait_ms)
        # A probe that seems to cost nothing for once forgives no debt.
        self._loss_ms = loss_ms = max(loss_ms, (1 - _LOSS_DECAY) * self._loss_ms)
        earned_ms = self._share * step_ms * (_HOPELESS_SHARE if is_hopeless else 1.0)
        self._step_ms = step_ms
        self._credit_ms = min(max(self._credit_ms, -max(_MAX_LOANS * loss_ms, _MAX_DEBT_STEPS * step_ms)) + earned_ms, loss_ms)
        self._earned_ms += earned_ms
        needed_ms = loss_ms - min(_MAX_LOANS * loss_ms, _LOAN_SHARE * self._earned_ms) * self._is_promising
        self.is_near = self._credit_ms >= needed_ms - _NEAR_STEPS * earned_ms
        if self._credit_ms < needed_ms or not is_ready():
            return False
        self._credit_ms -= loss_ms
        self._expected_ms, self._taken_ms = expected_ms, loss_ms
        self._is_promising = False
        return True

    def settle(self, lost_ms: float, *, is_answered: bool) -> None:
        """What the last probe lost by the clock, and whether drafters answered it."""
        self._is_answered = is_answered
        if not self._expected_ms:
            return
        lost_ms = max(lost_ms, _MIN_LOST * self._expected_ms)
        self._credit_ms += self._taken_ms - lost_ms
        if is_answered:
            times = min(max(lost_ms / self._expected_ms, 1.0), _SURPRISE * self._surcharge, _MAX_SURCHARGE)
            self._surcharge += _SURCHARGE_BLEND * (times - self._surcharge)
        self._taken_ms = 0.0

    def charge(self, loss_ms: float) -> None:
        """Drafting has lost so much, since it began."""
        self._credit_ms = min(self._credit_ms, max(self._credit_ms - loss_ms, -max(self._loss_ms, _MAX_DEBT_STEPS * self._step_ms)))

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
        self._num_since = self._gap = _FIRST_SPELL_STEPS

    def note_plain(self) -> None:
        """A step that would not draft."""
        self._num_left = self._num_since = 0
        self._gap = _FIRST_SPELL_STEPS

    def is_due(self, step_ms: float, loss_ms: float, is_ending: Callable[[], bool] = lambda: False, *, is_in_doubt: bool) -> bool:
        """Called once a step that would draft: True for those that are to be without drafts.

        Args:
            step_ms: of the step with drafts.
            loss_ms: what all steps of a spell lose.
            is_ending: whether it is too late for one.
            is_in_doubt: whether drafting pays can't be said without it.
        """
        if self._num_left:
            self._num_left -= 1
            return True
        self._num_since += 1
        loss_ms = max(loss_ms, MIN_PROBE_LOSS * step_ms)
        self._credit_ms = min(self._credit_ms + self._share * step_ms, loss_ms)
        if not (is_in_doubt and self._num_since >= self._gap) and (not self._share or self._credit_ms < loss_ms):
            return False
        if is_ending():
            return False
        self._credit_ms = max(0.0, self._credit_ms - loss_ms)
        self._num_left, self._num_since = PLAIN_STEPS - 1, 0
        self._gap = min(2 * self._gap, SPELL_STEPS) if is_in_doubt else self._gap
        return True


def num_probed_rows(num_rows: int) -> int:
    """Of which a probe verifies all drafts, and where nothing is drafted beside it asks for any: one in 16, four at least where there are as many."""
    return max(-(-num_rows // _STRIDE), min(num_rows, _MIN_ROWS))


def probed_rows(num_rows: int, probe: int) -> slice:
    """These rows, in turn from probe to probe."""
    stride = -(-num_rows // max(1, num_probed_rows(num_rows))) or 1
    return slice(probe % stride, None, stride)
