"""CPUs without the instructions that compiled passes need compute the same with torch, and the log says so."""

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.engine.tiny_models import save_tiny_model

ROOT = Path(__file__).parents[2]


def test_models_run_on_a_cpu_with_avx2(tmp_path: Path) -> None:
    save_tiny_model(tmp_path / "tiny", "qwen2")
    environment = os.environ | {"ATEN_CPU_CAPABILITY": "avx2", "ONEDNN_MAX_CPU_ISA": "AVX2", "XDG_CACHE_HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "tests.engine.older_cpu", str(tmp_path / "tiny")]
    done = subprocess.run(command, cwd=ROOT, env=environment, stdin=subprocess.DEVNULL, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    found = json.loads(done.stdout)
    assert found.pop("auto, bfloat16")[0] in ("bf16", "fp32")
    assert found.pop("auto, 4 bits")[0] in ("int4", "bf16")
    assert {name: kind for name, (kind, _) in found.items()} == {
        "fp32": "DenseLinear", "bf16": "DenseLinear", "int8": "Int8Linear", "int4": "Int4Linear",
    }  # fmt: skip
    differences = {name: difference for name, (_, difference) in found.items()}
    assert 0 < differences["bf16"] < 0.05, differences
    assert 0 < differences["int8"] < 0.05, differences
    assert 0 < differences["int4"] < 0.5, differences  # rounded here: the file has float32
    assert "weights bf16 are multiplied by torch, not in float16 tiles: this CPU has no AVX512-FP16" in done.stderr
    for weights in ("int4", "int8"):
        assert f"(AVX-512 VNNI): the output layer of weights {weights} is float32" in done.stderr
