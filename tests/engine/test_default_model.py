"""The default model end to end: conversion against what is known of it, logits and greedy text against transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from safetensors import safe_open

from specwire.engine.checkpoint import resolve_model
from specwire.engine.default_model import DEFAULT_MODEL, default_model_file
from specwire.engine.gguf import GGUFFile
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.loader import load_model, tensor_shapes
from specwire.tokenizer import Tokenizer
from tests.engine.tiny_models import compute, make_runner

PROMPT = "What is the capital of France? Then count:   1 2  3"


@pytest.fixture(scope="module")
def folder() -> Path:
    return resolve_model(DEFAULT_MODEL)


def test_known_shape(folder):
    config = ModelConfig.from_folder(folder)
    assert config == ModelConfig(
        model_type="llama",
        vocab_size=49_152,
        hidden_size=576,
        intermediate_size=1536,
        num_layers=30,
        num_heads=9,
        num_kv_heads=3,
        head_dim=64,
        max_position_embeddings=8192,
        rms_norm_eps=1e-5,
        rope=config.rope,
        tie_word_embeddings=True,
        bos_token_id=1,
        eos_token_ids=(2,),
    )
    assert (config.rope.rope_type, config.rope.theta) == ("default", 100_000.0)
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        stored = {name: tuple(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118 (not a dict)
    assert stored == tensor_shapes(config)
    assert sum(torch.Size(shape).numel() for shape in stored.values()) == 134_515_008


def test_converted_weights_are_the_files_values_rounded(folder):
    """Two tensors taken apart by hand: the first Q4_1 block of a value projection, a row of the Q8_0 embedding."""
    gguf = GGUFFile(default_model_file())
    with safe_open(folder / "model.safetensors", framework="pt") as file:
        for name, converted in (
            ("blk.7.attn_v.weight", "model.layers.7.self_attn.v_proj.weight"),
            ("token_embd.weight", "model.embed_tokens.weight"),
        ):
            info = gguf.tensors[name]
            with default_model_file().open("rb") as stored:
                stored.seek(info.offset)
                raw = stored.read(34)
            scale = torch.frombuffer(bytearray(raw[:2]), dtype=torch.float16).float()
            if info.ggml_type == 3:
                minimum = torch.frombuffer(bytearray(raw[2:4]), dtype=torch.float16).float()
                values = torch.tensor([byte & 15 for byte in raw[4:20]] + [byte >> 4 for byte in raw[4:20]]) * scale + minimum
            else:
                values = torch.frombuffer(bytearray(raw[2:34]), dtype=torch.int8) * scale
            assert torch.equal(file.get_tensor(converted)[0, :32], values.bfloat16())


def test_tokenizer(folder):
    tokenizer = Tokenizer.from_folder(folder, DEFAULT_MODEL)
    assert (tokenizer.vocab_size, tokenizer.bos_token_id, tokenizer.eos_token_ids) == (49_152, 1, (2,))
    # Runs of spaces before digits: each digit is a token, and the spaces merge without it.
    spaces = {count: tokenizer.encode(" " * count) for count in range(1, 6)}
    for count, ids in spaces.items():
        assert tokenizer.encode(" " * count + "42") == [*ids, *tokenizer.encode("4"), *tokenizer.encode("2")]
    rendered = tokenizer.render_chat([{"role": "user", "content": "Hi"}])
    assert rendered == (
        "<|im_start|>system\nYou are a helpful AI assistant named SmolLM, trained by Hugging Face<|im_end|>\n"
        "<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n"
    )
    theirs = transformers.AutoTokenizer.from_pretrained(folder)
    messages = [{"role": "system", "content": "S  1"}, {"role": "user", "content": "Hi"}]
    assert tokenizer.render_chat(messages) == theirs.apply_chat_template(messages, tokenize=False, add_generation_prompt=True)
    assert tokenizer.encode_chat(messages) == theirs.apply_chat_template(messages, add_generation_prompt=True)["input_ids"]


@torch.inference_mode()
def test_logits_and_greedy_tokens_equal_transformers(folder):
    """33 greedy tokens, one a pass behind a chunked prefill; transformers sees prompt and answer at once."""
    num_tokens, tolerance = 33, 2e-3
    tokenizer = Tokenizer.from_folder(folder)
    prompt = tokenizer.encode_chat([{"role": "user", "content": PROMPT}])
    runner, manager = make_runner(load_model(folder, torch.float32))
    manager.open(0, prompt)
    logits = [compute(runner, manager, {0: prompt[start : start + 33]})[0] for start in range(0, len(prompt), 33)]
    answer = [int(logits[-1][-1].argmax())]
    while len(answer) < num_tokens:
        logits.append(compute(runner, manager, {0: answer[-1:]})[0])
        answer.append(int(logits[-1][-1].argmax()))
    ours = torch.cat(logits)
    reference = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    theirs = reference(torch.tensor([prompt + answer[:-1]])).logits[0]
    torch.testing.assert_close(ours, theirs, atol=tolerance, rtol=0)
    margins = theirs.topk(2).values
    decided = (margins[:, 0] - margins[:, 1] > tolerance)[len(prompt) - 1 :]
    assert decided.sum() >= num_tokens - 2, "the comparison needs clear winners"
    expected = theirs[len(prompt) - 1 :].argmax(-1)
    assert torch.equal(torch.tensor(answer)[decided], expected[decided])
    assert "Paris" in tokenizer.decode(answer)
