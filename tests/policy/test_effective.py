"""The speculative configuration in effect: values, where they come from, and why they are not what was written."""

import dataclasses
from typing import Any

import pytest

from specwire.config import CoordinatorConfig
from specwire.config_file import read_config_file
from specwire.config_layers import resolve
from specwire.messages import ServiceDescription
from specwire.policy.capacity import describe_engine
from specwire.policy.effective import EffectiveSetting, effective_speculation
from specwire.speculative_config import SpeculativeConfig

VERIFIER = ServiceDescription("m", "", 100, max_model_len=64, max_num_draft_tokens=3, max_num_seqs=8, max_num_batched_tokens=64)


def settings_of(config: CoordinatorConfig, verifier: ServiceDescription = VERIFIER, **more: Any) -> dict[str, EffectiveSetting]:
    return {setting.key: setting for setting in effective_speculation(config, describe_engine(config, [verifier]), **more)}


def test_every_key_is_there_and_most_are_as_they_were_written() -> None:
    config = CoordinatorConfig(drafters=("d:1",), speculative_config=SpeculativeConfig(num_speculative_tokens=2), adaptive_hysteresis=0.5)
    settings = settings_of(config)
    assert {field.name for field in dataclasses.fields(SpeculativeConfig)} < settings.keys()
    assert settings["num_speculative_tokens"] == EffectiveSetting("num_speculative_tokens", 2, 2, "")
    assert settings["num_speculative_tokens_per_batch_size"].value == [(1, 8, 2)]
    assert settings["method"] == EffectiveSetting("method", "ngram", "ngram", "default")
    assert settings["adaptive_hysteresis"] == EffectiveSetting("adaptive_hysteresis", 0.5, 0.5, "")
    assert not any(setting.reasons for setting in settings.values())


def test_what_is_clipped_says_why() -> None:
    speculative = SpeculativeConfig(num_speculative_tokens_per_batch_size=((1, 4, 5), (6, 99, 1)))
    settings = settings_of(CoordinatorConfig(drafters=("d:1",), speculative_config=speculative))
    k, schedule = settings["num_speculative_tokens"], settings["num_speculative_tokens_per_batch_size"]
    assert (k.value, k.configured, k.reasons) == (3, 5, ("num_speculative_tokens clipped from 5 to 3: a verifier takes no more",))
    assert schedule.value == [(1, 5, 3), (6, 8, 1)]
    assert schedule.configured == ((1, 4, 5), (6, 99, 1))
    assert schedule.reasons == (
        "[1, 4, 5]: K clipped to num_speculative_tokens = 3",
        "[6, 99, 1]: end cut to max_num_seqs = 8",
        "5 sequences: in no entry, so that K of [1, 4, 5] goes on",
    )


@pytest.mark.parametrize(
    ("drafters", "method", "most", "reason"),
    [
        ((), "ngram", 3, "there are no drafters"),
        (("d:1",), None, 3, "method is null: nothing is drafted"),
        (("d:1",), "ngram", 0, "the verifiers take no drafts"),
    ],
)
def test_no_drafts_say_why(drafters: tuple[str, ...], method: str | None, most: int, reason: str) -> None:
    config = CoordinatorConfig(drafters=drafters, speculative_config=SpeculativeConfig(method))
    settings = settings_of(config, dataclasses.replace(VERIFIER, max_num_draft_tokens=most))
    assert (settings["num_speculative_tokens"].value, settings["num_speculative_tokens"].reasons) == (0, (reason,))
    assert settings["num_speculative_tokens_per_batch_size"].value == [(1, 8, 0)]


def test_sources(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    path = tmp_path / "specwire.yaml"
    path.write_text("speculative_config: {num_speculative_tokens: 2}\ncoordinator:\n  drafters: d:1\n  adaptive_probe_share: 0.01\n")
    resolved = resolve(CoordinatorConfig, "coordinator", [read_config_file(path)])
    settings = settings_of(resolved.config, origins=resolved.origins)
    assert settings["num_speculative_tokens"].source.endswith("specwire.yaml:1")
    assert settings["adaptive_probe_share"].source.endswith("specwire.yaml:4")
    assert settings["method"].source == settings["calibration_file"].source == "default"
