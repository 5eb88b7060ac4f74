"""The five steps, one after the other, on running stacks."""

import asyncio
import contextlib
import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from specwire.advise.advice import Advice, Measured, make_advice
from specwire.advise.candidates import Candidate, absent, choose
from specwire.advise.configuration import CanaryPlan, drafter_keys, plan_canary, speculative_keys
from specwire.advise.drafts import AnswerDrafts, DraftYield, calibrated_survivals, expected_yield, synthetic_yield
from specwire.advise.loads import Loads
from specwire.advise.lookup import measure_repetition
from specwire.advise.measure import Measuring, hidden_drafts, step_points
from specwire.advise.online import OnlineRate
from specwire.advise.options import AdviseOptions
from specwire.advise.steps import StepTimes, cost_of_status, mean_table_ms
from specwire.advise.verdict import Decision, Expected, decide, stop_early
from specwire.advise.workload import HIGH_SHARE, LOW_SHARE, PlainRun, Rate, Workload, growth, num_running
from specwire.bench.accept import make_accept_report
from specwire.bench.acceptance import AcceptReport
from specwire.bench.progress import stop_on_interrupt
from specwire.bench.targets import connect
from specwire.bench.workload import Prompt, PromptLine, file_prompts
from specwire.client import AsyncClient
from specwire.errors import FailedPreconditionError, InvalidArgumentError, SpecwireError
from specwire.messages import CoordinatorStatus

logger = logging.getLogger(__name__)


class Stack(NamedTuple):
    """A coordinator that may be chosen."""

    address: str
    make_client: Callable[[], AsyncClient]


@dataclass(frozen=True, slots=True)
class Findings:
    """Everything that was found.

    Args:
        workload: step 1. candidates, chosen: step 2. acceptance, drafts: step 3, of the chosen one. measured, advice, low, high: step 4; None where
            step 3 has stopped it. plan: step 5; None where nothing is to be tried.
        drafter_keys: what the chosen one's configuration says of its drafters.
        keys: of the speculative configuration about K, that follow the decision.
    """

    model_id: str
    max_num_seqs: int
    workload: Workload
    candidates: tuple[Candidate, ...]
    chosen: Candidate
    acceptance: AcceptReport
    drafts: DraftYield
    measured: Measured | None
    advice: Advice | None
    low: OnlineRate | None
    high: OnlineRate | None
    decision: Decision
    plan: CanaryPlan | None
    drafter_keys: dict[str, object]
    keys: dict[str, object]
    reservations: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class _Accepted:
    """One coordinator and what of its drafts is accepted."""

    client: AsyncClient
    status: CoordinatorStatus
    measuring: Measuring
    prompts: list[Prompt]
    report: AcceptReport
    answers: list[AnswerDrafts]
    drafts: DraftYield
    is_synthetic: bool
    tokens: list[tuple[list[int], list[int], float]]
    candidate: Candidate

    @property
    def context_len(self) -> int:
        """Mean tokens of a sequence while it is answered."""
        return round(sum(len(prompt) + len(answer) / 2 for prompt, answer, _ in self.tokens) / len(self.tokens))


async def run_steps(options: AdviseOptions, lines: list[PromptLine], stacks: Sequence[Stack]) -> Findings | None:
    """All of it; None after Ctrl-C.

    Raises:
        SpecwireError: nothing could be measured.
    """
    async with contextlib.AsyncExitStack() as clients:
        opened = [await clients.enter_async_context(stack.make_client()) for stack in stacks]
        with stop_on_interrupt() as stop:
            found = []
            for client, stack in zip(opened, stacks, strict=True):
                accepted = await _accept(options, lines, client, stack.address, stop)
                if accepted is None:
                    return None
                found.append(accepted)
            models = {each.report.model_id for each in found}
            if len(models) > 1:
                raise FailedPreconditionError(f"the coordinators serve different models: {', '.join(sorted(models))}; name those of one model")
            candidates = [each.candidate for each in found]
            chosen = found[candidates.index(choose(candidates))]
            return await _decide(options, chosen, candidates, stop)


async def _accept(options: AdviseOptions, lines: list[PromptLine], client: AsyncClient, address: str, stop: asyncio.Event) -> _Accepted | None:
    """Answers all prompts with drafts; None if it is stopped."""
    tokenizer = await connect(client, options.accept.ready_timeout_s)
    if tokenizer is None:
        raise InvalidArgumentError("the coordinator serves no tokenizer, so a prompt file is of no use")
    prompts = file_prompts(lines, tokenizer, options.accept.max_tokens, as_chat=options.accept.chat)
    status = await client.get_status()
    for reservation in hidden_drafts(status):
        logger.warning("%s", reservation)
    measuring = Measuring(client, options, status, stop)
    run = await measuring.acceptance(prompts)
    if run.interrupted:
        return None
    report = make_accept_report(prompts, tokenizer.to_spec().model_id, run, None)
    done = [record for record in run.records if record.is_ok]
    if not done:
        raise SpecwireError(f"all {report.num_failed} requests failed: {run.records[0].error_text}")
    answers = [AnswerDrafts.of(prompts[record.index], record) for record in done]
    most = max((count for answer in answers for count in answer.num_drafts), default=0)
    is_synthetic = any(record.spec is not None and record.spec.synthetic for record in done)
    drafts = (synthetic_yield if is_synthetic else expected_yield)(answers, most)
    tokens = [(prompts[record.index].token_ids, record.token_ids, prompts[record.index].weight) for record in done]
    candidate = _candidate(status, address, report, drafts, round(sum(len(prompt) + len(answer) / 2 for prompt, answer, _ in tokens) / len(tokens)))
    return _Accepted(client, status, measuring, prompts, report, answers, drafts, is_synthetic, tokens, candidate)


