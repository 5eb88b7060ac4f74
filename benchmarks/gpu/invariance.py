"""Drafter invariance on a GPU: real weights, the requests and configurations of the CPU matrix, bfloat16, and how close a call each difference was.

On a GPU the shape of a batch decides how sums round, so a near tie can fall the other way. Every request is compared with a one-token loop
through the engine on the same GPU: the share of requests that differ anywhere, and at the first difference of each how far the loop's own token was
ahead of the next one (z + T * noise). Batches of equal shapes round alike: `differs_from_plain` counts the requests whose answer is not that of the
same services without drafts. Where a service is killed only a third of the requests run, twelve at once, so that it is started again as seldom as
can be. `text` compares greedy answers of the services with a one-token loop on the CPU in float32.
"""

import argparse
import asyncio
import contextlib
import math
import random
import statistics
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import torch

from benchmarks.gpu.head_files import save_eagle3_head
from benchmarks.gpu.jobs import SECONDS
from benchmarks.gpu.slices import Slice, Slices, make_parser
from specwire.config import DEFAULT_MODEL
from specwire.engine.checkpoint import resolve_model
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.hashing import weights_hash
from tests.engine.tiny_models import save_tiny_model
from tests.integration.invariance import Difference, Outcome, check, compare, run
from tests.integration.matrix import (
    BATCH_SIZE,
    HEAD,
    K_MAX,
    MAX_MODEL_LEN,
    SAMPLINGS,
    Case,
    Configuration,
    fleet_configs,
    full_matrix,
    head_method,
    load_cases,
)
from tests.integration.noisy_model import NOISE_SCALE, save_noisy
from tests.integration.reference import Expected, OneTokenLoop
from tests.integration.stack import NUM_THREADS, Fleet

SLICES = SECONDS["invariance"]
"""Each alone: they share the start of the services and the reference."""
MAX_MARGIN, MAX_BORDER = 0.15, 0.02
"""What rounding in bfloat16 is taken to explain: a lead over the next token (docs/design.md, section 3), which is what a border of top-k is, too; and
a share of the mass at a border of top-p."""
PLAIN = "no drafter"
_CPU_THREADS = 8
_TINY_VOCAB = 256


@dataclass(frozen=True, slots=True)
class Suite:
    """What all slices share."""

    model: Path
    cases: Sequence[Case]
    expected: Mapping[int, Expected]
    fleet: Fleet
    sockets: Path
    head: str
    """Its method."""
    answers: dict[str, dict[int, list[int]]] = field(default_factory=dict)
    """Token ids by configuration and case."""

    async def run(self, configuration: Configuration, cases: Sequence[Case] | None = None) -> Outcome:
        """The cases, by default all of them, through a configuration."""
        chosen = list(range(len(self.cases))) if cases is None else [self.cases.index(case) for case in cases]
        expected = {number: self.expected[index] for number, index in enumerate(chosen)}
        outcome = await run(configuration, self.fleet, self.sockets, [self.cases[index] for index in chosen], expected)
        got = {self.cases.index(difference.case): difference.got for difference in outcome.differences}
        answers = {index: got.get(index, self.expected[index].token_ids) for index in chosen}
        self.answers.setdefault(configuration.name, {}).update(answers)
        return outcome

    def num_different(self, left: str, right: str) -> int | None:
        """Requests that two configurations answer differently, of those that both had; None if not both ran."""
        if left not in self.answers or right not in self.answers:
            return None
        both = self.answers[left].keys() & self.answers[right].keys()
        return sum(self.answers[left][index] != self.answers[right][index] for index in both)

    def margin(self, difference: Difference) -> tuple[float, float]:
        """(lead, distance to a filter's border) of the loop's token there; a text that ends early or goes on is no near tie of anything."""
        margins = self.expected[self.cases.index(difference.case)].margins
        if difference.position >= min(len(margins), len(difference.got)):
            return float("inf"), float("inf")
        found = margins[difference.position]
        return found.top2, found.border


