"""Stop rules: any grouping of tokens into steps ends as one token a step does."""

import codecs
from collections.abc import Sequence
from typing import NamedTuple

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from coordinator.stop import StopRules
from specwire.messages import FinishReason
from specwire.sampling_params import SamplingParams
from specwire.tokenizer import Tokenizer
from tests.coordinator.byte_tokenizer import EOS, LONGER, VOCAB_SIZE, ids_of, make_tokenizer, token_bytes

TOKENIZER = make_tokenizer()
AB, BC, ABC = 257, 258, 259
IDS = [*b"abc", *"é".encode(), *"€".encode(), *"😀".encode(), *range(257, VOCAB_SIZE), EOS]


class Run(NamedTuple):
    """Everything that a sequence gave."""

    num_tokens: int
    reason: FinishReason | None
    cause: int | str | None
    text: str | None


def run(params: SamplingParams, groups: Sequence[Sequence[int]], *, num_prompt: int = 3, max_model_len: int = 1000) -> Run:
    """Pushes groups until a rule fires; checks that each outcome is one that a caller can rely on."""
    rules = StopRules(params, (EOS,), num_prompt, max_model_len, TOKENIZER if params.stop else None)
    num_tokens, text = 0, ""
    for group in groups:
        outcome = rules.push(group)
        num_tokens += outcome.num_taken
        assert (outcome.text is None) == (not params.stop)
        text += outcome.text or ""
        if outcome.finish_reason is not None:
            return Run(num_tokens, outcome.finish_reason, outcome.stop_cause, text if params.stop else None)
        assert outcome.num_taken == len(group)
    return Run(num_tokens, None, None, text if params.stop else None)


def reference(params: SamplingParams, token_ids: Sequence[int], max_tokens: int) -> Run:
    """The one-token-a-step decoder in the plainest form: Python's own UTF-8 decoder, a search through the whole text after each token."""
    decoder = codecs.getincrementaldecoder("utf-8")("replace")
    stop_ids = set(params.stop_token_ids) | (set() if params.ignore_eos else {EOS})
    text = ""
    for count, token_id in enumerate(token_ids, start=1):
        if count >= params.min_tokens and token_id in stop_ids:
            return Run(count, FinishReason.STOP, token_id, text + decoder.decode(b"", True) if params.stop else None)
        num_old = len(text)
        text += decoder.decode(token_bytes(token_id))
        if count >= params.min_tokens:
            ends = [(end, end - len(stop)) for stop in params.stop for end in range(num_old + 1, len(text) + 1) if text[:end].endswith(stop)]
            if ends:
                end, start = min(ends)
                return Run(count, FinishReason.STOP, text[start:end], text[: end if params.include_stop_str_in_output else start])
        if count >= max_tokens:
            return Run(count, FinishReason.LENGTH, None, text + decoder.decode(b"", True) if params.stop else None)
    return Run(len(token_ids), None, None, text if params.stop else None)


def stop_strings(max_size: int) -> st.SearchStrategy[list[str]]:
    """Mostly of a and b, so that they overlap with each other and with the text."""
    return st.lists(st.text("ab", min_size=1, max_size=4) | st.text("abcé€😀", min_size=1, max_size=5), max_size=max_size)


def groupings(draw: st.DrawFn, token_ids: list[int]) -> list[list[int]]:
    groups, start = [], 0
    while start < len(token_ids):
        size = draw(st.integers(1, 8))
        groups.append(token_ids[start : start + size])
        start += size
    return groups


@st.composite
def cases(draw: st.DrawFn) -> tuple[SamplingParams, list[int], list[list[int]], int]:
    token_ids = draw(st.lists(st.sampled_from(IDS) | st.sampled_from([*b"ab", AB]), min_size=1, max_size=40))
    max_tokens = draw(st.none() | st.integers(1, 30))
    params = SamplingParams(
        max_tokens=max_tokens,
        min_tokens=draw(st.integers(0, max_tokens or 20)),
        stop=tuple(draw(stop_strings(4))),
        include_stop_str_in_output=draw(st.booleans()),
        stop_token_ids=tuple(draw(st.lists(st.sampled_from(IDS[-12:]), max_size=2))),
        ignore_eos=draw(st.booleans()),
    )
    return params, token_ids, groupings(draw, token_ids), draw(st.integers(1, 40))


