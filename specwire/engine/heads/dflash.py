"""DFlash (https://arxiv.org/abs/2602.06036): a block of mask tokens denoised in one pass; every mask predicts the token at its own place."""

from pathlib import Path

from specwire.engine.heads.block import BlockHead
from specwire.engine.heads.config import HeadConfig
from specwire.engine.heads.tensors import HeadReader
from specwire.errors import UnsupportedError


def dflash_head(reader: HeadReader, config: HeadConfig, target: Path | None, num_positions: int) -> BlockHead:
    """Arguments and errors as `BlockHead`."""
    if config.flag("sample_from_anchor"):
        raise UnsupportedError(f"{config.name}: sample_from_anchor true is not built for dflash; use a head with false, or one of dspark")
    return BlockHead(reader, config, target, num_positions, first_draft=1)