def chosen_configurations(name: str, options: argparse.Namespace, head: str) -> list[Configuration]:
    """Those of a slice, as far as they are asked for: what is killed is needed again as seldom as can be.

    Args:
        head: its method.
    """
    if name == "text":
        return [Configuration(PLAIN)]
    kinds = {
        "plain": lambda c: not c.drafters and not c.preempts,
        "drafters": lambda c: bool(c.drafters) and not c.preempts and not c.kill,
        "faults": lambda c: c.preempts or bool(c.kill),
    }
    only = options.configurations
    chosen = [
        c
        for c in full_matrix(head)
        if kinds[name](c) and (not only or c.name in only) and (c.has_head(head) or name == "plain" or not options.only_head)
    ]
    return sorted(chosen, key=lambda c: (bool(c.kill), c.kill in c.drafters))


def third_of(cases: Sequence[Case]) -> list[Case]:
    """As many as run at once, of every sampling."""
    return list(cases[:: -(-len(cases) // BATCH_SIZE)])


def describe(suite: Suite, outcome: Outcome) -> dict[str, Any]:
    """A row: what happened, how many requests differ, and the margins at their first differences."""
    first = [(difference, *suite.margin(difference)) for difference in outcome.differences]
    leads = sorted(lead for _, lead, _ in first)
    figures = {key: value for key, value in outcome.to_json().items() if key not in ("differences", "differences_excused")}
    return figures | {
        "diverged": len(first),
        "diverged_share": len(first) / outcome.num_requests,
        "median_margin": _finite(statistics.median(leads)) if leads else None,
        "largest_margin": _finite(leads[-1]) if leads else None,
        "differs_from_plain": suite.num_different(outcome.configuration.name, PLAIN),
        "unexplained": sum(lead > MAX_MARGIN and border > _border_limit(at.case) for at, lead, border in first),
        "first_differences": [
            {"prompt": at.case.prompt, "sampling": at.case.sampling, "position": at.position, "margin": _finite(lead), "border": _finite(border)}
            for at, lead, border in first
        ],
    }


def _border_limit(case: Case) -> float:
    return MAX_BORDER if case.params.top_p < 1 else MAX_MARGIN


def _finite(value: float) -> float | None:
    """JSON knows no infinity."""
    return value if math.isfinite(value) else None


def measure_text(part: Slice, suite: Suite) -> None:
    """Greedy answers through the services without drafts, beside the CPU in float32."""
    cases = [case for case in suite.cases if case.params.is_greedy]
    outcome = asyncio.run(suite.run(Configuration(PLAIN), cases))
    got = {suite.cases.index(difference.case): difference.got for difference in outcome.differences}
    loop = OneTokenLoop(suite.model, MAX_MODEL_LEN, _CPU_THREADS)
    num_tokens = num_equal = 0
    for case in cases:
        index = suite.cases.index(case)
        text = got.get(index, suite.expected[index].token_ids)
        exact = loop.generate(case.prompt_token_ids, case.params)
        difference = _first_difference(case, exact, text)
        num_tokens += len(exact.token_ids)
        num_equal += len(exact.token_ids) if difference is None else difference.position
        if difference is not None:
            position = difference.position
            tokens = [loop.tokenizer.decode(ids[position : position + 1]) for ids in (exact.token_ids, text)]
            part.add({"prompt": case.prompt, "position": position, "margin": exact.margins[position].top2, "cpu": tokens[0], "gpu": tokens[1]})
    part.note(requests=len(cases), diverged=len(part.rows), tokens=num_tokens, tokens_before_differences=num_equal)


def _first_difference(case: Case, exact: Expected, text: list[int]) -> Difference | None:
    return None if text == exact.token_ids else compare(case, exact, text, None)


def unexplained(part: Slice) -> list[str]:
    """A line for each configuration that shows differences which rounding does not explain."""
    rows = [row for row in part.rows if row.get("unexplained")]
    return [f"{row['configuration']}: {row['unexplained']} first differences with a margin above {MAX_MARGIN}" for row in rows]


def unfulfilled(outcome: Outcome) -> list[str]:
    """Why a configuration did not do what it is there for, if it did not."""
    try:
        check(replace(outcome, differences=[]))
    except AssertionError as error:
        return [str(error)]
    return []


@contextlib.contextmanager
def make_suite(options: argparse.Namespace, slices: Sequence[str]) -> Iterator[Suite]:
    """Reference and services. On a GPU all services of the slices start at once, while the reference runs; on a CPU each when it is first needed.

    A tiny run without a model of its own gets one of random weights, and a head of it.
    """
    with tempfile.TemporaryDirectory(prefix="sw-") as name:
        folder = Path(name)
        models, head, device = folder / "models", Path(options.head), options.device
        if options.tiny and options.model == DEFAULT_MODEL:
            source = models / "tiny"
            save_tiny_model(source)
            shape = ModelConfig.from_folder(source)
            head = save_eagle3_head(shape, shape.vocab_size, models / "head", K_MAX)
        else:
            source = resolve_model(options.model)
        method = head_method(head)
        save_noisy(source, models / "noisy", NOISE_SCALE)
        dtype = "float32" if device == "cpu" else "bfloat16"
        fleet = Fleet(folder, fleet_configs(str(source), models / "noisy", head, device=device, dtype=dtype))
        try:
            if device != "cpu":
                chosen = [configuration for name in slices for configuration in chosen_configurations(name, options, method)]
                fleet.start(*dict.fromkeys(service for configuration in chosen for service in configuration.services))
            loop = OneTokenLoop(source, MAX_MODEL_LEN, NUM_THREADS, dtype=getattr(torch, dtype), device=device)
            num_prompts, max_tokens = options.prompts, options.max_tokens
            cases = _tiny_cases(num_prompts, max_tokens) if options.tiny else load_cases(loop.tokenizer, num_prompts, max_tokens=max_tokens)
            expected = {index: loop.generate(case.prompt_token_ids, case.params) for index, case in enumerate(cases)}
            print(f"reference: {sum(len(one.token_ids) for one in expected.values())} tokens of {len(cases)} requests", flush=True)
            yield Suite(source, cases, expected, fleet, folder, method)
        finally:
            fleet.stop()


def _tiny_cases(num_prompts: int, max_tokens: int) -> list[Case]:
    """Random ids: a model of random weights has nothing to say to texts."""
    rng = random.Random(0)
    return [
        Case(
            f"random {seed}", name, [rng.randrange(_TINY_VOCAB) for _ in range(rng.randint(4, 30))], params.replace(seed=seed, max_tokens=max_tokens)
        )
        for name, params in SAMPLINGS.items()
        for seed in range(num_prompts)
    ]


def main(arguments: list[str] | None = None) -> None:
    """Runs the slices asked for."""
    parser = make_parser(__doc__ or "", SLICES)
    parser.add_argument("--model", default=DEFAULT_MODEL, help="folder or GGUF file of the real weights")
    parser.add_argument("--head", default=str(HEAD), help="folder of a draft head of the model")
    parser.add_argument("--only-head", action="store_true", help="of `drafters` and `faults` the configurations in which the head drafts")
    parser.add_argument("--prompts", type=int, default=12)
    parser.add_argument("--max-tokens", type=int, default=64)
    parser.add_argument("--configurations", nargs="+", default=[], help="of the slices; all if none is named")
    slices, options = Slices.parse("invariance", parser, arguments)
    names = slices.pending()
    if not names:
        return
    wrong: list[str] = []
    with make_suite(options, names) as suite:
        for name in names:
            with slices.open(name) as part:
                part.note(weights=weights_hash(suite.model)[:16], draft_noise_scale=NOISE_SCALE, explained_margin=MAX_MARGIN)
                if name == "text":
                    measure_text(part, suite)
                    continue
                for configuration in chosen_configurations(name, options, suite.head):
                    outcome = asyncio.run(suite.run(configuration, third_of(suite.cases) if configuration.kill else None))
                    part.add(describe(suite, outcome))
                    if not options.tiny:  # a random model may repeat nothing, and then ngram has nothing to say
                        wrong += unfulfilled(outcome)
            wrong += unexplained(part)
    if wrong:
        raise SystemExit("\n".join(wrong))


if __name__ == "__main__":
    main()
