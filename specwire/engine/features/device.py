"""Pages on a GPU that another process of the same host reads: CUDA's handles, in the form that torch gives them."""

import logging
from collections.abc import Sequence
from typing import NamedTuple

import torch

from specwire.errors import UnavailableError

logger = logging.getLogger(__name__)


class DeviceMemory(NamedTuple):
    """What opens a tensor's memory elsewhere; bytes are in hex, so that JSON holds them."""

    uuid: str  # of the GPU: processes may number them differently
    handle: str
    num_bytes: int
    offset: int
    counter: str
    counter_offset: int
    event: str
    waits_for_event: bool


def share_pages(pages: torch.Tensor) -> DeviceMemory:
    """Makes a tensor on a GPU readable for other processes, for as long as this one lives.

    Raises:
        UnavailableError: the driver or the allocator in use can't share it.
    """
    try:
        _, handle, num_bytes, offset, counter, counter_offset, event, waits = pages.untyped_storage()._share_cuda_()
    except RuntimeError as error:
        raise UnavailableError(f"memory on {pages.device} can't be shared ({error})") from error
    uuid = str(torch.cuda.get_device_properties(pages.device).uuid)
    return DeviceMemory(uuid, handle.hex(), num_bytes, offset, counter.hex(), counter_offset, event.hex(), waits)


def open_pages(memory: DeviceMemory, dtype: torch.dtype, shape: Sequence[int], device: str = "cuda") -> torch.Tensor:
    """Another process's tensor, to be read only, as memory of this process's own GPU; it is there as long as its process.

    That of another GPU is mapped, and read by kernels of one's own GPU over the link between them (peer access); the other GPU runs nothing for it,
    and this process need not see it (CUDA_VISIBLE_DEVICES; CUDA's documentation of cudaIpcOpenMemHandle).

    Args:
        device: where it is read: `cuda` or `cuda:N`.

    Raises:
        UnavailableError: there is no GPU here, or it can't open that memory: no link between the two, or another host.
    """
    if not torch.cuda.is_available():
        raise UnavailableError("the verifier's features are on a GPU, and this process sees none")
    torch.cuda.init()
    index = torch.device(device).index
    index = torch.cuda.current_device() if index is None else index
    is_own = str(torch.cuda.get_device_properties(index).uuid) == memory.uuid
    handle, counter, event = map(bytes.fromhex, (memory.handle, memory.counter, memory.event))
    # The event says when the zeros of new pages are there, which nobody reads; another GPU's can't be opened where that GPU is not seen.
    waits = memory.waits_for_event and is_own
    try:
        storage = torch.UntypedStorage._new_shared_cuda(index, handle, memory.num_bytes, memory.offset, counter, memory.counter_offset, event, waits)
    except RuntimeError as error:
        raise UnavailableError(f"the verifier's features on GPU {memory.uuid} can't be opened from cuda:{index} ({error})") from error
    if not is_own:
        logger.info("the verifier's features are on GPU %s: cuda:%d reads them over the link between the two", memory.uuid, index)
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).view(tuple(shape))
