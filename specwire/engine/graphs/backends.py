"""Which kernels a round runs on: Triton's on CUDA, their torch twins elsewhere. The only place that chooses."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from types import ModuleType
from typing import TYPE_CHECKING, Protocol

import torch

from specwire.engine.kernels.linear import Linear, LogitsHead
from specwire.engine.kernels.options import KernelOptions, padded_rows
from specwire.engine.kernels.ragged_attention import AttentionPlan, plan_attention, ragged_attention, slot_table
from specwire.engine.kv_cache import KVCache
from specwire.engine.models.config import ModelConfig
from specwire.engine.models.decoder import Decoder

if TYPE_CHECKING:
    from specwire.engine.kernels.work_list import DeviceAttentionPlan

_SHORT_QUERY_LEN = 32
"""Rounds with longer rows take the attention kernel's tiles for prefill."""


class PassInputs(Protocol):
    """What the layers read in a pass of R requests and T tokens, padding included: of a round, or of drafting."""

    @property
    def token_ids(self) -> torch.Tensor: ...  # [T] int64
    @property
    def positions(self) -> torch.Tensor: ...  # [T] int64
    @property
    def slot_mapping(self) -> torch.Tensor: ...  # [T] int64
    @property
    def cu_seqlens_q(self) -> torch.Tensor: ...  # [R + 1] int32
    @property
    def seq_lens(self) -> torch.Tensor: ...  # [R] int32
    @property
    def block_tables(self) -> torch.Tensor: ...  # [R, max_blocks] int32


