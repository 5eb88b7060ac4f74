"""Every message survives the wire unchanged, and arrays that do not fit together are refused by name."""

from array import array

import pytest

from specwire import messages as m
from specwire.errors import InvalidArgumentError
from specwire.sampling_params import SamplingParams
from specwire.v1 import types_pb2, verifier_pb2
from specwire.wire import common, describe, draft, generate, verify
from tests.wire.responses import unpack_batch_response, unpack_response

SAMPLING = SamplingParams(
    n=2, max_tokens=7, min_tokens=1, temperature=0.7, top_p=0.9, top_k=40, min_p=0.05, seed=2**64 - 1, presence_penalty=0.5, frequency_penalty=-0.25,
    repetition_penalty=1.25, stop=("a", "ß"), include_stop_str_in_output=True, stop_token_ids=(5, 6), ignore_eos=True, logit_bias={3: -1.5, 4: 2.0},
    allowed_token_ids=(1, 2, 3), bad_words_token_ids=((1,), (2, 3)), logprobs=3, max_draft_tokens=4, priority=-2,
)  # fmt: skip
FEATURE = m.FeatureHandle(9, 1, 2, "hash", "17/5/token", [4, 5], 16, 3, 2**62, 6, "unix:features", "verifier")
TIMING = m.RoundTiming(1, 2, 3, 4)
OUTCOMES = [[m.ConditionalOutcome(0, 7, [1, 2], [0.5, 0.25]), m.ConditionalOutcome(2, 8, [], [])], []]


def through(message, pack, unpack):
    packed = pack(message)
    return unpack(type(packed).FromString(packed.SerializeToString()))


def test_sampling_round_trip():
    assert through(SAMPLING, common.pack_sampling, common.unpack_sampling) == SAMPLING


def test_explicit_zeros_arrive_as_zeros():
    params = SamplingParams(temperature=0.0, seed=0, logprobs=0, min_tokens=0, top_k=0, max_draft_tokens=0)
    arrived = through(params, common.pack_sampling, common.unpack_sampling)
    assert (arrived.temperature, arrived.seed, arrived.logprobs, arrived.min_tokens, arrived.top_k, arrived.max_draft_tokens) == (0.0, 0, 0, 0, 0, 0)
    packed = common.pack_sampling(params)
    for name in ("temperature", "seed", "logprobs", "min_tokens", "top_k", "max_draft_tokens"):
        assert packed.HasField(name), name


def test_absent_sampling_fields_take_defaults():
    arrived = common.unpack_sampling(types_pb2.SamplingParams())
    assert arrived == SamplingParams(max_tokens=None)
    assert arrived.seed is None
    assert arrived.logprobs is None
    assert arrived.max_draft_tokens is None
    assert common.unpack_sampling(types_pb2.SamplingParams(allowed_token_ids={"token_ids": b"\x01\0\0\0"})).allowed_token_ids == (1,)


def test_verify_round_trip():
    message = m.VerifyRound(
        session=2**63 + 1, lane=3, round=17, closes=[m.SlotRef(4, 2)],
        opens=[m.VerifyOpen(4, 3, [1, 2, 3], 2, SAMPLING, 2**64 - 1, 1, (2, 3), b"tenant", (0.75, 0.5), "blue", "request-1")],
        rows=[
            m.VerifyRow(4, 3, 0, token_budget=512),
            m.VerifyRow(5, 1, 2**40, base_len=9, first_token=11, draft_tokens=[7, 8]),
            m.VerifyRow(6, 1, 16, base_len=10, from_round=16),
        ],
        overlays=[m.LogitOverlay(1, 0, [3, 4], b"\x01")], proposals=m.Proposals(2, [1, 2, 3, 4], [0.5, 0.25, 0.5, 0.25]),
        conditional=[OUTCOMES[0], [], []], hello=m.Hello("c", 5, 2), traceparents=("00-a-b-01", "00-c-d-01"), sent_ns=99,
    )  # fmt: skip
    assert through(message, verify.pack_round, verify.unpack_round) == message


def test_verify_result_round_trip():
    logprobs = [m.TokenLogprobs(-0.5, [(1, -0.5), (2, -1.5)]), m.TokenLogprobs(-0.25, [(3, -0.25), (1, -2.0)])]
    message = m.VerifyResult(
        session=1, lane=0, round=3,
        rows=[
            m.VerifyRowResult(m.RowStatus.OK, 12, 16, 1, [5, 6], logprobs),
            m.VerifyRowResult(m.RowStatus.OUT_OF_BLOCKS),
            m.VerifyRowResult(m.RowStatus.BAD, error="NaN logits"),
            m.VerifyRowResult(m.RowStatus.OK, 13, 0, 0, [9], [m.TokenLogprobs(-1.0, [])]),
        ],
        free_blocks=10, promised_blocks=2, num_padded_tokens=8, features=[FEATURE], chosen_outcomes=[-1, 0, 0, 0], timing=TIMING,
        welcome=m.Welcome("v", 2, 12), draining=True, opened_num_cached_tokens=[0, 48],
    )  # fmt: skip
    assert through(message, verify.pack_result, verify.unpack_result) == message


