"""The offline API over real services with a tiny model."""

import io
import json
import logging
import math
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy
import pytest
from rich.console import Console

from specwire import LLM, Chat, InvalidArgumentError, RequestOutput, SamplingParams, SpecwireError
from specwire.messages import SpecStats
from specwire.offline import Counter, RequestMetrics, Vector
from specwire.offline import llm as llm_module
from specwire.offline.options import make_options
from specwire.offline.progress import show_progress
from tests.engine.tiny_models import save_tiny_model

TEMPLATE = "{% for message in messages %}<{{ message.content }}>{% endfor %}"
PARAMS = SamplingParams(max_tokens=16, ignore_eos=True)


@pytest.fixture(scope="module")
def llm(tmp_path_factory: pytest.TempPathFactory) -> Iterator[LLM]:
    model = tmp_path_factory.mktemp("model") / "tiny"
    save_tiny_model(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    flags = {"dtype": "float32", "num_threads": 1, "kv_cache_memory": 8_000_000}
    speculation = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_min": 1}
    with LLM(str(model), speculative_config=speculation, **flags) as started:  # type: ignore[arg-type]
        yield started


def values(llm: LLM) -> dict[str, int]:
    return {metric.name.removeprefix("vllm:"): metric.value for metric in llm.get_metrics() if isinstance(metric, Counter)}


def test_a_list_of_prompts(llm: LLM) -> None:
    prompts = ["abcabcabcabc", {"prompt": "hello"}, [1, 2, 3], {"prompt_token_ids": [1, 2, 3]}, Chat([{"role": "user", "content": "hi"}])]
    outputs = llm.generate(prompts, PARAMS, request_id="run")
    assert [output.prompt for output in outputs] == ["abcabcabcabc", "hello", None, None, "<hi>"]
    assert [output.request_id for output in outputs] == [f"run-{index}" for index in range(5)]
    assert outputs[2].prompt_token_ids == [1, 2, 3]
    assert outputs[2].outputs[0].token_ids == outputs[3].outputs[0].token_ids
    tokenizer = llm.get_tokenizer()
    for output in outputs:
        [choice] = output.outputs
        assert (len(choice.token_ids), choice.finish_reason, choice.index, output.finished, choice.logprobs) == (16, "length", 0, True, None)
        assert choice.text == tokenizer.decode(choice.token_ids)
        assert output.metrics is not None
        assert output.metrics.num_prompt_tokens == len(output.prompt_token_ids)
        assert output.metrics.num_generation_tokens == 16
        assert output.metrics.arrival_time <= output.metrics.finished_time


def test_one_prompt_is_a_list_of_one(llm: LLM) -> None:
    assert len(llm.generate("abc", PARAMS)) == len(llm.generate([5, 6, 7], PARAMS)) == len(llm.generate({"prompt": "abc"}, PARAMS)) == 1
    assert llm.generate([], PARAMS) == []


def test_a_bad_prompt_does_not_lose_the_others(llm: LLM, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING, "specwire.offline"):
        good, long, unknown, last = llm.generate(["abc", "x" * 300, [99_999], "def"], PARAMS)
    assert len(good.outputs[0].token_ids) == len(last.outputs[0].token_ids) == 16
    with pytest.raises(InvalidArgumentError, match="the prompt has 300 tokens, but a sequence may have 256"):
        _ = long.outputs
    assert (long.prompt, long.metrics, long.num_cached_tokens) == ("x" * 300, None, None)
    assert isinstance(unknown.error, InvalidArgumentError)
    assert unknown.prompt_token_ids == [99_999]
    assert "2 of 4 prompts failed" in caplog.text


def test_choices_seeds_and_logprobs(llm: LLM) -> None:
    params = SamplingParams(n=2, temperature=0.9, seed=3, max_tokens=8, logprobs=2)
    [output] = llm.generate("abc", params)
    assert [choice.index for choice in output.outputs] == [0, 1]
    assert output.outputs[0].token_ids != output.outputs[1].token_ids
    for choice in output.outputs:
        assert choice.logprobs is not None
        assert len(choice.logprobs) == len(choice.token_ids)
        own = [entries[token_id] for token_id, entries in zip(choice.token_ids, choice.logprobs, strict=True)]
        assert choice.cumulative_logprob == pytest.approx(math.fsum(entry.logprob for entry in own))
        for entries in choice.logprobs:
            assert 2 <= len(entries) <= 3
            assert [entry.rank for entry in entries.values()][:2] == [1, 2]
    assert llm.generate("abc", params)[0].outputs == output.outputs
    assert output.metrics is not None
    assert output.metrics.num_generation_tokens == sum(len(choice.token_ids) for choice in output.outputs)


def test_parameters_of_each_prompt(llm: LLM) -> None:
    outputs = llm.generate(["abc", "abc"], [PARAMS, PARAMS.replace(max_tokens=4)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [16, 4]
    assert outputs[0].outputs[0].token_ids[:4] == outputs[1].outputs[0].token_ids
    with pytest.raises(InvalidArgumentError, match="sampling_params lists 1 SamplingParams for 2 prompts"):
        llm.generate(["abc", "abc"], [PARAMS])
    for wrong in (3, "ab", [PARAMS, 3], {"max_tokens": 3}):
        with pytest.raises(InvalidArgumentError, match="sampling_params is"):
            llm.generate(["abc", "abc"], wrong)  # type: ignore[arg-type]


def test_chat(llm: LLM) -> None:
    [alone] = llm.chat([{"role": "user", "content": "one"}], PARAMS)
    first, second = llm.chat([[{"role": "user", "content": "one"}], [{"role": "user", "content": "two"}]], PARAMS)
    assert (alone.prompt, first.prompt, second.prompt) == ("<one>", "<one>", "<two>")
    assert alone.outputs == first.outputs != second.outputs
    assert alone.outputs == llm.generate("<one>", PARAMS)[0].outputs


def test_metrics_add_up(llm: LLM) -> None:
    before = values(llm)
    # A loop of a tiny model comes late: long answers have drafts that are right.
    outputs = llm.generate(["abcabcabcabc", "ababababab"], PARAMS.replace(max_tokens=120))
    after = values(llm)
    changes = {name: after[name] - before[name] for name in after}
    specs = [output.metrics.spec for output in outputs if output.metrics is not None]
    assert changes["generation_tokens"] == 240
    assert changes["prompt_tokens"] == 22
    assert changes["spec_decode_num_drafts"] == sum(spec.num_drafts for spec in specs) > 0
    assert changes["spec_decode_num_draft_tokens"] == sum(spec.num_draft_tokens for spec in specs)
    assert changes["spec_decode_num_accepted_tokens"] == sum(spec.num_accepted_tokens for spec in specs) > 0
    [vector] = [metric for metric in llm.get_metrics() if isinstance(metric, Vector)]
    assert vector.name == "vllm:spec_decode_num_accepted_tokens_per_pos"
    assert (len(vector.values), sum(vector.values)) == (3, after["spec_decode_num_accepted_tokens"])
    assert vector.labels["engine"] == "0"


@pytest.mark.parametrize(
    ("prompts", "message"),
    [(7, "prompts is 7"), ([{"text": "a"}], "prompt 0 is .*exactly one of"), (["a", 3], "prompt 1 is 3"), ([b"a"], "prompt 0 is b'a'")],
)
def test_what_is_no_prompt(llm: LLM, prompts: object, message: str) -> None:
    with pytest.raises(InvalidArgumentError, match=message):
        llm.generate(prompts)  # type: ignore[arg-type]
    with pytest.raises(InvalidArgumentError, match="messages is"):
        llm.chat("text")  # type: ignore[arg-type]


def test_the_client_streams(llm: LLM) -> None:
    events = list(llm.client.stream("abc", PARAMS))
    assert [token for event in events for token in event.token_ids] == llm.generate("abc", PARAMS)[0].outputs[0].token_ids


def test_progress_shows_counts_and_speed() -> None:
    good = RequestOutput("0", "a", [1], RequestMetrics(0.0, 1.0, 1, 0, 5, SpecStats()))
    bad = RequestOutput("1", "b", [], error=SpecwireError("no"))
    for wanted in (True, False):
        console = Console(file=io.StringIO(), force_terminal=True, width=120)
        with show_progress(2, wanted=wanted, console=console) as ended:
            ended(good)
            ended(bad)
        text = console.file.getvalue()  # type: ignore[attr-defined]
        assert ("2/2" in text and "1 failed" in text and "tokens/s out" in text) is wanted


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"max_model_length": 5}, "LLM has no argument max_model_length; did you mean max_model_len"),
        ({"trust_remote_code": True}, "LLM has no argument trust_remote_code"),
        ({"model": "./nothing"}, "the model ./nothing does not exist"),
        ({"max_num_seqs": 0}, "max_num_seqs is 0"),
        ({"tensor_parallel_size": 2}, "tensor_parallel_size"),
        ({"speculative_config": {"methods": "ngram"}}, "methods"),
        ({"overrides": ["verifier.max_num_seq=1"]}, "max_num_seq"),
        ({"config": "none.yaml"}, "none.yaml"),
        ({"config": ""}, "config is ''"),
        ({"config": 3}, "config is 3"),
        ({"model": b"x"}, "model is b'x'"),
        ({"model": ""}, "model is ''"),
        ({"speculative_config": "ngram"}, "speculative_config is 'ngram', but must be a mapping"),
        ({"speculative_config": {"method": {3}}}, "speculative_config can't be read"),
        ({"overrides": "verifier.max_num_seqs=1"}, "overrides is 'verifier"),
        ({"overrides": {"verifier.max_num_seqs": 1}}, "overrides is {"),
        ({"overrides": [3]}, r"overrides is \[3\]"),
        ({"num_threads": "4"}, "num_threads is '4', but must be an integer"),
        ({"kv_cache_memory": 1e9}, "kv_cache_memory is 1000000000.0, but must be an integer"),
        ({"max_num_seqs": True}, "max_num_seqs is True, but must be an integer"),
        ({"verifiers": 2.5}, "verifiers is 2.5, but must be an integer"),
        ({"gpu_memory_utilization": "0.5"}, "gpu_memory_utilization is '0.5', but must be a number"),
        ({"skip_tokenizer": "yes"}, "skip_tokenizer is 'yes', but must be True or False"),
        ({"dtype": 3}, "dtype is 3, but must be text"),
    ],
)
def test_wrong_arguments(arguments: dict[str, object], message: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SpecwireError, match=message):
        LLM(**arguments)  # type: ignore[arg-type]


