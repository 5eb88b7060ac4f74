"""The output of `specwire batch`: only its own files are gone on with."""

import json
from pathlib import Path

import pytest

from specwire.cli.batch_lines import Writer, answered_ids
from tests.cli.batch_calls import batch

WHOLE = '{"id": 1, "text": "x", "token_ids": [5]}'


@pytest.mark.parametrize(
    ("content", "line"),
    [
        ("my notes\n", 1),
        ("my notes", 1),
        ('{"id": 1, "prompt": "a"}', 1),
        ('{"id": 1, "prompt": "a"}\n', 1),
        ('{"id": true, "token_ids": []}\n', 1),
        ('{"id": 1, "error": 5}\n', 1),
        ("[]\n", 1),
        (f"{WHOLE}\nmy notes", 2),
        (f'{WHOLE}\nmy notes\n{{"id": 3, "te', 2),
    ],
)
def test_an_output_that_is_none_is_left_alone(source: Path, tmp_path: Path, content: str, line: int) -> None:
    output = tmp_path / "notes.txt"
    output.write_text(content)
    result = batch(source, "--output", output, "--resume")
    assert result.exit_code == 1
    assert f"line {line} of {output} is no result of a batch" in result.stderr
    assert output.read_text() == content


@pytest.mark.parametrize(
    ("cut", "left", "answered"),
    [("{", "", set()), ('{"id": 2, "text": "\\ud8', "", set()), (WHOLE, f"{WHOLE}\n", {1})],
    ids=["start", "middle", "end"],
)
def test_a_record_that_was_cut_short(tmp_path: Path, cut: str, left: str, answered: set[int]) -> None:
    path = tmp_path / "out"
    before = '{"id": "a", "choices": []}\n'
    path.write_text(before + cut)
    assert answered_ids(path) == {"a", *answered}
    assert path.read_text() == before + left


@pytest.mark.parametrize("resume", [[], ["--resume"]])
def test_the_input_is_no_output(source: Path, tmp_path: Path, resume: list[str]) -> None:
    before = source.read_text()
    other_name = tmp_path / "link"
    other_name.symlink_to(source)
    result = batch(source, "--output", other_name, *resume)
    assert result.exit_code == 2
    assert "is the file of the requests; name another one" in result.stderr
    assert source.read_text() == before


def test_an_output_without_an_end_is_not_resumed(source: Path) -> None:
    result = batch(source, "--output", "/dev/zero", "--resume")
    assert result.exit_code == 2
    assert "--output /dev/zero is no regular file" in result.stderr


def test_records_can_always_be_written(tmp_path: Path) -> None:
    path = tmp_path / "out"
    records = [{"id": 1, "error": {"message": "\ud800 é"}}, {"id": 2, "token_ids": [], "text": "é"}]
    for encoding, expected in (("utf-8", "é"), ("ascii", "\\u00e9")):
        with path.open("w", encoding=encoding) as stream:
            writer = Writer(stream, keep_order=False)
            for index, record in enumerate(records):
                writer.write(index, record)
        assert [json.loads(line) for line in path.read_text(encoding=encoding).splitlines()] == records
        assert expected in path.read_text(encoding=encoding)
