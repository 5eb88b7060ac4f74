"""Reads GGUF files: metadata, tensors of the common types dequantised to float32, 4-bit ones as they are (format: ggml's docs/gguf.md)."""

import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from specwire.errors import InvalidArgumentError, UnsupportedError

_MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY, _FLOAT32 = 8, 9, 6

_BLOCK = 32
# ggml type -> (name, elements per block, bytes per block)
_READABLE = {0: ("F32", 1, 4), 1: ("F16", 1, 2), 2: ("Q4_0", _BLOCK, 18), 3: ("Q4_1", _BLOCK, 20), 8: ("Q8_0", _BLOCK, 34), 30: ("BF16", 1, 2)}
_OTHER_NAMES = {
    6: "Q5_0", 7: "Q5_1", 9: "Q8_1", 10: "Q2_K", 11: "Q3_K", 12: "Q4_K", 13: "Q5_K", 14: "Q6_K", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS",
    18: "IQ3_XXS", 19: "IQ1_S", 20: "IQ4_NL", 21: "IQ3_S", 22: "IQ2_S", 23: "IQ4_XS", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4",
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class TensorInfo:
    """Where a tensor lies; `shape` in row-major order (GGUF stores it reversed)."""

    name: str
    shape: tuple[int, ...]
    ggml_type: int
    offset: int  # bytes from the start of the file


class Q4Blocks(NamedTuple):
    """A 4-bit tensor as it is stored: number k of a row is codes * scale + minimum of its block, k div 32."""

    codes: np.ndarray  # [..., columns] uint8, 0 to 15
    scale: np.ndarray  # [..., columns / 32] float16
    minimum: np.ndarray  # likewise


class GGUFFile:
    """A memory-mapped GGUF file.

    Attributes:
        metadata: key -> number, string, bool or list.
        tensors: name -> where it lies.

    Raises:
        InvalidArgumentError: missing, not GGUF, or cut off.
        UnsupportedError: a version other than 2 and 3.
    """

    def __init__(self, path: Path) -> None:
        if not path.is_file():
            raise InvalidArgumentError(f"{path} is not a file; give the path of a .gguf file")
        self.path = path
        with path.open("rb") as file:
            if file.read(4) != _MAGIC:
                raise InvalidArgumentError(f"{path} is not a GGUF file: it does not start with {_MAGIC!r}")
            self._data = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
        self._position = len(_MAGIC)
        try:
            self._read_header()
        except (struct.error, ValueError, RecursionError) as error:
            raise InvalidArgumentError(f"{path} is cut off or damaged at byte {self._position} of {len(self._data)}: {error}") from error

    def _read_header(self) -> None:
        version = self._scalar("I")
        if version not in _VERSIONS:
            raise UnsupportedError(f"{self.path} has GGUF version {version}; supported: {', '.join(map(str, _VERSIONS))}")
        num_tensors, num_keys = self._scalar("Q"), self._scalar("Q")
        self.metadata: dict[str, Any] = {}
        for _ in range(num_keys):
            key = self._string()
            self.metadata[key] = self._value(self._scalar("I"))
        entries = []
        for _ in range(num_tensors):
            name = self._string()
            dimensions = [self._scalar("Q") for _ in range(self._scalar("I"))]
            entries.append((name, tuple(reversed(dimensions)), self._scalar("I"), self._scalar("Q")))
        alignment = self.metadata.get("general.alignment", 32)
        if not isinstance(alignment, int) or alignment < 1:
            raise ValueError(f"an alignment of {alignment!r}")
        start = -(-self._position // alignment) * alignment
        self.tensors = {name: TensorInfo(name, shape, kind, start + offset) for name, shape, kind, offset in entries}

    def tensor(self, name: str) -> np.ndarray:
        """The tensor's values as float32, dequantised.

        Raises:
            InvalidArgumentError: no such tensor, or the file is cut off.
            UnsupportedError: stored in a type that this reader does not know.
        """
        info, type_name, raw = self._raw(name)
        return _dequantise(type_name, raw).reshape(info.shape)

    def q4_blocks(self, name: str) -> Q4Blocks | None:
        """The tensor's blocks if it is stored in Q4_1 or Q4_0, else None; see `tensor` for errors."""
        info, type_name, raw = self._raw(name)
        if type_name not in ("Q4_0", "Q4_1"):
            return None
        scale = _half(raw, 0)
        minimum = _half(raw, 2) if type_name == "Q4_1" else -8 * scale
        if np.isinf(minimum.astype(np.float16)).any():
            return None
        shape = (*info.shape[:-1], info.shape[-1] // _BLOCK)
        codes = _nibbles(raw[:, 4 if type_name == "Q4_1" else 2 :]).reshape(info.shape)
        return Q4Blocks(codes, scale.astype(np.float16).reshape(shape), minimum.astype(np.float16).reshape(shape))

    def _raw(self, name: str) -> tuple[TensorInfo, str, np.ndarray]:
        """Where a tensor lies, its type, and its bytes: [bytes] of an unquantised type, or [blocks, bytes per block]."""
        info = self.tensors.get(name)
        if info is None:
            raise InvalidArgumentError(f"{self.path} has no tensor {name}")
        if info.ggml_type not in _READABLE:
            type_name = _OTHER_NAMES.get(info.ggml_type, f"number {info.ggml_type}")
            supported = ", ".join(sorted(entry[0] for entry in _READABLE.values()))
            raise UnsupportedError(f"tensor {name} of {self.path} has type {type_name}; supported: {supported}")
        type_name, elements, num_bytes = _READABLE[info.ggml_type]
        size = math.prod(info.shape) // elements * num_bytes
        if info.offset + size > len(self._data):
            raise InvalidArgumentError(f"{self.path} is cut off: tensor {name} ends at byte {info.offset + size} of {len(self._data)}")
        raw = np.frombuffer(self._data, dtype=np.uint8, count=size, offset=info.offset)
        return info, type_name, raw.reshape(-1, num_bytes) if elements > 1 else raw

    def _scalar(self, code: str) -> Any:
        value = struct.unpack_from("<" + code, self._data, self._position)[0]
        self._position += struct.calcsize("<" + code)
        return value

    def _string(self) -> str:
        length = self._scalar("Q")
        if self._position + length > len(self._data):
            raise ValueError(f"a string of {length} bytes")
        text = self._data[self._position : self._position + length].decode("utf-8", errors="replace")
        self._position += length
        return text

    def _value(self, kind: int) -> Any:
        if kind == _STRING:
            return self._string()
        if kind == _ARRAY:
            element_kind, length = self._scalar("I"), self._scalar("Q")
            return [self._value(element_kind) for _ in range(length)]
        if kind not in _SCALARS:
            raise ValueError(f"metadata type {kind}")
        value = self._scalar(_SCALARS[kind])
        # The shortest decimal number that is this float32: 1e-05 rather than 9.999999747378752e-06.
        return float(str(np.float32(value))) if kind == _FLOAT32 else value


def _dequantise(type_name: str, raw: np.ndarray) -> np.ndarray:
    """raw [bytes] of an unquantised type or [blocks, bytes per block] -> float32."""
    match type_name:
        case "F32":
            return raw.view("<f4")
        case "F16":
            return raw.view("<f2").astype(np.float32)
        case "BF16":
            return (raw.view("<u2").astype(np.uint32) << 16).view(np.float32)
        case "Q8_0":
            return _half(raw, 0) * raw[:, 2:].view(np.int8).astype(np.float32)
        case "Q4_0":
            return _half(raw, 0) * (_nibbles(raw[:, 2:]).astype(np.float32) - 8)
        case _:
            assert type_name == "Q4_1", type_name
            return _half(raw, 0) * _nibbles(raw[:, 4:]).astype(np.float32) + _half(raw, 2)


def _half(raw: np.ndarray, offset: int) -> np.ndarray:
    """The float16 at a byte offset of each block, as float32 [blocks, 1]."""
    return np.ascontiguousarray(raw[:, offset : offset + 2]).view("<f2").astype(np.float32)


def _nibbles(packed: np.ndarray) -> np.ndarray:
    """[blocks, 16] bytes -> [blocks, 32]: low halves are elements 0..15, high halves 16..31."""
    return np.concatenate((packed & 0x0F, packed >> 4), axis=1)
