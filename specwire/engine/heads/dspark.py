"""DSpark (https://arxiv.org/abs/2607.05147): DFlash's block, drawn token by token with a low-rank bias by the previous one, and confidences."""

from pathlib import Path

from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.markov import Confidence, Markov
from specwire.engine.heads.tensors import HeadReader
from specwire.errors import InvalidArgumentError, UnsupportedError

_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_PROJ = "confidence_head.proj"
TOP_K = "dspark_draft_topk"
"""Key of a configuration."""
_TEMPERATURES = "confidence_temperatures"


def dspark_head(reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> BlockHead:
    """Arguments and errors as `BlockHead`."""
    # The paper's heads have no such key and draft at the anchor; the library's default is the same.
    first_draft = 0 if config.flag("sample_from_anchor", default=True) else 1
    markov = _read_markov(reader, config)
    confidence = _read_confidence(reader, config, markov)
    return BlockHead(reader, config, target, num_positions, first_draft=first_draft, markov=markov, confidence=confidence)


def _read_markov(reader: HeadReader, config: HeadConfig) -> Markov | None:
    rank = config.number("markov_rank", 0)
    if not rank:
        return None
    kind = config.options.get("markov_head_type", "vanilla")
    if kind != "vanilla":
        raise UnsupportedError(f"{config.name}: markov_head_type is {kind!r}, but only 'vanilla' is built; use a head with it")
    top_k = config.number(TOP_K, 0)
    if top_k > config.draft_vocab_size:
        raise InvalidArgumentError(f"{config.name}: {TOP_K} is {top_k}, but the head drafts {config.draft_vocab_size} ids; lower it")
    return Markov(reader.single(_W1, config.layers.vocab_size, rank), reader.single(_W2, config.draft_vocab_size, rank), top_k)


def _read_confidence(reader: HeadReader, config: HeadConfig, markov: Markov | None) -> Confidence | None:
    if not config.flag("enable_confidence_head"):
        return None
    width, with_markov = config.layers.hidden_size, config.flag("confidence_head_with_markov")
    if with_markov and markov is None:
        raise InvalidArgumentError(f"{config.name}: confidence_head_with_markov is true, but markov_rank is 0; save the head again")
    if with_markov and markov is not None:
        width += markov.w1.shape[1]
    weight = reader.tensors.read(f"{_PROJ}.weight", (1, width))[0].to(reader.device, copy=True)
    bias = float(reader.tensors.read(f"{_PROJ}.bias", (1,))[0]) if f"{_PROJ}.bias" in reader.tensors else 0.0
    temperatures = config.options.get(_TEMPERATURES) or []
    if not isinstance(temperatures, list) or not all(isinstance(t, (int, float)) and t > 0 for t in temperatures):
        raise InvalidArgumentError(f"{config.name}: {_TEMPERATURES} is {temperatures!r}, but must be a list of numbers above 0")
    return Confidence(weight, bias, markov if with_markov else None, tuple(map(float, temperatures)))