@settings(max_examples=500, deadline=None)
@given(cases())
def test_any_grouping_equals_one_token_a_step(case: tuple[SamplingParams, list[int], list[list[int]], int]) -> None:
    params, token_ids, groups, room = case
    limit = min(room, params.max_tokens or room)
    expected = reference(params, token_ids, limit)
    single = run(params, [[token_id] for token_id in token_ids], max_model_len=3 + room)
    grouped = run(params, groups, max_model_len=3 + room)
    assert grouped == single
    if expected.reason is None and params.stop:
        # Still running: what is shown is a beginning of the text, and all of it but a possible beginning of a stop string or a cut character.
        assert single[:3] == expected[:3]
        assert expected.text is not None
        assert single.text is not None
        assert expected.text.startswith(single.text)
        held = expected.text[len(single.text) :].rstrip("\ufffd")
        assert held == "" or any(stop.startswith(held[i:]) and stop != held[i:] for stop in params.stop for i in range(len(held)))
    else:
        assert single == expected


@pytest.mark.parametrize("include", [False, True])
def test_long_stop_strings_that_nearly_repeat_themselves(include: bool) -> None:
    """What they hold back grows with the text, and still the strings are found where they end first."""
    stops = ("b" + "a" * 1000, "a" * 1000 + "b" + "a" * 20, "ab" * 400 + "c")
    text = "a" * 1500 + "b" + "a" * 10 + "ab" * 450 + "c"
    rules = StopRules(SamplingParams(max_tokens=None, stop=stops, include_stop_str_in_output=include), (EOS,), 3, 5000, TOKENIZER)
    shown = ""
    for token_id in ids_of(text):
        outcome = rules.push([token_id])
        shown += outcome.text or ""
        if outcome.finish_reason is not None:
            break
    assert outcome.stop_cause == stops[2]
    assert shown == text[: len(text) if include else -len(stops[2])]


@settings(max_examples=300, deadline=None)
@given(st.lists(st.sampled_from(IDS), min_size=1, max_size=30), stop_strings(4).filter(bool))
@example([*ids_of("ab"), 0xE2, 0x82], ["c"])
def test_shown_text_is_never_taken_back(token_ids: list[int], stops: list[str]) -> None:
    """At every moment the shown text is a beginning of the whole text: no part of a character, nothing from beyond a stop string."""
    rules = StopRules(SamplingParams(max_tokens=None, stop=tuple(stops)), (), 1, 1 + len(token_ids), TOKENIZER)
    whole = b"".join(map(token_bytes, token_ids)).decode("utf-8", "replace")
    shown = ""
    for token_id in token_ids:
        outcome = rules.push([token_id])
        assert outcome.text is not None
        shown += outcome.text
        assert whole.startswith(shown)
        assert not any(stop in shown for stop in stops)
        if outcome.finish_reason is not None:
            break


