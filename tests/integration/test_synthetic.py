"""Synthetic acceptance through all services: drafts are accepted at the configured rates, whatever they are."""

import asyncio
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path

import grpc
import pytest

from specwire.messages import ChoiceDelta, GenerateRequest, SpecStats, VerifyResult
from specwire.rpc import open_channel
from specwire.sampling_params import SamplingParams
from specwire.v1 import coordinator_pb2_grpc
from specwire.wire import generate
from tests.engine.tiny_models import save_tiny_model
from tests.wire.responses import unpack_response
from verifier_svc.launched import LaunchedRound
from verifier_svc.verifier import Verifier

from .invariance import add_spec
from .tiny import drafter_config, tiny_stack, verifier_config

_K = 4
_DEFAULT_RATES = (0.8, 0.6, 0.4, 0.2)
_RATES_BY_LABEL = {"default": (), "half": (1.0, 0.5, 0.25, 0.0), "never": (0.0, 0.0, 0.0, 0.0), "always": (1.0, 1.0, 1.0, 1.0)}
_NUM_REQUESTS = 12
_NUM_TOKENS = 120


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("synthetic") / "tiny"
    save_tiny_model(path)
    return path


class Rows:
    """What became of the drafts of each verified row, by the label of its request."""

    def __init__(self, verifier: Verifier) -> None:
        self.by_label: defaultdict[str, list[tuple[int, int]]] = defaultdict(list)
        self._labels: dict[tuple[int, int], str] = {}
        self._finish = verifier.finish
        verifier.finish = self._record  # type: ignore[method-assign]

    def acceptance(self, label: str) -> list[float]:
        """Share of rows whose first i + 1 drafts were all accepted, among those that have as many."""
        rows = self.by_label[label]
        return [sum(a > i for n, a in rows if n > i) / sum(n > i for n, _ in rows) for i in range(_K)]

    def _record(self, launched: LaunchedRound) -> VerifyResult:
        request, result = launched.request, self._finish(launched)
        self._labels |= {(message.slot, message.epoch): message.request_id for message in request.opens}
        for row, answer in zip(request.rows, result.rows, strict=True):
            if row.draft_tokens:
                self.by_label[self._labels[row.slot, row.epoch]].append((len(row.draft_tokens), answer.num_accepted))
        return result


async def run(stub: coordinator_pb2_grpc.CoordinatorServiceStub, label: str, rates: Sequence[float], seed: int) -> tuple[list[int], SpecStats]:
    """One request through the Generate call, which can carry rates: all token ids, and the statistics."""
    params = SamplingParams(temperature=1.0, seed=seed, max_tokens=_NUM_TOKENS, ignore_eos=True)
    request = GenerateRequest([32 + seed, 97, 98], params, label, synthetic_acceptance_rates=tuple(rates))
    token_ids: list[int] = []
    last: ChoiceDelta | None = None
    async for response in stub.Generate(generate.pack_request(request)):
        for last in unpack_response(response):
            token_ids += last.token_ids
    assert last is not None
    assert last.spec_stats is not None
    return token_ids, last.spec_stats


async def test_acceptance_follows_the_rates_of_each_sequence(socket_dir: Path, folder: Path) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(_DEFAULT_RATES)}
    verifier = verifier_config(folder, num_speculative_tokens=_K, speculation=synthetic)
    speculation = {"num_speculative_tokens": _K}
    async with (
        tiny_stack(socket_dir, verifier, drafter_config(folder), speculation=speculation) as stack,
        open_channel(stack.coordinator.address) as channel,
    ):
        rows = Rows(stack.verifier)
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        totals: dict[str, SpecStats] = {}
        requests = [(label, rates, seed) for label, rates in _RATES_BY_LABEL.items() for seed in range(_NUM_REQUESTS)]
        results = await asyncio.gather(*(run(stub, *request) for request in requests))
    for (label, _, _), (token_ids, spec) in zip(requests, results, strict=True):
        assert len(token_ids) == _NUM_TOKENS
        assert spec.synthetic
        totals[label] = add_spec(totals.get(label, SpecStats()), spec)
    for label, rates in _RATES_BY_LABEL.items():
        wanted = rates or _DEFAULT_RATES
        assert rows.acceptance(label) == pytest.approx(wanted, abs=0.06), label
        # The coordinator's statistics say what the verifier did.
        assert totals[label].num_draft_tokens == sum(n for n, _ in rows.by_label[label])
        assert totals[label].num_accepted_tokens == sum(a for _, a in rows.by_label[label])
        assert totals[label].num_drafts == len(rows.by_label[label]) > 250
    assert rows.acceptance("always") == [1.0] * _K
    assert rows.acceptance("never") == [0.0] * _K


async def test_rates_are_refused_with_their_values(socket_dir: Path, folder: Path) -> None:
    synthetic = {"rejection_sample_method": "synthetic", "synthetic_acceptance_rates": list(_DEFAULT_RATES)}
    verifier = verifier_config(folder, num_speculative_tokens=_K, speculation=synthetic)
    async with tiny_stack(socket_dir, verifier, drafter_config(folder)) as stack, open_channel(stack.coordinator.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        for rates, message in ((0.5, 0.5), "has 2 entries, but num_speculative_tokens is 4"), ((0.25, 0.5, 0.5, 0.5), "rise from 0.25 to 0.5"):
            with pytest.raises(grpc.aio.AioRpcError) as refusal:
                await run(stub, "wrong", rates, 0)
            assert refusal.value.code() is grpc.StatusCode.INVALID_ARGUMENT
            assert message in (refusal.value.details() or "")
    async with tiny_stack(socket_dir, verifier_config(folder), drafter_config(folder)) as stack, open_channel(stack.coordinator.address) as channel:
        stub = coordinator_pb2_grpc.CoordinatorServiceStub(channel)
        with pytest.raises(grpc.aio.AioRpcError) as refusal:
            await run(stub, "strict", _DEFAULT_RATES, 0)
        assert refusal.value.code() is grpc.StatusCode.FAILED_PRECONDITION
        assert "rejection_sample_method is strict; leave them out, or start it with synthetic" in (refusal.value.details() or "")
        result = await stack.client.generate([1, 2, 3], max_tokens=8)
        assert not result.spec.synthetic
