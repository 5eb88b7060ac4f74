"""Few files of a training: what is served and all figures first, then drafts and answers as far as there is room."""

import io
import logging
import tarfile
from collections.abc import Iterable, Sequence
from pathlib import Path

_PART_BYTES = 15 << 20
_MOST_PARTS = 4
_WEIGHTS = ".safetensors"

logger = logging.getLogger("train_heads")


def pack(results: Path, work: Path, folder: Path, served: Sequence[str]) -> None:
    """Writes results.tar.00, .01, ... into a folder; `cat results.tar.* | tar x` is the way back.

    Args:
        results, work: of the training.
        served: heads whose weights are wanted most; those of the others come behind all figures and drafts.
    """
    folder.mkdir(parents=True, exist_ok=True)
    for old in folder.glob("results.tar.*"):
        old.unlink()
    wanted = sorted(path for path in results.rglob("*") if path.is_file() and not path.name.startswith("."))
    weights = [path for path in wanted if path.suffix == _WEIGHTS]
    first = [path for path in wanted if path.suffix not in (_WEIGHTS, ".npz")]
    first += [path for path in weights if path.relative_to(results).parts[0] in served]
    then = sorted((path for path in wanted if path.suffix == ".npz"), key=lambda path: path.stat().st_size)
    rest = [path for path in weights if path not in first]
    groups = [(path, path.relative_to(results.parent)) for path in (*first, *then, *rest)]
    answers = sorted((work / "answers").glob("*"))
    groups += [(path, Path("work") / path.relative_to(work)) for path in answers]
    content, left_out = _tar(groups)
    for number, start in enumerate(range(0, len(content), _PART_BYTES)):
        (folder / f"results.tar.{number:02d}").write_bytes(content[start : start + _PART_BYTES])
    logger.info("packed %.1f MiB into %s%s", len(content) / 2**20, folder, f"; without {', '.join(left_out)}" if left_out else "")


def _tar(files: Iterable[tuple[Path, Path]]) -> tuple[bytes, list[str]]:
    """The archive, and what no longer found room in it."""
    buffer, left_out = io.BytesIO(), []
    with tarfile.open(fileobj=buffer, mode="w") as archive:
        for path, name in files:
            if buffer.tell() + path.stat().st_size + 20_480 > _PART_BYTES * _MOST_PARTS:
                left_out.append(str(name))
                continue
            archive.add(path, str(name))
    return buffer.getvalue(), left_out
