"""The default model through the whole service: text, drafts, description, tokenizer."""

import time
from collections.abc import AsyncIterator

import pytest
import torch

from specwire.config import VerifierConfig
from specwire.messages import Hello, RowStatus
from specwire.rpc import open_channel
from specwire.tokenizer import Tokenizer
from specwire.v1 import verifier_pb2 as pb
from specwire.v1 import verifier_pb2_grpc
from specwire.wire.describe import unpack_description, unpack_tokenizer
from tests.verifier.harness import GREEDY, Rounds, VerifyStream, decode, open_message, prefill
from verifier_svc.loading import load_verifier
from verifier_svc.server import VerifierServer

NUM_TOKENS = 8


@pytest.fixture
async def server(socket_dir) -> AsyncIterator[VerifierServer]:
    before = torch.get_num_threads()
    config = VerifierConfig(listen=(f"unix:{socket_dir}/v.sock",), dtype="float32", kv_cache_memory=64 << 20)
    server = VerifierServer(config.listen, lambda: load_verifier(config, "me"), "me")
    await server.start()
    await server.load()
    yield server
    await server.stop(1.0)
    torch.set_num_threads(before)


async def test_smollm2_answers_alike_with_and_without_drafts(server):
    async with open_channel(server.bound_addresses[0]) as channel:
        stub = verifier_pb2_grpc.VerifierServiceStub(channel)
        description = unpack_description((await stub.Describe(pb.VerifierServiceDescribeRequest())).description)
        assert (description.model_id, description.vocab_size, description.dtype) == ("SmolLM2-135M-Instruct", 49_152, "float32")
        assert description.max_model_len == 1456  # what 64 MiB of float32 KV hold of 8,192
        assert len(description.verify_cost.num_tokens) >= 1
        tokenizer = Tokenizer(unpack_tokenizer((await stub.GetTokenizer(pb.VerifierServiceGetTokenizerRequest())).tokenizer))
        assert tokenizer.fingerprint == description.tokenizer_fingerprint
        assert tokenizer.eos_token_ids == description.eos_token_ids

        prompt = tokenizer.encode_chat([{"role": "user", "content": "What is the capital of France?"}])
        stream = VerifyStream(stub, Hello("test", time.time_ns(), 2))
        await stream.start()
        rounds = Rounds(None)
        first = await stream.round_trip(rounds.build([prefill(0, 512)], opens=[open_message(0, prompt, GREEDY)]))
        plain = list(first.rows[0].token_ids)
        while len(plain) < NUM_TOKENS:
            answer = await stream.round_trip(rounds.build([decode(0, prompt + plain)]))
            plain += answer.rows[0].token_ids
        assert "Paris" in tokenizer.decode(plain)

        first = await stream.round_trip(rounds.build([prefill(1, 512)], opens=[open_message(1, prompt, GREEDY)]))
        assert (first.rows[0].num_cached_tokens, first.rows[0].token_ids) == ((len(prompt) - 1) // 16 * 16, plain[:1])
        answer = await stream.round_trip(rounds.build([decode(1, prompt + plain[:1], [*plain[1:4], 0, 0])]))
        assert (answer.rows[0].status, answer.rows[0].num_accepted, answer.rows[0].token_ids) == (RowStatus.OK, 3, plain[1:5])
