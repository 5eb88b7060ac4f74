"""What a report says of where it was made."""

import pytest

from specwire.bench.environment import command_line, describe_environment


@pytest.mark.parametrize("secret", [["--api-key", "s3cret"], ["--api-key=s3cret"]])
def test_the_api_key_stays_out_of_the_report(secret: list[str]) -> None:
    text = command_line(["/somewhere/bin/specwire", "bench", "serve", *secret, "--goodput", "ttft:1 tpot:2"])
    assert "s3cret" not in text
    assert text.startswith("specwire bench serve --api-key")
    assert text.endswith("--goodput 'ttft:1 tpot:2'")


def test_a_module_is_named_as_the_command() -> None:
    assert command_line(["/somewhere/specwire/cli/__main__.py", "sweep", "--model=m"]) == "specwire sweep --model=m"


def test_environment() -> None:
    environment = describe_environment()
    assert set(environment) == {"date", "command", "machine", "versions"}
    assert environment["machine"]["cores"] >= 1
    assert environment["machine"]["memory_gib"] > 0
    assert {"python", "grpcio", "numpy", "protobuf"} <= set(environment["versions"])
