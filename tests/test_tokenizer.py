"""Encoding, streaming decoding, fingerprints and the trip over the wire, on small tokenizers made here."""

import dataclasses
import json
import random
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from specwire.errors import InvalidArgumentError
from specwire.tokenizer import Tokenizer, fingerprint

TEXTS = [
    "",
    " ",
    "Hello, world!",
    "   12   345    6",
    "a  1\n\n   22\t\t3 \n",
    "def f(x):\n    return x + 10  # ten\n",
    "naïve café — “quotes” … 3½",
    "日本語のテキスト、そして 한국어",
    "مرحبا بالعالم",
    "👩‍👩‍👧‍👦 🏳️‍🌈 e\u0301",
    "\ufffd inside \ufffd\ufffd",
    '{"key": [1, 2.50, -3e10], "other": null}',
    "x" * 200,
]


def byte_level_bpe(vocab_size: int = 400, digits: bool = True) -> RawTokenizer:
    """A small BPE trained on TEXTS, with special and ordinary added tokens."""
    raw = RawTokenizer(BPE())
    splitters = [pre_tokenizers.Digits(individual_digits=True)] if digits else []
    raw.pre_tokenizer = pre_tokenizers.Sequence([*splitters, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)])
    raw.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    raw.train_from_iterator(TEXTS, trainers.BpeTrainer(vocab_size=vocab_size, initial_alphabet=alphabet, show_progress=False))
    raw.add_special_tokens([AddedToken("<s>", special=True, normalized=False), AddedToken("</s>", special=True, normalized=False)])
    raw.add_tokens([AddedToken("<tool>", special=False, normalized=False)])
    return raw


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("tokenizer")
    raw = byte_level_bpe()
    raw.save(str(folder / "tokenizer.json"))
    settings = {"bos_token": {"content": "<s>"}, "eos_token": "</s>", "chat_template": "{{ bos_token }}{{ messages[0]['content'] }}{{ eos_token }}"}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    (folder / "config.json").write_text(json.dumps({"eos_token_id": [7, 8], "max_position_embeddings": 99}))
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": 9}))
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> Tokenizer:
    return Tokenizer.from_folder(folder, "tiny")


@pytest.mark.parametrize("text", TEXTS)
def test_round_trip(tokenizer, text):
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_random_round_trips(tokenizer):
    rng = random.Random(0)
    alphabet = "ab 1  \n\t{}é日👩\u200d🏽\u0301\ufffd"
    for _ in range(500):
        text = "".join(rng.choice(alphabet) for _ in range(rng.randint(1, 40)))
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_ids_of_a_folder(tokenizer):
    spec = tokenizer.to_spec()
    bos, eos = tokenizer.encode("<s>")[0], tokenizer.encode("</s>")[0]
    assert tokenizer.eos_token_ids == (eos, 9, 7, 8), "the tokenizer's own first, then generation_config's, then config's"
    assert (tokenizer.bos_token_id, spec.max_model_len, spec.model_id) == (bos, 99, "tiny")
    assert tokenizer.vocab_size == tokenizer.encode("<tool>")[0] + 1
    assert tokenizer.token_text(eos) == "</s>"
    assert tokenizer.token_text(10_000) is None


def test_special_tokens_are_skipped_on_request_only(tokenizer):
    ids = tokenizer.encode("a<tool>b</s>")
    assert tokenizer.decode(ids) == "a<tool>b"
    assert tokenizer.decode(ids, skip_special_tokens=False) == "a<tool>b</s>"


@pytest.mark.parametrize("setting", [True, False])
def test_bos_is_added_once(folder, tmp_path, setting):
    raw = RawTokenizer.from_file(str(folder / "tokenizer.json"))
    bos = raw.token_to_id("<s>")
    if not setting:  # by the tokenizer's own post-processor instead
        raw.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=[("<s>", bos)])
    raw.save(str(tmp_path / "tokenizer.json"))
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "add_bos_token": setting}))
    tokenizer = Tokenizer.from_folder(tmp_path)
    plain = tokenizer.encode("hello", add_special_tokens=False)
    assert tokenizer.encode("hello") == [bos, *plain]
    assert bos not in plain


def test_a_tokenizer_survives_the_wire(tokenizer):
    from specwire.wire.describe import pack_tokenizer, unpack_tokenizer

    spec = unpack_tokenizer(type(pack_tokenizer(tokenizer.to_spec())).FromString(pack_tokenizer(tokenizer.to_spec()).SerializeToString()))
    assert spec == tokenizer.to_spec()
    again = Tokenizer(spec)
    for text in TEXTS:
        assert again.encode(text) == tokenizer.encode(text)
    assert again.render_chat([{"role": "user", "content": "x"}]) == "<s>x</s>"


