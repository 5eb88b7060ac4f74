"""Prompts from files and made-up ones."""

import gzip
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from specwire.bench.workload import Lengths, file_prompts, read_prompt_file, repeat, synthetic_prompts
from specwire.errors import InvalidArgumentError
from tests.bench.fake_backend import prompts
from tests.coordinator.byte_tokenizer import ids_of, make_tokenizer

IDS = range(3, 90)


def test_fixed_lengths() -> None:
    made = synthetic_prompts(20, Lengths(7, 5), IDS, 0)
    assert {(len(prompt.token_ids), prompt.max_tokens) for prompt in made} == {(7, 5)}
    assert {token_id for prompt in made for token_id in prompt.token_ids} <= set(IDS)
    assert len({tuple(prompt.token_ids) for prompt in made}) == 20


def test_the_seed_decides_and_more_prompts_change_none() -> None:
    lengths = Lengths(9, 4, "uniform", 0.5, prefix_len=3)
    assert synthetic_prompts(30, lengths, IDS, 5)[:10] == synthetic_prompts(10, lengths, IDS, 5) != synthetic_prompts(10, lengths, IDS, 6)


def test_uniform_lengths_take_every_value_in_range() -> None:
    made = synthetic_prompts(2000, Lengths(10, 100, "uniform", 0.3), IDS, 0)
    assert {len(prompt.token_ids) for prompt in made} == set(range(7, 14))
    assert {prompt.max_tokens for prompt in made} == set(range(70, 131))


def test_lognormal_lengths_have_their_mean_and_sigma() -> None:
    values = [prompt.max_tokens for prompt in synthetic_prompts(5000, Lengths(1, 200, "lognormal", 0.5), IDS, 0)]
    assert np.mean(values) == pytest.approx(200, rel=0.03)
    assert np.std(np.log(values)) == pytest.approx(0.5, rel=0.05)


def test_lengths_are_at_least_one() -> None:
    assert min(len(prompt.token_ids) for prompt in synthetic_prompts(500, Lengths(1, 1, "lognormal", 2.0), IDS, 0)) == 1


def test_a_shared_prefix_comes_on_top() -> None:
    made = synthetic_prompts(10, Lengths(4, 1, prefix_len=6), IDS, 0)
    assert len({tuple(prompt.token_ids[:6]) for prompt in made}) == 1
    assert {len(prompt.token_ids) for prompt in made} == {10}
    assert len({tuple(prompt.token_ids[6:]) for prompt in made}) == 10


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"input_len": 0}, "--input-len is 0"),
        ({"output_len": 0}, "--output-len is 0"),
        ({"prefix_len": -1}, "--prefix-len is -1"),
        ({"distribution": "normal"}, "fixed, uniform, lognormal"),
        ({"distribution": "uniform", "spread": 1.5}, "--length-spread is 1.5"),
        ({"spread": -0.1}, "--length-spread is -0.1"),
    ],
)
def test_impossible_lengths(values: dict[str, Any], message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        Lengths(**{"input_len": 5, "output_len": 5} | values)


@pytest.mark.parametrize("suffix", ["", ".gz"])
def test_prompt_files(tmp_path: Path, suffix: str) -> None:
    lines = [{"id": "a/1", "category": "code", "weight": 2, "turns": ["first", "second"]}, {"prompt": "x\u2028y"}]
    content = "\n\n".join(json.dumps(line, ensure_ascii=False) for line in lines).encode()
    path = tmp_path / f"prompts.jsonl{suffix}"
    path.write_bytes(gzip.compress(content) if suffix else content)
    one, two = read_prompt_file(path)
    assert (one.name, one.text, one.category, one.weight) == ("a/1", "first", "code", 2.0)
    assert (two.name, two.text, two.category, two.weight) == ("3", "x\u2028y", "", 1.0)
    [first, _] = file_prompts([one, two], make_tokenizer(), 9, as_chat=False)
    assert (first.name, first.token_ids, first.max_tokens, first.category, first.weight) == ("a/1", ids_of("first"), 9, "code", 2.0)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "is empty"),
        (b'{"prompt": "a"}\n{"prompt": ', "line 2 of .* no JSON"),
        (b'["a"]', "line 1 of .* is a list"),
        (b'{"text": "a"}', "has no text"),
        (b'{"turns": []}', "has no text"),
        (b'{"prompt": "a", "weight": 0}', "the weight 0"),
        (b'{"prompt": "a", "weight": "much"}', "the weight 'much'"),
        (b'{"prompt": "\xff"}', "can't be read"),
    ],
)
def test_bad_prompt_files_are_named(tmp_path: Path, content: bytes, message: str) -> None:
    path = tmp_path / "prompts.jsonl"
    path.write_bytes(content)
    with pytest.raises(InvalidArgumentError, match=message):
        read_prompt_file(path)


def test_missing_and_truncated_prompt_files(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        read_prompt_file(tmp_path / "no")
    path = tmp_path / "prompts.gz"
    path.write_bytes(gzip.compress(b'{"prompt": "a"}')[:-9])
    with pytest.raises(InvalidArgumentError, match="can't be read"):
        read_prompt_file(path)


def test_repeating() -> None:
    assert [prompt.name for prompt in repeat(prompts(3), 5)] == ["0", "1", "2", "0", "1"]
    assert [prompt.name for prompt in repeat(prompts(3), 2, first=2)] == ["2", "0"]
