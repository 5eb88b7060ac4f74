"""How every pass over uploaded tokens begins."""

import torch

from specwire.engine.graphs.backends import Backend
from specwire.engine.graphs.draft_tensors import DraftInputs, DraftRows
from specwire.engine.kv_cache import KVCache


def read_call(backend: Backend, upload: torch.Tensor, tables: torch.Tensor, inputs: DraftInputs, rows: DraftRows, kv_cache: KVCache) -> None:
    """Takes over a call's block-table changes, then derives the inputs of its first pass and all of its rows but the results.

    Args:
        upload: the call's message, on the device.
        tables: [N, max_blocks] int32, block tables of all slots.
        inputs: of the size that the pass is padded to.
        rows: of the largest call.
    """
    backend.drafts.write_tables(upload, tables)
    backend.drafts.prepare(upload, tables, inputs, rows.first(len(inputs.seq_lens)), kv_cache.block_size, kv_cache.scratch_block)
