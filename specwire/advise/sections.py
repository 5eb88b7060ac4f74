"""The five steps in words, for the terminal and for the report. Pure."""

from typing import NamedTuple

from specwire.advise.candidates import sentences as candidate_sentences
from specwire.advise.run import Findings
from specwire.advise.verdict import Verdict


class Section(NamedTuple):
    """One step."""

    title: str
    lines: list[str]


def sections(findings: Findings) -> list[Section]:
    """All five, also those that were not reached."""
    return [
        Section("1. Workload", findings.workload.sentences()),
        Section("2. Drafter", _drafter(findings)),
        Section("3. Acceptance", _acceptance(findings)),
        Section("4. Online", _online(findings)),
        Section("5. Canary", _canary(findings)),
    ]


def _drafter(findings: Findings) -> list[str]:
    lines = candidate_sentences(findings.candidates, findings.chosen)
    for other in findings.candidates:
        if not other.address:
            length = (
                f": acceptance length {other.acceptance_length:.2f}, {other.tokens_per_step:.2f} tokens a step" if other.acceptance_length else ""
            )
            lines.append(f"not there: {other.method}{length} ({other.note})")
    return lines


def _acceptance(findings: Findings) -> list[str]:
    total, *categories = findings.acceptance.groups
    k = findings.chosen.num_speculative_tokens
    lines = [
        f"with K = {k}, a verification with drafts gives {total.acceptance_length:.2f} tokens (mean, by weight), any step "
        f"{findings.drafts.tokens[-1]:.2f}; "
        f"{findings.drafts.share[-1]:.0%} of the steps have drafts, of which {total.acceptance_rate:.0%} are accepted"
    ]
    if len(categories) > 1:
        share = sum(group.weight for group in categories)
        parts = [f"{group.name} {group.acceptance_length:.2f} ({group.weight / share:.0%} of the weight)" for group in categories]
        lines.append(f"by category: {', '.join(parts)}")
    if findings.decision.verdict is Verdict.STOPPED:
        lines.append(f"stopped here: {findings.decision.reasons[0]}")
    return lines


def _online(findings: Findings) -> list[str]:
    if findings.low is None or findings.high is None or findings.advice is None:
        return ["not measured"]
    lines = [f"by measured steps, the best that throughput can do: {findings.advice.headline}"]
    lines += [findings.low.sentence(), findings.high.sentence()]
    lines += findings.decision.reasons
    return [*lines, *(f"doubt: {doubt}" for doubt in findings.decision.doubts), *(f"note: {note}" for note in findings.advice.notes)]


def _canary(findings: Findings) -> list[str]:
    if findings.plan is None:
        return ["nothing to try"]
    return [*findings.plan.steps, *(f"roll back if {guard}" for guard in findings.plan.guards)]
