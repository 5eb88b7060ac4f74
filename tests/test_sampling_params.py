"""What a caller may ask of sampling: bad values are refused with value, limit and remedy; zeros stay zeros."""

import pytest

from specwire.errors import InvalidArgumentError
from specwire.sampling_params import MAX_BAD_WORD_IDS, MAX_BAD_WORDS, MAX_STOP_STRINGS, SamplingParams

NAN, INF = float("nan"), float("inf")

BAD_VALUES: list[tuple[dict[str, object], str]] = [
    ({"n": 0}, "n is 0, but must be from 1 to 128"),
    ({"n": 129}, "n is 129, but must be from 1 to 128"),
    ({"n": 1.0}, "n is 1.0, but must be an integer from 1 to 128"),
    ({"n": True}, "n is True, but must be an integer"),
    ({"seed": 10**5000}, "seed is an integer of thousands of digits, but must be from 0"),
    ({"seed": 10**200}, "000..., but must be from 0"),
    ({"n": "x" * 10**6}, "n is 'xxxxxxxxxxxx...xxxxxxxxxxxxx', but must be an integer"),
    ({"max_tokens": 0}, "max_tokens is 0, but must be from 1 to"),
    ({"max_tokens": "7"}, "max_tokens is '7', but must be an integer"),
    ({"min_tokens": -1}, "min_tokens is -1, but must be from 0 to"),
    ({"min_tokens": 5, "max_tokens": 4}, "min_tokens is 5, but max_tokens is 4; lower min_tokens or raise max_tokens"),
    ({"temperature": -0.1}, "temperature is -0.1, but must be from 0 to 100"),
    ({"temperature": NAN}, "temperature is nan, but must be a finite number"),
    ({"temperature": INF}, "temperature is inf, but must be a finite number"),
    ({"temperature": None}, "temperature is None, but must be a finite number"),
    ({"top_p": 0.0}, "top_p is 0, but must be in (0, 1]; for greedy sampling set temperature=0"),
    ({"top_p": 1.01}, "top_p is 1.01, but must be from 0 to 1"),
    ({"top_p": NAN}, "top_p is nan"),
    ({"top_k": -2}, "top_k is -2, but must be from -1 to"),
    ({"top_k": 1.5}, "top_k is 1.5, but must be an integer"),
    ({"min_p": -0.1}, "min_p is -0.1, but must be from 0 to 1"),
    ({"min_p": 1.1}, "min_p is 1.1, but must be from 0 to 1"),
    ({"seed": -1}, "seed is -1, but must be from 0 to 18446744073709551615"),
    ({"seed": 2**64}, "seed is 18446744073709551616, but must be from 0 to 18446744073709551615"),
    ({"presence_penalty": 2.1}, "presence_penalty is 2.1, but must be from -2 to 2"),
    ({"frequency_penalty": -2.1}, "frequency_penalty is -2.1, but must be from -2 to 2"),
    ({"repetition_penalty": 0.0}, "repetition_penalty is 0, but must be from 1e-06 to 1e+06"),
    ({"repetition_penalty": INF}, "repetition_penalty is inf, but must be a finite number"),
    ({"stop": "END"}, "stop is 'END', but must be a list of strings that are not empty; send one such as ['END']"),
    ({"stop": 3}, "stop is 3, but must be a list of strings that are not empty"),
    ({"stop": ("",)}, "stop is [''], but must be a list of strings that are not empty"),
    ({"stop": (3,)}, "stop is [3], but must be a list of strings that are not empty"),
    ({"stop": ("a\ud800",)}, "which is not valid UTF-8 at character 1; send valid text"),
    ({"stop": ("x" * 4000, "y" * 97)}, "stop has 4097 characters in all, but may have 4096; send fewer or shorter strings"),
    ({"stop": ("x",) * (MAX_STOP_STRINGS + 1)}, f"stop has {MAX_STOP_STRINGS + 1} strings, but at most {MAX_STOP_STRINGS} are taken; send fewer"),
    ({"include_stop_str_in_output": 1}, "include_stop_str_in_output is 1, but must be true or false"),
    ({"ignore_eos": "yes"}, "ignore_eos is 'yes', but must be true or false"),
    ({"stop_token_ids": 7}, "stop_token_ids is 7, but must be a list of token ids"),
    ({"stop_token_ids": (-1,)}, "a token id in stop_token_ids is -1, but must be from 0 to"),
    ({"logit_bias": [1, 2]}, "logit_bias is [1, 2], but must map token ids to numbers"),
    ({"logit_bias": {"1": 0.5}}, "a token id in logit_bias is '1', but must be an integer"),
    ({"logit_bias": {-3: 0.5}}, "a token id in logit_bias is -3, but must be from 0 to"),
    ({"logit_bias": {3: 100.5}}, "logit_bias[3] is 100.5, but must be from -100 to 100"),
    ({"logit_bias": {3: NAN}}, "logit_bias[3] is nan, but must be a finite number"),
    ({"allowed_token_ids": ()}, "allowed_token_ids is empty, so that nothing could be sampled; leave it out to allow every token"),
    ({"allowed_token_ids": "12"}, "allowed_token_ids is '12', but must be a list of token ids"),
    ({"allowed_token_ids": (1, 2**31)}, "a token id in allowed_token_ids is 2147483648, but must be from 0 to 2147483647"),
    ({"bad_words_token_ids": 5}, "bad_words_token_ids is 5, but must be a list of token-id lists"),
    ({"bad_words_token_ids": ((1,),) * (MAX_BAD_WORDS + 1)}, f"has {MAX_BAD_WORDS + 1} words, but at most {MAX_BAD_WORDS} are taken; send fewer"),
    ({"bad_words_token_ids": ((1,) * MAX_BAD_WORD_IDS, (1,))}, f"has {MAX_BAD_WORD_IDS + 1} ids in all, but may have {MAX_BAD_WORD_IDS}; send fewer"),
    ({"bad_words_token_ids": (5,)}, "bad_words_token_ids[0] is 5, but must be a list of token ids"),
    ({"bad_words_token_ids": ((1,), ())}, "bad_words_token_ids[1] is empty, but a bad word has at least one token id; remove it"),
    ({"bad_words_token_ids": ((1, -1),)}, "a token id in bad_words_token_ids[0] is -1, but must be from 0 to"),
    ({"logprobs": -1}, "logprobs is -1, but must be from 0 to 20"),
    ({"logprobs": 21}, "logprobs is 21, but must be from 0 to 20"),
    ({"logprobs": True}, "logprobs is True, but must be an integer"),
    ({"max_draft_tokens": -1}, "max_draft_tokens is -1, but must be from 0 to"),
    ({"priority": 0.5}, "priority is 0.5, but must be an integer"),
]


