"""A trained head with fewer ids to draft: its output layer, most of a draft's time on a CPU, shrinks in proportion. Nothing is trained again.

`python -m specwire.train.narrow HEAD --answers FOLDER --ids 16384` notes in the head's folder which ids are most frequent in answers that
`specwire train` generated: drafters on a CPU draft only those. With another folder OUTPUT it writes a copy of the head that drafts them alone,
wherever it runs. The head's layers stay as they are, and so does the fit of its scores.
"""

import argparse
import json
import logging
import os
import shutil
from pathlib import Path

import numpy as np
import torch
from safetensors.torch import save_file

from specwire.engine.heads.vocabulary import FREQUENT_IDS
from specwire.errors import FailedPreconditionError, InvalidArgumentError, SpecwireError
from specwire.train.tensors import read_all

logger = logging.getLogger(__name__)


def count_ids(answers: Path, vocab_size: int) -> np.ndarray:
    """[vocab_size] int64, how often each id is in the answers of a folder.

    Raises:
        FailedPreconditionError: it has none, or those of another vocabulary.
    """
    parts = sorted(answers.glob("part-*.npz"))
    if not parts:
        raise FailedPreconditionError(f"{answers} has no part-*.npz; name the folder of answers of a `specwire train`")
    counts = np.zeros(vocab_size, dtype=np.int64)
    for path in parts:
        with np.load(path) as stored:
            tokens = stored["tokens"]
        if len(tokens) and int(tokens.max()) >= vocab_size:
            raise FailedPreconditionError(f"{path} has id {tokens.max()}, but the head's target {vocab_size} ids; name answers of this target")
        counts += np.bincount(tokens, minlength=vocab_size)
    return counts


def note_frequent_ids(head: Path, counts: np.ndarray, num_ids: int) -> int:
    """Writes the num_ids most frequent ids into a head's folder; what was noted before is replaced.

    Args:
        counts: [vocab_size].

    Returns:
        How many of the ids were counted at all.

    Raises:
        FailedPreconditionError: the head drafts only some of its target's ids already.
        InvalidArgumentError: num_ids is not fewer than there are.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    if config.get("draft_vocab_size") != len(counts):
        raise FailedPreconditionError(
            f"{head} drafts {config.get('draft_vocab_size')} of {len(counts)} ids; only heads that draft all can be narrowed"
        )
    ids = _frequent_ids(counts, num_ids)
    scratch = head / f".{FREQUENT_IDS}"
    with scratch.open("wb") as file:
        np.save(file, ids.astype(np.int32))
    os.replace(scratch, head / FREQUENT_IDS)
    return int((counts[ids] > 0).sum())


def narrow(head: Path, output: Path, counts: np.ndarray, num_ids: int) -> int:
    """Writes a copy of a head that drafts the num_ids most frequent ids; a folder that was there is replaced.

    Args:
        head: in the speculators format, with its target's whole vocabulary and output layer.
        counts: [vocab_size].

    Returns:
        How many of the ids were counted at all.

    Raises:
        FailedPreconditionError: the head has a vocabulary or an output layer of its own.
        InvalidArgumentError: num_ids is not fewer than there are, or output is the head itself.
    """
    config = json.loads((head / "config.json").read_text(encoding="utf-8"))
    tensors = read_all(head)
    own = [name for name in ("d2t", "lm_head.weight", "markov_head.markov_w2.weight") if name in tensors]
    if own or config.get("draft_vocab_size") != len(counts):
        raise FailedPreconditionError(
            f"{head} drafts {config.get('draft_vocab_size')} of {len(counts)} ids and has {', '.join(own) or 'no tensor'} of its own; "
            "only heads that share their target's whole output layer can be narrowed"
        )
    if output.resolve() == head.resolve():
        raise InvalidArgumentError(f"output is {output}, the head itself; name another folder")
    ids = torch.from_numpy(_frequent_ids(counts, num_ids))
    tensors["d2t"] = ids - torch.arange(num_ids)
    tensors["t2d"] = torch.zeros(len(counts), dtype=torch.bool).scatter_(0, ids, torch.ones_like(ids, dtype=torch.bool))
    scratch = output.with_name(f".{output.name}.new")
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    save_file(tensors, scratch / "model.safetensors", metadata={"format": "pt"})
    (scratch / "model.safetensors").chmod(0o644)
    (scratch / "config.json").write_text(json.dumps(config | {"draft_vocab_size": num_ids}, indent=2) + "\n", encoding="utf-8")
    shutil.rmtree(output, ignore_errors=True)
    os.replace(scratch, output)
    return int((counts[ids.numpy()] > 0).sum())


def _frequent_ids(counts: np.ndarray, num_ids: int) -> np.ndarray:
    """[num_ids] int64, rising."""
    if not 0 < num_ids < len(counts):
        raise InvalidArgumentError(f"--ids is {num_ids}, but must be 1 to {len(counts) - 1}: the target has {len(counts)} ids")
    return np.sort(np.argsort(-counts, kind="stable")[:num_ids])


def main() -> None:
    """See the module."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a trained head")
    parser.add_argument("output", type=Path, nargs="?", help="folder of a copy that drafts these ids alone (default: drafters on a CPU do)")
    parser.add_argument("--answers", type=Path, required=True, help="folder with part-*.npz of `specwire train`")
    parser.add_argument("--ids", type=int, default=16384, help="that can be drafted (default: %(default)s)")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    try:
        path = args.head / "config.json"
        if not path.is_file():
            raise InvalidArgumentError(f"{args.head} has no config.json; name the folder of a trained head")
        counts = count_ids(args.answers, json.loads(path.read_text(encoding="utf-8"))["transformer_layer_config"]["vocab_size"])
        num_seen = narrow(args.head, args.output, counts, args.ids) if args.output else note_frequent_ids(args.head, counts, args.ids)
    except SpecwireError as error:
        raise SystemExit(str(error)) from error
    share = np.sort(counts)[::-1][: args.ids].sum() / max(counts.sum(), 1)
    logger.info(
        "%s drafts %d ids, %d of them seen, which make up %.2f%% of the answers' tokens",
        args.output or f"{args.head} on a CPU",
        args.ids,
        num_seen,
        100 * share,
    )


if __name__ == "__main__":
    main()
