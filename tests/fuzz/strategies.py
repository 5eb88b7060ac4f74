"""Random protobuf messages: made from their descriptors, or from good ones by a few changes; and random bytes in their place."""

import copy
import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from google.protobuf.descriptor import Descriptor, FieldDescriptor
from google.protobuf.message import Message
from google.protobuf.message_factory import GetMessageClass
from hypothesis import strategies as st

_INT64_ARRAYS = {"parent_rounds", "from_rounds", "stream_ids"}
_FLOAT_ARRAYS = {"synthetic_acceptance_rates", "logit_bias_values", "probs", "confidences"}
_MAX_DEPTH = 4

_small = st.integers(0, 8)
_int32s = st.one_of(_small, st.integers(0, 70), st.sampled_from([-1, 61, 255, 256, 2**31 - 1, -(2**31)]))
_int64s = st.one_of(_small, st.sampled_from([-1, 2**31, 2**63 - 1, -(2**63)]))
_floats = st.one_of(st.sampled_from([0.0, 0.5, 1.0, -1.0, 2.0, 1e-6, 1e-40, 3e38, -0.0, math.nan, math.inf, -math.inf]), st.floats(0, 1, width=32))
_doubles = st.one_of(_floats, st.sampled_from([1e-300, 1e300, 100.0, 101.0]))
_texts = st.one_of(st.sampled_from(["", "a", "the", "\x00", "é" * 3, "🙂"]), st.text(max_size=8))


def _pack(code: str, values: Sequence[Any]) -> bytes:
    return struct.pack(f"<{len(values)}{code}", *values)


def _arrays(name: str) -> st.SearchStrategy[bytes]:
    """What a `bytes` field may hold: nearly always whole values."""
    if name in _INT64_ARRAYS:
        whole = st.lists(_int64s, max_size=6).map(lambda values: _pack("q", values))
    elif name in _FLOAT_ARRAYS:
        whole = st.lists(_floats, max_size=6).map(lambda values: _pack("f", values))
    else:
        whole = st.lists(_int32s, max_size=12).map(lambda values: _pack("i", values))
    long = st.sampled_from([_pack("i", [7] * 300), bytes(5000)])
    return st.one_of(whole, whole, whole, st.binary(max_size=9), long)


_SCALARS = {
    FieldDescriptor.TYPE_BOOL: st.booleans(),
    FieldDescriptor.TYPE_STRING: _texts,
    FieldDescriptor.TYPE_DOUBLE: _doubles,
    FieldDescriptor.TYPE_FLOAT: _floats,
    FieldDescriptor.TYPE_INT32: _int32s,
    FieldDescriptor.TYPE_ENUM: st.integers(0, 9),
    FieldDescriptor.TYPE_INT64: _int64s,
    FieldDescriptor.TYPE_UINT32: st.one_of(_small, st.sampled_from([2**31 - 1, 2**31, 2**32 - 1])),
    FieldDescriptor.TYPE_UINT64: st.one_of(_small, st.sampled_from([2**32, 2**63 - 1, 2**63, 2**64 - 1])),
    FieldDescriptor.TYPE_FIXED64: st.one_of(_small, st.sampled_from([2**63, 2**64 - 1])),
}


def _values(field: FieldDescriptor, depth: int) -> st.SearchStrategy[Any]:
    """One value of a field, of a repeated one too."""
    if field.type == FieldDescriptor.TYPE_MESSAGE:
        return messages(field.message_type, depth + 1)
    if field.type == FieldDescriptor.TYPE_BYTES:
        return _arrays(field.name)
    return _SCALARS[field.type]


def _set(message: Message, field: FieldDescriptor, draw: st.DrawFn, depth: int) -> None:
    message.ClearField(field.name)
    if field.is_repeated:
        values = draw(st.lists(_values(field, depth), max_size=3))
        getattr(message, field.name).extend(values)
    elif field.type == FieldDescriptor.TYPE_MESSAGE:
        getattr(message, field.name).CopyFrom(draw(_values(field, depth)))
    else:
        setattr(message, field.name, draw(_values(field, depth)))


@st.composite
def messages(draw: st.DrawFn, descriptor: Descriptor, depth: int = 0) -> Message:
    """Any message of a type; each field is there or not."""
    message = GetMessageClass(descriptor)()
    if depth < _MAX_DEPTH:
        for field in descriptor.fields:
            if draw(st.booleans()):
                _set(message, field, draw, depth)
    return message


@st.composite
def partial_messages(draw: st.DrawFn, descriptor: Descriptor) -> Message:
    """A message with one or two fields."""
    message = GetMessageClass(descriptor)()
    for field in draw(st.lists(st.sampled_from(list(descriptor.fields)), min_size=1, max_size=2)):
        _set(message, field, draw, 1)
    return message


@st.composite
def changed(draw: st.DrawFn, message: Message) -> Message:
    """A message that differs from a given one in one field, somewhere in it."""
    new = copy.deepcopy(message)
    place: Message = new
    for _ in range(_MAX_DEPTH):
        inner = [value for field, value in place.ListFields() if field.type == FieldDescriptor.TYPE_MESSAGE]
        candidates = [item for value in inner for item in (value if not isinstance(value, Message) else [value])]
        if not candidates or draw(st.integers(0, 2)) == 0:
            break
        place = draw(st.sampled_from(candidates))
    fields = list(place.DESCRIPTOR.fields)
    if fields:
        field = draw(st.sampled_from(fields))
        if draw(st.integers(0, 5)) == 0:
            place.ClearField(field.name)
        else:
            _set(place, field, draw, 1)
    return new


@st.composite
def damaged(draw: st.DrawFn, data: bytes) -> bytes:
    """Bytes with some of them changed, cut off or put in."""
    start = draw(st.integers(0, len(data)))
    end = draw(st.integers(start, min(len(data), start + 4)))
    return data[:start] + draw(st.binary(max_size=4)) + data[end:]


@dataclass(frozen=True)
class Conversation:
    """What a client sends on one call, and whether it leaves before the end."""

    messages: tuple[bytes, ...]
    leaves: bool

    def __repr__(self) -> str:
        return f"Conversation({[data.hex() for data in self.messages]}, leaves={self.leaves})"


@st.composite
def conversations(draw: st.DrawFn, good: Sequence[Sequence[Message]], most: int) -> Conversation:
    """Nearly always a good conversation with a few changes; sometimes any messages of its type, or bytes that may be none.

    Args:
        good: conversations that the service takes.
        most: messages that the call may have.
    """
    parts = list(draw(st.sampled_from(good)))
    descriptor = parts[0].DESCRIPTOR
    for _ in range(draw(st.sampled_from([1, 1, 2, 3, 0]))):
        index = draw(st.integers(0, len(parts) - 1))
        kind = draw(st.sampled_from(["change", "change", "change", "change", "any", "repeat", "drop", "swap"]))
        if kind == "change":
            parts[index] = draw(changed(parts[index]))
        elif kind == "any":
            parts[index] = draw(messages(descriptor))
        elif kind == "repeat" and len(parts) < most:
            parts.insert(index, parts[index])
        elif kind == "drop" and len(parts) > 1:
            del parts[index]
        elif kind == "swap":
            other = draw(st.integers(0, len(parts) - 1))
            parts[index], parts[other] = parts[other], parts[index]
    data = [part.SerializeToString() for part in parts]
    if draw(st.integers(0, 7)) == 0:
        index = draw(st.integers(0, len(data) - 1))
        data[index] = draw(st.one_of(damaged(data[index]), st.binary(max_size=40)))
    return Conversation(tuple(data), leaves=draw(st.integers(0, 7)) == 0)
