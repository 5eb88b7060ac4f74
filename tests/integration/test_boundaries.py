"""Where sequences end: each answer is the one-token reference's in tokens, text, finish reason, usage and logprobs, or a clear error."""

import asyncio
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from specwire.client.results import GenerationResult
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams
from tests.engine.tiny_models import save_tiny_model

from .reference import Expected, OneTokenLoop
from .tiny import TinyStack, drafter_config, tiny_stack, verifier_config

_MAX_MODEL_LEN = 64
_K = 7
_EOS_IDS = [257, *range(24)]
"""So many that an output ends after some tokens."""
_PROMPT = [72, 105, 32, 116, 104, 101, 114, 101]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("boundaries") / "tiny"
    save_tiny_model(path, eos_token_id=_EOS_IDS)
    return path


@pytest.fixture(scope="module")
def target(folder: Path) -> OneTokenLoop:
    return OneTokenLoop(folder, _MAX_MODEL_LEN, num_threads=1)


def prompt_of(num_tokens: int) -> list[int]:
    """Any text of so many tokens."""
    return [32 + (7 * index) % 90 for index in range(num_tokens)]


def check_equal(result: GenerationResult, expected: Expected, prompt: Sequence[int]) -> None:
    [choice] = result.choices
    assert choice.token_ids == expected.token_ids
    assert choice.text == expected.text
    assert choice.finish_reason == expected.finish_reason
    assert choice.stop_cause == (expected.token_ids[-1] if expected.finish_reason == "stop" else None)
    assert (choice.usage.num_prompt_tokens, choice.usage.num_generated_tokens) == (len(prompt), len(expected.token_ids))
    assert len(choice.origins) == len(expected.token_ids)
    assert (choice.logprobs is None) == (expected.logprobs is None)
    for ours, reference in zip(choice.logprobs or (), expected.logprobs or (), strict=True):
        assert ours.sampled == pytest.approx(reference.sampled, abs=1e-4)
        assert [token_id for token_id, _ in ours.top] == [token_id for token_id, _ in reference.top]
        assert [logprob for _, logprob in ours.top] == pytest.approx([logprob for _, logprob in reference.top], abs=1e-4)


async def check_request(stack: TinyStack, target: OneTokenLoop, prompt: list[int], params: SamplingParams) -> GenerationResult:
    """Runs a request whole and as a stream, against the reference."""
    expected = target.generate(prompt, params)
    result = await stack.client.generate(prompt, params)
    check_equal(result, expected, prompt)
    events = [event async for event in stack.client.stream(prompt, params)]
    assert [token_id for event in events for token_id in event.token_ids] == expected.token_ids
    assert "".join(event.text for event in events) == expected.text
    assert [event.finish_reason for event in events if event.finish_reason] == [expected.finish_reason]
    return result


@pytest.mark.parametrize("num_tokens", [*range(_MAX_MODEL_LEN - _K - 3, _MAX_MODEL_LEN)])
async def test_prompts_up_to_the_end_of_the_context(socket_dir: Path, folder: Path, target: OneTokenLoop, num_tokens: int) -> None:
    config = verifier_config(folder, max_model_len=_MAX_MODEL_LEN)
    async with tiny_stack(socket_dir, config, drafter_config(folder), speculation={"num_speculative_tokens": _K}) as stack:
        prompt = prompt_of(num_tokens)
        for params in (
            SamplingParams(max_tokens=None, logprobs=2, ignore_eos=True),
            SamplingParams(max_tokens=None, temperature=0.9, seed=num_tokens),
            SamplingParams(max_tokens=_MAX_MODEL_LEN - num_tokens, ignore_eos=True),
        ):
            await check_request(stack, target, prompt, params)


@pytest.mark.parametrize(
    ("num_tokens", "max_tokens", "message"),
    [
        (
            _MAX_MODEL_LEN - 1,
            2,
            "the prompt has 63 tokens and max_tokens is 2, together 65, but a sequence may have 64; .* set max_tokens to 1 or less",
        ),
        (_MAX_MODEL_LEN, 1, "the prompt has 64 tokens, but a sequence may have 64, output included, .* shorten it"),
        (_MAX_MODEL_LEN, None, "the prompt has 64 tokens, but a sequence may have 64, output included, .* shorten it"),
        (_MAX_MODEL_LEN + 1, None, "the prompt has 65 tokens, but a sequence may have 64, output included, .* shorten it"),
        (0, 1, "the prompt is empty; send at least one token"),
    ],
)
async def test_requests_past_the_context_are_refused_with_the_numbers(
    socket_dir: Path, folder: Path, target: OneTokenLoop, num_tokens: int, max_tokens: int | None, message: str
) -> None:
    async with tiny_stack(socket_dir, verifier_config(folder, max_model_len=_MAX_MODEL_LEN), drafter_config(folder)) as stack:
        with pytest.raises(InvalidArgumentError, match=message):
            await stack.client.generate(prompt_of(num_tokens), max_tokens=max_tokens)
        await check_request(stack, target, _PROMPT, SamplingParams(max_tokens=5))


async def test_a_drafter_with_a_shorter_window_than_the_target(socket_dir: Path, folder: Path, target: OneTokenLoop) -> None:
    window = 40
    drafter = drafter_config(folder, speculation={"max_model_len": window})
    config = verifier_config(folder, max_model_len=_MAX_MODEL_LEN)
    async with tiny_stack(socket_dir, config, drafter, speculation={"num_speculative_tokens": _K}) as stack:
        for num_tokens in (8, window - _K - 1, window - 2, window - 1, window, window + 1, window + 10):
            params = SamplingParams(max_tokens=None, ignore_eos=True)
            result = await check_request(stack, target, prompt_of(num_tokens), params)
            # Drafts are positions inside of the window.
            assert result.spec.num_draft_tokens <= max(0, window - num_tokens - 1)
            if num_tokens == 8:
                assert result.spec.num_draft_tokens > 10
                assert result.spec.num_accepted_tokens == result.spec.num_draft_tokens


