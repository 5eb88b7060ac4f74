"""One clear error in place of what libraries raise when a device has no memory left."""

import os
import re
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from specwire.errors import ResourceExhaustedError

_PHRASES = ("out of memory", "can't allocate memory", "not enough memory", "cublas_status_alloc_failed", "size calculation overflowed")
"""In errors of the CUDA runtime, torch's CPU allocator and cuBLAS; torch's CUDA allocator has an exception of its own."""
_ASKED = re.compile(r"tried to allocate ([\d.]+ ?[A-Za-z]+)", re.IGNORECASE)


@contextmanager
def explain_out_of_memory(doing: str, device: torch.device | str, remedy: str) -> Iterator[None]:
    """Turns an allocation that fails inside into a ResourceExhaustedError that says what was asked, what was free and what to change.

    Args:
        doing: `load the weights of X`; follows "cannot".
        device: where.
        remedy: options to lower, and the like.
    """
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        asked = _ASKED.search(str(error))
        reason = f"{asked[1]} more were asked for" if asked else (str(error) or type(error).__name__).splitlines()[0]
        raise ResourceExhaustedError(f"cannot {doing} on {device}: out of memory ({reason}; {_free(torch.device(device))}); {remedy}") from error


def is_out_of_memory(error: BaseException) -> bool:
    """Whether an error means that a device, or the machine, has no memory left."""
    text = str(error).lower()
    return isinstance(error, (torch.OutOfMemoryError, MemoryError)) or any(phrase in text for phrase in _PHRASES)


def format_bytes(num_bytes: int) -> str:
    """With a binary unit and about three digits."""
    value, units = float(num_bytes), ["bytes", "KiB", "MiB", "GiB", "TiB"]
    while abs(value) >= 1024 and len(units) > 1:
        value /= 1024
        units.pop(0)
    return f"{value:.0f} {units[0]}" if units[0] == "bytes" or abs(value) >= 100 else f"{value:.1f} {units[0]}"


def _free(device: torch.device) -> str:
    if device.type == "cuda" and torch.cuda.is_available():
        try:
            free, total = torch.cuda.mem_get_info(device)
        except RuntimeError:  # there is not even memory for this process's context
            return "too little is free to ask how much"
        return f"{format_bytes(free)} of {format_bytes(total)} are free, this process holds {format_bytes(torch.cuda.memory_reserved(device))}"
    free = os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    return f"{format_bytes(free)} of the machine's memory are free"
