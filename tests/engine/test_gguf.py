"""The GGUF reader on hand-made blocks, and conversion of a small file made from a known model."""

import json
import struct

import numpy as np
import pytest
import torch
from safetensors.torch import load_file

from specwire.engine.gguf import GGUFFile
from specwire.engine.gguf_convert import convert_gguf
from specwire.engine.models.loader import load_model
from specwire.errors import InvalidArgumentError, UnsupportedError
from specwire.tokenizer import Tokenizer
from tests.engine.gguf_writer import float32_tensor, write_gguf, write_tiny_gguf
from tests.engine.tiny_models import compute, make_runner, save_tiny_model


def half(value: float) -> bytes:
    return struct.pack("<e", value)


LOW, HIGH = list(range(16)), list(range(15, -1, -1))
NIBBLES = bytes(low | high << 4 for low, high in zip(LOW, HIGH, strict=True))


@pytest.mark.parametrize(
    ("kind", "content", "expected"),
    [
        ("F32", np.arange(32, dtype="<f4").tobytes(), list(range(32))),
        ("F16", np.arange(32, dtype="<f2").tobytes(), list(range(32))),
        ("BF16", b"\x80\x3f" * 32, [1.0] * 32),
        ("Q4_0", half(0.5) + NIBBLES, [0.5 * (q - 8) for q in LOW + HIGH]),
        ("Q4_1", half(0.25) + half(-3.0) + NIBBLES, [0.25 * q - 3.0 for q in LOW + HIGH]),
        ("Q8_0", half(2.0) + bytes(np.arange(-16, 16, dtype=np.int8)), [2.0 * q for q in range(-16, 16)]),
    ],
)
def test_block_types(tmp_path, kind, content, expected):
    write_gguf(tmp_path / "x.gguf", {}, {"first": float32_tensor(np.ones(3)), "t": ((2, 32), kind, content * 2)})
    values = GGUFFile(tmp_path / "x.gguf").tensor("t")
    assert values.dtype == np.float32
    np.testing.assert_array_equal(values, [expected, expected])


def test_metadata(tmp_path):
    metadata = {"a.number": 7, "a.flag": True, "a.text": "ü", "a.real": 1e-5, "a.names": ["x", "yz"], "a.ids": [3, -1]}
    write_gguf(tmp_path / "x.gguf", metadata, {})
    assert GGUFFile(tmp_path / "x.gguf").metadata == metadata


def test_refusals(tmp_path):
    path = tmp_path / "x.gguf"
    with pytest.raises(InvalidArgumentError, match=r"x\.gguf is not a file"):
        GGUFFile(path)
    path.write_bytes(b"PK\x03\x04 something else")
    with pytest.raises(InvalidArgumentError, match="not a GGUF file"):
        GGUFFile(path)
    write_gguf(path, {}, {}, version=9)
    with pytest.raises(UnsupportedError, match="version 9"):
        GGUFFile(path)
    write_gguf(path, {"k": "v"}, {"t": ((256,), "Q6_K", bytes(210))})
    with pytest.raises(UnsupportedError, match=r"tensor t .* type Q6_K; supported: BF16, F16, F32, Q4_0, Q4_1, Q8_0"):
        GGUFFile(path).tensor("t")
    with pytest.raises(InvalidArgumentError, match="no tensor other"):
        GGUFFile(path).tensor("other")
    write_gguf(path, {"k": "v"}, {"t": float32_tensor(np.ones(64))})
    whole = path.read_bytes()
    path.write_bytes(whole[:-100])
    with pytest.raises(InvalidArgumentError, match="cut off: tensor t"):
        GGUFFile(path).tensor("t")
    path.write_bytes(whole[:30])
    with pytest.raises(InvalidArgumentError, match="cut off or damaged"):
        GGUFFile(path)


NAMES = {
    "model.embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "self_attn.q_proj": "attn_q",
    "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v",
    "self_attn.o_proj": "attn_output",
    "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up",
    "mlp.down_proj": "ffn_down",
}


