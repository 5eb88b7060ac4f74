"""Features over gRPC: what a drafter gets on its own stream beside the rounds, and how that stream ends."""

import asyncio
from pathlib import Path

import grpc
import pytest
import torch

from specwire.messages import FeaturePull, FeatureRange, RowStatus
from specwire.wire.features import pack_pull, unpack_pulled
from tests.verifier.harness import GREEDY, Rounds, make_verifier, open_message, prefill, serve
from tests.verifier.test_features import LONG, SOURCES, true_features


async def test_a_drafter_pulls_what_the_last_round_computed(model, socket_dir: Path):
    verifier, source = make_verifier(model, features=SOURCES), SOURCES[0]
    async with serve(verifier, socket_dir) as served:
        stream, pulls = served.stream(), served.stub.PullFeatures()
        await stream.start()
        rounds = Rounds(verifier)
        result = await stream.round_trip(rounds.build([prefill(0, 30)], opens=[open_message(0, LONG, GREEDY)]))
        [handle] = result.features
        assert (handle.num_positions, handle.address, handle.source) == (30, "", "")
        ranges = [FeatureRange(handle.generation, 3, 20), FeatureRange(handle.generation, 25, 6), FeatureRange(handle.generation + 1, 0, 1)]
        await pulls.write(pack_pull(FeaturePull(source.hash, ranges)))
        pulled = unpack_pulled(await pulls.read())
        assert pulled.statuses == [RowStatus.OK, RowStatus.BAD, RowStatus.STALE]
        found = torch.frombuffer(bytearray(pulled.data), dtype=source.dtype).view(-1, source.width)
        torch.testing.assert_close(found, true_features(model, LONG, source)[3:23], atol=1e-4, rtol=1e-4)
        samples = {(sample.metric.name, sample.label_values): sample.value for sample in served.server.metrics.collect()}
        assert [samples["specwire_verifier_feature_ranges_total", (status,)] for status in ("ok", "stale", "bad")] == [1, 1, 1]
        assert samples["specwire_verifier_feature_bytes_total", ()] == 20 * source.width * 4
        assert samples["specwire_verifier_feature_seconds", ()].count == 1
        await pulls.done_writing()
        assert await pulls.read() is grpc.aio.EOF


async def test_a_wrong_request_ends_the_stream_with_its_reason(model, socket_dir: Path):
    async with serve(make_verifier(model, features=SOURCES), socket_dir, max_message_bytes=1 << 16) as served:
        for pull, reason in (
            (FeaturePull("other", []), "features other are not kept here"),
            (FeaturePull(SOURCES[0].hash, [FeatureRange(1, 0, 10_000)]), "have 960000 bytes of features, but an answer may have 61440"),
        ):
            pulls = served.stub.PullFeatures()
            await pulls.write(pack_pull(pull))
            with pytest.raises(grpc.aio.AioRpcError, match="INVALID_ARGUMENT") as caught:
                await pulls.read()
            assert reason in caught.value.details()


async def test_a_verifier_without_heads_says_what_to_start_it_with(model, socket_dir: Path):
    async with serve(make_verifier(model), socket_dir) as served:
        pulls = served.stub.PullFeatures()
        with pytest.raises(grpc.aio.AioRpcError, match="UNIMPLEMENTED") as caught:
            await pulls.read()
        assert "start it with --features" in caught.value.details()


async def test_a_verifier_that_stops_ends_the_streams_of_idle_drafters(model, socket_dir: Path):
    """It need not wait for them as long as it would for rounds."""
    async with serve(make_verifier(model, features=SOURCES), socket_dir) as served:
        pulls = served.stub.PullFeatures()
        await pulls.write(pack_pull(FeaturePull(SOURCES[0].hash, [])))
        assert unpack_pulled(await pulls.read()).statuses == []
        stop = asyncio.create_task(served.server.stop(60.0))
        with pytest.raises(grpc.aio.AioRpcError, match="UNAVAILABLE") as caught:
            await pulls.read()
        assert "the verifier is stopping" in caught.value.details()
        assert await asyncio.wait_for(stop, 30)
