"""Draws the pictures of the documentation as SVG: `make docs`. Each has its own light background, so that it reads on any page."""

import re
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from xml.sax.saxutils import escape

ROOT = Path(__file__).resolve().parents[1]

INK, GREY, LINE, PAPER = "#1f2933", "#5b6875", "#9aa5b1", "#fbfcfd"
BLUE, GREEN, ORANGE, VIOLET, PLAIN = "#dbeafe", "#c9efd4", "#fde0b8", "#e6defa", "#eceff2"
STRONG = {"blue": "#2563eb", "green": "#15803d", "orange": "#c2410c"}


class Picture:
    """A canvas of so many pixels; y grows downwards.

    Args:
        title: what a screen reader says.
    """

    def __init__(self, width: int, height: int, title: str) -> None:
        self._size = width, height
        self._parts = [
            f"<title>{escape(title)}</title>",
            f'<rect x="0.5" y="0.5" width="{width - 1}" height="{height - 1}" rx="8" fill="{PAPER}" stroke="#dfe4e9"/>',
        ]

    def box(self, x: float, y: float, width: float, height: float, fill: str, *lines: str, stroke: str = LINE, small: bool = True) -> None:
        """A rectangle with centred lines; the first is bold, the others are small."""
        self._parts.append(f'<rect x="{x:g}" y="{y:g}" width="{width:g}" height="{height:g}" rx="6" fill="{fill}" stroke="{stroke}"/>')
        top = y + height / 2 - 9 * (len(lines) - 1) + 5
        for number, line in enumerate(lines):
            self.text(x + width / 2, top + 18 * number, line, bold=number == 0 and len(lines) > 1, size=12 if number and small else 14)

    def text(self, x: float, y: float, text: str, *, anchor: str = "middle", size: int = 14, bold: bool = False, colour: str = INK) -> None:
        weight = ' font-weight="600"' if bold else ""
        self._parts.append(f'<text x="{x:g}" y="{y:g}" text-anchor="{anchor}" font-size="{size}" fill="{colour}"{weight}>{escape(text)}</text>')

    def line(
        self, points: Sequence[tuple[float, float]], colour: str = LINE, *, width: float = 1.5, dashed: bool = False, head: bool = False
    ) -> None:
        """Straight pieces; with a head, the last one is an arrow."""
        dash = ' stroke-dasharray="5 4"' if dashed else ""
        end = ' marker-end="url(#head)"' if head else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self._parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width:g}"{dash}{end}/>')

    def both_ways(self, x: float, top: float, bottom: float) -> None:
        """A vertical arrow with two heads."""
        self.line([(x, (top + bottom) / 2), (x, top)], GREY, head=True)
        self.line([(x, (top + bottom) / 2), (x, bottom)], GREY, head=True)

    def dot(self, x: float, y: float, colour: str) -> None:
        self._parts.append(f'<circle cx="{x:g}" cy="{y:g}" r="4" fill="{colour}"/>')

    def svg(self) -> str:
        width, height = self._size
        head = (
            '<marker id="head" viewBox="0 0 10 10" refX="9" refY="5" markerWidth="7" markerHeight="7" orient="auto-start-reverse">'
            f'<path d="M0,0 L10,5 L0,10 z" fill="{GREY}"/></marker>'
        )
        return (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" width="{width}" height="{height}" role="img" '
            f"font-family=\"system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif\">\n<defs>{head}</defs>\n"
            + "\n".join(self._parts)
            + "\n</svg>\n"
        )


