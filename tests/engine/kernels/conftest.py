"""Triton's kernels run on the GPU if there is one, else in Triton's interpreter (tests/conftest.py)."""

import os
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch

assert torch.cuda.is_available() != (os.environ.get("TRITON_INTERPRET") == "1"), "Triton's interpreter runs kernels on a CPU, and only there"


@dataclass
class Called:
    """What kernels did to start early, in the interpreter."""

    instructions: list[str] = field(default_factory=list)
    prefetched: list[tuple[int, int]] = field(default_factory=list)  # (address, bytes)


@pytest.fixture
def early_start(monkeypatch: pytest.MonkeyPatch) -> Called:
    """The instructions of an early start do nothing in the interpreter, which runs one kernel after the other."""
    called = Called()
    if not torch.cuda.is_available():
        from triton.runtime.interpreter import InterpreterBuilder, TensorHandle

        from specwire.engine.kernels import early

        def inline_asm(builder, code, constraints, values, dtypes, is_pure, pack):  # type: ignore[no-untyped-def]
            assert "prefetch" in code, code
            addresses, num_bytes, inside = (value.data.ravel() for value in values)
            called.prefetched += [(int(a), int(n)) for a, n, is_inside in zip(addresses, num_bytes, inside, strict=True) if is_inside]
            return SimpleNamespace(get_result=lambda index: TensorHandle(values[0].data * 0, values[0].dtype))

        monkeypatch.setattr(early, "gdc_wait", lambda: called.instructions.append("wait"))
        monkeypatch.setattr(early, "gdc_launch_dependents", lambda: called.instructions.append("announce"))
        monkeypatch.setattr(InterpreterBuilder, "create_inline_asm", inline_asm)
    return called


@pytest.fixture
def poisoned_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fresh tensors hold NaN, so that an element that nobody writes shows."""

    def poisoned(allocate):
        def allocated(*args, **kwargs):
            tensor = allocate(*args, **kwargs)
            return tensor.fill_(float("nan")) if tensor.is_floating_point() else tensor

        return allocated

    monkeypatch.setattr(torch, "empty_like", poisoned(torch.empty_like))
    monkeypatch.setattr(torch.Tensor, "new_empty", poisoned(torch.Tensor.new_empty))
