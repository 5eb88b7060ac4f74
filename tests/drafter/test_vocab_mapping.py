"""A draft model with another tokenizer than the target's drafts the tokens that both have."""

import logging
from collections.abc import Sequence
from pathlib import Path

import pytest
import tokenizers
import torch
from tokenizers.models import BPE, WordLevel

from drafter_svc.draft_model import DraftModel
from drafter_svc.forward import EagerForward
from drafter_svc.load import load_draft_model
from drafter_svc.method import Ask
from drafter_svc.vocab_mapping import SPACE_PREFIXES, VocabMapping, read_mapping, space_prefixes
from specwire.config import DEFAULT_MODEL, DrafterConfig
from specwire.engine.checkpoint import resolve_model
from specwire.engine.kv_cache import KVCache
from specwire.engine.runner import ModelRunner
from specwire.errors import InvalidArgumentError
from specwire.messages import RowStatus
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.draft_models import GREEDY, MODEL, SAMPLED
from tests.drafter.helpers import open_request
from tests.drafter.target import VOCAB_SIZE, target_logits
from tests.engine.tiny_models import save_tiny_model
from tests.heads.reference import Noise

BYTE_LEVEL, SENTENCE_PIECE = SPACE_PREFIXES


def words(*vocabulary: str, space: str = "", unknown: str | None = None) -> tokenizers.Tokenizer:
    """A tokenizer with these tokens, ids in order; `space` is its sign for a space."""
    vocab = {text: index for index, text in enumerate(vocabulary)}
    if not space:
        return tokenizers.Tokenizer(WordLevel(vocab, unk_token=unknown or "<none>"))
    tokenizer = tokenizers.Tokenizer(BPE(vocab, [], unk_token=unknown))
    kinds = tokenizers.pre_tokenizers
    tokenizer.pre_tokenizer = kinds.ByteLevel(add_prefix_space=False) if space == BYTE_LEVEL else kinds.Metaspace(prepend_scheme="never")
    return tokenizer


class Broken:
    """Its encode answers with these tokens, or raises."""

    def __init__(self, tokens: Sequence[str] | None) -> None:
        self.tokens = tokens

    def encode(self, sequence: str, *, add_special_tokens: bool) -> "Broken":
        assert (sequence, add_special_tokens) == (" a", False)
        if self.tokens is None:
            raise RuntimeError("no such method")
        return self


def test_the_sign_for_a_space_is_what_a_tokenizer_writes() -> None:
    smollm = tokenizers.Tokenizer.from_file(str(resolve_model(DEFAULT_MODEL) / "tokenizer.json"))
    assert space_prefixes(smollm) == (BYTE_LEVEL,)
    assert space_prefixes(Broken([f"{SENTENCE_PIECE}a"])) == (SENTENCE_PIECE,)  # type: ignore[arg-type]
    for tokens in (None, [], [""], ["a"], [" a"], ["\ta"], [BYTE_LEVEL, "a"], ["xb"]):
        assert space_prefixes(Broken(tokens)) == SPACE_PREFIXES, tokens  # type: ignore[arg-type]


