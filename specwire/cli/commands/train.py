"""`specwire train`: a draft head for a target."""

from pathlib import Path
from typing import Annotated

import typer

from specwire.cli.app import app, exit_on_error
from specwire.config import DEFAULT_MODEL
from specwire.extras import check_engine

UNFINISHED = 3
"""Exit status of a run that ended at --max-seconds; started again, it goes on."""

CPU_ROWS = 32
"""Answers that are generated at once, and saved together, on a CPU."""


@app.command(short_help="Train a draft head.")
def train(
    prompts: Annotated[Path, typer.Option(help="JSONL file (also gzipped) with `prompt` or `turns`, of which the first counts.")],
    output: Annotated[Path, typer.Option(help="Folder of the run; the checkpoint is its subfolder `head`. Named again, the run goes on.")],
    recipe: Annotated[str, typer.Option(help="eagle3, dspark, or a YAML file with a recipe's fields.")] = "eagle3",
    change: Annotated[list[str] | None, typer.Option("--set", help="A field of the recipe, as key=value.")] = None,
    model: Annotated[str, typer.Option(help="The target: a folder, .gguf file, hub id, or the default model's name.")] = DEFAULT_MODEL,
    answers: Annotated[Path | None, typer.Option(help="Folder of the target's answers, to share them. [default: OUTPUT/answers]")] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda or cuda:N.")] = "cpu",
    dtype: Annotated[str, typer.Option(help="Of the target: auto (bfloat16 on CUDA, float32 on a CPU), float32 or bfloat16.")] = "auto",
    max_seconds: Annotated[float, typer.Option(help="Stop after so many seconds with status 3, to be gone on with; 0 = never.")] = 0.0,
    num_prompts: Annotated[int, typer.Option(help="Prompts drawn from the file; 0 = all that fit.")] = 0,
    num_held_out: Annotated[int, typer.Option(help="Prompts of these for the evaluation alone, at most a tenth.")] = 512,
    max_prompt_tokens: Annotated[int, typer.Option(help="Longer prompts are left out.")] = 320,
    max_answer_tokens: Annotated[int, typer.Option(help="Answers end there.")] = 256,
    answers_per_prompt: Annotated[int, typer.Option(help="Answers generated to each prompt.")] = 1,
    greedy_share: Annotated[float, typer.Option(help="Share of the answers that is greedy.")] = 0.5,
    temperature: Annotated[float, typer.Option(help="Of the other answers.")] = 0.7,
    num_threads: Annotated[int, typer.Option(help="Threads of one operator on a CPU; 0 = one a core.")] = 0,
    seed: Annotated[int, typer.Option(help="Of prompts and answers; the recipe has its own.")] = 0,
) -> None:
    """Train a draft head on the target's own answers: generate, train, calibrate, evaluate, export. Minutes on a GPU for a small target."""
    with exit_on_error(1):
        check_engine("torch", "safetensors")
    with exit_on_error(2):
        from specwire.train.data import DataConfig
        from specwire.train.recipe import load_recipe
        from specwire.train.run import TrainOptions

        options = TrainOptions(
            model=model,
            prompts=prompts,
            output=output,
            recipe=load_recipe(recipe, change or ()),
            data=DataConfig(
                num_prompts=num_prompts,
                num_held_out=num_held_out,
                max_prompt_tokens=max_prompt_tokens,
                max_answer_tokens=max_answer_tokens,
                answers_per_prompt=answers_per_prompt,
                greedy_share=greedy_share,
                temperature=temperature,
                rows_per_part=CPU_ROWS if device == "cpu" else DataConfig().rows_per_part,
                seed=seed,
            ),
            answers=answers,
            device=device,
            dtype=dtype,
            max_seconds=max_seconds,
        )
    with exit_on_error(1):
        from specwire.train.console import run_train

        is_finished = run_train(options, num_threads)
    raise typer.Exit(0 if is_finished else UNFINISHED)