def test_draft_round_trip():
    message = m.DraftRound(
        session=1, lane=2, round=3, closes=[m.SlotRef(0, 1)], opens=[m.DraftOpen(0, 2, [1, 2], 2, SAMPLING, 7, 0, b"t", "v", "r")],
        commits=[m.DraftCommit(1, 1, 5, [6, 7]), m.DraftCommit(2, 1, 5, [])], features=[FEATURE], rows=[m.DraftRow(1, 1, 7, 5, 2)],
        hello=m.Hello("c", 1, 1), traceparents=("t",), sent_ns=5,
    )  # fmt: skip
    assert through(message, draft.pack_round, draft.unpack_round) == message


def test_draft_result_round_trip():
    message = m.DraftResult(
        session=1, lane=2, round=0,
        rows=[
            m.DraftRowResult(m.RowStatus.OK, 1, 1, 7, [4, 5], array("f", [0.5, 0.25])),
            m.DraftRowResult(m.RowStatus.CATCHING_UP, 2, 1, 9, error="behind"),
        ],
        proposals=m.Proposals(1, [4, 5], [0.5, 0.25]), conditional=OUTCOMES, timing=TIMING, welcome=m.Welcome("d", 1, 3), draining=True,
    )  # fmt: skip
    assert through(message, draft.pack_result, draft.unpack_result) == message


def test_description_round_trip():
    message = m.ServiceDescription(
        "id", "i", 49152, 8192, 5, 16, "w", "f", "bfloat16", "1", "cpu", 16, 100, (1, 2), (m.FeatureSet("eagle3", "h", (2, 15), 576, "bfloat16"),),
        m.VerifyCost((1, 8), (1.5, 2.5), 0.5, 0.25, 8, 6, (16, 32), (4.5, 8.5)), (m.DraftCost(5, 1, 0.5),), "0.1.0", "ngram", (2,), 512, 1 << 20,
        True, "synthetic", 0.125, draft_chunk_ms=6.5,
    )  # fmt: skip
    assert through(message, describe.pack_description, describe.unpack_description) == message


def test_tokenizer_round_trip():
    message = m.TokenizerSpec(b'{"a": 1}', "f", (2, 0), 100, "{{ x }}", 1, True, "id", 8192)
    assert through(message, describe.pack_tokenizer, describe.unpack_tokenizer) == message
    bare = m.TokenizerSpec(b"{}", "f", (), 1)
    assert through(bare, describe.pack_tokenizer, describe.unpack_tokenizer) == bare


def test_generate_request_round_trip():
    message = m.GenerateRequest([1, 2], SAMPLING, "r", b"k", "v", (0.5,), 0, "t")
    assert through(message, generate.pack_request, generate.unpack_request) == message
    assert through(m.GenerateRequest([1]), generate.pack_request, generate.unpack_request).timeout_ms is None


def test_choice_round_trip():
    full = m.ChoiceDelta(
        1, [5, 6], bytes([2, 4]), "text", [m.TokenLogprobs(-0.5, [(5, -0.5)]), m.TokenLogprobs(-1.0, [(6, -1.0)])], m.FinishReason.STOP, "\n\n",
        m.Usage(3, 0, 2), m.SpecStats(1, 5, 1, (1, 0, 0, 0, 0), 1, 0, True), m.ErrorStatus(13, "x"),
    )  # fmt: skip
    assert unpack_response(generate.pack_response([full, m.ChoiceDelta(0, [], text="", stop_cause=0)])) == [
        full,
        m.ChoiceDelta(0, [], text="", stop_cause=0),
    ]


