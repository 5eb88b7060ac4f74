"""One set of certificates and API keys for all tests of a module."""

import dataclasses
import datetime
from pathlib import Path

import pytest
import yaml

from specwire.api_keys import hash_key, make_key
from tests.security.certificates import DAY, Authority, Pair
from tests.security.key_file import File


@dataclasses.dataclass(frozen=True)
class Files:
    """Certificates of one authority, of another one, and what is wrong with either."""

    ca: Authority
    other_ca: Authority
    server: Pair
    client: Pair
    expired: Pair
    not_yet: Pair
    self_signed: Pair
    other_host: Pair
    foreign: Pair


@dataclasses.dataclass(frozen=True)
class Keys:
    """A file of API keys, and the keys themselves."""

    file: str
    right: str
    expired: str
    wrong: str


def make_files(folder: Path) -> Files:
    ca, other_ca = Authority(folder), Authority(folder, "other-ca")
    return Files(
        ca=ca,
        other_ca=other_ca,
        server=ca.issue("server"),
        client=ca.issue("client"),
        expired=ca.issue("expired", start=-2 * DAY, end=-DAY),
        not_yet=ca.issue("not-yet", start=DAY),
        self_signed=ca.issue_self_signed("self-signed"),
        other_host=ca.issue("other-host", "elsewhere.example"),
        foreign=other_ca.issue("foreign"),
    )


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return make_files(tmp_path_factory.mktemp("certificates"))


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Keys:
    right, expired = make_key(), make_key()
    yesterday = datetime.datetime.now(datetime.UTC) - DAY
    path = tmp_path_factory.mktemp("keys") / "keys.yaml"
    path.write_text(
        yaml.safe_dump([{"name": "blue", "hash": hash_key(right)}, {"name": "late", "hash": hash_key(expired), "expires": yesterday.isoformat()}])
    )
    return Keys(str(path), right, expired, make_key())


@pytest.fixture
def file(tmp_path: Path) -> File:
    return File(tmp_path / "keys.yaml")