def test_what_other_programs_hold_is_taken(tmp_path: Path) -> None:
    """Paths as objects, numpy's numbers, and None for what was left out."""
    save_tiny_model(tmp_path / "draft")
    (tmp_path / "specwire.yaml").write_text("verifier: {max_num_seqs: 3}\n")
    speculation = {"method": "draft_model", "model": tmp_path / "draft"}
    flags = {"num_threads": numpy.int64(2), "max_model_len": None, "startup_timeout_s": 7}
    options = make_options(tmp_path / "draft", speculation, tmp_path / "specwire.yaml", ("verifier.max_num_batched_tokens=64",), flags)
    assert (options.verifier.model, options.verifier.max_num_seqs, options.verifier.num_threads) == (str(tmp_path / "draft"), 3, 2)
    assert (options.verifier.max_num_batched_tokens, options.up.startup_timeout_s) == (64, 7.0)
    assert options.verifier.speculative_config.model == str(tmp_path / "draft")


def test_ctrl_c_ends_the_batch_and_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """The signal comes when the first answer is there and most are not."""
    make = llm_module.make_output

    def interrupted(*arguments: Any) -> RequestOutput:
        signal.raise_signal(signal.SIGINT)
        return make(*arguments)

    monkeypatch.setattr(llm_module, "make_output", interrupted)
    with pytest.raises(KeyboardInterrupt):
        llm.generate(["abc"] * 64, PARAMS.replace(max_tokens=200))
    monkeypatch.undo()
    # A request that is answered behind them says that they are gone.
    assert len(llm.generate("abc", PARAMS)[0].outputs[0].token_ids) == 16
    assert llm.client.get_status().sequences_by_reason["cancelled"] > 0