def test_equal_strings_are_equal_tokens_but_for_the_space(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    draft = words("<unk>", "cat", f"{BYTE_LEVEL}cat", "Dog", "<0x0A>", f"{BYTE_LEVEL}a", "past")
    target = words(f"{SENTENCE_PIECE}cat", "<0x0A>", "dog", "cat", f"{SENTENCE_PIECE}a", "<s>")
    mapping = VocabMapping(draft, target, draft_size=6, target_size=6, unknown_id=0)
    assert dict(zip(mapping.columns.tolist(), mapping.target_ids.tolist(), strict=True)) == {1: 3, 2: 0, 4: 1, 5: 4}
    assert mapping.draft_ids(range(6)) == [2, 4, 0, 1, 5, 0], "case counts, and what is missing is unknown"
    assert "4 tokens in common: 67% of the draft model's 6 and 67% of the target's 6" in caplog.text
    assert "only 4 tokens in common" in caplog.text


def test_the_lowest_id_counts_and_ids_past_the_models_do_not() -> None:
    draft = words(f"{BYTE_LEVEL}x", f"{SENTENCE_PIECE}x", "y", "z")
    target = words("y", f"{SENTENCE_PIECE}x", f"{BYTE_LEVEL}x", "z")
    mapping = VocabMapping(draft, target, draft_size=3, target_size=4, unknown_id=2)
    assert dict(zip(mapping.columns.tolist(), mapping.target_ids.tolist(), strict=True)) == {0: 1, 2: 0}
    with pytest.raises(InvalidArgumentError, match="the draft model's unknown token is 3, but its vocabulary ends at 2"):
        VocabMapping(draft, target, 3, 4, 3)
    with pytest.raises(InvalidArgumentError, match="no token in common"):
        VocabMapping(words("p"), words("q"), 1, 1, 0)


def save(folder: Path, tokenizer: tokenizers.Tokenizer) -> Path:
    folder.mkdir(exist_ok=True)
    tokenizer.save(str(folder / "tokenizer.json"))
    return folder


def test_unknown_tokens_are_read_as_the_draft_models_own(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    target = save(tmp_path / "target", words("a", "b", "c"))
    with_unknown = save(tmp_path / "unknown", words("a", "<unk>", unknown="<unk>"))
    assert read_mapping(with_unknown, target, 2, 3, (0,)).draft_ids([0, 1, 2]) == [0, 1, 1]
    without = save(tmp_path / "without", words("b", "</s>"))
    assert read_mapping(without, target, 2, 3, (1,)).draft_ids([0, 1, 2]) == [1, 0, 1]
    assert "its EOS token 1 stands for tokens that it lacks" in caplog.text
    with pytest.raises(InvalidArgumentError, match="neither an unknown token nor an EOS token"):
        read_mapping(without, target, 2, 3, ())
    (without / "tokenizer_config.json").write_text('{"unk_token": {"content": "b"}}')
    assert read_mapping(without, target, 2, 3, ()).draft_ids([0, 1, 2]) == [0, 0, 0]
    with pytest.raises(InvalidArgumentError, match=r"has no tokenizer.json, which use_heterogeneous_vocab needs"):
        read_mapping(tmp_path, target, 2, 3, ())


TARGET_SIZE = 70


def shuffled_mapping() -> VocabMapping:
    """Every other token of the draft model, at other places."""
    draft = words(*(f"w{i}" for i in range(VOCAB_SIZE)))
    order = torch.randperm(TARGET_SIZE, generator=torch.Generator().manual_seed(3)).tolist()
    names = [f"w{2 * i}" if 2 * i < VOCAB_SIZE else f"theirs{i}" for i in range(TARGET_SIZE)]
    return VocabMapping(draft, words(*(names[i] for i in order)), VOCAB_SIZE, TARGET_SIZE, 1)


def test_drafts_have_the_targets_ids_and_noise() -> None:
    mapping = shuffled_mapping()
    cache = KVCache(MODEL.config, 32, MODEL.dtype)
    method = DraftModel(
        MODEL, EagerForward(ModelRunner(MODEL, cache), mapping), num_blocks=32, max_num_drafts=4, vocab_size=TARGET_SIZE, max_num_seqs=4
    )
    assert method.description.vocab_size == TARGET_SIZE
    text = [(7 * i + 3) % TARGET_SIZE for i in range(60)]
    for seq_id, noise in enumerate((Noise(0.0, 1), Noise(0.8, 2**63 + 5, 1))):
        method.open(seq_id, open_request(text[:20], sampling=SAMPLED if seq_id else GREEDY, noise_key=noise.key, choice=noise.choice))
        while method.catch_up(32):
            pass
        known = text[:20]
        for num_new in (3, 1, 5):
            drafts = method.propose([Ask(seq_id, 4)])[0]
            assert drafts.status is RowStatus.OK
            drafted: list[int] = []
            for _ in range(4):
                mine = target_logits(MODEL, mapping.draft_ids(known + drafted))[-1]
                logits = torch.full((TARGET_SIZE,), -torch.inf).index_copy(0, mapping.target_ids, mine[mapping.columns])
                drafted.append(noise.draw(logits, len(known) + len(drafted), TARGET_SIZE))
            assert drafts.token_ids == drafted
            new = (drafted + text)[:num_new]
            method.append(seq_id, new)
            known = known + new
    with pytest.raises(InvalidArgumentError, match=f"token id {TARGET_SIZE}"):
        method.append(0, [TARGET_SIZE])


def test_a_drafter_speaks_in_the_targets_ids(tmp_path: Path) -> None:
    draft, target = tmp_path / "draft", tmp_path / "target"
    save_tiny_model(draft)
    save_tiny_model(target, vocab_size=280)
    spec = SpeculativeConfig(method="draft_model", model=str(draft), use_heterogeneous_vocab=True)
    with pytest.raises(InvalidArgumentError, match="use_heterogeneous_vocab is true, but target_model is not set"):
        load_draft_model(DrafterConfig(dtype="float32", speculative_config=spec))
    method = load_draft_model(DrafterConfig(dtype="float32", kv_cache_memory=1 << 20, target_model=str(target), speculative_config=spec))
    assert method.description.vocab_size == 280
    method.open(0, open_request([5, 6, 279]))
    assert len(method.propose([Ask(0, 3)])[0].token_ids) == 3
