"""An executor whose rounds arrive when a test says so, as those of a device do."""

import threading
import time
from collections.abc import Sequence

import torch

from specwire.engine.block_manager import BlockManager
from specwire.engine.graphs.runner import RoundCounts
from specwire.engine.kv_cache import KVCache
from specwire.engine.sampling.segments import SegmentTokens
from specwire.engine.sampling.slot import SlotSampling
from verifier_svc.executor import Executor, PendingRound
from verifier_svc.plan import Segment
from verifier_svc.slots import Slot


class LateRound:
    """A round that is on its way until `arrive` is called, with an error if the device failed."""

    def __init__(self, computed: PendingRound) -> None:
        self._computed = computed
        self._arrived = threading.Event()
        self._error: Exception | None = None

    def arrive(self, error: Exception | None = None) -> None:
        self._error = error
        self._arrived.set()

    def is_done(self) -> bool:
        return self._arrived.is_set()

    def wait(self) -> None:
        assert self._arrived.wait(60)

    def results(self) -> list[SegmentTokens]:
        self.wait()
        if self._error is not None:
            raise self._error
        return self._computed.results()


class LateExecutor:
    """Launches on another executor at once, so that blocks are written in order.

    Attributes:
        launched: all rounds, oldest first.
    """

    def __init__(self, inner: Executor) -> None:
        self._inner = inner
        self.launched: list[LateRound] = []

    @property
    def kv_cache(self) -> KVCache:
        return self._inner.kv_cache

    @property
    def sampling_device(self) -> torch.device:
        return self._inner.sampling_device

    @property
    def counts(self) -> RoundCounts:
        return self._inner.counts

    def open(self, slot: Slot) -> None:
        self._inner.open(slot)

    def close(self, slot: Slot) -> None:
        self._inner.close(slot)

    def samples_on_host(self, sampling: SlotSampling) -> bool:
        return self._inner.samples_on_host(sampling)

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> LateRound:
        self.launched.append(LateRound(self._inner.launch(segments, blocks)))
        return self.launched[-1]


class SlowRound:
    """A round that nobody finds done before somebody has waited for it."""

    def __init__(self, computed: PendingRound, delay_s: float) -> None:
        self._computed = computed
        self._delay_s = delay_s
        self._is_done = False

    def is_done(self) -> bool:
        return self._is_done

    def wait(self) -> None:
        time.sleep(self._delay_s)
        self._is_done = True

    def results(self) -> list[SegmentTokens]:
        return self._computed.results()


class SlowExecutor(LateExecutor):
    """Rounds arrive by themselves, after a while. Counts what was launched behind rounds in flight.

    Args:
        delay_s: that it takes to wait for one.
    """

    def __init__(self, inner: Executor, delay_s: float) -> None:
        super().__init__(inner)
        self.num_from_device = 0
        self._delay_s = delay_s

    def launch(self, segments: Sequence[Segment], blocks: BlockManager) -> SlowRound:  # type: ignore[override]
        self.num_from_device += sum(segment.from_device for segment in segments)
        return SlowRound(self._inner.launch(segments, blocks), self._delay_s)