def write_llama_gguf(path, tensors: dict[str, torch.Tensor], tokens: list[str], extra: dict | None = None) -> None:
    """Writes a tiny model as GGUF does it: reversed shapes, q and k rows of each head interleaved."""
    stored = {}
    for name, tensor in tensors.items():
        values = tensor.numpy()
        for heads, part in ((4, "q_proj"), (2, "k_proj")):
            if part in name:
                values = values.reshape(heads, 2, -1, values.shape[1]).swapaxes(1, 2).reshape(values.shape)
        body, kind = name.rsplit(".", 1)
        if body.startswith("model.layers."):
            _, _, index, rest = body.split(".", 3)
            body = f"blk.{index}.{NAMES[rest]}"
        else:
            body = NAMES[body]
        stored[f"{body}.{kind}"] = float32_tensor(np.ascontiguousarray(values))
    metadata = {
        "general.architecture": "llama",
        "llama.context_length": 256,
        "llama.embedding_length": 64,
        "llama.block_count": 3,
        "llama.feed_forward_length": 96,
        "llama.attention.head_count": 4,
        "llama.attention.head_count_kv": 2,
        "llama.attention.layer_norm_rms_epsilon": 1e-6,
        "tokenizer.ggml.model": "gpt2",
        "tokenizer.ggml.pre": "smollm",
        "tokenizer.ggml.tokens": tokens,
        "tokenizer.ggml.token_type": [1] * 256 + [3, 3, 4],
        "tokenizer.ggml.merges": ["Ġ Ġ"],
        "tokenizer.ggml.bos_token_id": 256,
        "tokenizer.ggml.eos_token_id": 257,
        "tokenizer.chat_template": "{{ messages[0].content }}{{ eos_token }}",
    }
    write_gguf(path, metadata | (extra or {}), stored)


@pytest.fixture(scope="module")
def tiny_gguf(tmp_path_factory):
    folder = tmp_path_factory.mktemp("tiny")
    model = save_tiny_model(folder / "hf", "llama")
    vocab = json.loads((folder / "hf" / "tokenizer.json").read_text())["model"]["vocab"]
    tokens = [*sorted(vocab, key=vocab.get), "<bos>", "<eos>", "<extra>"]
    tokens[0] = "ĠĠ"  # stands for a byte that no test text holds
    write_llama_gguf(folder / "tiny.gguf", load_file(folder / "hf" / "model.safetensors"), tokens)
    (folder / "out").mkdir()
    convert_gguf(folder / "tiny.gguf", folder / "out")
    return folder, model


@torch.inference_mode()
def test_converted_model_equals_the_original(tiny_gguf):
    folder, reference = tiny_gguf
    runner, manager = make_runner(load_model(folder / "out", torch.float32))
    tokens = list(range(60))
    manager.open(0, tokens)
    logits = compute(runner, manager, {0: tokens})[0]
    for parameter in reference.parameters():
        parameter.copy_(parameter.to(torch.bfloat16))  # the folder holds bfloat16
    torch.testing.assert_close(logits, reference(torch.tensor([tokens])).logits[0], atol=1e-4, rtol=0)


def test_converted_folder_loads_in_transformers_too(tiny_gguf):
    import transformers

    folder, _ = tiny_gguf
    config = transformers.AutoConfig.from_pretrained(folder / "out")
    assert (config.model_type, config.num_key_value_heads, config.rms_norm_eps, config.tie_word_embeddings) == ("llama", 2, 1e-6, False)
    tokenizer = transformers.AutoTokenizer.from_pretrained(folder / "out")
    assert tokenizer.eos_token_id == 257
    assert tokenizer.encode("a <eos> b") == Tokenizer.from_folder(folder / "out").encode("a <eos> b")


