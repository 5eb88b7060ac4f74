"""Calibration across restarts: one JSON file, written whole or not at all, and used only by those whose scores it is about."""

import json
import logging
import os
import tempfile
from pathlib import Path
from typing import Any

import numpy as np

from specwire.policy.calibration import NUM_BINS, Calibrator

logger = logging.getLogger(__name__)

_FORMAT = "specwire-calibration"
_VERSION = 1
_MAX_COUNT = 1e9
_MAX_GROUPS = 64


def save_calibration(path: Path, calibrator: Calibrator, models: str) -> bool:
    """Writes the calibrator's counts in place of what is there; False, and a warning, where that fails.

    Args:
        models: what the counts are about: whatever identifies target and drafters.
    """
    groups = [
        {
            "method": method,
            "greedy": is_greedy,
            "trials": calibrator.trials[index].round(3).tolist(),
            "accepted": calibrator.accepted[index].round(3).tolist(),
        }
        for index, (method, is_greedy) in enumerate(calibrator.groups)
    ]
    document = {"format": _FORMAT, "version": _VERSION, "models": models, "num_bins": NUM_BINS, "groups": groups}
    try:
        with tempfile.NamedTemporaryFile("w", dir=path.parent, prefix=f".{path.name}.", delete=False, encoding="utf-8") as file:
            temporary = Path(file.name)
            try:
                json.dump(document, file)
                file.flush()
                os.fsync(file.fileno())
                temporary.replace(path)
            except BaseException:
                temporary.unlink()
                raise
    except OSError as error:
        logger.warning("calibration can't be kept in %s: %s", path, error)
        return False
    return True


def load_calibration(path: Path, calibrator: Calibrator, models: str) -> bool:
    """Adds what `save_calibration` wrote to a new calibrator; False, and a log that says why, where there is nothing that it can take.

    Fewer positions than the file has take their part; further ones start from the prior.
    """
    try:
        document = json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        logger.info("calibration starts afresh: there is no %s yet", path)
        return False
    except (OSError, ValueError, RecursionError) as error:
        logger.warning("calibration starts afresh: %s can't be read: %s", path, error)
        return False
    try:
        _check_header(document, models)
        groups = [_read_group(group, calibrator.num_positions) for group in _check_groups(document["groups"])]
    except _Mismatch as mismatch:
        logger.warning("calibration starts afresh: %s %s", path, mismatch)
        return False
    for name, is_greedy, trials, accepted in groups:
        calibrator.restore([(name, is_greedy)], trials[None], accepted[None])
    logger.info("calibration of %d kinds of drafts taken from %s", len(groups), path)
    return True


class _Mismatch(Exception):
    pass


def _check_header(document: Any, models: str) -> None:
    if not isinstance(document, dict) or document.get("format") != _FORMAT:
        raise _Mismatch("is no calibration file")
    for key, expected in (("version", _VERSION), ("num_bins", NUM_BINS), ("models", models)):
        if document.get(key) != expected:
            raise _Mismatch(f"has {key} {document.get(key)!r}, but here it is {expected!r}")


def _check_groups(groups: Any) -> list[Any]:
    if not isinstance(groups, list) or len(groups) > _MAX_GROUPS:
        raise _Mismatch(f"has no list of at most {_MAX_GROUPS} groups")
    return groups


def _read_group(group: Any, num_positions: int) -> tuple[str, bool, np.ndarray, np.ndarray]:
    if not isinstance(group, dict) or not isinstance(group.get("method"), str) or not isinstance(group.get("greedy"), bool):
        raise _Mismatch("has a group without a method")
    trials, accepted = (_read_counts(group.get(key), num_positions) for key in ("trials", "accepted"))
    if (accepted > trials + 0.01).any():  # both are rounded
        raise _Mismatch(f"has more accepted drafts than drafts of {group['method']}")
    return group["method"], group["greedy"], trials, np.minimum(accepted, trials)


def _read_counts(rows: Any, num_positions: int) -> np.ndarray:
    try:
        counts = np.array(rows, dtype=np.float64)
    except (TypeError, ValueError) as error:
        raise _Mismatch(f"has counts that are no numbers ({error})") from error
    if counts.ndim != 2 or counts.shape[1] != NUM_BINS or not ((counts >= 0) & (counts <= _MAX_COUNT)).all():
        raise _Mismatch(f"has counts of shape {counts.shape}, or out of range")
    padded = np.zeros((num_positions, NUM_BINS))
    taken = min(num_positions, len(counts))
    padded[:taken] = counts[:taken]
    return padded