def _candidate(status: CoordinatorStatus, address: str, report: AcceptReport, drafts: DraftYield, context_len: int) -> Candidate:
    cost, most = cost_of_status(status), status.num_speculative_tokens
    gain = None
    if not cost.unknown and len(drafts.tokens) > 1:
        ms = [mean_table_ms(cost, 1, k, drafts.share[k], drafts.drafts[k], context_len) for k in range(len(drafts.tokens))]
        gain = max(drafts.tokens[k] * ms[0] / ms[k] for k in range(1, len(ms))) - 1
    costs = [entry for drafter in status.drafters if drafter.is_connected for entry in drafter.draft_cost if entry.num_draft_tokens <= most]
    dearest = max(costs, key=lambda entry: (-entry.num_sequences, entry.num_draft_tokens), default=None)
    return Candidate(
        method=", ".join(dict.fromkeys(drafter.method for drafter in status.drafters if drafter.is_connected)) or "the drafter",
        address=address,
        acceptance_length=report.groups[0].acceptance_length,
        tokens_per_step=drafts.tokens[-1],
        num_speculative_tokens=most,
        draft_ms=None if dearest is None else dearest.draft_ms,
        gain=gain,
    )


async def _decide(options: AdviseOptions, chosen: _Accepted, candidates: list[Candidate], stop: asyncio.Event) -> Findings | None:
    """The rest, on the chosen coordinator; None if it is stopped."""
    loads = Loads(chosen.client, options, max(chosen.measuring.concurrencies()), stop)
    plain = await loads.plain(chosen.prompts)
    if plain is None:
        return None
    workload, thresholds = _workload(options, chosen, *plain), options.thresholds
    total = chosen.report.groups[0]
    measured = advice = low = high = plan = None
    decision = stop_early(total.acceptance_length, total.stats.num_drafts, thresholds)
    if decision is None:
        measured = await _measure_steps(chosen)
        if stop.is_set():
            return None
        advice = make_advice(measured, thresholds.min_gain, chosen.measuring.most)
        sizes = [-(-rate.num_running // chosen.measuring.num_lanes) for rate in (workload.low, workload.high)]
        k = advice.best_drafting_k(sizes[0]) or measured.most
        low = await loads.at(workload.low, chosen.prompts, k)
        high = None if low is None else await loads.at(workload.high, chosen.prompts, k)
        if low is None or high is None:
            return None
        expected = [Expected(advice.gain_of(size, k), chosen.drafts.tokens[k]) for size in sizes]
        decision = decide(advice, low, high, thresholds, *expected)
    assert decision is not None, "step 3 has stopped it or step 4 has decided"
    keys = speculative_keys(decision, advice, len(chosen.drafts.tokens) - 1)
    if low is not None and high is not None:
        plan = plan_canary(keys, total.acceptance_length, low, high, thresholds)
    return Findings(
        model_id=chosen.report.model_id,
        max_num_seqs=chosen.status.max_num_seqs,
        workload=workload,
        candidates=(*candidates, *absent(candidates, workload.repetition, chosen.measuring.most)),
        chosen=chosen.candidate,
        acceptance=chosen.report,
        drafts=chosen.drafts,
        measured=measured,
        advice=advice,
        low=low,
        high=high,
        decision=decision,
        plan=plan,
        drafter_keys=drafter_keys(chosen.status),
        keys=keys,
        reservations=tuple(hidden_drafts(chosen.status)),
    )


async def _measure_steps(chosen: _Accepted) -> Measured:
    measuring = chosen.measuring
    points = step_points(await measuring.steps(chosen.prompts), measuring.num_lanes)
    has_drafts = any(point.num_requested for point in points)
    return Measured(
        model_id=chosen.report.model_id,
        method=chosen.candidate.method,
        max_num_seqs=chosen.status.max_num_seqs,
        drafts=chosen.drafts,
        survival=calibrated_survivals(chosen.answers, max(len(chosen.drafts.tokens) - 1, 1)),
        times=StepTimes(cost_of_status(chosen.status), points, chosen.context_len) if has_drafts else None,
        points=tuple(points),
        is_synthetic=chosen.is_synthetic,
        reservations=tuple(hidden_drafts(chosen.status)),
    )


def _workload(options: AdviseOptions, chosen: _Accepted, alone: PlainRun, some: PlainRun, full: PlainRun) -> Workload:
    num_answers = len(chosen.tokens)

    def rate(name: str, asked: float | None, share: float) -> Rate:
        requests_per_s = asked if asked is not None else share * full.requests_per_s
        running = num_running(requests_per_s, alone, full)
        return Rate(name, requests_per_s, requests_per_s / full.requests_per_s, running, growth(running, alone, some, full))

    return Workload(
        num_prompts=len(chosen.prompts),
        prompt_tokens=sum(len(prompt) for prompt, _, _ in chosen.tokens) / num_answers,
        output_tokens=sum(len(answer) for _, answer, _ in chosen.tokens) / num_answers,
        repetition=measure_repetition(chosen.tokens, chosen.measuring.most),
        alone=alone,
        some=some,
        full=full,
        low=rate("low", options.low_rate, LOW_SHARE),
        high=rate("high", options.high_rate, HIGH_SHARE),
        bound_share=options.thresholds.bound_share,
    )
