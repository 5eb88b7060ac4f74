"""A trained head, written and read by the drafter's loader, drafts what it drafted in training."""

import json
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from drafter_svc.block import BlockForward
from drafter_svc.head_forward import HeadForward, HeadRow
from drafter_svc.sequential import SequentialForward
from specwire.engine.graphs.draft_upload import DraftSampling
from specwire.engine.heads.load import load_head
from specwire.engine.heads.source import FeatureSource
from specwire.engine.kv_cache import KVCache
from specwire.errors import InvalidArgumentError
from specwire.train.batches import Batch, BatchSource
from specwire.train.deadline import Deadline
from specwire.train.evaluate import evaluate
from specwire.train.export import Trained, export
from specwire.train.heads import choose_draft_ids, make_head
from specwire.train.recipe import Recipe
from specwire.train.sampled import Sampled
from specwire.train.target import Target
from specwire.train.trainer import Trainer
from tests.train.conftest import DATA, small

VARIANTS = {
    "eagle3": small("eagle3"),
    "eagle3-two-layers-few-ids": small("eagle3", num_layers=2, draft_vocab_size=40),
    "dspark": small("dspark"),
    "dspark-few-ids": small("dspark", num_layers=1, draft_vocab_size=40, markov_rank=4),
}


def train_and_export(recipe: Recipe, target: Target, source: BatchSource, folder: Path) -> torch.nn.Module:
    """Returns the head with the weights as they were saved."""
    ids = choose_draft_ids(source.sequences, recipe.draft_vocab_size, target.config.vocab_size)
    on_device = None if ids is None else torch.from_numpy(ids)
    head = make_head(recipe, target, 3, on_device)
    trainer = Trainer(recipe, head, target, source, on_device, folder.parent / "checkpoint.pt")
    trainer.run(Deadline(0), lambda done, total, note: None)
    scale = getattr(head, "feature_scale", None)
    with torch.no_grad():
        if scale is not None:
            head.fc.weight.copy_((head.fc.weight.unflatten(1, (3, -1)) * scale[:, None]).flatten(1))
            scale.fill_(1)
        for parameter in head.parameters():
            parameter.copy_(parameter.bfloat16())
    evaluation = evaluate(head, target, source, recipe.num_draft_tokens, Deadline(0))
    trained = Trained(recipe, DATA, "tiny", (1, 2, 3), ids, source.sequences, evaluation, Sampled(), trainer.num_steps, trainer.seconds)
    export(folder, head.state_dict(), target, trained)
    return head


def served_drafts(folder: Path, recipe: Recipe, target: Target, batch: Batch, row: int, place: int) -> tuple[list[int], list[float]]:
    """Drafts behind tokens 0..place of a row, as the drafter makes them."""
    loaded = load_head(folder, recipe.method, target=target.folder, dtype="float32")
    shape = loaded.config.layers
    cache = KVCache(shape, 8, torch.float32)
    forward: HeadForward = (BlockForward if recipe.method == "dspark" else SequentialForward)(loaded.head, shape, cache)
    forward.open(0, DraftSampling(0.0, 1, 0))
    tokens = batch.tokens[row, : place + 1].tolist()
    row_tokens = tokens[forward.shift : place + forward.shift]
    features = projected(loaded.source, batch.features[row, :place])
    asked = HeadRow(0, 0, row_tokens, features, list(range(8)), recipe.num_draft_tokens, tokens[-1])
    [drafts] = forward.draft([asked])
    return list(drafts.token_ids), list(drafts.probs)


def projected(source: FeatureSource, features: torch.Tensor) -> torch.Tensor:
    assert source.projection is not None
    parts = features.unflatten(-1, (len(source.layer_ids), -1)).unbind(-2)
    if source.norms is not None:
        parts = [
            torch.nn.functional.rms_norm(part, part.shape[-1:], norm.float(), source.norm_eps) for part, norm in zip(parts, source.norms, strict=True)
        ]
    return torch.cat(list(parts), -1) @ source.projection.float().t()


@pytest.mark.parametrize("name", VARIANTS)
def test_the_drafter_drafts_what_was_drafted_in_training(name: str, target: Target, source: BatchSource, tmp_path: Path) -> None:
    recipe, folder = VARIANTS[name], tmp_path / "head"
    head = train_and_export(recipe, target, source, folder)
    batch = source.batch(np.arange(4))
    drafted = head.drafts(batch)
    num_checked = 0
    for row in range(4):
        first, last = int(batch.prompt_lens[row]), int(batch.lengths[row]) - 1
        for place in sorted({first, (first + last) // 2, last}):
            token_ids, probs = served_drafts(folder, recipe, target, batch, row, place)
            assert token_ids == drafted.tokens[row, place].tolist()
            assert probs == pytest.approx(drafted.signals[row, place, :, 0].sigmoid().tolist(), abs=1e-4)
            num_checked += len(token_ids)
    assert num_checked >= 40


def test_a_head_for_another_target_is_refused(target: Target, source: BatchSource, tmp_path: Path) -> None:
    train_and_export(small("eagle3", num_steps=1), target, source, tmp_path / "head")
    config = json.loads((target.folder / "config.json").read_text())
    other = tmp_path / "other"
    other.mkdir()
    (other / "config.json").write_text(json.dumps(config | {"hidden_size": 128}))
    with pytest.raises(InvalidArgumentError, match="hidden size 64"):
        load_head(tmp_path / "head", "eagle3", target=other)


def test_files_are_small_and_a_folder_is_replaced_as_a_whole(
    target: Target, source: BatchSource, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("specwire.train.export._SHARD_BYTES", 40_000)
    folder = tmp_path / "head"
    folder.mkdir()
    (folder / "old").touch()
    recipe = replace(small("dspark"), num_steps=1)
    train_and_export(recipe, target, source, folder)
    sizes = [path.stat().st_size for path in folder.glob("*.safetensors")]
    assert len(sizes) > 2
    assert max(sizes) < 60_000
    assert not (folder / "old").exists()
    assert load_head(folder, "dspark", target=target.folder).config.num_draft_tokens == recipe.num_draft_tokens
    assert "tokens per step" in (folder / "README.md").read_text()
