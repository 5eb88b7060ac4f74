"""The slice `loss` of `two_gpus`: real weights, strict acceptance, two verifiers with a GPU each, of which one is killed half-way.

No token may be lost: requests go on with the other verifier, and get what a one-token loop on the same GPU gives, but for near ties, as
docs/design.md (section 3) has it. The same requests run undisturbed first.
"""

import argparse
import asyncio
import contextlib
import os
from collections.abc import Iterator, Sequence

from benchmarks.gpu.invariance import MAX_MARGIN, describe, make_suite, unexplained, unfulfilled
from benchmarks.gpu.slices import Slice
from specwire.engine.models.hashing import weights_hash
from tests.integration.matrix import HEAD, Configuration

UNDISTURBED, LOST = "two verifiers", "two verifiers, one killed half-way"
_VERIFIERS, _KILLED = ("verifier", "second"), "second"
_K = 3
_NUM_PROMPTS, _TINY_PROMPTS = 4, 2
"""Each with three kinds of sampling; all of them run at once, so that a verifier is killed once."""
_MAX_TOKENS = 64


def configurations(head: str) -> list[Configuration]:
    """In their order.

    Args:
        head: method of the fleet's head.
    """
    speculation = {"num_speculative_tokens": _K}
    return [
        Configuration(UNDISTURBED, _VERIFIERS, ("noisy",), speculation),
        Configuration(LOST, _VERIFIERS, ("noisy",), speculation, kill=_KILLED),
        Configuration(f"{LOST}, {head}", _VERIFIERS, (head,), speculation, kill=_KILLED),
    ]


def measure_loss(part: Slice, options: argparse.Namespace) -> list[str]:
    """The whole slice; what should not have been, in words."""
    given = {"head": options.head or str(HEAD), "prompts": _TINY_PROMPTS if options.tiny else _NUM_PROMPTS, "max_tokens": _MAX_TOKENS}
    wrong: list[str] = []
    with make_suite(argparse.Namespace(**(vars(options) | given)), ()) as suite:
        part.note(gpus=list(options.gpus), weights=weights_hash(suite.model)[:16], explained_margin=MAX_MARGIN)
        left = [one for one in configurations(suite.head) if not part.has(configuration=one.name)]
        drafters = dict.fromkeys(name for one in left for name in one.drafters)
        for gpu, verifier, others in zip(options.gpus, _VERIFIERS, (tuple(drafters), ()), strict=True):
            with _seeing(gpu):
                suite.fleet.start(verifier, *others)
        with _seeing(options.gpus[1]):  # where the verifier that is killed is started again
            for configuration in left:
                outcome = asyncio.run(suite.run(configuration))
                row = describe(suite, outcome)
                if configuration.kill:
                    row["differs_from_undisturbed"] = suite.num_different(configuration.name, UNDISTURBED)
                part.add(row)
                wrong += unfulfilled(outcome)
    return wrong + unexplained(part)


@contextlib.contextmanager
def _seeing(gpu: str) -> Iterator[None]:
    """Services that are started in this context see this GPU alone; this process has chosen its own long ago."""
    before = os.environ.get("CUDA_VISIBLE_DEVICES")
    os.environ["CUDA_VISIBLE_DEVICES"] = gpu
    try:
        yield
    finally:
        if before is None:
            del os.environ["CUDA_VISIBLE_DEVICES"]
        else:
            os.environ["CUDA_VISIBLE_DEVICES"] = before


def say(wrong: Sequence[str]) -> None:
    """Raises SystemExit if anything is."""
    if wrong:
        raise SystemExit("\n".join(wrong))
