"""`specwire.yaml`: one file for all services: which one it is, and what it and `--set` say."""

import os
from pathlib import Path

from specwire.config import DEFAULT_FILE, FILE_VARIABLE
from specwire.config_layers import ConfigError, Problem, Source
from specwire.config_reader import ConfigReader, Reading
from specwire.errors import InvalidArgumentError


def find_config_file(named: str | None, *, in_folder: bool) -> Path | None:
    """The file to read: the named one ("" = none), else the one that SPECWIRE_CONFIG names, else ./specwire.yaml if `in_folder` and it exists.

    Raises:
        InvalidArgumentError: a named file is not there.
    """
    wanted = os.environ.get(FILE_VARIABLE) if named is None else named
    if wanted:
        if not Path(wanted).exists() or Path(wanted).is_dir():  # a pipe will do
            source = f" ({FILE_VARIABLE} names it)" if named is None else ""
            raise InvalidArgumentError(f"there is no configuration file {wanted}{source}; correct the name, or leave it out")
        return Path(wanted)
    path = Path(DEFAULT_FILE)
    return path if named is None and in_folder and path.is_file() else None


def read_config_file(path: Path) -> Source:
    """What the file says.

    Raises:
        ConfigError: it can't be read, or has unknown or repeated keys or values of a wrong type.
    """
    return _whole(inspect_config_file(path))


def inspect_config_file(path: Path) -> Reading:
    """What the file says, as far as it can be read. Raises ConfigError if nothing of it can."""
    try:
        text = path.read_bytes().decode("utf-8")
    except OSError as error:
        raise ConfigError([Problem(str(path), f"can't be read ({os.strerror(error.errno or 0)}); make it readable, or name another file")]) from error
    except UnicodeDecodeError as error:
        raise ConfigError([Problem(str(path), f"is no UTF-8 (byte {error.start}); save it as UTF-8")]) from error
    return ConfigReader(str(path), text).read()


def read_override(text: str) -> Source:
    """What `--set SECTION.KEY=VALUE` says; the value is written as in the file.

    Raises:
        ConfigError: as of a file.
    """
    name, separator, value = text.partition("=")
    if not separator or ("." not in name and name != "drafters"):
        raise ConfigError([Problem("--set", f"{text!r} is not SECTION.KEY=VALUE, for example verifier.max_num_seqs=8")])
    return _whole(ConfigReader("--set", value).read(name.split(".")))


def _whole(reading: Reading) -> Source:
    if reading.problems:
        raise ConfigError(reading.problems)
    return reading.source
