"""`specwire advise` on a real stack: a tiny model that repeats itself, and ngram drafts."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from specwire.cli import app
from tests.advise.test_advice import speculative
from tests.cli.up_process import Up


@pytest.mark.timeout(300)
def test_a_tiny_model(tmp_path: Path, socket_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.engine.tiny_models import save_tiny_model

    monkeypatch.setenv("TMPDIR", str(socket_dir))
    save_tiny_model(tmp_path / "tiny", max_position_embeddings=512)
    (tmp_path / "prompts.jsonl").write_text("".join(json.dumps({"prompt": "abcabcab" * count}) + "\n" for count in range(1, 5)))
    limits = ["--kv-cache-memory", "8000000", "--dtype", "float32", "--num-threads", "1"]
    # However busy the machine is, no step goes on without its drafts.
    patience = ["--set", "coordinator.min_draft_wait_ms=10000"]
    options = ["--port", "0", "--model", str(tmp_path / "tiny"), *limits, *patience, "--config="]
    up = Up(tmp_path, *options, timeout_s=100)
    try:
        address = up.wait_ready()
        arguments = ["--address", address, "--prompts", str(tmp_path / "prompts.jsonl"), "--output", str(tmp_path / "out"), "--ignore-eos"]
        sizes = ["--output-len", "48", "--concurrency", "1,4", "--step-len", "24", "--repeats", "1", "--online-seconds", "0.5", "--keep-going"]
        result = CliRunner().invoke(app, ["advise", *arguments, *sizes])
    finally:
        up.process.terminate()
        up.join()
    assert result.exit_code == 0, result.output
    report = json.loads((tmp_path / "out" / "advice.json").read_text())
    # The services have measured themselves, so that every size up to the largest batch is priced.
    assert all(point["table_ms"] > 0 for point in report["measured_steps"])
    assert report["max_num_seqs"] == max(entry["num_sequences"] for entry in report["batch_sizes"]) >= 4
    tokens = report["tokens_per_step_by_k"]
    assert tokens == sorted(tokens)
    assert tokens[-1] > 1.05, "greedy answers of a tiny model repeat themselves"
    assert report["acceptance"]["groups"][0]["prompts"] == 4
    assert report["workload"]["low"]["utilisation"] == pytest.approx(0.25)
    assert report["workload"]["repetition"]["in_answer"] > 0
    assert report["chosen"]["method"].startswith("ngram")
    # As ngram drafts itself: from the same places, by the same matches.
    assert report["workload"]["repetition"]["tokens_per_step"] == pytest.approx(tokens[-1], rel=0.1)
    assert report["verdict"] in ("on", "weigh", "dynamic", "adaptive", "off")
    assert [rate["name"] for rate in report["online"]] == ["low", "high"]
    assert report["speculative_config"]["method"] == "ngram" or report["leave_off"]
    speculative((tmp_path / "out" / "specwire.yaml").read_text(), tmp_path)
