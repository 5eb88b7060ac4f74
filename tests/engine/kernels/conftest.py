"""Triton's kernels run on the GPU if there is one, else in Triton's interpreter (tests/conftest.py)."""

import os

import torch

assert torch.cuda.is_available() != (os.environ.get("TRITON_INTERPRET") == "1"), "Triton's interpreter runs kernels on a CPU, and only there"
