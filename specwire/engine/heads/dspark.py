"""DSpark (https://arxiv.org/abs/2607.05147): DFlash's block, drawn token by token with a low-rank bias by the previous one, and confidences."""

from pathlib import Path

import torch
import torch.nn.functional as F

from specwire.engine.batch import RaggedBatch
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.device import DevicePass, DeviceTables
from specwire.engine.heads.dflash import BlockLayers, block_size, is_causal, mask_token_id
from specwire.engine.heads.head import Candidates
from specwire.engine.heads.tensors import HeadReader
from specwire.engine.heads.vocabulary import read_vocabulary
from specwire.engine.kv_cache import KVCache
from specwire.errors import InvalidArgumentError, UnsupportedError

_W1, _W2 = "markov_head.markov_w1.weight", "markov_head.markov_w2.weight"
_PROJ = "confidence_head.proj"
TOP_K = "dspark_draft_topk"
"""Key of a configuration."""
_TEMPERATURES = "confidence_temperatures"
_GROUP = 16
"""Columns that are looked at together for the highest logits."""


class Markov:
    """logits + w2 w1[previous]; see `specwire.engine.heads.head.MarkovHead`.

    Args:
        w1: [target's vocab_size, rank].
        w2: [draft_vocab_size, rank].
        top_k: only so many ids of the highest logits get the bias, and all others are left out; 0 = all ids.
    """

    def __init__(self, w1: torch.Tensor, w2: torch.Tensor, top_k: int) -> None:
        self.w1 = w1
        self._w2 = w2.float()
        self._top_k = top_k if top_k < len(w2) else 0

    def candidates(self, logits: torch.Tensor) -> Candidates:
        if not self._top_k:
            return Candidates(None, logits)
        return _best(logits, self._top_k)

    def biased(self, candidates: Candidates, previous: torch.Tensor) -> torch.Tensor:
        states = F.embedding(previous, self.w1).float()  # [R, rank]
        if candidates.columns is None:
            return torch.addmm(candidates.logits, states, self._w2.t())
        return candidates.logits + torch.einsum("rmk,rk->rm", self._w2[candidates.columns], states)


class Confidence:
    """sigmoid(linear(hidden, w1[previous]) / temperature); see `specwire.engine.heads.head.ConfidenceHead`.

    Args:
        weight: [hidden_size] or [hidden_size + rank].
        bias: of the linear function.
        markov: gives w1 where weight has a part for it.
        temperatures: by position, from sequential temperature scaling; positions behind the last have its temperature, none = 1.
    """

    def __init__(self, weight: torch.Tensor, bias: float, markov: Markov | None, temperatures: tuple[float, ...]) -> None:
        self._weight = weight.float()
        self._bias = bias
        self._markov = markov
        self._temperatures = temperatures or (1.0,)

    def __call__(self, hidden: torch.Tensor, previous: torch.Tensor, position: int) -> torch.Tensor:
        rows = hidden.float()
        if self._markov is not None:
            rows = torch.cat((rows, F.embedding(previous, self._markov.w1).float()), -1)
        temperature = self._temperatures[min(position, len(self._temperatures) - 1)]
        return torch.sigmoid((rows @ self._weight + self._bias) / temperature)


class DSparkHead:
    """See `specwire.engine.heads.head.BlockHead`; arguments as `Eagle3Head`."""

    def __init__(self, reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> None:
        self.vocabulary = read_vocabulary(reader, config, target)
        self.mask_token_id = mask_token_id(config)
        self.num_queries = block_size(config)
        # The paper's heads have no such key and draft at the anchor; the library's default is the same.
        self.first_draft = 0 if config.flag("sample_from_anchor", default=True) else 1
        self.is_causal = is_causal(config)
        self._layers = BlockLayers(reader, config, self.vocabulary, num_positions, self.num_queries)
        self.markov = _read_markov(reader, config)
        self.confidence = _read_confidence(reader, config, self.markov)

    def write_context(self, batch: RaggedBatch, features: torch.Tensor, kv_cache: KVCache) -> None:
        self._layers.write_context(batch, features, kv_cache)

    def forward(self, batch: RaggedBatch, kv_cache: KVCache) -> torch.Tensor:
        return self._layers.forward(batch, kv_cache)

    @property
    def tables(self) -> DeviceTables:
        return self._layers.tables

    def write_context_on(self, features: torch.Tensor, on: DevicePass) -> None:
        self._layers.write_context_on(features, on)

    def run(self, on: DevicePass) -> torch.Tensor:
        return self._layers.run(on)


def _best(logits: torch.Tensor, count: int) -> Candidates:
    """The `count` highest of each row: they lie in the `count` groups with the highest bests, so that most columns are only looked at once."""
    num_rows, size = logits.shape
    if size < _GROUP * count:
        best, columns = logits.topk(count, dim=1)
        return Candidates(columns, best)
    groups = F.pad(logits, (0, -size % _GROUP), value=-torch.inf).view(num_rows, -1, _GROUP)
    chosen = groups.amax(2).topk(count, dim=1).indices  # [R, count]
    values = groups.gather(1, chosen.unsqueeze(2).expand(-1, -1, _GROUP)).flatten(1)  # [R, count * _GROUP]
    best, places = values.topk(count, dim=1)
    return Candidates(chosen.gather(1, places // _GROUP) * _GROUP + places % _GROUP, best)


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
