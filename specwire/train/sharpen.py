"""How a trained head drafts where requests sample, found anew: nothing is trained again.

`python -m specwire.train.sharpen HEAD --prompts FILE --model TARGET --device cuda` answers held-out prompts with shared noise, as the evaluation of
`specwire train` does, and writes the sharpness that pays and the fits of the scores with it into the head's config.json and evaluation.json. The
prompts that are held out are those of a `specwire train` with the same file, --num-prompts and --seed.
"""

import argparse
import json
import logging
import os
from dataclasses import asdict
from pathlib import Path
from typing import Any

import torch

from specwire.config import DEFAULT_MODEL
from specwire.engine.checkpoint import resolve_model
from specwire.engine.models.loader import check_device, parse_dtype
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.json_files import read_json_object
from specwire.tokenizer import Tokenizer
from specwire.train.data import DataConfig, make_jobs
from specwire.train.deadline import Deadline
from specwire.train.sampled import MOST_PROMPTS, Sampled, fit_sampled
from specwire.train.stored import load_stored
from specwire.train.target import Target

logger = logging.getLogger(__name__)

_CONFIG, _EVALUATION = "config.json", "evaluation.json"


def sharpen(head: Path, target: Target, prompts: Path, data: DataConfig, most_prompts: int = MOST_PROMPTS) -> Sampled:
    """Measures, and writes what it found into the head's folder.

    Args:
        prompts: those of the training, of which data says which are held out.
        most_prompts: that are answered at each temperature.

    Raises:
        SpecwireError: a head or file that can't be used, or too few prompts to say anything; the folder is as it was.
    """
    config, evaluation = (read_json_object(head / name) for name in (_CONFIG, _EVALUATION))
    stored = load_stored(head, target)
    jobs = make_jobs(prompts, Tokenizer.from_folder(target.folder), data, target.config.max_position_embeddings)
    temperatures = sorted({data.temperature, 1.0})
    found = fit_sampled(
        stored.head, target, jobs, stored.feature_layers, stored.num_drafts, data.max_answer_tokens, temperatures, Deadline(0), most_prompts
    )
    if len(found.fits) < len(temperatures):
        raise InvalidArgumentError(f"{prompts}: the held-out prompts give too few drafts for {len(temperatures)} fits; give more prompts")
    _rewrite(head, {_CONFIG: _with_fits(config, found), _EVALUATION: evaluation | found.to_dict()})
    return found


def _with_fits(config: dict[str, Any], found: Sampled) -> dict[str, Any]:
    fits = [{"temperature": fit.temperature, "weights_by_position": fit.weights_by_position} for fit in found.fits]
    return config | {
        "confidence_calibration": config["confidence_calibration"] | {"sampled": fits},
        "draft_sharpness": found.sharpness,
    }


def _rewrite(folder: Path, contents: dict[str, dict[str, Any]]) -> None:
    """Both files or none, even where the disk is full."""
    for name, content in contents.items():
        (folder / f".{name}").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    for name in contents:
        os.replace(folder / f".{name}", folder / name)


def main(arguments: list[str] | None = None) -> None:
    """See the module."""
    defaults = DataConfig()
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("head", type=Path, help="folder of a trained head")
    parser.add_argument("--prompts", type=Path, required=True, help="JSONL file of the training prompts")
    parser.add_argument("--model", default=DEFAULT_MODEL, help="target (default: %(default)s)")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--num-prompts", type=int, default=defaults.num_prompts, help="of the training (default: all that fit)")
    parser.add_argument("--seed", type=int, default=defaults.seed, help="of the training")
    parser.add_argument("--max-prompt-tokens", type=int, default=defaults.max_prompt_tokens)
    parser.add_argument("--max-answer-tokens", type=int, default=defaults.max_answer_tokens)
    parser.add_argument("--most-prompts", type=int, default=MOST_PROMPTS, help="that are answered at each temperature (default: %(default)s)")
    args = parser.parse_args(arguments)
    logging.basicConfig(level=logging.INFO, format="%(message)s")
    data = DataConfig(
        num_prompts=args.num_prompts, seed=args.seed, max_prompt_tokens=args.max_prompt_tokens, max_answer_tokens=args.max_answer_tokens
    )
    try:
        check_device(args.device)
        device = torch.device(args.device)
        target = Target(resolve_model(args.model), parse_dtype("bfloat16" if device.type == "cuda" else "float32"), device)
        with torch.no_grad():
            found = sharpen(args.head, target, args.prompts, data, args.most_prompts)
    except SpecwireError as error:
        raise SystemExit(str(error)) from error
    logger.info("draft_sharpness %g: %.1f%% more tokens a step on answers that it was not chosen by", found.sharpness, 100 * (found.gain or 0.0))
    for fit in found.fits:
        logger.info("%s", {name: value for name, value in asdict(fit).items() if name != "weights_by_position"})


if __name__ == "__main__":
    main()
