"""Suffix decoding by brute force, and what tests do with a drafter of it."""

from collections import Counter
from collections.abc import Sequence
from fractions import Fraction

from drafter_svc.method import Ask, Drafts
from drafter_svc.suffix import Suffix
from drafter_svc.suffix_match import MAX_OCCURRENCES, Limits
from specwire.messages import DraftOpen, RowStatus
from specwire.sampling_params import SamplingParams

Scored = tuple[Fraction, list[int], list[Fraction]]


def make(k: int = 5, depth: int = 24, factor: float = 1.0, min_prob: float = 0.1, **more: int) -> Suffix:
    return Suffix(Limits(depth, factor, min_prob), max_num_drafts=k, **more)


def begin(method: Suffix, seq_id: int, prompt: Sequence[int], output: Sequence[int] = (), tenant: bytes = b"") -> None:
    method.open(seq_id, DraftOpen(0, 1, list(prompt), len(prompt), SamplingParams(), 7, tenant_cache_key=tenant))
    method.append(seq_id, output)


def remember(method: Suffix, output: Sequence[int], tenant: bytes = b"") -> None:
    begin(method, 999, [1], output, tenant)
    method.close(999)


def drafts(method: Suffix, context: Sequence[int], k: int = 99, tenant: bytes = b"") -> Drafts:
    begin(method, 0, context, tenant=tenant)
    (answer,) = method.propose([Ask(0, k)])
    method.close(0)  # all of it was the prompt: no past output comes of it
    assert answer.status is RowStatus.OK
    return answer


def reference_path(texts: Sequence[Sequence[int]], ends: list[tuple[int, int]], context: Sequence[int], k: int, limits: Limits) -> Scored:
    """Every match length by itself, over the occurrences (text, index behind it) given from the earliest to the latest."""
    best: Scored = (Fraction(0), [], [])
    for length in range(1, min(limits.max_depth, len(context) + 1)):
        rows = [(text, end) for text, end in ends if length <= end and list(texts[text][end - length : end]) == list(context[-length:])]
        rows = rows[-MAX_OCCURRENCES:]
        if not rows:
            break
        common = min(matching(texts[text][:end], context, limits.max_depth - 1) for text, end in rows)
        num_all, path, scores, total = len(rows) + 1, [], [], Fraction(0)
        for position in range(min(k, int(length * limits.max_spec_factor + 1e-6), limits.max_depth - length)):
            nexts = [texts[text][end + position] for text, end in rows if end + position < len(texts[text])]
            if not nexts:
                break
            counts = Counter(nexts)
            token = next(each for each in reversed(nexts) if counts[each] == max(counts.values()))
            if counts[token] < limits.min_token_prob * num_all:
                break
            path.append(token)
            scores.append(counts[token] / (len(rows) + Fraction(1, common + position)))
            total += Fraction(counts[token], num_all)
            rows = [(text, end) for text, end in rows if end + position < len(texts[text]) and texts[text][end + position] == token]
        if total >= best[0]:
            best = (total, path, scores)
    return best


def matching(text: Sequence[int], context: Sequence[int], most: int) -> int:
    return next((n for n in range(min(most, len(text), len(context))) if text[-1 - n] != context[-1 - n]), min(most, len(text), len(context)))


def reference(context: list[int], outputs: list[list[int]], k: int, limits: Limits) -> Scored:
    own = reference_path([context], [(0, end) for end in range(1, len(context))], context, k, limits)
    for anchor in (4, 1):
        if len(context) < anchor or limits.max_depth <= anchor:
            continue
        ends = [
            (text, end)
            for text, output in enumerate(outputs)
            for end in range(anchor, len(output) + 1)
            if output[end - anchor : end] == context[-anchor:]
        ]
        if ends:
            past = reference_path(outputs, ends[-MAX_OCCURRENCES:], context, k, limits)
            return past if past[0] > own[0] else own
    return own
