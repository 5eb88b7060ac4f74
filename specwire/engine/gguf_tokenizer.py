"""Builds a `tokenizers` tokenizer from a GGUF file's tokens and merges.

The splitter before the merges is not stored in the file, only its name (`tokenizer.ggml.pre`); a wrong one gives other ids for the same
text (SmolLM2 without its digit splitter: runs of spaces before digits).
"""

from typing import Any

from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers, processors
from tokenizers.models import BPE

from specwire.engine.gguf import GGUFFile
from specwire.errors import InvalidArgumentError, UnsupportedError

_CONTROL, _USER_DEFINED = 3, 4  # values of tokenizer.ggml.token_type
_WORDS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}%s| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_PRE_TOKENIZERS = ("gpt-2", "smollm", "qwen2", "llama-bpe")


def build_tokenizer(gguf: GGUFFile) -> Tokenizer:
    """The file's byte-level BPE tokenizer; control tokens (and bos, eos, unk, pad) are special.

    Raises:
        InvalidArgumentError: the file has no tokenizer.
        UnsupportedError: a tokenizer model or splitter that is not known.
    """
    metadata = gguf.metadata
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    if kind is None or "tokenizer.ggml.tokens" not in metadata:
        raise InvalidArgumentError(f"{gguf.path} holds no tokenizer; use a file that does, or the model's Hugging Face folder")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        raise UnsupportedError(
            f"tokenizer {kind!r} with splitter {pre!r} of {gguf.path} is not supported; "
            f"supported: 'gpt2' with {', '.join(_PRE_TOKENIZERS)}; use the model's Hugging Face folder"
        )
    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata.get("tokenizer.ggml.merges", [])]
    tokenizer = Tokenizer(BPE(vocab={token: i for i, token in enumerate(tokens)}, merges=merges, ignore_merges=pre == "llama-bpe"))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    if pre == "qwen2":
        tokenizer.normalizer = normalizers.NFC()

    special_ids = set(special_token_ids(metadata).values())
    types = metadata.get("tokenizer.ggml.token_type", [])
    special_ids |= {i for i, token_type in enumerate(types) if token_type == _CONTROL}
    tokenizer.add_special_tokens([AddedToken(tokens[i], special=True, normalized=False) for i in sorted(special_ids)])
    user_defined = [i for i, token_type in enumerate(types) if token_type == _USER_DEFINED]
    tokenizer.add_tokens([AddedToken(tokens[i], special=False, normalized=False) for i in user_defined])
    bos = metadata.get("tokenizer.ggml.bos_token_id")
    if metadata.get("tokenizer.ggml.add_bos_token") and bos is not None:
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{tokens[bos]}:0 $A:0", pair=f"{tokens[bos]}:0 $A:0 {tokens[bos]}:1 $B:1", special_tokens=[(tokens[bos], bos)]
        )
    return tokenizer


def special_token_ids(metadata: dict[str, Any]) -> dict[str, int]:
    """bos_token, eos_token, unk_token, pad_token -> id, where the file names one."""
    keys = {"bos_token": "bos", "eos_token": "eos", "unk_token": "unknown", "pad_token": "padding"}
    ids = {name: metadata.get(f"tokenizer.ggml.{key}_token_id") for name, key in keys.items()}
    return {name: token_id for name, token_id in ids.items() if token_id is not None}


def tokenizer_config(gguf: GGUFFile) -> dict[str, Any]:
    """The content of tokenizer_config.json."""
    metadata = gguf.metadata
    tokens = metadata["tokenizer.ggml.tokens"]
    arch = metadata["general.architecture"]
    return {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "clean_up_tokenization_spaces": False,
        "model_max_length": metadata[f"{arch}.context_length"],
        "chat_template": metadata.get("tokenizer.chat_template"),
        **{name: tokens[token_id] for name, token_id in special_token_ids(metadata).items()},
    }


def _pre_tokenizer(pre: str) -> pre_tokenizers.PreTokenizer:
    if pre == "gpt-2":
        return pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    first: pre_tokenizers.PreTokenizer
    if pre == "smollm":
        first = pre_tokenizers.Digits(individual_digits=True)
    else:
        first = pre_tokenizers.Split(Regex(_WORDS % ("" if pre == "qwen2" else "{1,3}")), behavior="isolated")
    return pre_tokenizers.Sequence([first, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=pre == "smollm")])
