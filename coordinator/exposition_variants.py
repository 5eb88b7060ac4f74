"""The metrics of a canary and its base by name, and their values now."""

from collections.abc import Iterator
from functools import partial

from specwire.metrics import Metric, Sample, make_counter, make_gauge, make_histogram

from .engine import Engine

_counter, _gauge, _histogram = partial(make_counter, "coordinator"), partial(make_gauge, "coordinator"), partial(make_histogram, "coordinator")
SHARE = _gauge("variant_share_ratio", "share of the requests that run with base or canary, while a canary runs", "variant")
REQUESTS = _counter("variant_requests", "admitted requests of base and canary, since the start of the last canary", "variant")
ENDED = _counter("variant_sequences", "their ended sequences, which the other numbers are about", "variant")
FAILED = _counter("variant_failed_sequences", "those of them that ended with an error", "variant")
GENERATED = _counter("variant_generated_tokens", "generated tokens of ended sequences of base and canary", "variant")
DRAFTS = _counter("variant_drafts", "their verifications with at least one draft token", "variant")
VERIFIED = _counter("variant_verified_tokens", "draft tokens that the target verified for them", "variant")
ACCEPTED = _counter("variant_accepted_tokens", "those of them that were accepted", "variant")
FIRST_TOKEN = _histogram("variant_time_to_first_token_seconds", "from arrival to the first token of their sequences", "variant")
TOKEN = _histogram("variant_time_per_token_seconds", "mean time between tokens of each of their sequences", "variant")
VARIANT_METRICS: tuple[Metric, ...] = (SHARE, REQUESTS, ENDED, FAILED, GENERATED, DRAFTS, VERIFIED, ACCEPTED, FIRST_TOKEN, TOKEN)


def collect_variants(engine: Engine) -> Iterator[Sample]:
    """Everything as it is now; may run on any thread. Nothing before the first canary."""
    for status in engine.variants.status():
        yield Sample(SHARE, (status.name,), status.share)
    for variant in engine.variants.measured:
        for metric, value in (
            (REQUESTS, variant.num_requests),
            (ENDED, variant.num_ended),
            (FAILED, variant.num_failed),
            (GENERATED, variant.num_generated_tokens),
            (DRAFTS, variant.num_drafts),
            (VERIFIED, variant.num_draft_tokens),
            (ACCEPTED, variant.num_accepted_tokens),
            (FIRST_TOKEN, variant.first_token),
            (TOKEN, variant.token),
        ):
            yield Sample(metric, (variant.name,), value)
