"""Chat templates: what they are given, and how those that can't be used are refused."""

import dataclasses
import json

import pytest
from tokenizers import Tokenizer as RawTokenizer
from tokenizers.models import BPE

from specwire.errors import FailedPreconditionError, InvalidArgumentError
from specwire.tokenizer import Tokenizer


@pytest.fixture
def tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """Without any ids but those of its special tokens."""
    folder = tmp_path_factory.mktemp("tokenizer")
    raw = RawTokenizer(BPE())
    raw.add_special_tokens(["<s>", "</s>"])
    raw.save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps({"bos_token": "<s>", "eos_token": "</s>"}))
    return Tokenizer.from_folder(folder, "tiny")


def with_template(tokenizer: Tokenizer, template: str | None) -> Tokenizer:
    return Tokenizer(dataclasses.replace(tokenizer.to_spec(), chat_template=template))


MESSAGES = [{"role": "system", "content": "<b>"}, {"role": "user", "content": "é"}]


@pytest.mark.parametrize(
    ("template", "expected"),
    [
        ("{% for m in messages %}\n{{ m.role }}:{{ m['content'] }}\n    {% endfor %}", "system:<b>\nuser:é\n"),
        ("{{ messages | tojson }}", '[{"role": "system", "content": "<b>"}, {"role": "user", "content": "é"}]'),
        ("{{ messages[0] | tojson(indent=1) }}", '{\n "role": "system",\n "content": "<b>"\n}'),
        ("{% if add_generation_prompt %}go{% endif %}", "go"),
        ("{% if tools %}{{ tools[0].name }}{% else %}none{% endif %}", "none"),
        ("{% generation %}{{ messages[1].content }}{% endgeneration %}!", "é!"),
        ("{% for m in messages %}{% if loop.index0 == 1 %}{% break %}{% endif %}{{ m.role }}{% endfor %}", "system"),
        ("{{ strftime_now('%%') }}{{ bos_token }}{{ eos_token }}", "%<s></s>"),
        ("{{ enable_thinking is defined }}", "False"),
    ],
)
def test_templates(tokenizer, template, expected):
    assert with_template(tokenizer, template).render_chat(MESSAGES) == expected


def test_template_arguments(tokenizer):
    chat = with_template(tokenizer, "{{ tools[0].name }} {{ add_generation_prompt }} {{ enable_thinking }}")
    assert chat.render_chat(MESSAGES, tools=[{"name": "f"}], add_generation_prompt=False, variables={"enable_thinking": 1}) == "f False 1"


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages.append(1) }}", "refuses the messages"),
        ("{{ ''.__class__.__mro__[1].__subclasses__() }}", "refuses the messages"),
        ("{{ missing.field }}", "'missing' is undefined"),
        ("{{ messages[0].content + 1 }}", "refuses the messages"),
    ],
)
def test_refusals_of_a_template(tokenizer, template, message):
    with pytest.raises(InvalidArgumentError, match=message):
        with_template(tokenizer, template).render_chat(MESSAGES)


def test_broken_and_absent_templates(tokenizer):
    with pytest.raises(InvalidArgumentError, match="can't be compiled"):
        with_template(tokenizer, "{% for %}")
    with pytest.raises(FailedPreconditionError, match="no chat template"):
        with_template(tokenizer, None).render_chat(MESSAGES)


def test_a_separate_template_file_and_named_templates(tokenizer, tmp_path):
    (tmp_path / "tokenizer.json").write_bytes(tokenizer.to_spec().tokenizer_json)
    templates = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "yes"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": templates}))
    assert Tokenizer.from_folder(tmp_path).render_chat(MESSAGES) == "yes"
    (tmp_path / "chat_template.jinja").write_text("from the file")
    assert Tokenizer.from_folder(tmp_path).render_chat(MESSAGES) == "from the file"