def test_bad_input_is_named(tmp_path, tokenizer):
    with pytest.raises(InvalidArgumentError, match=r"no tokenizer\.json"):
        Tokenizer.from_folder(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(InvalidArgumentError, match="KeyError: 'model'"):
        Tokenizer.from_folder(tmp_path)
    for content in (
        "[" * 100_000,
        '{"model": {"vocab": {}, "merges": [1]}}',
        '{"model": {"vocab": {"a": "b"}}}',
        '{"model": {"vocab": {}}, "added_tokens": [1]}',
    ):
        (tmp_path / "tokenizer.json").write_text(content)
        with pytest.raises(InvalidArgumentError, match="can't be read as a tokenizer"):
            Tokenizer.from_folder(tmp_path)
    with pytest.raises(InvalidArgumentError, match=r"tokenizer\.json \(3 bytes\) can't be read"):
        Tokenizer(dataclasses.replace(tokenizer.to_spec(), tokenizer_json=b"abc"))


# --- fingerprint ------------------------------------------------------------------------------------------------------


def parsed(raw: RawTokenizer) -> dict:
    return json.loads(raw.to_str())


def test_fingerprint_ignores_what_does_not_change_ids():
    base = parsed(byte_level_bpe())
    same = json.loads(json.dumps(base))
    same["padding"], same["truncation"], same["decoder"], same["post_processor"] = {"x": 1}, {"y": 2}, None, None
    same["model"]["merges"] = [" ".join(merge) for merge in same["model"]["merges"]]
    same["model"]["vocab"] = dict(reversed(same["model"]["vocab"].items()))
    same["model"]["a_new_option"] = None
    assert fingerprint(same) == fingerprint(base)


def test_fingerprint_follows_what_changes_ids():
    base = byte_level_bpe()
    seen = {fingerprint(parsed(base)), fingerprint(parsed(byte_level_bpe(digits=False)))}
    changed = parsed(base)
    changed["model"]["merges"] = changed["model"]["merges"][:-1]
    seen.add(fingerprint(changed))
    changed = parsed(base)
    first, second = list(changed["model"]["vocab"])[:2]
    changed["model"]["vocab"][first], changed["model"]["vocab"][second] = changed["model"]["vocab"][second], changed["model"]["vocab"][first]
    seen.add(fingerprint(changed))
    base.normalizer = normalizers.NFC()
    seen.add(fingerprint(parsed(base)))
    base.add_tokens(["<more>"])
    seen.add(fingerprint(parsed(base)))
    assert len(seen) == 6


# --- streaming ----------------------------------------------------------------------------------------------------------


def stream(tokenizer: Tokenizer, ids: list[int], *, skip_special_tokens: bool = True) -> list[str]:
    decoder = tokenizer.incremental_decoder(skip_special_tokens=skip_special_tokens)
    return [*(decoder.push(token_id) for token_id in ids), decoder.flush()]


@pytest.mark.parametrize("text", TEXTS)
def test_pieces_add_up_and_hold_whole_characters(tokenizer, text):
    ids = tokenizer.encode(text)
    pieces = stream(tokenizer, ids)
    assert "".join(pieces) == text
    if "\ufffd" not in text:
        assert not any("\ufffd" in piece for piece in pieces)


def test_a_character_comes_with_its_last_byte(tokenizer):
    byte_ids = [tokenizer.encode("x")[0]] + [tokenizer._tokenizer.token_to_id(c) for c in "ðŁĺĢ"]  # the four bytes of U+1F600
    assert None not in byte_ids
    assert stream(tokenizer, byte_ids) == ["x", "", "", "", "\U0001f600", ""]
    assert stream(tokenizer, byte_ids[:3]) == ["x", "", "", "\ufffd"], "at the end, what never became a character shows as U+FFFD"


def test_random_ids_add_up_to_their_text(tokenizer):
    """Also ids that are no UTF-8 together, special tokens, and streams longer than the decoder's window."""
    rng = random.Random(1)
    for _ in range(300):
        ids = [rng.randrange(tokenizer.vocab_size) for _ in range(rng.choice([1, 3, 10, 60, 200]))]
        for skip in (True, False):
            assert "".join(stream(tokenizer, ids, skip_special_tokens=skip)) == tokenizer.decode(ids, skip_special_tokens=skip)


def test_text_without_end_is_emitted_with_bounded_delay(tokenizer):
    """Bytes that never form a character are given out, all but the last three."""
    broken = tokenizer._tokenizer.token_to_id("ÿ")
    pieces = stream(tokenizer, [broken] * 20)
    assert "".join(pieces[:-1]) == "\ufffd" * 17


def test_leading_spaces_of_word_tokenizers_survive(tmp_path):
    """Decoders that strip the first word's space (Metaspace) need the tokens before as context."""
    raw = RawTokenizer(BPE(vocab={"▁a": 0, "▁b": 1, "c": 2, "▁": 3}, merges=[]))
    raw.pre_tokenizer = pre_tokenizers.Metaspace()
    raw.decoder = decoders.Metaspace()
    raw.save(str(tmp_path / "tokenizer.json"))
    tokenizer = Tokenizer.from_folder(tmp_path)
    ids = [0, 1, 2, 1, 0] * 12
    assert "".join(stream(tokenizer, ids)) == tokenizer.decode(ids)


def test_needs_no_torch():
    code = "import sys, specwire.tokenizer; sys.exit(bool({'torch', 'transformers'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False, cwd=Path(__file__).parents[1]).returncode == 0


@pytest.mark.parametrize("is_text", [True, False], ids=["encode", "decode"])
def test_other_threads_run_while_a_long_text_is_translated(tokenizer, is_text):
    text = "Hello, world! " * 60_000
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text
    began, ended = threading.Event(), threading.Event()

    def translate() -> None:
        began.set()
        if is_text:
            assert tokenizer.encode(text) == ids
        else:
            assert tokenizer.decode(ids) == text
        ended.set()

    worker = threading.Thread(target=translate)
    worker.start()
    began.wait()
    num_turns = 0
    while not ended.is_set():
        time.sleep(0.001)
        num_turns += 1
    worker.join()
    assert num_turns > 5
