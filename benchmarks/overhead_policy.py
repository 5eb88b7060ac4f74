"""What the choices of adaptive verification take by themselves, without a coordinator: microseconds of each call, the best and the median of many.

python -m benchmarks.overhead_policy [--sequences 256] [--drafts 7] [--calls 2000]

Two kinds of requests, drafts accepted at .9 and at .3, with noisy scores; the policy has served them for a hundred steps. A step calls
`choose_request` and `choose_kept`; every twelfth plans anew, and one in a few (of 256 rows: in eight) is learned from.
"""

import argparse
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import numpy as np

from benchmarks.report import RESULTS, Bystanders, print_table, write_report
from specwire.messages import DraftCost, VerifyCost
from specwire.policy.adaptive import AdaptivePolicy
from specwire.policy.calibration import Calibrator
from specwire.policy.cost import StepCost, StepShape
from specwire.policy.grades import NUM_GRADES, blend_qualities, grades_of

MAX_CHOICE_US = {(256, 7): 150.0}
"""What is promised of the two choices of a step, by sequences and drafts; without planning anew."""
_VERIFY_COST = VerifyCost((1, 64, 256, 1024, 2048), (4.0, 4.3, 6.0, 23.0, 46.0), 3e-5, 0.0, 256)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sequences", type=int, default=256)
    parser.add_argument("--drafts", type=int, default=7)
    parser.add_argument("--calls", type=int, default=2000, help="of each kind")
    parser.add_argument("--output", type=Path, default=RESULTS, help="folder for overhead_policy.json")
    args = parser.parse_args()
    bystanders = Bystanders()
    times = measure(args.sequences, args.drafts, args.calls)
    print_table(["call", "best us", "median us"], [[name, f"{best:.1f}", f"{median:.1f}"] for name, (best, median) in times.items()])
    figures = {
        "unit": "microseconds: best and median",
        "sequences": args.sequences,
        "num_speculative_tokens": args.drafts,
        "calls": args.calls,
        "choice_us_at_most": MAX_CHOICE_US.get((args.sequences, args.drafts)),
        "results": times,
    }
    print(f"\nwritten to {write_report('overhead_policy', figures, args.output, bystanders)}")


def measure(num_sequences: int, num_drafts: int, num_calls: int) -> dict[str, tuple[float, float]]:
    """Best and median microseconds of each call."""
    rng = np.random.default_rng(0)
    costs = tuple(DraftCost(k, n, 0.4 + 0.0005 * n * k) for k in (1, num_drafts) for n in (1, num_sequences))
    policy = AdaptivePolicy(StepCost.from_tables(_VERIFY_COST, costs), Calibrator(num_drafts), num_drafts)
    rates = np.where(np.arange(num_sequences) % 2 == 0, 0.9, 0.3)
    shape = StepShape(num_sequences, num_sequences, num_sequences * 500, 1, 0, (num_sequences,))
    num_asked, groups = np.full(num_sequences, num_drafts), np.full(num_sequences, policy.calibrator.group("", is_greedy=False))
    qualities, step = np.full(num_sequences, np.nan), 0

    def scores() -> np.ndarray:
        log_odds = np.log(rates / (1 - rates))[:, None] + 0.5 * rng.standard_normal((num_sequences, num_drafts))
        return (1 / (1 + np.exp(-log_odds))).astype(np.float32).ravel()

    def count_grades() -> np.ndarray:
        return np.bincount(grades_of(qualities), minlength=NUM_GRADES)

    def choose_request() -> None:
        nonlocal step
        step += 1
        policy.choose_request(step, shape, num_sequences, num_drafts, count_grades)

    request = policy.choose_request(step, shape, num_sequences, num_drafts)._replace(num_drafts=num_drafts, by_grade=(), num_asked=(), is_probe=False)
    for _ in range(100):
        kept = policy.choose_kept(request, scores(), num_asked, groups, shape, num_sequences)
        qualities = blend_qualities(qualities, kept.survival, num_asked)
        run = np.cumprod(rng.random((num_sequences, num_drafts)) < rates[:, None], axis=1).sum(axis=1)
        num_accepted = np.minimum(run, kept.num_kept)
        policy.observe(kept, num_asked, grades_of(qualities), num_accepted)
        choose_request()
    flat, grades = scores(), grades_of(qualities)
    choose = _time(choose_request, num_calls)
    keep = _time(lambda: policy.choose_kept(request, flat, num_asked, groups, shape, num_sequences), num_calls)
    return {
        "choose_request": choose,
        "choose_kept": keep,
        "both": (round(choose[0] + keep[0], 2), round(choose[1] + keep[1], 2)),
        "observe": _time(lambda: policy.observe(kept, num_asked, grades, num_accepted), num_calls),
    }


def _time(call: Callable[[], object], num_calls: int) -> tuple[float, float]:
    times = []
    for _ in range(num_calls):
        start_ns = time.perf_counter_ns()
        call()
        times.append((time.perf_counter_ns() - start_ns) / 1e3)
    return round(min(times), 2), round(statistics.median(times), 2)


if __name__ == "__main__":
    main()
