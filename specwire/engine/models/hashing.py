"""Identity of a model's weights."""

import hashlib
import json
from pathlib import Path

from specwire.engine.cache_dir import file_sha256
from specwire.json_files import read_json_object

_IGNORED_CONFIG_KEYS = ("_name_or_path", "transformers_version", "torch_dtype", "dtype", "use_cache")


def weights_hash(folder: Path) -> str:
    """Hex sha256 over config.json (without keys that change no logit) and all safetensors files, in the order of their names."""
    config = read_json_object(folder / "config.json")
    canonical = json.dumps({key: value for key, value in config.items() if key not in _IGNORED_CONFIG_KEYS}, sort_keys=True)
    digest = hashlib.sha256(canonical.encode())
    for path in sorted(folder.glob("*.safetensors")):
        digest.update(f"{path.name} {file_sha256(path)}\n".encode())
    return digest.hexdigest()
