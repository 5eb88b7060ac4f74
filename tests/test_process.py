"""The frame of the service processes."""

import os
import subprocess
import sys

import pytest

from specwire.process import set_model_environment


@pytest.mark.parametrize(("given", "expected"), [(None, "1000"), ("7", "7")])
def test_the_model_environment_is_a_default(monkeypatch: pytest.MonkeyPatch, given: str | None, expected: str) -> None:
    monkeypatch.setenv("GOMP_SPINCOUNT", given or "")
    if given is None:
        monkeypatch.delenv("GOMP_SPINCOUNT")
    set_model_environment()
    assert os.environ["GOMP_SPINCOUNT"] == expected


@pytest.mark.parametrize("service", ["verifier_svc", "drafter_svc"])
def test_services_import_torch_after_the_environment_is_set(service: str) -> None:
    """Its libraries read the environment when they are loaded."""
    script = f"import sys, {service}.__main__; sys.exit(int('torch' in sys.modules))"
    assert subprocess.run([sys.executable, "-c", script], check=False).returncode == 0
