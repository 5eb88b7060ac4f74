"""Scripts over the tests' byte tokenizer: a target that writes text, and a drafter for it."""

import dataclasses
from typing import Any

from tests.coordinator.byte_tokenizer import EOS, VOCAB_SIZE, make_spec
from tests.scripted.drafter import DrafterScript
from tests.scripted.verifier import VerifierScript

LETTERS = tuple(b"abcdefghijklmnopqrstuvwxyz   ")


def byte_verifier_script(**changes: Any) -> VerifierScript:
    """A target that says lower-case letters and spaces and never ends by itself."""
    script = VerifierScript(vocab_size=VOCAB_SIZE, alphabet=LETTERS, eos_token_ids=(EOS,), tokenizer=make_spec())
    return dataclasses.replace(script, **changes)


def byte_drafter_script(**changes: Any) -> DrafterScript:
    """A drafter that is right four times out of five."""
    script = DrafterScript(vocab_size=VOCAB_SIZE, alphabet=LETTERS, tokenizer_fingerprint=make_spec().fingerprint, acceptance=0.8)
    return dataclasses.replace(script, **changes)
