"""The sweep of products, in Triton's interpreter with made-up times, and the variants that are compared."""

import dataclasses
import json
from pathlib import Path

import pytest
import torch

from benchmarks.gpu import kernel_sweeps, row_sweeps
from benchmarks.gpu.draft_variants import draft_variants, read_sweep
from benchmarks.gpu.engine_models import LLAMA_1B, LLAMA_8B, TINY
from benchmarks.gpu.kernel_variants import options_of, products_of
from specwire.engine.kernels.options import KernelOptions, Product, ProductTuning, RowProduct, RowTuning
from tests.engine.kernels.conftest import Called, early_start  # noqa: F401 (a fixture)


@pytest.fixture
def timed(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    """Each call runs once and is a microsecond faster than the one before."""
    times: list[float] = []

    def graph_us(calls, rep_ms):  # type: ignore[no-untyped-def]
        calls[0]()
        times.append(100.0 - len(times))
        return times[-1]

    generator = torch.Generator().manual_seed(5)
    monkeypatch.setattr(kernel_sweeps, "graph_us", graph_us)
    monkeypatch.setattr(kernel_sweeps, "num_sets", lambda num_bytes: 1)
    monkeypatch.setattr(kernel_sweeps, "_normal", lambda *shape: torch.randn(shape, generator=generator))
    monkeypatch.setattr(kernel_sweeps, "_CUTS", ((32, 32, 2, 4), (16, 64, 2, 4)))
    monkeypatch.setattr(kernel_sweeps, "_NUM_PROGRAMS", (8,))
    return times


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
def test_products_that_beat_the_library_are_found(timed: list[float], early_start: Called) -> None:  # noqa: F811
    rows = list(kernel_sweeps.sweep_products(TINY, [3], 1e12))
    assert [row["case"] for row in rows] == [f"{name}, 3 rows" for name in ("qkv", "o", "gate_up", "down") for _ in range(2)]
    assert [row["is_best"] for row in rows] == [False, True] * 4
    tuned = products_of([row["product"] for row in rows if "product" in row])
    assert [(product.rows, product.out_features, product.in_features) for product in tuned] == [
        (16, 128, 64), (16, 64, 64), (16, 256, 64), (16, 64, 128),
    ]  # fmt: skip
    assert early_start.prefetched


@pytest.mark.skipif(torch.cuda.is_available(), reason="runs the kernels in Triton's interpreter")
def test_rows_are_swept(timed: list[float], early_start: Called, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:  # noqa: F811
    """Later calls are faster here: of each weight and kind the last cut is the best, and beats what the engine takes."""
    monkeypatch.setattr(row_sweeps, "graph_us", kernel_sweeps.graph_us)
    monkeypatch.setattr(row_sweeps, "num_sets", lambda num_bytes: 1)
    monkeypatch.setattr(row_sweeps, "_normal", kernel_sweeps._normal)
    monkeypatch.setattr(row_sweeps, "_CUTS", ((8192, 1), (16384, 2)))
    monkeypatch.setattr(row_sweeps, "_NUMS_PROGRAMS", (3,))
    rows = list(row_sweeps.sweep_rows(TINY, 1e12, KernelOptions(starts_early=True)))
    singles = [row for row in rows if ", 1 rows" in row["case"]]
    assert [row["case"] for row in singles] == [f"{name}, 1 rows" for name in ("qkv", "o", "gate_up", "down") for _ in range(4)] + [
        "head, 1 rows"
    ] * 2
    assert len(rows) - len(singles) == 9  # each weight and kind once at two rows
    shapes = [(128, 64), (64, 64), (256, 64), (64, 128)]
    best = RowTuning(16384, 2, 3)
    assert row_sweeps.best_products(rows, "fused") == tuple(RowProduct(*shape, best) for shape in shapes)
    assert row_sweeps.best_products(rows, "streamed") == tuple(RowProduct(*shape, best) for shape in (*shapes, (512, 64)))
    assert early_start.instructions

    (tmp_path / "variants-rows.json").write_text(json.dumps({"is_complete": True, "rows": rows}))
    read = read_sweep([tmp_path / "none", tmp_path], "variants-rows")
    variants = draft_variants(TINY, KernelOptions(starts_early=True), read, [])
    assert {row.tuning for row in variants["swept-fused"].options.row_products} == {best}
    assert variants["swept-all"].joins_passes


def test_variants_of_drafts() -> None:
    base = KernelOptions(starts_early=True)
    found = draft_variants(LLAMA_1B, base, [], [])
    assert next(iter(found)) == "base"
    assert "swept" not in found
    assert len(found["all"].options.row_products) == 5
    mine = draft_variants(LLAMA_1B, base, [], ["head", 'mine:{"joined": true, "attention_split": 128}'])
    assert list(mine) == ["base", "head", "mine"]
    assert mine["mine"].joins_passes
    assert mine["mine"].options == dataclasses.replace(base, attention_split=128)
    with pytest.raises(SystemExit, match="but there are base, split-64"):
        draft_variants(LLAMA_1B, base, [], ["turbo"])
    with pytest.raises(SystemExit, match="are no JSON object"):
        draft_variants(LLAMA_1B, base, [], ["mine:{"])


def test_no_cut_of_rows_spills() -> None:
    """A thread holds few numbers of a row."""
    for config in (LLAMA_1B, LLAMA_8B):
        for weight in row_sweeps.weights_of(config):
            found = row_sweeps.tunings(weight)
            assert len(set(found)) == len(found) >= 4
            assert all(weight.in_features / (32 * tuning.num_warps) <= 64 for tuning in found)


def test_cuts_fit_the_weights() -> None:
    """About two or four programs a multiprocessor, and no cut twice."""
    for out_features in (LLAMA_8B.hidden_size, 2 * LLAMA_8B.intermediate_size):
        tunings = kernel_sweeps.product_tunings(out_features, 128)
        assert len(set(tunings)) == len(tunings) >= 5
        for tuning in tunings:
            assert 1 <= tuning.splits <= 8
            assert tuning.prefetch_depth % tuning.depth == 0
            assert out_features // tuning.features * tuning.splits >= 192


def test_options_of_variants() -> None:
    product = Product(16, 64, 64, ProductTuning())
    base = KernelOptions(starts_early=True, products=(product,))
    assert options_of("base", base) == ("base", base)
    assert options_of("no-early-start", base) == ("no-early-start", KernelOptions(products=(product,)))
    assert options_of("no-own-products", base) == ("no-own-products", KernelOptions(starts_early=True))
    given = json.dumps({"products": [dataclasses.asdict(product)]})
    assert options_of(f"mine:{given}", KernelOptions(starts_early=True)) == ("mine", base)
    for wrong in ("mine:{", "mine:3"):
        with pytest.raises(SystemExit, match="are no JSON object"):
            options_of(wrong, base)
