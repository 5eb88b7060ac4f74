"""Which heads' features a verifier keeps."""

import logging

from specwire.config import VerifierConfig
from specwire.draft_checkpoint import HEAD_METHODS
from specwire.engine.checkpoint import resolve_model
from specwire.engine.heads.features import feature_source
from specwire.engine.heads.source import FeatureSource
from specwire.engine.models.config import ModelConfig
from specwire.messages import FeatureSet

logger = logging.getLogger(__name__)


def feature_sources(config: VerifierConfig, target: ModelConfig) -> list[FeatureSource]:
    """What the heads of --features read, and that of the speculative configuration, if its method is a head's; equal features once.

    Raises:
        SpecwireError: no head, or one made for another target; naming both.
    """
    sources: dict[str, FeatureSource] = {}
    for name in head_names(config):
        source = feature_source(resolve_model(name, is_head=True), target)
        if source.hash in sources:
            logger.info("the heads %s and %s read the same features, which are kept once", sources[source.hash].name, source.name)
        else:
            sources[source.hash] = source
            logger.info("keeping features of %s: layers %s, %d numbers a token (%s)", source.name, source.layer_ids, source.width, source.dtype)
    return list(sources.values())


def head_names(config: VerifierConfig) -> list[str]:
    """Folders or hub ids, each once. A head without a model of its own (mtp) is in the target's folder."""
    spec = config.speculative_config
    drafting = [spec.model or config.model] if set(spec.methods) & set(HEAD_METHODS) else []
    return list(dict.fromkeys([*config.features, *drafting]))


def describe_features(sources: list[FeatureSource]) -> tuple[FeatureSet, ...]:
    """As Describe says it."""
    return tuple(FeatureSet(one.name, one.hash, one.layer_ids, one.width, str(one.dtype).removeprefix("torch.")) for one in sources)
