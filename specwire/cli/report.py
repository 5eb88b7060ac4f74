"""What `specwire up` says about the services once they run."""

from collections.abc import Sequence

from rich.console import Console

from specwire.console import make_table
from specwire.messages import ServiceDescription
from specwire.policy.capacity import EngineDescription, describe_engine
from specwire.stack.plan import Stack

Rows = Sequence[tuple[str, ...]]


def print_report(console: Console, stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> None:
    """Prints addresses, the configuration in effect, the schedule, and what was clipped.

    Args:
        verifiers, drafters: what each of the stack's services says of itself, in its order.
    """
    engine = describe_engine(stack.coordinator, verifiers)  # as the coordinator does
    console.print(make_table(("service", "address", "runs"), service_rows(stack, verifiers, drafters), title="services"))
    console.print(make_table((), configuration_rows(stack, engine), title="configuration in effect"))
    if engine.num_speculative_tokens:
        rows = [(f"{start}" if start == end else f"{start}-{end}", str(value)) for start, end, value in engine.schedule_ranges]
        header = "sequences that sample in a step", "most drafts of each (K)"
        console.print(make_table(header, rows, title="schedule (of each verifier)"))
    for line in clipping(stack, engine, drafters):
        console.print(f"clipped: {line}", style="yellow", markup=False, highlight=False, soft_wrap=True)


def service_rows(stack: Stack, verifiers: Sequence[ServiceDescription], drafters: Sequence[ServiceDescription]) -> Rows:
    """(service, address, what it runs)."""
    rows = [("coordinator", stack.address, "clients call here")]
    if stack.http is not None:
        rows.append(("http", stack.http.listen[0], "OpenAI-compatible clients call here"))
    rows += [
        ("drafter", config.listen[0], f"{name_drafts(description.method, description.model_id)} {description.dtype}".rstrip())
        for config, description in zip(stack.drafters, drafters, strict=True)
    ]
    rows += [
        ("verifier", config.listen[0], f"{description.model_id} {_numbers(description)} on {description.device}")
        for config, description in zip(stack.verifiers, verifiers, strict=True)
    ]
    return rows


def configuration_rows(stack: Stack, engine: EngineDescription) -> Rows:
    """(name, value) of what decides capacity and speculation."""
    verifier, speculative, num_lanes = engine.verifier, stack.coordinator.speculative_config, len(stack.verifiers)
    rows = [
        ("max_model_len", str(engine.max_model_len)),
        ("max_num_seqs", f"{engine.max_num_seqs} on each of {num_lanes} verifiers" if num_lanes > 1 else str(engine.max_num_seqs)),
        ("max_num_batched_tokens", str(engine.max_num_batched_tokens)),
        ("KV cache", f"{verifier.num_blocks} blocks of {verifier.block_size} tokens"),
    ]
    if not engine.num_speculative_tokens:
        return [*rows, ("method", "none: plain decoding")]
    drafting = [config.speculative_config for config in stack.drafters]
    rows.append(("method", ", ".join(dict.fromkeys("+".join(each.methods) for each in drafting))))
    rows.append(("num_speculative_tokens", str(engine.num_speculative_tokens)))
    lookups = dict.fromkeys(f"{each.prompt_lookup_min}, {each.prompt_lookup_max}" for each in drafting if "ngram" in each.methods)
    if lookups:
        rows.append(("prompt_lookup_min, prompt_lookup_max", " and ".join(lookups)))
    if speculative.enable_adaptive_verification:
        rows.append(("enable_adaptive_verification", "true"))
    return [*rows, ("rejection_sample_method", speculative.rejection_sample_method), ("draft_sample_method", speculative.draft_sample_method)]


def name_drafts(method: str, model_id: str) -> str:
    """Where drafts come from: the method and its model; of methods that look drafts up, and of lists of them, the id alone, which has the name."""
    names, methods = model_id.split("+"), method.split("+")
    says_method = len(names) == len(methods) and all(map(str.startswith, names, methods))
    return model_id if says_method else f"{method} {model_id}".strip()


def _numbers(description: ServiceDescription) -> str:
    """Its dtype, and before it the format of the weights where the dtype does not say it."""
    return f"{description.weights} weights, {description.dtype}" if description.weights in ("int4", "int8") else description.dtype


def clipping(stack: Stack, engine: EngineDescription, drafters: Sequence[ServiceDescription]) -> list[str]:
    """What does not take effect as it was written, and why: what the coordinator clips, and what the model services did before."""
    reasons = []
    wanted_len = stack.verifiers[0].max_model_len
    if engine.verifier.max_model_len < wanted_len:
        reasons.append(f"max_model_len clipped from {wanted_len} to {engine.verifier.max_model_len}: KV cache or message size hold no more")
    reasons += engine.reasons
    for drafter in drafters:
        if 0 < drafter.max_model_len < engine.max_model_len:
            reasons.append(f"drafting ends at {drafter.max_model_len} of {engine.max_model_len} tokens: the drafter's window is shorter")
    return reasons + drafter_clipping(stack, engine)


def drafter_clipping(stack: Stack, engine: EngineDescription) -> list[str]:
    """Of drafters with a K of their own: the smaller of it and the coordinator's takes effect."""
    reasons = []
    for index, config in enumerate(stack.drafters):
        own, asked = config.speculative_config.num_speculative_tokens, engine.num_speculative_tokens
        if own != stack.coordinator.speculative_config.num_speculative_tokens:
            reasons.append(f"drafter {index}: its K is {own} and the coordinator's {asked}, so that it drafts at most {min(own, asked)}")
    return reasons
