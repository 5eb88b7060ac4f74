"""The report for people: one Markdown page beside the pictures."""

from collections.abc import Sequence

from specwire.advise.run import Findings
from specwire.advise.sections import sections


def to_markdown(findings: Findings, title: str, pictures: Sequence[str]) -> str:
    """The page.

    Args:
        title: what was measured.
        pictures: file names in the same folder.
    """
    parts = [f"# {title}", f"**{findings.decision.headline}**"]
    for section in sections(findings):
        parts.append(f"## {section.title}")
        parts.append("\n".join(f"- {line}" for line in section.lines))
        if section.title.startswith("2"):
            parts.append(_candidates(findings))
        elif section.title.startswith("3"):
            parts.append(_acceptance(findings))
        elif section.title.startswith("4") and findings.low is not None:
            parts.append(_online(findings))
    parts += [f"![{name.partition('.')[0]}]({name})" for name in pictures]
    return "\n\n".join(parts) + "\n"


def table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """In Markdown."""
    return "\n".join(f"| {' | '.join(row)} |" for row in (header, ["---"] * len(header), *rows))


def _candidates(findings: Findings) -> str:
    def shown(value: float | None, form: str) -> str:
        return "not known" if value is None else format(value, form)

    rows = [
        (
            candidate.method + (" (chosen)" if candidate is findings.chosen else ""),
            candidate.address or "not there",
            shown(candidate.acceptance_length, ".2f"),
            shown(candidate.tokens_per_step, ".2f"),
            shown(candidate.draft_ms, ".2f"),
            shown(candidate.gain, "+.1%"),
        )
        for candidate in findings.candidates
    ]
    return table(("drafter", "where", "acceptance length", "tokens a step", "ms a draft", "expected gain, 1 sequence"), rows)


def _acceptance(findings: Findings) -> str:
    groups = findings.acceptance.groups
    rows = [
        (
            group.name,
            f"{group.weight:g}",
            str(group.num_prompts),
            f"{group.acceptance_length:.2f}",
            f"{group.tokens_per_step:.2f}",
            f"{group.acceptance_rate:.0%}",
        )
        for group in (groups if len(groups) != 2 else groups[:1])
    ]
    return table(("category", "weight", "prompts", "acceptance length", "tokens a step", "accepted"), rows)


def _online(findings: Findings) -> str:
    rows = []
    for rate in (findings.low, findings.high):
        for index, (plain, drafted) in enumerate(rate.pairs if rate is not None else ()):
            assert rate is not None, "pairs are of a rate"
            figures = f"{plain.tpot_ms:.2f}", f"{drafted.tpot_ms:.2f}", f"{rate.tpot_gains[index]:+.1%}"
            served = f"{plain.tokens_per_s:.1f}", f"{drafted.tokens_per_s:.1f}", f"{rate.throughput_gains[index]:+.1%}"
            rows.append((rate.name, str(index + 1), *figures, *served))
    header = ("rate", "pair", "ms/token without", f"with K = {findings.decision.num_speculative_tokens}", "saved", "tokens/s without", "with", "more")
    return table(header, rows)
