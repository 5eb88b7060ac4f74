"""From a drafter's configuration to a head that drafts."""

import dataclasses
import logging
from pathlib import Path

import pytest
import torch

from drafter_svc.block import BlockForward
from drafter_svc.draft_head import DraftHead
from drafter_svc.load_head import load_draft_head
from drafter_svc.method import Ask, build_method
from drafter_svc.sequential import SequentialForward
from specwire.config import DrafterConfig
from specwire.errors import InvalidArgumentError
from specwire.messages import RowStatus
from specwire.speculative_config import SpeculativeConfig
from tests.drafter.helpers import open_request
from tests.heads.checkpoints import HIDDEN, VOCAB, Checkpoint
from tests.heads.target import Target
from tests.heads.test_formats import changed


def config(target: Target | None, **spec: object) -> DrafterConfig:
    return DrafterConfig(
        dtype="float32",
        num_threads=1,
        kv_cache_memory=1 << 20,
        target_model="" if target is None else str(target.folder),
        speculative_config=SpeculativeConfig.from_dict({"num_speculative_tokens": 3} | spec),
    )


def test_a_drafter_says_what_it_needs(target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    folder = checkpoints["eagle3_speculators"].folder
    drafter = build_method(config(target, method="eagle3", model=str(folder)))
    assert isinstance(drafter, DraftHead)
    description = drafter.description
    assert (description.method, description.vocab_size, description.max_model_len, description.max_num_draft_tokens) == ("eagle3", VOCAB, 256, 3)
    [needed] = description.feature_sets
    assert (needed.layer_ids, needed.width, needed.dtype) == ((1, 2, 4), HIDDEN, "float32")
    assert description.tokenizer_fingerprint, "that of the target"
    drafter.open(0, open_request([1, 2, 3]))
    assert drafter.propose([Ask(0, 2)])[0].status is RowStatus.CATCHING_UP, "nobody has said where features are"
    with pytest.raises(InvalidArgumentError, match="token id 259 is not in the head's vocabulary, 0 to 258"):
        drafter.append(0, [VOCAB])
    windowed = build_method(config(target, method="eagle3", model=str(folder), max_model_len=40))
    assert windowed.description.max_model_len == 40


@pytest.mark.parametrize("name", ["eagle3_speculators", "eagle3_two_layers", "dflash_plain", "mtp_speculators"])
def test_a_head_that_runs_does_not_depend_on_its_files(target: Target, checkpoints: dict[str, Checkpoint], name: str) -> None:
    """Nor on those of its target, whose embedding it may share: they may be written anew."""
    drafter = build_method(config(target, method=name.partition("_")[0], model=str(checkpoints[name].folder)))
    maps = Path("/proc/self/maps").read_text(encoding="utf-8")
    assert str(checkpoints[name].folder) not in maps
    assert str(target.folder) not in maps
    assert isinstance(drafter, DraftHead)


def test_without_the_instructions_torch_computes_a_head_and_the_log_says_so(
    target: Target, checkpoints: dict[str, Checkpoint], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(torch.cpu, "_is_vnni_supported", lambda: False)
    caplog.set_level(logging.INFO)
    model = str(checkpoints["eagle3_speculators"].folder)
    drafter = build_method(dataclasses.replace(config(target, method="eagle3", model=model), dtype="auto"))
    assert isinstance(drafter, DraftHead)
    assert isinstance(drafter._forward, SequentialForward)
    assert "is computed in bfloat16 by torch, not in 8 bits by compiled passes: this CPU has no 512-bit integer dot products" in caplog.text


def test_a_head_has_the_weights_of_its_files_and_says_so_where_they_were_to_be_made_up(
    target: Target, checkpoints: dict[str, Checkpoint], caplog: pytest.LogCaptureFixture
) -> None:
    usual = config(target, method="eagle3", model=str(checkpoints["eagle3_speculators"].folder))
    drafter = load_draft_head(dataclasses.replace(usual, load_format="dummy"))
    assert drafter.description.weights_hash == load_draft_head(usual).description.weights_hash
    assert caplog.text.count("load_format is dummy, but only targets and draft models have made-up weights") == 1


def test_mtp_without_a_model_is_the_targets_own(checkpoints: dict[str, Checkpoint]) -> None:
    folder = str(checkpoints["mtp_mimo"].folder)
    spec = SpeculativeConfig(method="mtp", num_speculative_tokens=2)
    own = load_draft_head(DrafterConfig(dtype="float32", kv_cache_memory=1 << 20, target_model=folder, speculative_config=spec))
    assert own.description.model_id == folder
    with pytest.raises(InvalidArgumentError, match="neither model nor the drafter's target_model is set"):
        load_draft_head(DrafterConfig(dtype="float32", speculative_config=spec))


def test_the_configuration_goes_before_the_head(target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    model = str(checkpoints["dspark_native"].folder)
    drafter = load_draft_head(config(target, method="dspark", model=model, dspark_draft_topk=7))
    assert isinstance(drafter._forward, BlockForward)
    markov = drafter._forward._head.markov
    assert markov is not None
    columns = markov.candidates(torch.randn(2, VOCAB)).columns
    assert columns is not None
    assert columns.shape == (2, 7)
    with pytest.raises(InvalidArgumentError, match="dspark_draft_topk is 300, but the head drafts 259 ids"):
        load_draft_head(config(target, method="dspark", model=model, dspark_draft_topk=300))
    with pytest.raises(InvalidArgumentError, match="num_speculative_tokens is 9, but the head"):
        load_draft_head(config(target, method="dspark", model=model, num_speculative_tokens=9))


def test_costs_are_measured_without_a_target(target: Target, checkpoints: dict[str, Checkpoint]) -> None:
    """With made-up features, which no sequence of anybody's reads."""
    from drafter_svc.cost import measure_draft_cost

    for name in ("eagle3_speculators", "dspark_native"):
        spec = {"method": name.partition("_")[0], "model": str(checkpoints[name].folder)}
        drafter = build_method(dataclasses.replace(config(target, **spec), max_num_seqs=2))
        profile = measure_draft_cost(drafter, 1.0, chunk=64)
        assert {cost.num_draft_tokens for cost in profile.costs} == {1, 2, 3}
        assert isinstance(drafter, DraftHead)
        drafter.check_integrity()


def test_the_head_says_how_sharp_its_drafts_are_unless_the_configuration_does(
    target: Target, checkpoints: dict[str, Checkpoint], tmp_path: Path
) -> None:
    folder = changed(checkpoints["eagle3_speculators"], tmp_path / "sharp", draft_sharpness=1.25)
    for spec, expected in (({}, 1.25), ({"draft_sharpness": 0.5}, 0.5)):
        drafter = load_draft_head(config(target, method="eagle3", model=str(folder), **spec))
        assert drafter._sharpness == expected
    plain = load_draft_head(config(target, method="eagle3", model=str(checkpoints["eagle3_speculators"].folder)))
    assert plain._sharpness == 1
    for number, value in enumerate(("1.2", 0, True, 11, float("nan"))):
        wrong = changed(checkpoints["eagle3_speculators"], tmp_path / f"wrong-{number}", draft_sharpness=value)
        with pytest.raises(InvalidArgumentError, match=r"draft_sharpness is .* must be a number from 0.1 to 10.0; remove it"):
            load_draft_head(config(target, method="eagle3", model=str(wrong)))
