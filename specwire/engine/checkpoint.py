"""From what a user calls a model to a Hugging Face style folder on this machine."""

import contextlib
import json
import logging
import os
import re
import shutil
import tempfile
import time
from pathlib import Path

from safetensors import SafetensorError

from specwire.config import DEFAULT_MODEL
from specwire.engine.cache_dir import cache_dir, file_sha256
from specwire.engine.default_model import default_model_file
from specwire.engine.gguf_convert import CONVERTER_VERSION, convert_gguf
from specwire.errors import FailedPreconditionError, InvalidArgumentError, UnavailableError

logger = logging.getLogger(__name__)

_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*(/[\w.-]+)?")
_SCRATCH = ".converting-"
_ABANDONED_S = 3600.0
_SIZES = "sizes.json"
_HUB_FILES = ["config.json", "generation_config.json", "tokenizer*", "*.jinja"]
_HUB_WEIGHTS = ["*.safetensors", "*.safetensors.index.json"]
_HUB_HEAD = ["pytorch_model.bin", "mask_embedding.pt"]
"""What folders of draft heads may have beside or instead of safetensors."""


def resolve_model(name: str, *, with_weights: bool = True, is_head: bool = False) -> Path:
    """The folder of a model: config.json, safetensors, tokenizer.json.

    Args:
        name: a local folder, a .gguf file (converted once into the user's cache directory), a hub id (downloaded or taken from the
            hub's own cache), or "SmolLM2-135M-Instruct", which an installed package holds.
        with_weights: False saves the download of weights that nobody will read.
        is_head: it may be a draft head, whose weights come in other files, too.

    Raises:
        InvalidArgumentError: no such file or folder, or a damaged file.
        UnsupportedError: a GGUF file of a kind that can't be converted.
        FailedPreconditionError: the default model's package is absent, or the cache directory can't take what a GGUF file is converted to.
        UnavailableError: the hub does not give the model.
    """
    if name == DEFAULT_MODEL:
        return converted_gguf(default_model_file())
    path = Path(os.path.expanduser(name))
    if path.is_dir():
        if not (path / "config.json").is_file():
            raise InvalidArgumentError(f"the folder {path} has no config.json; give a Hugging Face model folder, a .gguf file or a hub id")
        return path
    if path.suffix == ".gguf":
        if not path.is_file():
            raise InvalidArgumentError(f"the model file {path} does not exist; give a .gguf file, a Hugging Face folder or a hub id")
        return converted_gguf(path)
    if path.exists():
        raise InvalidArgumentError(f"{path} is neither a folder nor a .gguf file; give one of these or a hub id")
    if not _HUB_ID.fullmatch(name):
        raise InvalidArgumentError(f"the model {name!r} is no existing folder or .gguf file, and no hub id (owner/name); give one of these")
    return _from_hub(name, [*_HUB_FILES, *(_HUB_WEIGHTS if with_weights else ()), *(_HUB_HEAD if is_head else ())])


def converted_gguf(path: Path) -> Path:
    """The folder that a GGUF file is converted to, made at the first call for this content; safe if processes race.

    Raises:
        FailedPreconditionError: it can't be written.
    """
    folder = cache_dir() / "gguf" / f"{path.stem}-{file_sha256(path)[:16]}-v{CONVERTER_VERSION}"
    if _is_whole(folder):
        return folder
    try:
        _convert_into(path, folder)
    except (OSError, SafetensorError) as error:
        raise FailedPreconditionError(
            f"cannot keep {path}, converted, in {folder.parent} ({error}); make room there, or name another cache directory by XDG_CACHE_HOME"
        ) from error
    return folder


def _convert_into(path: Path, folder: Path) -> None:
    folder.parent.mkdir(parents=True, exist_ok=True)
    _sweep(folder.parent)
    started = time.monotonic()
    scratch = Path(tempfile.mkdtemp(prefix=_SCRATCH, dir=folder.parent))
    new = scratch / "new"
    try:
        new.mkdir()
        convert_gguf(path, new)
        _seal(new)
        if folder.is_dir() and not _is_whole(folder):
            _move_damaged(folder, scratch / "damaged")
        try:
            os.rename(new, folder)
        except OSError:
            # Another process was first (a rename onto a non-empty folder fails): its result is the same.
            if not _is_whole(folder):
                raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)
    logger.info("converted %s into %s in %.1f s", path, folder, time.monotonic() - started)


def _move_damaged(folder: Path, aside: Path) -> None:
    """Makes place for a conversion, unless another process mends the folder at this moment."""
    try:
        os.rename(folder, aside)
    except FileNotFoundError:
        return  # the other one has moved it
    if not _is_whole(aside):
        logger.warning("%s is damaged and replaced", folder)
        return
    # The other one has replaced it since it was looked at. A third one may have put its own there by now: that is the same.
    with contextlib.suppress(OSError):
        os.rename(aside, folder)


def _seal(folder: Path) -> None:
    """Has all files of a folder written out, and their sizes in one more."""
    paths = [path for path in folder.rglob("*") if path.is_file()]
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in paths}
    (folder / _SIZES).write_text(json.dumps(sizes), encoding="utf-8")
    for path in (*paths, folder / _SIZES):
        with path.open("rb") as file:
            os.fsync(file.fileno())


def _is_whole(folder: Path) -> bool:
    """Whether a folder has all that was written: a machine that lost power may have left a part, one who tidied up, too."""
    try:
        sizes = json.loads((folder / _SIZES).read_text(encoding="utf-8"))
        return all((folder / name).stat().st_size == size for name, size in sizes.items())
    except (OSError, ValueError, AttributeError):
        return False


def _sweep(folder: Path) -> None:
    """Removes what conversions that were killed have left."""
    for path in folder.glob(f"{_SCRATCH}*"):
        with contextlib.suppress(OSError):
            # A folder's own time stays while a file in it is written.
            newest = max(each.stat().st_mtime for each in (path, *path.rglob("*")))
            if time.time() - newest > _ABANDONED_S:
                shutil.rmtree(path, ignore_errors=True)


def _from_hub(name: str, patterns: list[str]) -> Path:
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError

    try:
        return Path(snapshot_download(name, allow_patterns=patterns))
    except (OSError, ValueError, HfHubHTTPError) as error:
        raise UnavailableError(
            f"cannot get the model {name!r} from the Hugging Face hub ({type(error).__name__}: {error}); check the id and the network, "
            f"set HF_TOKEN for a gated model, or give a local folder or .gguf file (the default {DEFAULT_MODEL} needs no network)"
        ) from error
