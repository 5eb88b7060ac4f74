"""Services that die, hang, lie and are replaced under 16 streams: tokens, errors and pauses beside an undisturbed run.

python -m benchmarks.drills [--quick] [--only NAME ...]

Every service is a process of its own; a killed one is started again half a second later, as `specwire up` does. Every answer is compared token
by token with what the target alone gives. Status 1 where something is not as it must be.
"""

import argparse
import asyncio
import gc
import logging
import tempfile
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

from benchmarks import drills_drafter, drills_models
from benchmarks.drills_drafter import ALLOWED_MS, FAULTS, MIN_WAIT_MS, Plan
from benchmarks.report import RESULTS, Bystanders, print_table, write_report

logger = logging.getLogger(__name__)

DRAFTER_DRILLS = ("kill", "hang", *FAULTS)
MODEL_DRILLS = ("verifier", "coordinator", "swap")
_SWAPS = ("close", "far", "suffix", "ngram")
_Result = tuple[dict[str, Any], list[str]]


async def drill_drafter(plan: Plan, kinds: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Everything that can happen to a drafter."""
    figures: dict[str, Any] = {}
    problems: list[str] = []

    async def note(name: str, result: Awaitable[_Result]) -> dict[str, Any]:
        figures[name], found = await result
        problems.extend(f"{name}: {problem}" for problem in found)
        logger.info("%s: %s", name, figures[name])
        return figures[name]

    with tempfile.TemporaryDirectory(prefix="sw-") as folder:
        async with drills_drafter.start_stack(Path(folder), plan) as stack:
            quiet = await note("undisturbed", drills_drafter.run_quiet(stack, plan))
            for kind in kinds:
                if kind in FAULTS:
                    await stack.drafter.replace(drills_drafter.faulty_drafter(stack.drafter.address, kind, plan))
                    quiet = await note(f"undisturbed_before_{kind}", drills_drafter.run_quiet(stack, plan))
                drill = await note(kind, drills_drafter.run_drill(stack, plan, kind, quiet["step_p99_ms"]))
                if not drill["is_in_time"]:
                    problems.append(f"{kind}: pauses are {drill['excess_p99_ms']} ms (p99) longer than they may be")
    return figures, problems


async def drill_models(num_restarts: int, names: list[str]) -> tuple[dict[str, Any], list[str]]:
    """Verifier, coordinator and swaps."""
    figures: dict[str, Any] = {}
    problems: list[str] = []
    with tempfile.TemporaryDirectory(prefix="specwire-drills-") as scratch:
        models = drills_models.Models(Path(scratch))

        async def run(drill: Callable[..., Awaitable[_Result]], what: Any, **options: Any) -> None:
            name = drill.__name__
            with tempfile.TemporaryDirectory(prefix="sw-") as folder:
                async with drills_models.start_stack(models, Path(folder), **options) as stack:
                    figures[name], found = await drill(stack, models, what)
            problems.extend(f"{name}: {problem}" for problem in found)
            logger.info("%s: %s", name, figures[name])

        if "verifier" in names:
            await run(drills_models.restart_verifier, num_restarts)
        if "coordinator" in names:
            await run(drills_models.restart_coordinator, num_restarts, num_streams=20)
            await run(drills_models.hand_on_verifier, num_restarts)
            taken = figures["hand_on_verifier"]
            if not taken["is_in_time"]:
                problems.append(f"the verifier was free after {max(taken['free_after_s'])} s, but {taken['allowed_s']} s are allowed")
        if "swap" in names:
            await run(drills_models.swap_drafters, _SWAPS, num_drafters=2)
    return figures, problems


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--quick", action="store_true", help="4 disturbances of each kind instead of 20, 2 restarts instead of 5")
    parser.add_argument("--only", nargs="*", default=[], choices=[*DRAFTER_DRILLS, *MODEL_DRILLS], help="these drills; all if none is given")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for drills.json")
    args = parser.parse_args()
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s")
    gc.disable()  # the client's own collections, over hundreds of thousands of noted gaps, would be gaps
    bystanders = Bystanders()
    chosen = args.only or [*DRAFTER_DRILLS, *MODEL_DRILLS]
    kinds, names = [kind for kind in DRAFTER_DRILLS if kind in chosen], [name for name in MODEL_DRILLS if name in chosen]
    plan = Plan(dict.fromkeys(DRAFTER_DRILLS, 4 if args.quick else 20), quiet_s=5.0 if args.quick else 15.0)
    figures: dict[str, Any] = {"allowed_ms": ALLOWED_MS, "min_wait_ms": MIN_WAIT_MS, "streams": plan.num_streams}
    problems: list[str] = []
    if kinds:
        figures["drafter"], found = asyncio.run(drill_drafter(plan, kinds))
        problems += found
    if names:
        more, found = asyncio.run(drill_models(2 if args.quick else 5, names))
        figures |= more
        problems += found
    columns = ("disturbances", "gap_p50_ms", "gap_max_ms", "wait_max_ms", "excess_p99_ms", "different_answers", "client_errors")
    rows = [[kind, *(str(figures["drafter"][kind][column]) for column in columns)] for kind in kinds]
    print_table(["", *columns], rows)
    print(f"\nwritten to {write_report('drills', figures | {'problems': problems}, args.output, bystanders)}")
    if problems:
        raise SystemExit("\n".join(problems))


if __name__ == "__main__":
    main()
