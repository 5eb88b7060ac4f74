"""The verifier's stream of features under fuzz."""

import contextlib
from collections.abc import AsyncIterator, Sequence
from pathlib import Path

from hypothesis import strategies as st

from specwire.messages import FeaturePull, FeatureRange
from specwire.wire import features
from tests.fuzz.caller import Caller
from tests.fuzz.strategies import Conversation
from tests.fuzz.targets import Target
from tests.verifier.harness import GREEDY, Rounds, make_verifier, open_message, prefill, serve, tiny_model
from tests.verifier.test_features import LONG, SOURCES

_NUM_POSITIONS = 20


class PullTarget(Target):
    """The real verifier with a sequence whose features are there."""

    def __init__(self) -> None:
        super().__init__()
        self._verifier = make_verifier(tiny_model(), features=SOURCES)

    @property
    def strategy(self) -> st.SearchStrategy[Conversation]:
        """The sequence's generation is known only once it is served."""
        return st.deferred(lambda: super(PullTarget, self).strategy)

    @contextlib.asynccontextmanager
    async def serve(self, folder: Path) -> AsyncIterator[None]:
        async with serve(self._verifier, folder) as served:
            self._server, rounds, stream = served.server, Rounds(self._verifier), served.stream()
            await stream.start()
            result = await stream.round_trip(rounds.build([prefill(0, _NUM_POSITIONS)], opens=[open_message(0, LONG, GREEDY)]))
            generation = result.features[0].generation
            ranges = [FeatureRange(generation, 3, 10), FeatureRange(generation, 15, 6), FeatureRange(generation + 1, 0, 1)]
            pulls = [FeaturePull(SOURCES[0].hash, ranges), FeaturePull(SOURCES[1].hash, []), FeaturePull(SOURCES[1].hash, ranges[:1])]
            self.good = [[features.pack_pull(pull) for pull in pulls]]
            self.caller = Caller(served.channel, "/specwire.v1.VerifierService/PullFeatures", streams=True, waits=True)
            yield

    def is_idle(self) -> bool:
        streams = self._server._servicer._features
        assert streams is not None
        return not streams._inboxes

    def summarize(self, responses: Sequence[bytes]) -> object:
        return [features.unpack_pulled(features.pb.PullFeaturesResponse.FromString(response)) for response in responses]
