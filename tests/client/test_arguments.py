"""What callers may pass, by table."""

import subprocess
import sys
from typing import Any

import numpy as np
import pytest

from specwire import AsyncClient, Client, TlsOptions
from specwire.client.arguments import check_concurrency, items_of_batch, make_params
from specwire.client.generation import Deadline, Retries
from specwire.client.prompts import BatchItem, check_prompt
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({}, SamplingParams()),
        ({"stop": "END"}, SamplingParams(stop=("END",))),
        ({"stop": ["a", "b"]}, SamplingParams(stop=("a", "b"))),
        ({"stop": []}, SamplingParams()),
        ({"stop_token_ids": [3, 4]}, SamplingParams(stop_token_ids=(3, 4))),
        ({"allowed_token_ids": range(3)}, SamplingParams(allowed_token_ids=(0, 1, 2))),
        ({"allowed_token_ids": None}, SamplingParams()),
        ({"bad_words_token_ids": [[1, 2], [3]]}, SamplingParams(bad_words_token_ids=((1, 2), (3,)))),
        ({"logit_bias": {5: -1.5}}, SamplingParams(logit_bias={5: -1.5})),
        ({"max_tokens": None}, SamplingParams(max_tokens=None)),
        ({"temperature": 0, "seed": 0, "logprobs": 0, "min_tokens": 0, "top_k": 0}, SamplingParams(temperature=0, seed=0, logprobs=0)),
    ],
)
def test_parameters_by_name(changes: dict[str, Any], expected: SamplingParams) -> None:
    assert make_params(None, changes) == expected


