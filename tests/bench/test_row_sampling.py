"""The kinds of rows that the GPU benchmark times sample the same tokens with the kernels as with their twins."""

import pytest
import torch

from benchmarks.gpu.row_sampling import KINDS, Rows, num_different


@pytest.mark.parametrize("kind", KINDS)
def test_kinds_sample_what_the_twin_does(kind):
    rows = Rows(KINDS[kind], 2, 99, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    assert num_different(rows) == 0
    assert (int(rows.inputs.asks[0]) == 0) == kind.startswith("nothing")