def test_session_round_trip():
    update = m.SessionUpdate(
        deltas=[m.StreamDelta(7, 0, [1, 2], bytes([1, 2])), m.StreamDelta(2**62, 1, [], b"")],
        events=[m.SessionEvent(7, m.ChoiceDelta(0, [1], b"\1")), m.SessionEvent(8, error=m.ErrorStatus(3, "bad")), m.SessionEvent(7, done=True)],
    )
    assert through(update, generate.pack_update, generate.unpack_update) == update
    start = m.SessionStart(3, m.GenerateRequest([4], SAMPLING))
    assert generate.unpack_command(generate.pack_command([generate.pack_start(start)], [1, 2])) == ([start], [1, 2])
    assert unpack_batch_response(generate.pack_batch_response(4, [], m.ErrorStatus(8, "full"))) == (4, [], m.ErrorStatus(8, "full"))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda rows: setattr(rows, "slots", b"\0\0\0"), "rows.slots has 3 bytes"),
        (lambda rows: setattr(rows, "epochs", b"\0" * 8), "epochs has 2 values, but slots has 1"),
        (lambda rows: setattr(rows, "num_drafts", b"\x05\0\0\0"), "rows.draft_tokens holds 1 values, but its counts add up to 5"),
        (lambda rows: setattr(rows, "num_drafts", b"\xff\xff\xff\xff"), "count of -1"),
        (lambda rows: rows.proposals.MergeFrom(types_pb2.Proposals(num_candidates=3)), "proposals hold 0 ids"),
        (lambda rows: rows.overlays.add(row=1), "overlay names row 1"),
    ],
)
def test_misfit_arrays_are_refused(change, words):
    packed = verify.pack_round(m.VerifyRound(1, 0, 1, rows=[m.VerifyRow(0, 1, 0, base_len=2, first_token=3, draft_tokens=[4])]))
    change(packed.rows)
    with pytest.raises(InvalidArgumentError, match=words):
        verify.unpack_round(packed)


def test_unknown_status_is_refused():
    packed = verify.pack_result(m.VerifyResult(1, 0, 1, rows=[m.VerifyRowResult(m.RowStatus.OK)]))
    packed.statuses = b"\x09"
    with pytest.raises(InvalidArgumentError, match="statuses hold 9"):
        verify.unpack_result(verifier_pb2.VerifyResponse.FromString(packed.SerializeToString()))


@pytest.mark.parametrize("data", [b"not gzip", describe.pack_tokenizer(m.TokenizerSpec(b"{}" * 100, "f", (), 1)).tokenizer_json_gz[:-9]])
def test_broken_tokenizer_is_refused(data):
    with pytest.raises(InvalidArgumentError, match="tokenizer_json_gz"):
        describe.unpack_tokenizer(types_pb2.TokenizerSpec(tokenizer_json_gz=data))


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda packed: setattr(packed.verify_cost, "step_ms", b""), "verify_cost.step_ms has 0 values, but verify_cost.num_tokens has 1"),
        (lambda packed: setattr(packed.verify_cost, "chunk_ms", b""), "verify_cost.chunk_ms has 0 values, but verify_cost.chunk_num_tokens has 1"),
        (lambda packed: setattr(packed.draft_cost, "draft_ms", b""), "draft_cost.draft_ms has 0 values, but draft_cost.num_draft_tokens has 1"),
    ],
)
def test_cost_tables_with_missing_values_are_refused(change, words):
    description = m.ServiceDescription(
        "model",
        "id",
        1,
        1,
        1,
        1,
        verify_cost=m.VerifyCost((1,), (2.0,), chunk_num_tokens=(8,), chunk_ms=(3.0,)),
        draft_cost=(m.DraftCost(1, 1, 1.0),),
    )
    packed = describe.pack_description(description)
    change(packed)
    with pytest.raises(InvalidArgumentError, match=words):
        describe.unpack_description(packed)


def test_cost_tables_of_an_older_service_are_read():
    old = types_pb2.ServiceDescription(
        verify_cost=types_pb2.VerifyCostTable(num_tokens=b"\x01\0\0\0", step_ms=b"\0\0\0\x40", ms_per_row=0.5, max_graph_tokens=1),
        draft_cost=types_pb2.DraftCostTable(num_draft_tokens=b"\x05\0\0\0", num_sequences=b"\x01\0\0\0", draft_ms=b"\0\0\x80\x3f"),
    )
    description = describe.unpack_description(old)
    assert description.verify_cost == m.VerifyCost((1,), (2.0,), ms_per_row=0.5, max_graph_tokens=1)
    assert (description.draft_cost, description.draft_ms_per_kv_token) == ((m.DraftCost(5, 1, 1.0),), 0.0)


def test_conditional_drafts_need_a_count_a_row():
    packed = draft.pack_result(m.DraftResult(1, 0, 1, [m.DraftRowResult(m.RowStatus.OK, 0, 1, 2)], conditional=[[], []]))
    with pytest.raises(InvalidArgumentError, match="num_outcomes has 2 values, but the round has 1 rows"):
        draft.unpack_result(packed)
