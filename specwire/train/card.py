"""The model card of a trained head."""

from typing import TYPE_CHECKING

from specwire.train.evaluate import Evaluation, Walk
from specwire.train.recipe import DSPARK_FIELDS

if TYPE_CHECKING:
    from specwire.train.export import Trained

_METHOD_NAMES = {"eagle3": "EAGLE-3", "dspark": "DSpark"}


def model_card(trained: "Trained", num_parameters: int, num_bytes: int) -> str:
    """README.md of the checkpoint: what it is for, what it was made of, what it reached."""
    recipe, data, sequences, evaluation = trained.recipe, trained.data, trained.sequences, trained.evaluation
    name = _METHOD_NAMES[recipe.method]
    num_trained = int((~sequences.is_held_out).sum())
    vocabulary = "the target's" if trained.draft_ids is None else f"the {len(trained.draft_ids)} ids most frequent in the answers"
    fields = "\n".join(f"- {key}: {value}" for key, value in recipe.to_dict().items() if recipe.method == "dspark" or key not in DSPARK_FIELDS)
    return f"""---
library_name: speculators
tags: [speculative-decoding, {recipe.method}]
---

# {name} draft head for {trained.target_name}

Drafts the next {recipe.num_draft_tokens} tokens of {trained.target_name} for speculative decoding.
It is of no use without that model, whose embedding and output layer it shares.
Format: the speculators library's (`config.json`, safetensors in bfloat16).

| | |
|---|---|
| parameters | {num_parameters:,} ({num_bytes / 2**20:.1f} MiB), {recipe.num_layers} decoder layer{"" if recipe.num_layers == 1 else "s"} |
| reads | the residual stream entering layers {", ".join(map(str, trained.feature_layers))} |
| draft vocabulary | {vocabulary} |
| training | {trained.num_steps:,} steps, {trained.seconds:,.0f} s |

## Data

{num_trained:,} answers of the target itself ({sequences.num_answer_tokens:,} answer tokens with those held out), at most
{data.max_answer_tokens} tokens each, to prompts of at most {data.max_prompt_tokens} tokens: {data.greedy_share:.0%} greedy, the others at temperature
{data.temperature:g}. {sequences.num_loops:,} answers that ended in a loop were cut. No text but the prompts is anybody else's.

## Evaluation

On held-out prompts of the same kind, drafts the head's most likely tokens, no tree; tokens per step count the accepted drafts and the next token.

| answers | sequences | tokens per step | first i drafts accepted, i = 1, 2, ... |
|---|---|---|---|
{_row("greedy", evaluation.greedy)}
{_row(f"temperature {data.temperature:g}", evaluation.sampled)}

{_calibration(evaluation)}
The fit is in `config.json` (`confidence_calibration`: P(accepted, if all before are) = sigmoid(weight x log-odds + bias), by position).
{_sharpness(trained)}All figures: `evaluation.json`.

## Recipe

{fields}

Made with `specwire train`. Drafts never change what the target generates; a head that fits badly is only slower.
"""


def _row(name: str, walk: Walk) -> str:
    shares = ", ".join(f"{share:.2f}" for share in walk.acceptance_by_position)
    return f"| {name} | {walk.num_sequences:,} | {walk.acceptance_length:.2f} | {shares} |"


def _sharpness(trained: "Trained") -> str:
    found = trained.sampled
    if found.gain is None:
        return ""
    if found.sharpness == 1:
        return "Sharper drafts gain nothing where requests sample.\n"
    return (
        f"Where requests sample, its logits are multiplied by {found.sharpness:g} before noise is added (`draft_sharpness`):\n"
        f"{found.gain:.1%} more tokens a step at the answers' temperature and at 1, on answers that the factor was not chosen by.\n"
        "The fits are of drafts made so.\n"
    )


def _calibration(evaluation: Evaluation) -> str:
    raw, narrow, wide = evaluation.raw_calibration_error, evaluation.calibration_error, evaluation.wide_calibration_error
    area, wide_area = evaluation.area_under_curve, evaluation.wide_area_under_curve
    if raw is None or narrow is None or wide is None or area is None or wide_area is None:
        return "There were too few drafts to say how well the head's probabilities predict acceptance."
    return (
        f"Expected calibration error of the head's own probability of its draft as that of acceptance: {raw:.1%}; after a logistic fit by position\n"
        f"{narrow:.1%}, area under the curve {area:.2f}; with margin and entropy as further inputs {wide:.1%} and {wide_area:.2f}."
    )