def test_converted_tokenizer(tiny_gguf):
    tokenizer = Tokenizer.from_folder(tiny_gguf[0] / "out")
    assert (tokenizer.bos_token_id, tokenizer.eos_token_ids, tokenizer.vocab_size) == (256, (257,), 259)
    assert tokenizer.encode("x<eos>")[-1] == 257
    assert tokenizer.encode("<extra>") == [258]
    assert tokenizer.decode([258, 257]) == "<extra>", "user-defined tokens are text, control tokens are not"
    assert tokenizer.render_chat([{"role": "user", "content": "hi"}]) == "hi<eos>"
    merged, space = tokenizer.encode("  ")[0], tokenizer.encode(" ")[0]
    assert tokenizer.encode("   7")[:3] == [merged, space, tokenizer.encode("7")[0]], "spaces before a digit merge by themselves"


@pytest.mark.parametrize(
    ("extra", "error", "named"),
    [
        ({"general.architecture": "gemma"}, UnsupportedError, "'gemma'"),
        ({"tokenizer.ggml.pre": "deepseek-llm"}, UnsupportedError, "'deepseek-llm'"),
        ({"tokenizer.ggml.model": "llama"}, UnsupportedError, "tokenizer 'llama'"),
    ],
)
def test_conversion_refuses_by_name(tmp_path, extra, error, named):
    write_llama_gguf(tmp_path / "x.gguf", {"model.embed_tokens.weight": torch.zeros(4, 64)}, ["a"], extra)
    with pytest.raises(error, match=named):
        convert_gguf(tmp_path / "x.gguf", tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


@pytest.mark.parametrize(
    ("wrong", "message"),
    [
        ({"general.alignment": 0}, "damaged at byte .* an alignment of 0"),
        ({"general.alignment": "x"}, "an alignment of 'x'"),
        ({"llama.embedding_length": "x"}, "can't be understood .TypeError"),
        ({"llama.attention.head_count": 0}, "can't be understood .ZeroDivisionError"),
        ({"tokenizer.ggml.tokens": [1, 2]}, "can't be understood .TypeError"),
        ({"tokenizer.ggml.merges": ["x y"]}, "can't be understood .Exception: .*Token `x` out of vocabulary"),
        ({"tokenizer.ggml.bos_token_id": 99}, "can't be understood .IndexError"),
    ],
)
def test_values_that_cannot_be_are_named(tmp_path, wrong, message):
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path)
    metadata = GGUFFile(path).metadata
    write_gguf(path, metadata | wrong, {"token_embd.weight": float32_tensor(np.ones((2, 8)))})
    with pytest.raises(InvalidArgumentError, match=f"{path}.*{message}"):
        convert_gguf(path, tmp_path)
    assert not (tmp_path / "model.safetensors").exists()


def test_blocks_and_lists_that_cannot_be_are_named(tmp_path):
    path = tmp_path / "x.gguf"
    write_tiny_gguf(path)
    metadata = GGUFFile(path).metadata
    write_gguf(path, metadata, {"token_embd.weight": ((2, 33), "Q8_0", bytes(68))})
    with pytest.raises(InvalidArgumentError, match="cannot reshape"):
        convert_gguf(path, tmp_path)
    lists = struct.pack("<IQ", 9, 1) * 5000
    path.write_bytes(b"GGUF" + struct.pack("<IQQQ", 3, 0, 1, 1) + b"k" + struct.pack("<I", 9) + lists)
    with pytest.raises(InvalidArgumentError, match="cut off or damaged"):
        GGUFFile(path)


def test_conversion_refuses_tensors_without_a_place(tmp_path):
    write_gguf(tmp_path / "x.gguf", {"general.architecture": "llama"}, {"rope_freqs.weight": float32_tensor(np.ones(4))})
    with pytest.raises(UnsupportedError, match=r"rope_freqs\.weight"):
        convert_gguf(tmp_path / "x.gguf", tmp_path)
    write_llama_gguf(tmp_path / "y.gguf", {"model.embed_tokens.weight": torch.zeros(4, 64)}, ["a"])
    metadata = GGUFFile(tmp_path / "y.gguf").metadata | {"llama.vocab_size": 4}
    write_gguf(tmp_path / "z.gguf", metadata, {"blk.0.ssm_a": float32_tensor(np.ones(4))})
    with pytest.raises(UnsupportedError, match=r"blk\.0\.ssm_a"):
        convert_gguf(tmp_path / "z.gguf", tmp_path)