TABLE = [
    # name, parameters, groups, (tokens, reason, cause, text)
    ("eos inside a block", {}, [[97, 98, EOS, 99]], (3, "stop", EOS, None)),
    ("eos ignored", {"ignore_eos": True}, [[97, EOS, 99]], (3, None, None, None)),
    ("eos below min_tokens", {"min_tokens": 3}, [[97, EOS], [99, EOS]], (4, "stop", EOS, None)),
    ("eos at min_tokens", {"min_tokens": 2}, [[97, EOS]], (2, "stop", EOS, None)),
    ("eos ignored, but a stop id", {"ignore_eos": True, "stop_token_ids": (EOS,)}, [[97, EOS]], (2, "stop", EOS, None)),
    ("stop id", {"stop_token_ids": (98,)}, [[97], [99, 98, 97]], (3, "stop", 98, None)),
    ("length inside a block", {"max_tokens": 3}, [[97, 97], [97, 97]], (3, "length", None, None)),
    ("length at a block's end", {"max_tokens": 4}, [[97, 97], [97, 97]], (4, "length", None, None)),
    ("eos at max_tokens is a stop", {"max_tokens": 2}, [[97, EOS]], (2, "stop", EOS, None)),
    ("string over tokens", {"stop": ("abc",)}, [[99, 97], [98, 99, 97]], (4, "stop", "abc", "c")),
    ("string inside a token", {"stop": ("b",)}, [[ABC]], (1, "stop", "b", "a")),
    ("string kept", {"stop": ("b",), "include_stop_str_in_output": True}, [[ABC]], (1, "stop", "b", "ab")),
    ("first end wins", {"stop": ("abc", "b")}, [[ABC]], (1, "stop", "b", "a")),
    ("same end: the longest", {"stop": ("c", "bc")}, [[97, 98, 99]], (3, "stop", "bc", "a")),
    ("overlap with itself", {"stop": ("aab",)}, [ids_of("aaab")], (4, "stop", "aab", "a")),
    ("eos flushes held text, has none itself", {"stop": ("abc",)}, [[97, 98, EOS]], (3, "stop", EOS, "ab")),
    ("stop id's text is left out", {"stop": ("zzz",), "stop_token_ids": (99,)}, [[97, 99]], (2, "stop", 99, "a")),
    ("stop id before stop string", {"stop": ("c",), "stop_token_ids": (99,)}, [[97, 99]], (2, "stop", 99, "a")),
    ("string at max_tokens is a stop", {"stop": ("b",), "max_tokens": 2}, [[97, 98]], (2, "stop", "b", "a")),
    ("length flushes held text", {"stop": ("abc",), "max_tokens": 2}, [[97, 98]], (2, "length", None, "ab")),
    ("length inside a character", {"stop": ("x",), "max_tokens": 2}, [[97, 0xC3]], (2, "length", None, "a\ufffd")),
    ("character over steps", {"stop": ("x",)}, [[0xF0], [0x9F, 0x98], [0x80]], (4, None, None, "😀")),
    ("cut character is not shown", {"stop": ("x",)}, [[97, 0xF0, 0x9F, 0x98]], (4, None, None, "a")),
    ("string of cut characters", {"stop": ("é€",)}, [[97, 0xC3], [0xA9, 0xE2], [0x82, 0xAC, 97]], (6, "stop", "é€", "a")),
    ("string below min_tokens", {"stop": ("b",), "min_tokens": 3}, [[97, 98], [97, 98]], (4, "stop", "b", "aba")),
    ("string that begins below min_tokens", {"stop": ("abc",), "min_tokens": 3}, [[97, 98, 99]], (3, "stop", "abc", "")),
    ("held back", {"stop": ("abcab",)}, [[97, 98, 99, 97]], (4, None, None, "")),
    ("held back, then let go", {"stop": ("abcab",)}, [[97, 98, 99, 97], [97]], (5, None, None, "abca")),
    ("the longest beginning is held", {"stop": ("abc", "bb")}, [[97, 98], [99]], (3, "stop", "abc", "")),
    ("nothing pushed", {"stop": ("a",)}, [[]], (0, None, None, "")),
]  # fmt: skip


@pytest.mark.parametrize(("params", "groups", "expected"), [pytest.param(*row[1:], id=row[0]) for row in TABLE])
def test_table(params: dict, groups: list[list[int]], expected: tuple) -> None:
    outcome = run(SamplingParams(**{"max_tokens": None} | params), groups)
    assert (outcome.num_tokens, outcome.reason and outcome.reason.label, outcome.cause, outcome.text) == expected


def test_the_context_ends_a_sequence() -> None:
    assert run(SamplingParams(max_tokens=None), [[97] * 4, [97] * 4], num_prompt=5, max_model_len=11) == Run(6, FinishReason.LENGTH, None, None)
    assert run(SamplingParams(max_tokens=50), [[97] * 9], num_prompt=10, max_model_len=11) == Run(1, FinishReason.LENGTH, None, None)


@pytest.mark.parametrize("position", range(8))
def test_eos_at_each_position_of_a_block(position: int) -> None:
    block = [97] * 8
    block[position] = EOS
    assert run(SamplingParams(), [[97], block]) == Run(position + 2, FinishReason.STOP, EOS, None)


@pytest.mark.parametrize("max_tokens", range(1, 13))
def test_max_tokens_with_whole_blocks_accepted(max_tokens: int) -> None:
    assert run(SamplingParams(max_tokens=max_tokens), [[97] * 8, [97] * 8]) == Run(max_tokens, FinishReason.LENGTH, None, None)


def test_no_tokenizer_is_needed_without_stop_strings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tokenizer, "incremental_decoder", lambda self: pytest.fail("decoded a request without stop strings"))
    assert StopRules(SamplingParams(), (EOS,), 1, 100, TOKENIZER).push([97, 98]).text is None


def test_longer_tokens_are_what_the_reference_thinks() -> None:
    assert [TOKENIZER.decode([257 + i]) for i in range(len(LONGER))] == [token.decode("utf-8", "replace") for token in LONGER]
    assert TOKENIZER.decode([EOS]) == ""
    assert TOKENIZER.encode("aé") == ids_of("aé")
