"""`specwire up` with its HTTP API, over a tiny model: a chat, and one trace through all four processes."""

import json
import signal
from pathlib import Path

import openai
import pytest

from specwire.cli.trace import group, read_spans
from tests.cli.up_process import Up
from tests.engine.tiny_models import save_tiny_model

TEMPLATE = "{% for message in messages %}{{ message.content }}\n{% endfor %}"


@pytest.mark.timeout(180)
def test_up_serves_http(tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = tmp_path / "tiny"
    save_tiny_model(model)
    (model / "tokenizer_config.json").write_text(json.dumps({"chat_template": TEMPLATE}), encoding="utf-8")
    monkeypatch.setenv("TMPDIR", str(socket_dir))
    flags = ("--model", str(model), "--num-threads", "1", "--kv-cache-memory", "8000000", "--trace-file", "traces.jsonl")
    up = Up(tmp_path, "--port", "0", "--http-port", "0", *flags, timeout_s=120)
    try:
        url = up.wait_for(r"OpenAI-compatible HTTP API: (\S+)")
        with openai.OpenAI(base_url=url, api_key="none") as client:
            name = client.models.list().data[0].id
            messages = [{"role": "user", "content": "abcabcabc"}]
            answer = client.chat.completions.create(model=name, messages=messages, max_tokens=24, temperature=0)  # type: ignore[call-overload]
            stream = client.chat.completions.create(model=name, messages=messages, max_tokens=24, temperature=0, stream=True)  # type: ignore[call-overload]
            assert "".join(chunk.choices[0].delta.content or "" for chunk in stream) == answer.choices[0].message.content
            assert answer.usage.completion_tokens == 24
        assert up.end(signal.SIGINT) == 0, up.output
    finally:
        if up.process.poll() is None:
            up.process.kill()
            up.join()
    traces = group(read_spans(tmp_path / "traces.jsonl")[0])
    assert len(traces) == 2
    for trace in traces:
        assert {span.service for span in trace.spans} == {"http", "coordinator", "drafter", "verifier"}
        by_id = {span.span_id for span in trace.spans}
        assert [span.name for span in trace.spans if span.parent_id not in by_id] == ["http"]
