"""Identity of a model's weights."""

import hashlib
import json
from pathlib import Path

from specwire.engine.cache_dir import file_sha256

_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def weights_hash(folder: Path) -> str:
    """Hex sha256 over config.json (without keys that change no logit) and all safetensors files, in the order of their names."""
    config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
    canonical = json.dumps({key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}, sort_keys=True)
    digest = hashlib.sha256(canonical.encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()
