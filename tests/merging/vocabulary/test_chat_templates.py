"""Chat templates: the majority's, the built-in ones rendered by transformers, and where they are written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from isomerge.checkpoint import Checkpoint
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.vocabulary import BUILT_IN, chat_template, write_chat_template
from merging.vocabulary.animals import animals
from models import edit_json, word_tokenizer

SYSTEM, USER, ANSWER = (
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "Hi there"},
    {"role": "assistant", "content": "Hello!"},
)
# The published formats. mergekit 0.1.5 renders chatml and mistral the same; its llama3 has a newline after each
# <|eot_id|>, its alpaca no empty line before the last "### Response:", its exaone indents every line.
EXPECTED = {
    "alpaca": "Be brief.\n\n### Instruction:\nHi there\n\n### Response:\nHello!\n\n### Instruction:\nHi there\n\n"
    "### Response:\n",
    "chatml": "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n"
    "<|im_start|>assistant\nHello!<|im_end|>\n<|im_start|>user\nHi there<|im_end|>\n<|im_start|>assistant\n",
    "exaone": "[|system|]Be brief.[|endofturn|]\n[|user|]Hi there\n[|assistant|]Hello![|endofturn|]\n"
    "[|user|]Hi there\n[|assistant|]",
    "llama3": "<s><|start_header_id|>system<|end_header_id|>\n\nBe brief.<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|>"
    "<|start_header_id|>assistant<|end_header_id|>\n\nHello!<|eot_id|>"
    "<|start_header_id|>user<|end_header_id|>\n\nHi there<|eot_id|><|start_header_id|>assistant<|end_header_id|>\n\n",
    "mistral": "<s> [INST] Be brief.\n\nHi there [/INST] Hello!</s> [INST] Hi there [/INST]",
}


def rendered(template: str, messages: list[dict[str, str]], **options: Any) -> str:
    tokenizer = word_tokenizer(["<unk>", "<s>", "</s>"])
    return str(tokenizer.apply_chat_template(messages, chat_template=template, tokenize=False, **options))


@pytest.mark.parametrize("name", EXPECTED)
def test_a_built_in_template_writes_the_published_format(name: str) -> None:
    template = chat_template(name, {})
    assert template == BUILT_IN[name]
    assert rendered(template, [SYSTEM, USER, ANSWER, USER], add_generation_prompt=True) == EXPECTED[name]


def test_a_conversation_without_a_system_message_starts_as_published() -> None:
    assert rendered(BUILT_IN["exaone"], [USER]) == "[|system|][|endofturn|]\n[|user|]Hi there\n"
    assert rendered(BUILT_IN["mistral"], [USER]) == "<s> [INST] Hi there [/INST]"
    assert rendered(BUILT_IN["alpaca"], [USER, ANSWER]) == "### Instruction:\nHi there\n\n### Response:\nHello!"
    with pytest.raises(Exception, match="alternate"):
        rendered(BUILT_IN["mistral"], [USER, USER])


def with_templates(tmp: Path, *templates: str | None) -> dict[str, Checkpoint]:
    models = animals(tmp)
    for name, template in zip(models, templates, strict=True):
        if template is not None:
            (tmp / name / "chat_template.jinja").write_text(template)
    return models


def test_auto_takes_what_most_models_have_and_the_first_among_equals(tmp_path: Path) -> None:
    assert chat_template("auto", with_templates(tmp_path / "1", "{{ 'a' }}", "{{ 'b' }}", "{{ 'b' }}\n")) == "{{ 'b' }}"
    assert chat_template("auto", with_templates(tmp_path / "2", None, "{{ 'b' }}", "{{ 'a' }}")) == "{{ 'b' }}"
    assert chat_template("auto", with_templates(tmp_path / "3", None, None, None)) is None


def test_auto_reads_the_older_places_too(tmp_path: Path) -> None:
    models = animals(tmp_path)
    named = [{"name": "rag", "template": "{{ 'r' }}"}, {"name": "default", "template": "{{ 'd' }}"}]
    edit_json(tmp_path / "A" / "tokenizer_config.json", chat_template=named)
    (tmp_path / "B" / "chat_template.json").write_text(json.dumps({"chat_template": "{{ 'd' }}"}))
    edit_json(tmp_path / "C" / "tokenizer_config.json", chat_template="{{ 'c' }}")
    assert chat_template("auto", models) == "{{ 'd' }}"


def test_a_literal_template_is_taken_as_it_is_and_checked() -> None:
    literal = "{% for m in messages %}{% generation %}{{ m['content'] }}{% endgeneration %}{% break %}{% endfor %}"
    assert chat_template(literal, {}) == literal
    assert chat_template("{{ raise_exception('only for tools') }}", {}).startswith("{{")
    with pytest.raises(RequestError, match="line 2 is not valid Jinja"):
        chat_template("{% for m in messages %}\n{% endfr %}", {})
    with pytest.raises(RequestError, match="Did you mean 'chatml'"):
        chat_template("chat-ml", {})


@pytest.mark.parametrize(
    "endless",
    ["{{ 9 ** 9 ** 9 ** 9 }}", "{% for a in range(9**5) %}" * 3 + "{% endfor %}" * 3],
)
def test_a_template_is_not_rendered_to_be_checked(endless: str) -> None:
    assert chat_template(endless, {}) == endless


def test_damaged_templates_of_models_are_named(tmp_path: Path) -> None:
    models = animals(tmp_path)
    edit_json(tmp_path / "A" / "tokenizer_config.json", chat_template=[3, {"name": "default"}])
    assert chat_template("auto", {"A": models["A"]}) is None
    (tmp_path / "B" / "chat_template.jinja").write_bytes(b"{{ '\xff' }}")
    with pytest.raises(CheckpointError, match="byte 4 is not UTF-8"):
        chat_template("auto", models)


def test_a_written_template_is_the_only_one_transformers_finds(tmp_path: Path) -> None:
    animals(tmp_path)
    folder = tmp_path / "A"
    named = [{"name": "rag", "template": "{{ 'r' }}"}, {"name": "default", "template": "{{ 'd' }}"}]
    edit_json(folder / "tokenizer_config.json", chat_template=named)
    (folder / "additional_chat_templates").mkdir()
    (folder / "additional_chat_templates" / "tool_use.jinja").write_text("{{ 't' }}")
    written = write_chat_template(folder, BUILT_IN["chatml"])
    assert [path.name for path in written] == ["chat_template.jinja", "tokenizer_config.json"]
    tokenizer = AutoTokenizer.from_pretrained(folder)
    assert tokenizer.chat_template == BUILT_IN["chatml"]
    assert tokenizer.bos_token == "<s>"
