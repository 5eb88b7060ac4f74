"""Bodies of requests: what is read, and how what is wrong is named."""

from typing import Any

import pytest

from specwire.errors import InvalidArgumentError
from specwire.http.failures import Refusal, refusal_of
from specwire.http.fields import read_fields
from specwire.http.requests import ChatRequest, CompletionRequest, SamplingFields
from specwire.sampling_params import SamplingParams
from tests.coordinator.byte_tokenizer import make_tokenizer

PROMPT = {"prompt": "a"}
MESSAGES = {"messages": [{"role": "user", "content": "a"}]}


def params(body: dict[str, Any]) -> SamplingParams:
    kind: type[SamplingFields] = ChatRequest if "messages" in body else CompletionRequest
    return read_fields(kind, body).sampling_params(make_tokenizer())


def test_defaults_are_openais() -> None:
    assert params(PROMPT) == SamplingParams(max_tokens=16, temperature=1.0)
    assert params(MESSAGES) == SamplingParams(max_tokens=None, temperature=1.0)


def test_every_parameter_arrives() -> None:
    sent = {
        "n": 2, "max_tokens": 5, "min_tokens": 1, "temperature": 0.5, "top_p": 0.9, "top_k": 7, "min_p": 0.1, "seed": 3, "stop": "x",
        "stop_token_ids": [4], "include_stop_str_in_output": True, "ignore_eos": True, "frequency_penalty": 0.1, "presence_penalty": 0.2,
        "repetition_penalty": 1.1, "logit_bias": {"5": 1, "6": -1.5}, "allowed_token_ids": [5, 6], "bad_words": ["é"], "max_draft_tokens": 0,
        "priority": -1, "logprobs": 2,
    }  # fmt: skip
    assert params(PROMPT | sent) == SamplingParams(
        n=2, max_tokens=5, min_tokens=1, temperature=0.5, top_p=0.9, top_k=7, min_p=0.1, seed=3, stop=("x",), stop_token_ids=(4,),
        include_stop_str_in_output=True, ignore_eos=True, frequency_penalty=0.1, presence_penalty=0.2, repetition_penalty=1.1,
        logit_bias={5: 1, 6: -1.5}, allowed_token_ids=(5, 6), bad_words_token_ids=(tuple("é".encode()),), max_draft_tokens=0, priority=-1, logprobs=2,
    )  # fmt: skip
    assert params(MESSAGES | {"logprobs": True, "top_logprobs": 4, "max_completion_tokens": 9, "max_tokens": 9}).logprobs == 4
    assert params(MESSAGES | {"logprobs": True}).logprobs == 0


@pytest.mark.parametrize("seed", [0, -1, -(2**63), 2**63, 2**64 - 1])
def test_seeds(seed: int) -> None:
    assert params(PROMPT | {"seed": seed}).seed == seed % 2**64


@pytest.mark.parametrize(
    "neutral",
    [
        {"best_of": 1}, {"best_of": 3, "n": 3}, {"suffix": ""}, {"store": False}, {"response_format": {"type": "text"}}, {"service_tier": "auto"},
        {"use_beam_search": False}, {"skip_special_tokens": True}, {"functions": None, "unheard_of": None}, {"length_penalty": 1.0},
        {"metadata": {}},
    ],
)  # fmt: skip
def test_what_is_done_anyway_may_be_asked_for(neutral: dict[str, Any]) -> None:
    assert params(PROMPT | neutral) == SamplingParams(n=neutral.get("n", 1), max_tokens=16, temperature=1.0)


