"""The file of API keys, and the command that writes it."""

import dataclasses
import datetime
import json
import os
from pathlib import Path
from typing import Any

import pytest
import yaml
from typer.testing import CliRunner

from coordinator.api_keys import KeyRing
from specwire.api_keys import ApiKey, add_api_key, hash_key, load_api_keys, make_key, parse_expiry
from specwire.cli.app import app
from specwire.errors import InvalidArgumentError, UnauthenticatedError

HASH, OTHER_HASH = hash_key("a"), hash_key("b")
NEW_YEAR = datetime.datetime(2031, 1, 1, tzinfo=datetime.UTC)


def test_keys_are_random_and_their_hashes_are_sha256() -> None:
    keys = {make_key() for _ in range(100)}
    assert len(keys) == 100
    assert all(key.startswith("sw-") and len(key) >= 3 + 43 for key in keys), "256 bits take 43 characters"
    assert hash_key("abc") == "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[]", ()),
        (f"- name: blue\n  hash: {HASH}\n", (ApiKey("blue", HASH),)),
        (f'[{{"name": "blue", "hash": "{HASH}", "tokens_per_minute": 7}}]', (ApiKey("blue", HASH, tokens_per_minute=7),)),
        (f"- {{name: blue, hash: {HASH}, expires: 2031-01-01}}", (ApiKey("blue", HASH, expires=NEW_YEAR),)),
        (f"- {{name: blue, hash: {HASH}, expires: 2031-01-01T01:00:00+01:00}}", (ApiKey("blue", HASH, expires=NEW_YEAR),)),
        (f"- {{name: blue, hash: {HASH}, expires: '2031-01-01T00:00:00Z'}}", (ApiKey("blue", HASH, expires=NEW_YEAR),)),
        (f"- {{name: a, hash: {HASH}}}\n- {{name: b, hash: {OTHER_HASH}}}", (ApiKey("a", HASH), ApiKey("b", OTHER_HASH))),
    ],
)
def test_files_are_read(text: str, expected: tuple[ApiKey, ...], tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    assert load_api_keys(str(path)) == expected


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("- [", "are neither YAML nor JSON in line"),
        (f"- {{name: a, hash: {HASH}, expires: 2030-02-30}}", "have a value that is none (day is out of range for month)"),
        ("[" * 20_000, "have a value that is none (maximum recursion depth"),
        (f"- {{name: a, hash: {HASH}, tokens_per_minute: {'1' * 5000}}}", "have a value that is none (Exceeds the limit"),
        ("a: 1", "are a dict, but must be a list"),
        ("", "have no list"),
        ("# nobody yet\n", "have no list"),
        ("null", "have no list"),
        ("- 7", "entry 1: it is a int, but must have name and hash"),
        (f"- {{hash: {HASH}}}", "entry 1: name is missing"),
        ("- {name: a}", "entry 1: hash is missing"),
        ("- {name: a, hash: sw-my-secret}", "entry 1: hash is not the 64 lower-case hex digits of a SHA-256"),
        (f"- {{name: 'a b', hash: {HASH}}}", "entry 1: name is 'a b'"),
        (f"- {{name: 7, hash: {HASH}}}", "entry 1: name is 7"),
        (f"- {{name: a, hash: {HASH}, token_per_minute: 1}}", "'token_per_minute' is not known; did you mean tokens_per_minute?"),
        (f"- {{name: a, hash: {HASH}, 3: 1}}", "3 is not known; known are name, hash"),
        (f"- {{name: a, hash: {HASH}, tokens_per_minute: -1}}", "tokens_per_minute is -1"),
        (f"- {{name: a, hash: {HASH}, tokens_per_minute: many}}", "tokens_per_minute is 'many'"),
        (f"- {{name: a, hash: {HASH}, requests_per_minute: true}}", "requests_per_minute is True"),
        (f"- {{name: a, hash: {HASH}, max_concurrent_requests: 1.5}}", "max_concurrent_requests is 1.5"),
        (f"- {{name: a, hash: {HASH}, min_priority: high}}", "min_priority is 'high'"),
        (f"- {{name: a, hash: {HASH}, min_priority: 2147483648}}", "min_priority is 2147483648"),
        (f"- {{name: a, hash: {HASH}, expires: soon}}", "expires is 'soon', but must be a date"),
        (f"- {{name: a, hash: {HASH}, expires: 7}}", "expires is 7, but must be a date"),
        (f"- {{name: a, hash: {HASH}}}\n- {{name: a, hash: {OTHER_HASH}}}", "entry 2: its name is that of entry 1"),
        (f"- {{name: a, hash: {HASH}}}\n- {{name: b, hash: {HASH}}}", "entry 2: its hash is that of entry 1"),
    ],
)
def test_wrong_files_are_refused_by_entry(text: str, message: str, tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(text)
    with pytest.raises(InvalidArgumentError) as caught:
        load_api_keys(str(path))
    assert message in str(caught.value)
    assert "sw-my-secret" not in str(caught.value), "somebody may have put a key where its hash belongs"


def test_files_that_cannot_be_read_are_named(tmp_path: Path) -> None:
    with pytest.raises(InvalidArgumentError, match="nowhere can't be read \\(No such file"):
        load_api_keys(str(tmp_path / "nowhere"))
    (tmp_path / "latin").write_bytes(b"- name: \xff")
    with pytest.raises(InvalidArgumentError, match="it is no UTF-8"):
        load_api_keys(str(tmp_path / "latin"))


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "# the team's keys",
        f"# the team's keys\n- name: old\n  hash: {HASH}  # since spring\n",
        f"  - name: old\n    hash: {HASH}",
        f"- {{name: old, hash: {HASH}}}",
        f'[\n  {{"name": "old", "hash": "{HASH}"}}\n]\n',
        "[]",
    ],
)
def test_entries_are_appended_and_the_rest_stays(text: str | None, tmp_path: Path) -> None:
    path = tmp_path / "keys"
    if text is not None:
        path.write_text(text)
        path.chmod(0o640)
    old = (ApiKey("old", HASH),) if text and "name" in text else ()
    entry = ApiKey("new", OTHER_HASH, max_concurrent_requests=3, requests_per_minute=60, min_priority=0, expires=NEW_YEAR)
    add_api_key(str(path), entry)
    assert load_api_keys(str(path)) == (*old, entry)
    assert path.stat().st_mode & 0o777 == (0o600 if text is None else 0o640)
    if text and "#" in text:
        assert path.read_text().startswith(text)
    assert os.listdir(tmp_path) == ["keys"]


