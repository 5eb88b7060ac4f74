"""Machine operations that Numba has no words for: pointers, atomics, waiting, and numbers as bits. Addresses are int64."""

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 16
I16, I32, I64, F32 = ir.IntType(16), ir.IntType(32), ir.IntType(64), ir.FloatType()
_VOID, _INT, _FLOAT = ir.VoidType(), types.int64, types.float32

Emit = Callable[..., ir.Value]
"""A builder and the arguments' values -> the result's."""


def vector(kind: ir.Type, lanes: int = LANES) -> ir.VectorType:
    """A vector type, 16 lanes unless told."""
    return ir.VectorType(kind, lanes)


def pointer(builder: ir.IRBuilder, address: ir.Value, kind: ir.Type) -> ir.Value:
    """An address as a pointer."""
    return builder.inttoptr(address, kind.as_pointer())


def call(builder: ir.IRBuilder, name: str, result: ir.Type, *arguments: ir.Value) -> ir.Value:
    """Calls an LLVM intrinsic or a function of the C library."""
    kind = ir.FunctionType(result, [argument.type for argument in arguments])
    return builder.call(cgutils.get_or_insert_function(builder.module, kind, name), arguments)


def operation(result: types.Type, parameters: tuple[types.Type, ...], emit: Emit) -> Any:
    """A function that compiled code can call, of fixed types."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> ir.Value:
        value = emit(builder, *args)
        return context.get_dummy_value() if result == types.void else value

    signature = result(*parameters), codegen
    match len(parameters):
        case 0:
            return intrinsic(lambda typingctx: signature)
        case 1:
            return intrinsic(lambda typingctx, a: signature)
        case 2:
            return intrinsic(lambda typingctx, a, b: signature)
        case 3:
            return intrinsic(lambda typingctx, a, b, c: signature)
        case 4:
            return intrinsic(lambda typingctx, a, b, c, d: signature)
        case 5:
            return intrinsic(lambda typingctx, a, b, c, d, e: signature)
        case 6:
            return intrinsic(lambda typingctx, a, b, c, d, e, f: signature)
        case 7:
            return intrinsic(lambda typingctx, a, b, c, d, e, f, g: signature)
        case 8:
            return intrinsic(lambda typingctx, a, b, c, d, e, f, g, h: signature)
        case 10:
            return intrinsic(lambda typingctx, a, b, c, d, e, f, g, h, i, j: signature)
    raise AssertionError(f"no operation of {len(parameters)} parameters")


def _view(kind: types.Type, bits: ir.Type) -> Any:
    return operation(types.CPointer(kind), (_INT,), lambda builder, address: pointer(builder, address, bits))


f32_at = _view(types.float32, F32)
i8_at = _view(types.int8, ir.IntType(8))
u16_at = _view(types.uint16, I16)
i32_at = _view(types.int32, I32)
i64_at = _view(types.int64, I64)
"""Address -> C pointer, for `carray`."""

load_acquire = operation(_INT, (_INT,), lambda b, address: b.load_atomic(pointer(b, address, I64), "acquire", 8))
store_release = operation(types.void, (_INT, _INT), lambda b, address, value: b.store_atomic(value, pointer(b, address, I64), "release", 8))
add_atomic = operation(_INT, (_INT, _INT), lambda b, address, value: b.atomic_rmw("add", pointer(b, address, I64), value, "acq_rel"))
replace_atomic = operation(
    types.boolean,
    (_INT, _INT, _INT),
    lambda b, address, old, new: b.extract_value(b.cmpxchg(pointer(b, address, I64), old, new, "acq_rel", "acquire"), 1),
)
"""Address, expected value, new value -> whether it was as expected and is replaced."""

pause = operation(types.void, (), lambda b: call(b, "llvm.x86.sse2.pause", _VOID))
give_way = operation(types.int32, (), lambda b: call(b, "sched_yield", I32))
post = operation(types.int32, (_INT,), lambda b, address: call(b, "sem_post", I32, address))
wait = operation(types.int32, (_INT,), lambda b, address: call(b, "sem_wait", I32, address))
"""Of a POSIX semaphore, `sem_t`."""

f32_of_bits = operation(_FLOAT, (types.int32,), lambda b, bits: b.bitcast(bits, F32))
bits_of_f32 = operation(types.int32, (_FLOAT,), lambda b, value: b.bitcast(value, I32))
round_even = operation(_FLOAT, (_FLOAT,), lambda b, value: call(b, "llvm.rint.f32", F32, value))
"""To the nearest integer, ties to the even one."""
