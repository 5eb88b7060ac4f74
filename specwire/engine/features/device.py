"""Pages on a GPU that another process of the same host reads: CUDA's handles, in the form that torch gives them."""

from collections.abc import Sequence
from typing import NamedTuple

import torch

from specwire.errors import UnavailableError


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


def open_pages(memory: DeviceMemory, dtype: torch.dtype, shape: Sequence[int]) -> torch.Tensor:
    """Another process's tensor, to be read only; its memory is there as long as its process.

    Raises:
        UnavailableError: this process does not see that GPU, or can't open its memory.
    """
    devices = range(torch.cuda.device_count()) if torch.cuda.is_available() else ()
    device = next((index for index in devices if str(torch.cuda.get_device_properties(index).uuid) == memory.uuid), None)
    if device is None:
        raise UnavailableError("the verifier's features are on a GPU that this process does not see")
    torch.cuda.init()
    handle, counter, event = map(bytes.fromhex, (memory.handle, memory.counter, memory.event))
    try:
        storage = torch.UntypedStorage._new_shared_cuda(
            device, handle, memory.num_bytes, memory.offset, counter, memory.counter_offset, event, memory.waits_for_event
        )
    except RuntimeError as error:
        raise UnavailableError(f"the verifier's features on cuda:{device} can't be opened here ({error})") from error
    return torch.empty(0, dtype=dtype, device=storage.device).set_(storage).view(tuple(shape))