def test_names_change_given_parameters() -> None:
    given = SamplingParams(temperature=0.7, seed=3)
    assert make_params(given, {"seed": 0}) == SamplingParams(temperature=0.7, seed=0)
    assert make_params(given, {}) == given
    assert given.seed == 3


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"temprature": 1.0}, "unknown sampling parameter temprature; did you mean temperature?"),
        ({"max_new_tokens": 1}, "unknown sampling parameter max_new_tokens; did you mean max_tokens?"),
        ({"bad_words": ["x"]}, "did you mean bad_words_token_ids?"),
        ({"stops": ["x"]}, "did you mean stop?"),
        ({"qqqqq": 1}, "unknown sampling parameter qqqqq; remove it, known are n, max_tokens, min_tokens,"),
        ({"top_p": 0}, "top_p is 0"),
        ({"temperature": "hot"}, "temperature is 'hot'"),
        ({"stop": 5}, "stop is 5, but must be a list of strings that are not empty"),
        ({"stop": [5]}, "stop is [5], but must be a list of strings that are not empty"),
        ({"stop": ["\ud800"]}, "not valid UTF-8 at character 0"),
        ({"stop_token_ids": 5}, "stop_token_ids holds 5 where a list is needed"),
        ({"stop_token_ids": ["x"]}, "stop_token_ids is 'x'"),
        ({"bad_words_token_ids": [5]}, "bad_words_token_ids holds 5 where a list is needed"),
        ({"bad_words_token_ids": ["word"]}, "bad_words_token_ids holds 'word' where a list is needed"),
        ({"logit_bias": [1]}, "logit_bias is [1], but must map"),
        ({"n": 0}, "n is 0"),
        ({"seed": -1}, "seed is -1"),
    ],
)
def test_wrong_parameters_are_named(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        make_params(None, changes)
    assert message in str(error.value)


def test_params_must_be_sampling_params() -> None:
    with pytest.raises(InvalidArgumentError, match="must be a SamplingParams"):
        make_params({"seed": 1}, {})  # type: ignore[arg-type]


def test_prompts() -> None:
    assert check_prompt("aé😀") == "aé😀"
    assert check_prompt([1, 2]) == [1, 2]
    assert check_prompt((1, 2)) == [1, 2]
    converted = check_prompt(np.array([1, 2], dtype=np.int64))
    assert converted == [1, 2]
    assert all(type(token_id) is int for token_id in converted)
    assert check_prompt([-1]) == [-1]  # the server knows the vocabulary


@pytest.mark.parametrize(
    ("prompt", "message"),
    [
        ("ab\ud83d", "character 2 is '\\ud83d'"),
        ("\udcff", "character 0"),
        ([1, "b"], "'b' at position 1"),
        ([1.0], "1.0 at position 0"),
        ([1, 2, 2**31], "2147483648 at position 2"),
        ([None], "None at position 0"),
        (b"ab\xff", "send text"),
        (5, "the prompt is 5"),
        (None, "the prompt is None"),
    ],
)
def test_wrong_prompts_are_named(prompt: Any, message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        check_prompt(prompt)
    assert message in str(error.value)


@pytest.mark.parametrize("timeout", [0, -1.0, float("inf"), float("nan")])
def test_wrong_timeouts(timeout: float) -> None:
    with pytest.raises(InvalidArgumentError, match="must be a positive number of seconds"):
        Deadline(timeout)


def test_the_sdk_imports_neither_models_nor_tokenizers() -> None:
    others = ("torch", "transformers", "tokenizers", "jinja2", "numpy", "opentelemetry", "rich", "yaml", "coordinator")
    code = f"import sys; from specwire import Client, AsyncClient, SamplingParams; SamplingParams();print([m for m in {others} if m in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_the_library_alone_imports_no_grpc() -> None:
    code = "import sys, specwire.sampling_params; print('grpc' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.strip() == "False"


def test_unknown_names_of_the_package() -> None:
    import specwire

    with pytest.raises(AttributeError, match="no attribute 'Clinet'"):
        specwire.Clinet  # noqa: B018


def test_parameters_of_a_batch() -> None:
    prompts = ["a", [1]]
    assert items_of_batch(prompts, None, {"seed": 1}) == (prompts, SamplingParams(seed=1))
    assert items_of_batch(prompts, SamplingParams(n=2), {}) == (prompts, SamplingParams(n=2))
    own = [SamplingParams(n=2), SamplingParams(n=3)]
    mixed = [*prompts, BatchItem("b", SamplingParams(n=4), 5.0, "x")]
    assert items_of_batch(iter(mixed), [*own, SamplingParams()], {})[0] == [*map(BatchItem, prompts, own), mixed[2]]
    with pytest.raises(InvalidArgumentError, match="params lists 1 SamplingParams for 2 prompts"):
        items_of_batch(prompts, [SamplingParams()], {})
    with pytest.raises(InvalidArgumentError, match="must be a SamplingParams"):
        items_of_batch(prompts[:1], ["seed"], {})  # type: ignore[list-item]
    with pytest.raises(InvalidArgumentError, match="must be a SamplingParams"):
        items_of_batch(prompts[:1], {"seed": 1}, {})  # type: ignore[arg-type]


@pytest.mark.parametrize("value", [0, -1, 1.5, True, None])
def test_wrong_concurrency(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_concurrency is"):
        check_concurrency(value)


@pytest.mark.parametrize("value", [-1, 1.5, True, None])
def test_wrong_numbers_of_retries(value: Any) -> None:
    with pytest.raises(InvalidArgumentError, match="max_retries is"):
        Retries(value)


CLIENTS: list[tuple[dict[str, Any], str]] = [
    ({"address": "127.0.0.1:99999"}, "address is '127.0.0.1:99999', but must be unix:path or host:port with a port from 1 to 65535"),
    ({"address": "127.0.0.1"}, "address is '127.0.0.1', but must be unix:path or host:port"),
    ({"address": "127.0.0.1:0"}, "with a port from 1 to 65535"),
    ({"address": "http://127.0.0.1:50050"}, "address is 'http://127.0.0.1:50050', but must be unix:path or host:port"),
    ({"address": "::1:50050"}, "address is '::1:50050', but must be"),
    ({"address": "localhost:50050\n"}, "but must be"),
    ({"address": "dns:///localhost"}, "address is 'dns:///localhost', but must be"),
    ({"address": ""}, "address is '', but must be"),
    ({"address": "unix:"}, "whose path has 0 bytes"),
    ({"address": "\udcff:1"}, "which is no UTF-8"),
    ({"address": 50050}, "address is 50050, but must be text"),
    ({"address": None}, "address is None, but must be text"),
    ({"max_message_mb": 0}, "max_message_mb is 0, but must be an integer from 1 to 2047"),
    ({"max_message_mb": 5000}, "max_message_mb is 5000"),
    ({"max_message_mb": 1.5}, "max_message_mb is 1.5"),
    ({"max_message_mb": True}, "max_message_mb is True"),
    ({"max_retries": -1}, "max_retries is -1"),
    ({"tls": "ca.pem"}, "tls is 'ca.pem', but must be a TlsOptions, such as TlsOptions(ca='ca.pem')"),
    ({"api_key": 5}, "api_key is of type int, but must be text"),
    ({"api_key": "a b"}, "the API key has spaces"),
    ({"tenant_cache_key": "x"}, "tenant_cache_key is 'x', but must be bytes, such as b'team-a'"),
]


@pytest.mark.parametrize(("arguments", "message"), CLIENTS)
@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_wrong_arguments_of_a_client(kind: type, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError) as error:
        kind(**arguments)
    assert message in str(error.value)


@pytest.mark.parametrize(
    "address", ["localhost:1", "a_b.internal:65535", "[::1]:50050", "10.0.0.1:50050", "dns:///localhost:50050", "unix:/tmp/c", "unix:c"]
)
def test_good_arguments_of_a_client(address: str) -> None:
    AsyncClient(address, max_message_mb=2047, tls=TlsOptions(), api_key="", tenant_cache_key=b"\xff")
