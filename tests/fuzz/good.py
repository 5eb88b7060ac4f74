"""What the services take: conversations that the fuzz begins with."""

from dataclasses import replace
from typing import Any

from google.protobuf.message import Message

from specwire.messages import DraftCommit, DraftRound, DraftRow, GenerateRequest, Hello, SlotRef, VerifyRound
from specwire.sampling_params import SamplingParams
from specwire.v1 import coordinator_pb2 as pb
from specwire.wire import draft, generate, verify
from tests.drafter.helpers import open_request
from tests.verifier.harness import PROMPT, Rounds, decode, make_verifier, open_message, prefill, tiny_model

SAMPLINGS = (
    SamplingParams(max_tokens=6, seed=1),
    SamplingParams(max_tokens=6, seed=2, temperature=0.9, top_p=0.9, top_k=20, min_p=0.01, logprobs=2, frequency_penalty=0.5, repetition_penalty=1.2),
    SamplingParams(
        max_tokens=5, min_tokens=2, seed=3, temperature=1.0, n=2, stop_token_ids=(4,), logit_bias={5: 2.0}, allowed_token_ids=tuple(range(3, 40)),
        bad_words_token_ids=((7,), (8, 9)), max_draft_tokens=2, priority=1,
    ),
)  # fmt: skip


def request(sampling: SamplingParams) -> pb.GenerateRequest:
    """Short, so that it ends soon whatever is changed."""
    return generate.pack_request(GenerateRequest([5, 17, 33, 5, 17], sampling, request_id="fuzz", timeout_ms=60_000))


def verify_conversation(sampling: SamplingParams) -> list[Message]:
    """Two sequences: prefills in one chunk and in two, drafts, a close."""
    rounds = Rounds(make_verifier(tiny_model(), num_blocks=24, max_model_len=64, max_num_seqs=4, max_num_batched_tokens=64, max_num_draft_tokens=4))
    sampling = sampling.replace(n=1)
    first, second = list(PROMPT), [4, 4, 9, 4, 4]
    parts = [VerifyRound(1, 0, 0, hello=Hello("fuzz", 1, 2))]

    def launch(rows: list, **fields: Any) -> list[list[int]]:
        parts.append(rounds.build(rows, **fields))
        return [row.token_ids for row in rounds.finish(rounds.verifier.launch(parts[-1])).rows]

    opens = [open_message(0, first, sampling), open_message(1, second, sampling)]
    got = launch([prefill(0, 16), prefill(1, 3)], opens=opens)
    first += got[0]
    got = launch([decode(0, first, [3, 4]), prefill(1, 3)])
    first, second = first + got[0], second + got[1]
    got = launch([decode(0, first), decode(1, second, [5])])
    launch([], closes=[SlotRef(0, 1), SlotRef(1, 1)])
    return [verify.pack_round(part) for part in parts]


def draft_conversation() -> list[Message]:
    """Two sequences: drafts, commits, a close."""
    first = DraftRound(1, 0, 0, hello=Hello("fuzz", 1, 2))
    tokens = [5, 6, 7, 8, 5, 6]
    parts = [
        first,
        replace(first, hello=None, round=1, opens=[open_request(tokens), open_request([9], slot=1)], rows=[DraftRow(0, 1, 6, 4, 0)]),
        replace(first, hello=None, round=2, commits=[DraftCommit(0, 1, 6, [7, 8])], rows=[DraftRow(0, 1, 8, 4, 1), DraftRow(1, 1, 1, 2, 0)]),
        replace(first, hello=None, round=3, closes=[SlotRef(0, 1)], rows=[DraftRow(1, 1, 1, 2, 2)]),
    ]
    return [draft.pack_round(part) for part in parts]