def test_what_cannot_be_appended_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "keys"
    path.write_text(f"- &x {{name: old, hash: {HASH}}}\n...\n")
    with pytest.raises(InvalidArgumentError, match="nothing can be appended"):
        add_api_key(str(path), ApiKey("new", OTHER_HASH))
    assert path.read_text().endswith("...\n")
    with pytest.raises(InvalidArgumentError, match="has a key named 'old' already"):
        add_api_key(str(path), ApiKey("old", OTHER_HASH))
    with pytest.raises(InvalidArgumentError, match="can't be written"):
        add_api_key(str(tmp_path / "no" / "folder"), ApiKey("new", OTHER_HASH))


@pytest.mark.parametrize(
    "value", [NEW_YEAR, "2031-01-01", "2031-01-01T00:00:00", "2031-01-01T00:00:00Z", datetime.date(2031, 1, 1), NEW_YEAR.replace(tzinfo=None)]
)
def test_expiry_in_every_form(value: Any) -> None:
    assert parse_expiry(value) == NEW_YEAR


def test_expiry_is_the_first_moment_that_is_too_late() -> None:
    key = ApiKey("a", HASH, expires=NEW_YEAR)
    assert key.has_expired(NEW_YEAR)
    assert not key.has_expired(NEW_YEAR - datetime.timedelta(microseconds=1))
    assert not ApiKey("a", HASH).has_expired(NEW_YEAR)


def test_the_command_prints_the_key_and_keeps_its_hash(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    arguments = [
        "keys",
        "new",
        "blue",
        "--file",
        str(path),
        "--max-concurrent-requests",
        "4",
        "--tokens-per-minute",
        "1000",
        "--expires",
        "2031-01-01",
    ]
    result = CliRunner().invoke(app, arguments)
    assert result.exit_code == 0
    key = result.stdout.strip()
    assert load_api_keys(str(path)) == (ApiKey("blue", hash_key(key), max_concurrent_requests=4, tokens_per_minute=1000, expires=NEW_YEAR),)
    assert key not in path.read_text()
    assert key not in result.stderr
    again = CliRunner().invoke(app, arguments)
    assert (again.exit_code, again.stdout) == (2, "")
    assert "has a key named 'blue' already" in again.stderr


def test_json_stays_json(tmp_path: Path) -> None:
    path = tmp_path / "keys.json"
    path.write_text("[]")
    add_api_key(str(path), ApiKey("a", HASH))
    assert json.loads(path.read_text()) == [{"name": "a", "hash": HASH}]


def test_names_that_are_gone_are_forgotten_once_nothing_of_them_runs(tmp_path: Path) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: a, hash: {HASH}}}\n- {{name: b, hash: {OTHER_HASH}}}\n- {{name: c, hash: {hash_key('c')}}}\n")
    keys = KeyRing(str(path), check_interval_s=0)
    usages = [keys.usage(name) for name in "abc"]
    usages[1].num_choices = 1
    path.write_text(f"- {{name: a, hash: {HASH}}}\n")
    digest = bytes.fromhex(HASH)
    keys.find(digest)
    assert (keys.usage("a") is usages[0], keys.usage("b") is usages[1], keys.usage("c") is usages[2]) == (True, True, False)
    usages[1].num_choices = 0
    path.write_text(f"- {{name: a, hash: {HASH}}} # again\n")
    keys.find(digest)
    assert keys.usage("b") is not usages[1]


@pytest.mark.parametrize("empty", ["", "# written in a moment\n"])
def test_a_file_that_is_empty_for_a_moment_locks_nobody_out(empty: str, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    path = tmp_path / "keys.yaml"
    path.write_text(f"- {{name: a, hash: {HASH}}}\n")
    keys, digest = KeyRing(str(path), check_interval_s=0), bytes.fromhex(HASH)
    path.write_text(empty)
    assert keys.find(digest).name == "a"
    assert keys.num_failed_reloads == 1
    path.write_text(f"- {{name: again, hash: {HASH}}}\n")
    assert keys.find(digest).name == "again"
    assert "every call is refused" not in caplog.text
    path.write_text("[]\n")
    with pytest.raises(UnauthenticatedError):
        keys.find(digest)
    assert "every call is refused" in caplog.text


def test_the_documented_entry_has_every_field() -> None:
    page = (Path(__file__).parents[2] / "docs" / "security.md").read_text(encoding="utf-8")
    [entry] = yaml.safe_load("- name:" + page.partition("```yaml\n- name:")[2].partition("```")[0])
    assert list(entry) == [field.name for field in dataclasses.fields(ApiKey)]
    ApiKey(**{**entry, "hash": HASH, "expires": parse_expiry(entry["expires"])})
