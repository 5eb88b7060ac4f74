"""What `specwire up` says about the services once they run."""

from collections.abc import Sequence

from rich import box
from rich.console import Console
from rich.table import Table

from specwire.cli.stack import Stack
from specwire.messages import ServiceDescription
from specwire.policy.schedule import dense_schedule, describe_clipping, schedule_ranges

Rows = Sequence[tuple[str, ...]]


def print_report(console: Console, stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> None:
    """Prints addresses, the configuration in effect, the schedule, and what was clipped.

    Args:
        verifiers, drafters: what each of the stack's services says of itself, in its order.
    """
    _print_table(console, "services", ("service", "address", "runs"), service_rows(stack, verifiers, drafters))
    _print_table(console, "configuration in effect", (), configuration_rows(stack, verifiers, drafters))
    if drafters:
        num_tokens, max_num_seqs = capacities(stack, verifiers, drafters)
        table = dense_schedule(stack.coordinator.speculative_config.num_speculative_tokens_per_batch_size, num_tokens, max_num_seqs)
        rows = [(f"{start}" if start == end else f"{start}-{end}", str(value)) for start, end, value in schedule_ranges(table)]
        _print_table(console, "schedule (of each verifier)", ("sequences that sample in a step", "most drafts of each (K)"), rows)
    for line in clipping(stack, verifiers, drafters):
        console.print(f"clipped: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def service_rows(stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> Rows:
    """(service, address, what it runs)."""
    rows = [("coordinator", stack.address, "clients call here")]
    rows += [
        ("drafter", config.listen[0], " ".join(filter(None, (description.method, description.model_id, description.dtype))))
        for config, description in zip(stack.drafters, drafters, strict=True)
    ]
    rows += [
        ("verifier", config.listen[0], f"{description.model_id} {description.dtype} on {description.device}")
        for config, description in zip(stack.verifiers, verifiers, strict=True)
    ]
    return rows


def configuration_rows(stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> Rows:
    """(name, value) of what decides capacity and speculation."""
    verifier, speculative = verifiers[0], stack.coordinator.speculative_config
    num_tokens, max_num_seqs = capacities(stack, verifiers, drafters)
    rows = [
        ("max_model_len", str(verifier.max_model_len)),
        ("max_num_seqs", f"{max_num_seqs} on each of {len(verifiers)} verifiers" if len(verifiers) > 1 else str(max_num_seqs)),
        ("max_num_batched_tokens", str(verifier.max_num_batched_tokens)),
        ("KV cache", f"{verifier.num_blocks} blocks of {verifier.block_size} tokens"),
    ]
    if not drafters:
        return [*rows, ("method", "none: plain decoding")]
    rows += [("method", str(speculative.method)), ("num_speculative_tokens", str(num_tokens))]
    if speculative.method == "ngram":
        rows.append(("prompt_lookup_min, prompt_lookup_max", f"{speculative.prompt_lookup_min}, {speculative.prompt_lookup_max}"))
    return [*rows, ("rejection_sample_method", speculative.rejection_sample_method), ("draft_sample_method", speculative.draft_sample_method)]


def capacities(stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> tuple[int, int]:
    """(K, sequences of a step) after clipping to what every service can hold; each sequence takes a token of the step's budget."""
    held = [description.max_num_draft_tokens for description in (*verifiers, *drafters)]
    max_num_seqs = min(min(description.max_num_seqs, description.max_num_batched_tokens) for description in verifiers)
    return min(stack.coordinator.speculative_config.num_speculative_tokens, *held), max_num_seqs


def clipping(stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> list[str]:
    """What does not take effect as it was written, and why."""
    reasons = []
    wanted_len = stack.verifiers[0].max_model_len
    for description in verifiers:
        if wanted_len and description.max_model_len < wanted_len:
            reasons.append(f"max_model_len {wanted_len} to {description.max_model_len}: its KV cache or message size holds no more")
    num_tokens, max_num_seqs = capacities(stack, verifiers, drafters)
    if max_num_seqs < stack.verifiers[0].max_num_seqs:
        reasons.append(f"max_num_seqs {stack.verifiers[0].max_num_seqs} to {max_num_seqs}: each takes a token of max_num_batched_tokens")
    if not drafters:
        return reasons
    speculative = stack.coordinator.speculative_config
    if num_tokens < speculative.num_speculative_tokens:
        reasons.append(f"num_speculative_tokens {speculative.num_speculative_tokens} to {num_tokens}: a service holds no more")
    for description in drafters:
        if 0 < description.max_model_len < verifiers[0].max_model_len:
            reasons.append(f"drafting ends at {description.max_model_len} of {verifiers[0].max_model_len} tokens: the drafter's window is shorter")
    return [
        *reasons,
        *(f"schedule {line}" for line in describe_clipping(speculative.num_speculative_tokens_per_batch_size, num_tokens, max_num_seqs)),
    ]


def _print_table(console: Console, title: str, header: Sequence[str], rows: Rows) -> None:
    table = Table(title=title, title_justify="left", box=box.SIMPLE, show_header=bool(header), title_style="bold")
    for name in header or rows[0]:
        table.add_column(name, overflow="fold")
    for row in rows:
        table.add_row(*row)
    console.print(table)
