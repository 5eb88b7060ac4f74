"""specwire.yaml as it is written: what can't be read is named with its line, and nothing is too much."""

from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from specwire.config_file import read_config_file
from specwire.config_layers import ConfigError, resolve
from specwire.config_reader import SECTIONS


@pytest.mark.parametrize(
    ("text", "problems"),
    [
        ("verifier:\n  max_num_seq: 3\n", ["specwire.yaml:2: verifier.max_num_seq is an unknown key; did you mean max_num_seqs?"]),
        ("verifyer: {}\n", ["specwire.yaml:1: verifyer is an unknown key; did you mean verifier?"]),
        (
            "coordinator:\n  num_speculative_tokens: 3\n",
            ["specwire.yaml:2: coordinator.num_speculative_tokens is an unknown key; it is one of speculative_config: put it there"],
        ),
        ("xyz: 1\n", ["specwire.yaml:1: xyz is an unknown key; known keys are speculative_config, verifier,"]),
        (
            "speculative_config: {metod: ngram}",
            ["specwire.yaml:1: speculative_config.metod is an unknown key; did you mean method?"],
        ),
        ("speculative_config: {metod: ngram}\nverifier: {speculative_config: {temp: 1}}", ["did you mean method?", "temp is an unknown key"]),
        ("up: {ports: 1}", ["up.ports is an unknown key; did you mean port?"]),
        (
            "verifier:\n  max_num_seqs: 3\ndrafter: {}\nverifier: {}\n",
            ["specwire.yaml:4: verifier stands here for the second time, first in line 1; remove one"],
        ),
        (
            "verifier:\n  max_num_seqs: 3\n  max-num-seqs: 3\n",
            ["specwire.yaml:3: verifier.max_num_seqs stands here for the second time, first in line 2"],
        ),
        ("verifier:\n  max_num_seqs: true\n", ["specwire.yaml:2: verifier.max_num_seqs is true, but must be an integer, without quotes or decimals"]),
        ("verifier:\n  max_num_seqs: '3'\n", ["verifier.max_num_seqs is '3', but must be an integer"]),
        ("verifier:\n  max_num_seqs: 3.0\n", ["verifier.max_num_seqs is 3.0, but must be an integer"]),
        ("verifier:\n  max_num_seqs:\n", ["verifier.max_num_seqs is empty, but must be an integer"]),
        ("verifier:\n  model: 7\n", ["verifier.model is 7, but must be text; put it in quotes"]),
        ("verifier:\n  enable_prefix_caching: 'no'\n", ["verifier.enable_prefix_caching is 'no', but must be true or false, without quotes"]),
        ("verifier:\n  listen: 50052\n", ["verifier.listen is 50052, but must be a list of texts"]),
        ("verifier:\n  listen: [50052]\n", ["verifier.listen is [50052], but must be a list of texts"]),
        ("coordinator:\n  verifier_wait_s: soon\n", ["coordinator.verifier_wait_s is 'soon', but must be a number"]),
        ("coordinator:\n  verifier_wait_s: yes\n", ["coordinator.verifier_wait_s is true, but must be a number"]),
        ("verifier: [1]\n", ["specwire.yaml:1: verifier must be a mapping of keys to values"]),
        ("- verifier\n", ["specwire.yaml:1: the file must be a mapping of keys to values"]),
        ("verifier:\n  speculative_config: 3\n", ["specwire.yaml:2: verifier.speculative_config must be a mapping"]),
        ("drafters: 2\n", ["specwire.yaml:1: drafters must be a list with an entry for each kind of drafter"]),
        ("drafters:\n- {method: ngram}\n- 3\n", ["specwire.yaml:3: drafters[1] must be a mapping"]),
        ("drafters:\n- {listen: 'a:1'}\n", ["specwire.yaml:2: drafters[0].listen is an unknown key"]),
        ("drafters:\n- {count: many}\n", ["drafters[0].count is 'many', but must be an integer"]),
        ("verifier: {model: !!int x}\n", ["specwire.yaml:1: verifier.model can't be read (ValueError)"]),
        ("verifier: {model: !!python/name:os.system x}\n", ["specwire.yaml:1: verifier.model can't be read (ConstructorError)"]),
        ("verifier: {? [a] : 1}\n", ["specwire.yaml:1: verifier.'a list or mapping' is an unknown key"]),
        ('"x\\ny": 1\n', ["specwire.yaml:1: 'x\\ny' is an unknown key"]),
        ("verifier:\n  model: 'x\n", ["specwire.yaml:3: is no YAML: while scanning a quoted scalar found unexpected end of stream"]),
        ("verifier: {}\n---\ndrafter: {}\n", ["is no YAML: expected a single document in the stream but found another document"]),
        ("verifier: {model: \x00}\n", ["is no YAML"]),
        (b"verifier: \xff\n", ["specwire.yaml: is no UTF-8 (byte 10); save it as UTF-8"]),
        (
            "verifier:\n  max_num_seqs: x\n  dtyp: 3\ncoordinator: {max_queue: []}\n",
            ["verifier.max_num_seqs is 'x'", "verifier.dtyp is an unknown key", "coordinator.max_queue is []"],
        ),
    ],
)
def test_what_can_not_be_read_is_named_with_its_line(write_config: Any, text: str | bytes, problems: list[str]) -> None:
    with pytest.raises(ConfigError) as caught:
        read_config_file(write_config(text))
    found = list(map(str, caught.value.problems))
    assert len(found) == len(problems), found
    for line, problem in zip(found, problems, strict=True):
        assert problem in line
        assert line.startswith("specwire.yaml:")


BOMB = "".join(f"x{i}: &x{i} [{', '.join([f'*x{i - 1}'] * 9) if i else 'a'}]\n" for i in range(30))


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("verifier: " + "[" * 20_000, "specwire.yaml: has lists or mappings too deep in each other"),
        ("verifier: " + "{a: " * 20_000, "specwire.yaml: has lists or mappings too deep in each other"),
        (BOMB + "verifier: {model: *x29}\n", "specwire.yaml: has more than 20000 keys and values"),
        ("verifier: &v {model: *v}\n", "specwire.yaml: has more than 20000 keys and values"),
        ("verifier: &v {max_num_seqs: 8}\ndrafter:\n  <<: *v\n", "specwire.yaml:3: drafter.'<<' is a merge key, which is not read here"),
    ],
    ids=["brackets", "braces", "bomb", "endless", "merge"],
)
def test_what_is_too_much_is_refused_at_once(write_config: Any, text: str, problem: str) -> None:
    with pytest.raises(ConfigError) as failure:
        read_config_file(write_config(text))
    [found] = failure.value.problems
    assert str(found).startswith(problem)


scalars = st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(max_size=8) | st.dates()


keys = st.sampled_from(
    [*SECTIONS, "drafters", "speculative_config", "max_num_seqs", "listen", "method", "model", "count", "verifier_wait_s", "address"]
)


documents = st.recursive(scalars, lambda inner: st.lists(inner, max_size=3) | st.dictionaries(keys | scalars, inner, max_size=5), max_leaves=12)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents | st.text(max_size=40))
def test_any_file_is_taken_or_refused_with_reasons(write_config: Any, document: Any) -> None:
    text = document if isinstance(document, str) else yaml.safe_dump(document, allow_unicode=True)
    reasons = ["taken"]
    try:
        source = read_config_file(write_config(text.encode("utf-8", "replace")))
        for section, kind in SECTIONS.items():
            resolve(kind, section, [source])
    except ConfigError as error:
        reasons = list(map(str, error.problems))
    assert all(reasons)
    assert not any("\n" in reason for reason in reasons), reasons