class Attention(Protocol):
    """Attention of the passes of one padded size."""

    def update(self, inputs: PassInputs) -> None:
        """Once a pass, before its layers."""
        ...

    def __call__(self, query: torch.Tensor, layer_kv: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        """query [T, num_heads, head_dim] -> the same shape, contiguous; rows of no request are undefined."""
        ...


class LayerOps(Protocol):
    """What stands between a layer's products, see `layer_ops_torch`."""

    def add_rms_norm(self, x: torch.Tensor | None, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor: ...

    def rotary_kv_write(
        self,
        qkv: torch.Tensor,
        cos: torch.Tensor,
        signed_sin: torch.Tensor,
        positions: torch.Tensor,
        slot_mapping: torch.Tensor,
        layer_kv: torch.Tensor,
        q_norm: torch.Tensor | None = None,
        k_norm: torch.Tensor | None = None,
        eps: float = 0.0,
    ) -> torch.Tensor: ...

    def silu_mul(self, gate_up: torch.Tensor) -> torch.Tensor: ...


class Backend(Protocol):
    """Kernels of one kind. Modules: `rounds` like `round_ops_torch`, `rows` like `row_ops_torch`, `drafts` like `draft_ops_torch`."""

    @property
    def layers(self) -> LayerOps: ...
    @property
    def rounds(self) -> ModuleType: ...
    @property
    def rows(self) -> ModuleType: ...
    @property
    def drafts(self) -> ModuleType: ...

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """`linear(x)`."""
        ...

    def head(self, head: LogitsHead, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """`head.write(hidden, logits)`."""
        ...

    def fused(self, model: Decoder, num_tokens: int) -> "FusedLayers | None":
        """Runs the layers of a pass of so many tokens in place of `run_layers`; None: nothing does."""
        ...

    def attention(self, num_requests: int, max_num_tokens: int, max_query_len: int, *, is_causal: bool = True) -> Attention:
        """For rounds of at most these sizes; those of one backend share their scratch, so they run one after the other. Without is_causal every
        token of a request sees all of its positions."""
        ...


FusedLayers = Callable[[Decoder, KVCache, Backend, PassInputs, Attention], torch.Tensor]


def choose_backend(config: ModelConfig, device: torch.device, dtype: torch.dtype, block_size: int) -> Backend:
    """The kernels for a device."""
    return TritonBackend(config, device) if device.type == "cuda" else TorchBackend(config, device, dtype, block_size)


class TorchBackend:
    """The twins; they wait for the device, so no graph can hold them."""

    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, block_size: int) -> None:
        from specwire.engine.graphs import draft_ops_torch, round_ops_torch, row_ops_torch
        from specwire.engine.kernels import layer_ops_torch

        self.layers, self.rounds, self.rows, self.drafts = layer_ops_torch, round_ops_torch, row_ops_torch, draft_ops_torch
        self._config, self._device, self._dtype, self._block_size = config, device, dtype, block_size

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `Backend.linear`."""
        return linear(x)

    def head(self, head: LogitsHead, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """See `Backend.head`."""
        head.write(hidden, logits)

    def fused(self, model: Decoder, num_tokens: int) -> FusedLayers | None:
        """See `Backend.fused`."""
        return None

    def attention(self, num_requests: int, max_num_tokens: int, max_query_len: int, *, is_causal: bool = True) -> Attention:
        """See `Backend.attention`."""
        return _TorchAttention(self._config, self._device, self._dtype, self._block_size, is_causal)


class _TorchAttention:
    def __init__(self, config: ModelConfig, device: torch.device, dtype: torch.dtype, block_size: int, is_causal: bool) -> None:
        self._group, self._scale = config.num_heads // config.num_kv_heads, config.head_dim**-0.5
        self._device, self._dtype, self._block_size, self._is_causal = device, dtype, block_size, is_causal
        self._plan = AttentionPlan(())

    def update(self, inputs: PassInputs) -> None:
        cu_seqlens_q = inputs.cu_seqlens_q.cpu().numpy().astype("int64")
        num_requests = int((cu_seqlens_q[1:] > cu_seqlens_q[:-1]).sum())  # padding requests are behind all others
        if not num_requests:
            self._plan = AttentionPlan(())
            return
        seq_lens = inputs.seq_lens[:num_requests].cpu().numpy().astype("int64").clip(min=1)  # a dead row sees one position rather than none
        slots = slot_table(inputs.block_tables[:num_requests].cpu().numpy(), self._block_size)
        self._plan = plan_attention(
            cu_seqlens_q[: num_requests + 1], seq_lens, slots, self._group, self._device, self._dtype, is_causal=self._is_causal
        )

    def __call__(self, query: torch.Tensor, layer_kv: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        output = query.new_zeros(query.shape)
        real = ragged_attention(query, layer_kv, inputs.cu_seqlens_q, inputs.seq_lens, inputs.block_tables, self._scale, plan=self._plan)
        output[: len(real)] = real  # one call of all rows leaves the padding out
        return output


class TritonBackend:
    """Kernels that a CUDA graph can hold. They also run in Triton's interpreter, for tests.

    Args:
        config: the model's.
        device: its device.
        options: choices among the kernels.
    """

    def __init__(self, config: ModelConfig, device: torch.device, options: KernelOptions | None = None) -> None:
        from specwire.engine.graphs import draft_ops, round_ops, row_ops
        from specwire.engine.kernels.layer_ops import TritonLayerOps
        from specwire.engine.kernels.skinny_linear import ProductScratch
        from specwire.engine.kernels.work_list import PREFILL_TUNING, AttentionScratch, AttentionTuning

        self.rounds, self.rows, self.drafts = round_ops, row_ops, draft_ops
        options = self._options = options or KernelOptions.for_device(device)
        self.layers = TritonLayerOps(options)
        self._config = config
        short = AttentionTuning() if not options.attention_split else replace(AttentionTuning(), few_min_split=options.attention_split)
        self._short, self._long = (
            AttentionScratch(config.num_kv_heads, config.head_dim, device, tuning) for tuning in (short, PREFILL_TUNING)
        )  # fmt: skip
        self._products = {(p.rows, p.out_features, p.in_features): p.tuning for p in options.products}
        self._product_scratch = ProductScratch(options.products, device)

    def linear(self, linear: Linear, x: torch.Tensor) -> torch.Tensor:
        """See `Backend.linear`; a single row, and few rows of the weights among the options, take a kernel of our own."""
        weight, early = linear.plain_weight, self._options.is_early(len(x))
        if weight is None:
            return linear(x)
        if len(x) <= self._options.streamed_rows and (row_tuning := self._options.row_tuning(weight)) is not None:
            from specwire.engine.kernels.row_stream import row_stream

            return row_stream(x, weight, linear.bias, tuning=row_tuning, early=early)
        if len(x) == 1:
            from specwire.engine.kernels.row_linear import row_linear

            return row_linear(x, weight, linear.bias, early=early, early_cut=self._options.cut_of(weight))
        tuning = self._products.get((padded_rows(len(x)), *weight.shape))
        if tuning is None:
            return linear(x)
        from specwire.engine.kernels.skinny_linear import skinny_linear

        return skinny_linear(x, weight, linear.bias, tuning, self._product_scratch, early=early)

    def head(self, head: LogitsHead, hidden: torch.Tensor, logits: torch.Tensor) -> None:
        """See `Backend.head`."""
        weight = head.plain_weight
        tuning = None if weight is None or len(hidden) > self._options.streamed_rows else self._options.row_tuning(weight)
        if weight is None or tuning is None:
            head.write(hidden, logits)
            return
        from specwire.engine.kernels.row_stream import row_stream

        row_stream(hidden, weight, tuning=tuning, output=logits, early=self._options.is_early(len(hidden)))

    def fused(self, model: Decoder, num_tokens: int) -> FusedLayers | None:
        """See `Backend.fused`."""
        from specwire.engine.graphs.fused_rows import can_fuse, run_fused_rows

        return partial(run_fused_rows, options=self._options) if can_fuse(model, self._options, num_tokens) else None

    def attention(self, num_requests: int, max_num_tokens: int, max_query_len: int, *, is_causal: bool = True) -> Attention:
        """See `Backend.attention`."""
        from specwire.engine.kernels.work_list import DeviceAttentionPlan

        scratch = self._long if max_query_len > _SHORT_QUERY_LEN else self._short
        plan = DeviceAttentionPlan(scratch, num_requests, max_num_tokens, max_query_len, self._config.num_heads, is_causal=is_causal)
        return _TritonAttention(plan, self._config.head_dim**-0.5, self._options)


class _TritonAttention:
    def __init__(self, plan: "DeviceAttentionPlan", scale: float, options: KernelOptions) -> None:
        from specwire.engine.kernels.paged_attention import paged_attention

        self._plan, self._scale, self._options, self._attend = plan, scale, options, paged_attention

    def update(self, inputs: PassInputs) -> None:
        self._plan.update(inputs.cu_seqlens_q, inputs.seq_lens)

    def __call__(self, query: torch.Tensor, layer_kv: torch.Tensor, inputs: PassInputs) -> torch.Tensor:
        output = torch.empty_like(query, memory_format=torch.contiguous_format)
        self._attend(query, layer_kv, inputs.block_tables, self._scale, self._plan, output, early=self._options.is_early(len(query)))
        return output