WRONG: list[tuple[dict[str, Any], str, str]] = [
    (PROMPT | {"temprature": 1}, "temprature", "did you mean temperature?"),
    (PROMPT | {"xyz": 1}, "xyz", "not known"),
    (PROMPT | {"metadata": {"a": "b"}}, "metadata", "nothing is stored; leave it out"),
    ({}, "prompt", "prompt is missing"),
    ({"prompt": None}, "prompt", "prompt is missing"),
    ({"prompt": 3}, "prompt", "must be text, a list of texts"),
    ({"prompt": {"a": 1}}, "prompt", "must be text"),
    ({"prompt": ["a", 1]}, "prompt", "must be text"),
    ({"prompt": []}, "prompt", "0 prompts"),
    ({"prompt": ["a"] * 1025}, "prompt", "1025 prompts"),
    (PROMPT | {"n": "2"}, "n", 'n is "2", but must be an integer'),
    (PROMPT | {"n": 2.0}, "n", "must be an integer"),
    (PROMPT | {"n": True}, "n", "n is true, but must be an integer"),
    (PROMPT | {"n": 129}, "n", "from 1 to 128"),
    (PROMPT | {"temperature": "hot"}, "temperature", "must be a number"),
    (PROMPT | {"temperature": 101}, "temperature", "from 0 to 100"),
    (PROMPT | {"temperature": float("nan")}, "temperature", "finite"),
    (PROMPT | {"top_p": 0}, "top_p", "(0, 1]"),
    (PROMPT | {"stream": "yes"}, "stream", "must be true or false"),
    (PROMPT | {"stop": 3}, "stop", "text or a list of texts"),
    (PROMPT | {"stop": ["x"] * 17}, "stop", "at most 16"),
    (PROMPT | {"stop": [""]}, "stop", "not empty"),
    (PROMPT | {"stop_token_ids": ["a"]}, "stop_token_ids", "stop_token_ids[0]"),
    (PROMPT | {"stop_token_ids": [-1]}, "stop_token_ids", "from 0"),
    (PROMPT | {"logit_bias": {"a": 1}}, "logit_bias", "must be token ids"),
    (PROMPT | {"logit_bias": {"1": 101}}, "logit_bias", "from -100 to 100"),
    (PROMPT | {"logit_bias": [1]}, "logit_bias", "an object of token ids"),
    (PROMPT | {"logit_bias": {"5": 1, "05": 2}}, "logit_bias", "2 keys for 1 token ids"),
    (PROMPT | {"n": 10**4000}, "n", "0..., but must be from 1 to 128"),
    (PROMPT | {"x" * 10**6: 1}, "x" * 80, "not known here"),
    (PROMPT | {"user": "\ud800"}, "user", "not valid UTF-8"),
    (PROMPT | {"bad_words": ["\ud800"]}, "bad_words", "not valid UTF-8"),
    (PROMPT | {"bad_words": ["a"] * 1025}, "bad_words", "1025 words, but may have 1024"),
    (PROMPT | {"bad_words": ["a" * 70_000]}, "bad_words", "70000 characters, but may have 65536"),
    (PROMPT | {"stop_token_ids": ["a"] * 10**6}, "stop_token_ids", "stop_token_ids[0]"),
    (PROMPT | {"bad_words": [" "]}, "bad_words", "without characters"),
    (PROMPT | {"logprobs": 21}, "logprobs", "from 0 to 20"),
    (PROMPT | {"logprobs": True}, "logprobs", "must be an integer"),
    (PROMPT | {"echo": True, "logprobs": 0}, "echo", "only generated tokens"),
    (PROMPT | {"max_tokens": 0}, "max_tokens", "from 1"),
    (PROMPT | {"max_completion_tokens": 0}, "max_completion_tokens", "from 1"),
    (PROMPT | {"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "its other name"),
    (PROMPT | {"seed": 2**64}, "seed", "seed is 18446744073709551616"),
    (PROMPT | {"seed": 10**4000}, "seed", "seed is an integer of more than 40 digits"),
    (PROMPT | {"stream_options": {"include_usage": True}}, "stream_options", "stream is not true"),
    (PROMPT | {"stream": True, "stream_options": {"include_usage": 1}}, "stream_options", "stream_options.include_usage is 1"),
    (PROMPT | {"best_of": 2}, "best_of", "not supported"),
    (PROMPT | {"suffix": "x"}, "suffix", "not supported"),
    (PROMPT | {"guided_json": {}}, "guided_json", "grammar"),
    (PROMPT | {"prompt_logprobs": 1}, "prompt_logprobs", "not supported"),
    (PROMPT | {"response_format": {"type": "json_object"}}, "response_format", "not supported"),
    (PROMPT | {"store": 0}, "store", "not supported"),
    ({"messages": "hi"}, "messages", "must be a list"),
    ({"messages": []}, "messages", "messages is empty"),
    ({"messages": ["hi"]}, "messages", "messages[0]"),
    ({"messages": [{"content": "hi"}]}, "messages", "at position 0"),
    ({"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]}, "messages", "only text"),
    (MESSAGES | {"top_logprobs": 1}, "top_logprobs", "logprobs is not true"),
    (MESSAGES | {"logprobs": True, "top_logprobs": 21}, "top_logprobs", "from 0 to 20"),
    (MESSAGES | {"tool_choice": "required"}, "tool_choice", "auto or none"),
    (MESSAGES | {"parallel_tool_calls": False}, "parallel_tool_calls", "not supported"),
    (MESSAGES | {"functions": []}, "functions", "replaced by tools"),
]


def read_all(kind: type[SamplingFields], body: dict[str, Any]) -> None:
    """As the service does it. Raises Refusal."""
    read = read_fields(kind, body)
    try:
        read.sampling_params(make_tokenizer())
        if isinstance(read, ChatRequest):
            read.chat()
        elif isinstance(read, CompletionRequest):
            assert read.prompts
    except InvalidArgumentError as error:
        raise refusal_of(error, read.names) from error


@pytest.mark.parametrize(("body", "param", "message"), WRONG)
def test_what_is_wrong_is_named(body: dict[str, Any], param: str, message: str) -> None:
    kind: type[SamplingFields] = ChatRequest if "messages" in body else CompletionRequest
    with pytest.raises(Refusal) as caught:
        read_all(kind, body)
    refusal = caught.value
    assert (refusal.status, refusal.param) == (400, param)
    assert message in str(refusal)
    assert refusal.body["error"]["type"] == "invalid_request_error"


@pytest.mark.parametrize("body", [[], "text", 3, None])
def test_a_body_is_an_object(body: Any) -> None:
    with pytest.raises(Refusal, match="must be a JSON object"):
        read_fields(CompletionRequest, body)


def test_bad_words_begin_a_text_or_follow_a_space() -> None:
    words = params(PROMPT | {"bad_words": ["ab", " cd "]}).bad_words_token_ids
    assert [bytes(word) for word in words] == [b"ab", b"cd"]