@pytest.mark.parametrize(("changes", "message"), BAD_VALUES, ids=[str(next(iter(changes))) for changes, _ in BAD_VALUES])
def test_bad_values_name_parameter_value_and_limit(changes: dict[str, object], message: str) -> None:
    for make in (lambda: SamplingParams(**changes), lambda: SamplingParams().replace(**changes)):  # type: ignore[arg-type]
        with pytest.raises(InvalidArgumentError) as raised:
            make()
        assert message in str(raised.value)
        assert ";" in str(raised.value)  # a remedy follows


@pytest.mark.parametrize(
    "changes",
    [
        {"n": 128},
        {"max_tokens": None, "min_tokens": 10},
        {"min_tokens": 4, "max_tokens": 4},
        {"temperature": 100},
        {"top_p": 1e-9},
        {"top_p": 1},
        {"top_k": -1},
        {"top_k": 2**31 - 1},
        {"min_p": 1.0},
        {"seed": 2**64 - 1},
        {"presence_penalty": -2, "frequency_penalty": 2},
        {"stop": ("é", "\n")},
        {"logit_bias": {0: -100, 7: 100.0}},
        {"allowed_token_ids": (0,)},
        {"bad_words_token_ids": ((1, 2, 3), (4,))},
        {"logprobs": 20},
        {"priority": -5},
    ],
)
def test_the_ends_of_every_range_are_accepted(changes: dict[str, object]) -> None:
    params = SamplingParams(**changes)  # type: ignore[arg-type]
    assert {name: getattr(params, name) for name in changes} == changes


ZEROS = {"temperature": 0.0, "seed": 0, "logprobs": 0, "min_tokens": 0, "top_k": 0, "min_p": 0.0, "max_draft_tokens": 0, "priority": 0}


def test_explicit_zeros_are_kept_and_are_not_none() -> None:
    others = SamplingParams(temperature=0.5, seed=5, logprobs=5, min_tokens=5, top_k=5, min_p=0.5, max_draft_tokens=5, priority=5)
    for params in (SamplingParams(**ZEROS), others.replace(**ZEROS)):  # type: ignore[arg-type]
        for name, zero in ZEROS.items():
            value = getattr(params, name)
            assert value == zero
            assert value is not None
    defaults = SamplingParams()
    assert (defaults.seed, defaults.logprobs, defaults.max_draft_tokens) == (None, None, None)


@pytest.mark.parametrize(("temperature", "is_greedy"), [(0, True), (0.99e-5, True), (1e-5, False), (0.01, False)])
def test_is_greedy(temperature: float, is_greedy: bool) -> None:
    assert SamplingParams(temperature=temperature).is_greedy == is_greedy


@pytest.mark.parametrize(
    ("changes", "has_penalties"),
    [({}, False), ({"presence_penalty": -0.1}, True), ({"frequency_penalty": 0.1}, True), ({"repetition_penalty": 0.9}, True)],
)
def test_has_penalties(changes: dict[str, float], has_penalties: bool) -> None:
    assert SamplingParams(**changes).has_penalties == has_penalties  # type: ignore[arg-type]


def test_replace_keeps_the_rest_and_refuses_unknown_names() -> None:
    params = SamplingParams(temperature=0.5, seed=3).replace(top_k=4)
    assert (params.temperature, params.seed, params.top_k) == (0.5, 3, 4)
    with pytest.raises(TypeError, match="temprature"):
        params.replace(temprature=1.0)


@pytest.mark.parametrize("name", ["stop_token_ids", "allowed_token_ids"])
def test_lists_of_ids_are_no_longer_than_the_vocabulary(name: str) -> None:
    SamplingParams(**{name: (1,) * 9}).check_vocab(9)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match=f"{name} has 9 ids, but the model has only 8; send each of them once"):
        SamplingParams(**{name: (1,) * 9}).check_vocab(8)  # type: ignore[arg-type]


def test_ids_are_checked_against_the_vocabulary() -> None:
    params = SamplingParams(stop_token_ids=(9,), logit_bias={9: 1.0}, allowed_token_ids=(9,), bad_words_token_ids=((1, 9),))
    params.check_vocab(10)
    for name in ("stop_token_ids", "logit_bias", "allowed_token_ids", "bad_words_token_ids"):
        with pytest.raises(InvalidArgumentError, match=f"{name} names token id 9, but the model's ids end at 8; use ids of the served tokenizer"):
            SamplingParams().replace(**{name: getattr(params, name)}).check_vocab(9)
