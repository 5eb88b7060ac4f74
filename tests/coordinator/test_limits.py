"""Which drafters may draft for a verifier, by their tokenizers and vocabularies."""

import pytest

from coordinator.limits import check_drafter
from specwire.config import CoordinatorConfig
from specwire.errors import FailedPreconditionError
from specwire.messages import ServiceDescription
from specwire.policy.capacity import check_match, describe_engine


def verifier(fingerprint: str = "", vocab_size: int = 100) -> ServiceDescription:
    return ServiceDescription("target", "v", vocab_size, 64, 5, 4, tokenizer_fingerprint=fingerprint, max_num_batched_tokens=64)


@pytest.mark.parametrize(
    ("ours", "theirs", "matches"),
    [
        (("a", 100), ("a", 100), True),
        (("a", 100), ("a", 128), True),  # a padded vocabulary
        (("a", 100), ("b", 100), False),
        (("", 100), ("", 100), True),  # neither has a tokenizer: the sizes decide
        (("", 100), ("", 128), False),
        (("a", 100), ("", 100), True),
        (("a", 100), ("", 128), False),
        (("", 100), ("a", 100), True),
        (("", 100), ("a", 101), False),
        (("a", 100), ("", 0), True),  # one that works on any ids
    ],
)
def test_drafters_that_match(ours: tuple[str, int], theirs: tuple[str, int], matches: bool) -> None:
    engine = describe_engine(CoordinatorConfig(), [verifier(*ours)])
    drafter = ServiceDescription("draft", "d", theirs[1], 64, 5, 4, tokenizer_fingerprint=theirs[0])
    if matches:
        check_drafter(engine, drafter)
        return
    with pytest.raises(
        FailedPreconditionError, match=f"fingerprint {theirs[0] or 'none'} and {theirs[1]} ids, but the target's has {ours[0] or 'none'}"
    ):
        check_drafter(engine, drafter)


def test_verifiers_without_a_tokenizer_match_each_other_only() -> None:
    check_match(verifier(), verifier())
    with pytest.raises(FailedPreconditionError, match="its tokenizer_fingerprint is 'a', but the first verifier's is ''"):
        check_match(verifier(), verifier("a"))
    with pytest.raises(FailedPreconditionError, match="its vocab_size is 128"):
        check_match(verifier(), verifier(vocab_size=128))