def services() -> str:
    """Who calls whom."""
    p = Picture(820, 400, "Clients call the coordinator, directly or through the HTTP service; the coordinator calls drafters and verifiers")
    p.box(30, 24, 230, 56, PLAIN, "gRPC clients", "Python client, command line")
    p.box(560, 24, 230, 56, PLAIN, "OpenAI clients", "curl, SDKs, the playground page")
    p.box(560, 130, 230, 56, VIOLET, "http × P", "OpenAI-compatible API, no torch")
    p.box(150, 130, 330, 56, BLUE, "coordinator", "queue, batches, how many drafts, commit; no torch")
    p.both_ways(205, 80, 130)
    p.text(215, 109, "Session: token ids", anchor="start", size=12, colour=GREY)
    p.both_ways(675, 80, 130)
    p.text(685, 109, "HTTP", anchor="start", size=12, colour=GREY)
    p.line([(560, 158), (480, 158)], GREY, head=True)
    p.text(520, 150, "Session", size=12, colour=GREY)
    p.box(40, 290, 240, 74, ORANGE, "drafter × M", "guesses the next tokens:", "lookup, a small model or a draft head")
    p.box(430, 290, 240, 74, GREEN, "verifier × N", "the target model: checks all guesses", "of all sequences in one batch")
    p.both_ways(215, 186, 290)
    p.text(205, 235, "Draft stream:", anchor="end", size=12, colour=GREY)
    p.text(205, 251, "one message a step", anchor="end", size=12, colour=GREY)
    p.both_ways(450, 186, 290)
    p.text(460, 235, "Verify stream:", anchor="start", size=12, colour=GREY)
    p.text(460, 251, "one message a step", anchor="start", size=12, colour=GREY)
    p.line([(430, 340), (280, 340)], GREY, dashed=True, head=True)
    p.text(355, 331, "hidden states,", size=12, colour=GREY)
    p.text(355, 356, "for draft heads", size=12, colour=GREY)
    return p.svg()


def step() -> str:
    """One step of one sequence, by an example."""
    p = Picture(820, 330, "A step: five drafts are proposed, two equal the target's own tokens, the third is replaced by the target's token")
    left, width, gap = 330, 84, 8

    def row(y: float, name: str, what: str, tokens: Sequence[tuple[str, str]]) -> None:
        p.text(24, y + 15, name, anchor="start", bold=True)
        p.text(24, y + 32, what, anchor="start", size=12, colour=GREY)
        for number, (token, fill) in enumerate(tokens):
            if token:
                p.box(left + number * (width + gap), y, width, 36, fill, token)

    p.text(24, 39, "committed text", anchor="start", bold=True)
    p.box(left, 16, 452, 36, PLAIN, "The capital of France is")
    row(76, "propose", "the drafter guesses K = 5 tokens", [(t, PLAIN) for t in (" Paris", ",", " a", " city", " of")])
    row(136, "verify", "the target's own token at each place, one pass", [(" Paris", GREEN), (",", GREEN), (" which", ORANGE), ("", ""), ("", "")])
    p.text(left + 3 * (width + gap) + 88, 151, "these follow a wrong guess:", size=12, colour=GREY)
    p.text(left + 3 * (width + gap) + 88, 167, "not looked at", size=12, colour=GREY)
    row(206, "commit", "acceptance length 3, from one pass", [(" Paris", GREEN), (",", GREEN), (" which", ORANGE)])
    for x, fill, text in ((24, GREEN, "accepted: draft = target's token"), (300, ORANGE, "recovered: the target's token in a draft's place")):
        p.box(x, 284, 18, 18, fill)
        p.text(x + 26, 298, text, anchor="start", size=12)
    p.text(24, 266, "If all drafts are right, the same pass gives one more token behind them, the bonus.", anchor="start", size=12, colour=GREY)
    return p.svg()


def timeline() -> str:
    """Where the time goes with and without drafts; widths are an illustration."""
    p = Picture(820, 278, "Six tokens take six passes of the target without drafts, and two passes with them")
    left, plain, draft, verify = 130, 92, 24, 112
    p.text(24, 47, "no drafts", anchor="start", bold=True)
    for number in range(6):
        p.box(left + number * plain, 24, plain - 2, 38, GREEN, "verify")
        p.text(left + number * plain + plain / 2, 80, f"token {number + 1}", size=12, colour=GREY)
    p.text(24, 147, "K = 3", anchor="start", bold=True)
    for number, (first, last) in enumerate(((1, 4), (5, 6))):
        start = left + number * (draft + verify + 6)
        p.box(start, 124, draft - 2, 38, ORANGE, "d")
        p.box(start + draft, 124, verify - 2, 38, GREEN, "verify")
        p.text(start + draft + verify / 2, 180, f"tokens {first} to {last}", size=12, colour=GREY)
    end = left + 2 * (draft + verify + 6)
    p.line([(end, 143), (left + 6 * plain, 143)], STRONG["green"], dashed=True)
    p.text((end + left + 6 * plain) / 2, 136, "saved", size=12, colour=STRONG["green"])
    p.line([(left, 214), (left + 6 * plain, 214)], GREY, head=True)
    p.text(left + 6 * plain + 8, 218, "time", anchor="start", size=12, colour=GREY)
    for number, line in enumerate((
        "A pass over four tokens takes little longer than one over a single token, as long as the batch is small: it mostly waits for",
        "the weights. In a large batch it takes longer, and each draft must be worth its time.",
    )):  # fmt: skip
        p.text(24, 246 + 15 * number, line, anchor="start", size=12, colour=GREY)
    return p.svg()


