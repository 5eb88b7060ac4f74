"""What can be said of a stack before anything is started."""

import os
from pathlib import Path

from specwire.errors import InvalidArgumentError
from specwire.stack.plan import StackOptions


def check_models(options: StackOptions) -> None:
    """Raises InvalidArgumentError if one of the models is a path to nothing."""
    check_model(options.verifier.model)
    for drafter in options.drafters:
        if drafter.speculative_config.has_model and drafter.speculative_config.model:
            check_model(drafter.speculative_config.model)


def check_model(model: str) -> None:
    """Raises InvalidArgumentError if the model is a path to nothing; the service that loads it checks everything else."""
    path = Path(os.path.expanduser(model))
    if (path.suffix == ".gguf" or model.startswith(("/", "./", "../", "~"))) and not path.exists():
        raise InvalidArgumentError(f"the model {model} does not exist; give a Hugging Face folder, a .gguf file or a hub id")