@pytest.mark.parametrize("temperature", [0.0, 1.0])
async def test_max_tokens_inside_and_behind_blocks_that_are_all_accepted(
    socket_dir: Path, folder: Path, target: OneTokenLoop, temperature: float
) -> None:
    config = verifier_config(folder, max_model_len=_MAX_MODEL_LEN)
    async with tiny_stack(socket_dir, config, drafter_config(folder), speculation={"num_speculative_tokens": _K}) as stack:
        for max_tokens in range(1, 13):
            params = SamplingParams(max_tokens=max_tokens, temperature=temperature, seed=3, logprobs=3, ignore_eos=True)
            result = await check_request(stack, target, _PROMPT, params)
            assert len(result.token_ids) == max_tokens
            # The prefill gives the first token, a step at most K + 1; nothing is drafted that max_tokens would cut.
            num_drafts = min(_K, max(0, max_tokens - 2)) + max(0, max_tokens - _K - 3)
            assert (result.spec.num_draft_tokens, result.spec.num_accepted_tokens) == (num_drafts, num_drafts), max_tokens


async def test_eos_at_each_position_of_an_accepted_block(socket_dir: Path, folder: Path, target: OneTokenLoop) -> None:
    """Output token 1 comes from the prefill; 2 to K + 2 are the first block: K accepted drafts and the bonus token."""
    params_by_length: dict[int, SamplingParams] = {}
    for seed in range(1_000):
        params = SamplingParams(max_tokens=_K + 3, temperature=1.0, seed=seed)
        expected = target.generate(_PROMPT, params)
        if expected.finish_reason == "stop":
            params_by_length.setdefault(len(expected.token_ids), params.replace(max_tokens=_K + 6, logprobs=1))
        if len(params_by_length) == _K + 3:
            break
    assert sorted(params_by_length) == [*range(1, _K + 4)]
    config = verifier_config(folder, max_model_len=_MAX_MODEL_LEN)
    async with tiny_stack(socket_dir, config, drafter_config(folder), speculation={"num_speculative_tokens": _K}) as stack:
        for length, params in sorted(params_by_length.items()):
            result = await check_request(stack, target, _PROMPT, params)
            assert (result.finish_reason, len(result.token_ids)) == ("stop", length)
            if length > 1:
                assert result.spec.num_draft_tokens == result.spec.num_accepted_tokens > 0
            # min_tokens lets none of them end there, and ignore_eos none at all.
            last = result.token_ids[-1]
            *_, stopped = await asyncio.gather(
                check_request(stack, target, _PROMPT, params.replace(min_tokens=length + 1)),
                check_request(stack, target, _PROMPT, params.replace(ignore_eos=True)),
                check_request(stack, target, _PROMPT, params.replace(ignore_eos=True, stop_token_ids=(last,))),
            )
            assert stopped.choices[0].stop_cause == last


async def test_many_ends_at_once(socket_dir: Path, folder: Path, target: OneTokenLoop) -> None:
    """Sequences of one batch that end at different tokens of their blocks do not disturb each other."""
    config = verifier_config(folder, max_model_len=_MAX_MODEL_LEN)
    requests = [
        (prompt_of(3 + index % 50), SamplingParams(max_tokens=1 + index % 9, temperature=index % 3 / 2, seed=index, logprobs=index % 4 or None))
        for index in range(40)
    ]
    async with tiny_stack(socket_dir, config, drafter_config(folder), speculation={"num_speculative_tokens": _K}) as stack:
        results = await asyncio.gather(*(stack.client.generate(prompt, params) for prompt, params in requests))
    for (prompt, params), result in zip(requests, results, strict=True):
        check_equal(result, target.generate(prompt, params), prompt)
    assert sum(result.spec.num_accepted_tokens for result in results) > 50


async def test_stop_strings_at_every_token_of_accepted_blocks(socket_dir: Path, folder: Path, target: OneTokenLoop) -> None:
    """Every token is a printable character here, so that the text says at which token a one-token decoder would stop."""
    params = SamplingParams(temperature=0.7, seed=1, max_tokens=24, ignore_eos=True, allowed_token_ids=tuple(range(94)))
    expected = target.generate(_PROMPT, params)
    text = expected.text
    assert len(text) == len(expected.token_ids) == 24
    config = verifier_config(folder, max_model_len=_MAX_MODEL_LEN)
    async with tiny_stack(socket_dir, config, drafter_config(folder), speculation={"num_speculative_tokens": _K}) as stack:
        stops = list(dict.fromkeys(text[start : start + length] for length in (1, 2, 3) for start in range(len(text) - length + 1)))
        results = await asyncio.gather(*(stack.client.generate(_PROMPT, params, stop=stop) for stop in stops))
        options: dict[str, Any] = {"include_stop_str_in_output": True}
        included = await asyncio.gather(*(stack.client.generate(_PROMPT, params, stop=["no such text", stop], **options) for stop in stops))
    for stop, result, longer in zip(stops, results, included, strict=True):
        end = text.index(stop) + len(stop)
        assert (result.token_ids, result.finish_reason, result.choices[0].stop_cause) == (expected.token_ids[:end], "stop", stop)
        assert result.text == text[: end - len(stop)]
        assert result.usage.num_generated_tokens == end
        assert (longer.token_ids, longer.text) == (expected.token_ids[:end], text[:end])
    assert sum(result.spec.num_accepted_tokens for result in results) > 20
