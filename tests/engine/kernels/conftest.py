"""Triton's kernels run on the GPU if there is one, else in Triton's interpreter, which must be chosen before Triton is imported."""

import os
import sys

import torch

if not torch.cuda.is_available():
    assert "triton" not in sys.modules or os.environ.get("TRITON_INTERPRET") == "1", "something imported Triton before its interpreter was chosen"
    os.environ["TRITON_INTERPRET"] = "1"
