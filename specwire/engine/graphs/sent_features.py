"""The features of a call on their way to the device."""

from collections.abc import Sequence

import torch

from specwire.engine.graphs.draft_upload import DraftRow


class SentFeatures:
    """A page-locked buffer and its counterpart on the device.

    Args:
        max_num_tokens: of the largest pass.
        width: numbers of a feature.
        dtype: of the head.
        device: where they go.
    """

    def __init__(self, max_num_tokens: int, width: int, dtype: torch.dtype, device: torch.device) -> None:
        self._sent = torch.zeros((max_num_tokens, width), dtype=dtype, pin_memory=device.type == "cuda")
        self.on_device = torch.zeros((max_num_tokens, width), dtype=dtype, device=device)

    def send(self, rows: Sequence[DraftRow]) -> None:
        """Starts the upload, in the order of the tokens."""
        begin = 0
        for row in rows:
            assert row.features is not None, f"row of slot {row.slot} without features"
            offset, count = row.start_position - row.features_start, len(row.token_ids)
            self._sent[begin : begin + count].copy_(row.features[offset : offset + count])
            begin += count
        self.on_device[:begin].copy_(self._sent[:begin], non_blocking=True)
