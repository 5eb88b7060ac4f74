"""What emitters of vector code share. Addresses are int64; what they point to need not be aligned."""

from llvmlite import ir
from numba.core import cgutils

from specwire.engine.cpu.intrinsics import F32, I16, I32, I64, call, pointer, vector

F32S, I32S, I16S = vector(F32), vector(I32), vector(I16)
ZERO = ir.Constant(I32S, [0] * 16)


def all_lanes(value: int) -> ir.Value:
    """16 equal int32."""
    return ir.Constant(I32S, [value] * 16)


def load(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
    """What is offset bytes behind base."""
    step = ir.Constant(I64, offset) if isinstance(offset, int) else offset
    value = builder.load(pointer(builder, builder.add(base, step), kind))
    value.align = 1
    return value


def store(builder: ir.IRBuilder, value: ir.Value, address: ir.Value, *, align: int = 4) -> None:
    """Writes a number or a vector to an address that is a multiple of align."""
    builder.store(value, pointer(builder, address, value.type)).align = align


def splat(builder: ir.IRBuilder, value: ir.Value) -> ir.Value:
    """A number in all 16 lanes."""
    kind = vector(value.type)
    first = builder.insert_element(ir.Constant(kind, ir.Undefined), value, ir.Constant(I32, 0))
    return builder.shuffle_vector(first, ir.Constant(kind, ir.Undefined), ZERO)


def splat_at(builder: ir.IRBuilder, base: ir.Value, offset: ir.Value | int, kind: ir.Type) -> ir.Value:
    """The number there in all lanes."""
    return splat(builder, load(builder, base, offset, kind))


def fma(builder: ir.IRBuilder, a: ir.Value, b: ir.Value, c: ir.Value) -> ir.Value:
    """a * b + c."""
    return call(builder, "llvm.fma.v16f32", F32S, a, b, c)


def times(builder: ir.IRBuilder, value: ir.Value, factor: int) -> ir.Value:
    """An int64 times a constant."""
    return builder.mul(value, ir.Constant(I64, factor))


def rows(builder: ir.IRBuilder, base: ir.Value, stride: ir.Value, count: int) -> list[ir.Value]:
    """Addresses of rows that are stride bytes apart."""
    return [builder.add(base, times(builder, stride, row)) for row in range(count)]


def accumulators(builder: ir.IRBuilder, count: int, kind: ir.VectorType = F32S) -> list[ir.Value]:
    """Variables that are zero."""
    slots = [cgutils.alloca_once(builder, kind) for _ in range(count)]
    zero = 0.0 if kind == F32S else 0
    for slot in slots:
        builder.store(ir.Constant(kind, [zero] * 16), slot)
    return slots


def prefetch(builder: ir.IRBuilder, address: ir.Value) -> None:
    """Asks memory for the cache line there, to be read soon."""
    arguments = (ir.Constant(I32, number) for number in (0, 3, 1))
    call(builder, "llvm.prefetch.p0", ir.VoidType(), pointer(builder, address, ir.IntType(8)), *arguments)