def simulated() -> list[tuple[int, float, float]]:
    """(sequences, adaptive, best fixed K) as throughput over that without drafts; from the table in docs/speculation.md: block, mixed."""
    text = (ROOT / "docs" / "speculation.md").read_text(encoding="utf-8")
    rows = re.findall(r"^\| (\d+) \|(?: [^|]+ \|){2} ([\d.]+) \| ([\d.]+) \|", text, re.MULTILINE)
    assert len(rows) >= 5, f"docs/speculation.md has {len(rows)} rows of its simulation"
    return [(int(count), float(over_none), float(over_none) / float(over_fixed)) for count, over_fixed, over_none in rows]


def load() -> str:
    """What drafts bring at which load."""
    rows = simulated()
    p = Picture(820, 344, "Drafts bring much at small batches; at large ones a fixed K costs throughput, adaptive verification does not")
    left, right, top, bottom, most = 90, 560, 40, 280, 5.0

    def place(index: int, value: float) -> tuple[float, float]:
        return left + index * (right - left) / (len(rows) - 1), bottom - value / most * (bottom - top)

    for value in range(6):
        y = place(0, value)[1]
        p.line([(left, y), (right, y)], "#dfe4e9" if value != 1 else GREY, width=1, dashed=value == 1)
        p.text(left - 12, y + 4, str(value), anchor="end", size=12, colour=GREY)
    for index, (count, _, _) in enumerate(rows):
        p.text(place(index, 0)[0], bottom + 20, str(count), size=12, colour=GREY)
    p.text((left + right) / 2, bottom + 44, "sequences in a batch", size=12, colour=GREY)
    for which, colour in ((2, STRONG["orange"]), (1, STRONG["blue"])):
        points = [place(index, row[which]) for index, row in enumerate(rows)]
        p.line(points, colour, width=2.5)
        for point in points:
            p.dot(*point, colour)
    for number, (colour, name, what) in enumerate((
        (STRONG["blue"], "adaptive verification", "chooses at each step"),
        (STRONG["orange"], "best fixed K", "above 0, best at each size"),
        (GREY, "no drafts", "= 1"),
    )):  # fmt: skip
        y = 60 + 54 * number
        p.line([(590, y - 5), (614, y - 5)], colour, width=2.5, dashed=number == 2)
        p.text(622, y, name, anchor="start", size=13, bold=True)
        p.text(622, y + 17, what, anchor="start", size=12, colour=GREY)
    p.text(left - 66, top - 12, "throughput, relative to no drafts", anchor="start", size=12, colour=GREY)
    p.text(590, 240, "Simulated: an 8b model, a block", anchor="start", size=12, colour=GREY)
    p.text(590, 256, "drafter, requests half easy, half", anchor="start", size=12, colour=GREY)
    p.text(590, 272, "hard (How many drafts).", anchor="start", size=12, colour=GREY)
    return p.svg()


PICTURES: dict[str, Callable[[], str]] = {"services.svg": services, "step.svg": step, "timeline.svg": timeline, "load.svg": load}
"""Files in docs/images."""


def main() -> None:
    for name, draw in PICTURES.items():
        path = ROOT / "docs" / "images" / name
        drawn = draw()
        if not path.exists() or path.read_text(encoding="utf-8") != drawn:
            path.write_text(drawn, encoding="utf-8")
            sys.stdout.write(f"{path.relative_to(ROOT)} is drawn anew\n")


if __name__ == "__main__":
    main()
