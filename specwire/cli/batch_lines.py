"""The lines of `specwire batch`: what may be asked on one, and what is written for it."""

import json
import reprlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TextIO

from specwire.cli.generate import result_object
from specwire.client import Chat, GenerationResult, Prompt
from specwire.client.prompts import check_label
from specwire.errors import InvalidArgumentError, SpecwireError
from specwire.statuses import status_code

_PROMPTS = ("prompt", "prompt_token_ids", "messages")
_RECORD_START = b'{"id": '


@dataclass(frozen=True, slots=True)
class Job:
    """One line: its number from 1, its id (the number, if it names none), what it asks, and sampling parameters by name.

    Args:
        error: what is wrong with the line; then the prompt is empty.
    """

    line: int
    id: str | int
    prompt: Prompt = ""
    sampling: Mapping[str, Any] = field(default_factory=dict)
    error: InvalidArgumentError | None = None


def read_jobs(lines: Iterable[bytes], done: Collection[str | int] = ()) -> Iterator[Job]:
    """One job a line that is not blank; a line that can't be read gives a job with an error. Those whose id is in `done` are left out."""
    seen: dict[str | int, int] = {}
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        job_id: str | int = number
        try:
            request = _parse(line)
            job_id = _id(request, number)
            if job_id in seen:
                raise InvalidArgumentError(f"the id {job_id!r} is that of line {seen[job_id]} too; ids must differ")
            seen[job_id] = number
            job = _job(number, job_id, request)
        except InvalidArgumentError as error:
            job = Job(number, job_id, error=error)
        if job_id not in done:
            yield job


def answer_record(job: Job, result: GenerationResult) -> dict[str, Any]:
    """What is written for an answer; with n > 1, a list of choices."""
    choices = [
        result_object(choice) | ({} if choice.error is None else {"error": _error_object(choice.error)})
        for choice in result.choices
    ]  # fmt: skip
    return {"id": job.id, **choices[0]} if len(choices) == 1 else {"id": job.id, "choices": choices}


def error_record(job: Job, error: SpecwireError) -> dict[str, Any]:
    """What is written for a line that got no answer."""
    return {"id": job.id, "line": job.line, "error": _error_object(error)}


class Writer:
    """Writes one JSON object a line, each whole before the next begins.

    Args:
        keep_order: hold back results until those of all jobs before them are there.
    """

    def __init__(self, stream: TextIO, *, keep_order: bool) -> None:
        self._stream = stream
        self._keep_order = keep_order
        self._held: dict[int, dict[str, Any]] = {}
        self._next = 0

    def write(self, index: int, record: dict[str, Any]) -> None:
        """Writes the record of the index-th job."""
        if not self._keep_order:
            self._put(record)
            return
        self._held[index] = record
        while self._next in self._held:
            self._put(self._held.pop(self._next))
            self._next += 1

    def _put(self, record: dict[str, Any]) -> None:
        line = json.dumps(record, ensure_ascii=False)
        try:
            line.encode(self._stream.encoding or "utf-8")
        except UnicodeEncodeError:  # what a message quotes of a request need not be valid text
            line = json.dumps(record)
        self._stream.write(line + "\n")
        self._stream.flush()


def answered_ids(path: Path) -> set[str | int]:
    """The ids that a former run's output has answers for. A last line that was cut short is removed from the file, or ended if it is whole.

    Raises:
        InvalidArgumentError: the file is not the output of a batch; it is left as it was.
    """
    if not path.exists():
        return set()
    answered: set[str | int] = set()
    with path.open("rb+") as stream:
        position = 0
        for number, line in enumerate(iter(stream.readline, b""), start=1):
            is_cut = not line.endswith(b"\n")
            record = _read_json(line)
            if record is None and is_cut and line.startswith(_RECORD_START[: len(line)]):
                stream.truncate(position)  # all lines before it are results
                break
            if not isinstance(record, dict) or not _is_result(record):
                raise InvalidArgumentError(f"line {number} of {path} is no result of a batch; name the right file, or another one")
            if "error" not in record:
                answered.add(record["id"])
            if is_cut:
                stream.write(b"\n")
            position += len(line)
    return answered


def _read_json(line: bytes) -> object:
    """None for what is no JSON."""
    try:
        return json.loads(line)
    except (ValueError, RecursionError):
        return None


def _is_result(record: Mapping[str, Any]) -> bool:
    """Whether `answer_record` or `error_record` may have made it; requests have ids too."""
    has_id = isinstance(record.get("id"), (str, int)) and not isinstance(record.get("id"), bool)
    return has_id and any(isinstance(record.get(key), kind) for key, kind in (("token_ids", list), ("choices", list), ("error", dict)))


def _parse(line: bytes) -> dict[str, Any]:
    try:
        request = json.loads(line)
    except (ValueError, RecursionError) as error:  # UnicodeDecodeError is one
        raise InvalidArgumentError(f'the line is no JSON ({error}); write it as in {{"prompt": "..."}}') from error
    if not isinstance(request, dict):
        raise InvalidArgumentError('the line is no JSON object; write it as in {"prompt": "..."}')
    return request


def _id(request: dict[str, Any], number: int) -> str | int:
    job_id = request.pop("id", number)
    if isinstance(job_id, bool) or not isinstance(job_id, (str, int)):
        raise InvalidArgumentError(f"id is {reprlib.repr(job_id)}, but must be text or an integer; it may be left out")
    return check_label("id", job_id) if isinstance(job_id, str) else job_id


def _job(number: int, job_id: str | int, request: dict[str, Any]) -> Job:
    given = [name for name in _PROMPTS if name in request]
    if len(given) != 1:
        raise InvalidArgumentError(f"the line has {' and '.join(given) or 'no prompt'}; give exactly one of {', '.join(_PROMPTS)}")
    value = request.pop(given[0])
    kind, wanted = (str, "text") if given[0] == "prompt" else (list, "a list")
    if not isinstance(value, kind):
        raise InvalidArgumentError(f"{given[0]} is {reprlib.repr(value)}, but must be {wanted}")
    prompt = Chat(value) if given[0] == "messages" else value  # type: ignore[arg-type]  # a list
    if isinstance(request.get("logit_bias"), dict):  # JSON has no other keys than text
        request["logit_bias"] = {_token_id(key): value for key, value in request["logit_bias"].items()}
    return Job(number, job_id, prompt, request)


def _token_id(key: str) -> int:
    try:
        return int(key)
    except ValueError:
        raise InvalidArgumentError(f'logit_bias has the key {key!r}, but its keys are token ids; write {{"50": -1.5}}') from None


def _error_object(error: SpecwireError) -> dict[str, str]:
    return {"code": status_code(error).name, "message": str(error)}
