"""Chat templates: choosing one and writing it where transformers looks for it."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from isomerge.checkpoint.base import Checkpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError, did_you_mean
from isomerge.json_files import read_text
from isomerge.merging.vocabulary.files import read_json, tokenizer_files
from isomerge.packages import why_not_imported

# Written from the published formats. transformers drops the newline after a block, so the lines below add nothing.
BUILT_IN = {
    "alpaca": """\
{%- for message in messages %}
{%- if not loop.first %}{{ '\\n\\n' }}{% endif %}
{%- if message['role'] == 'user' %}{{ '### Instruction:\\n' }}{% endif %}
{%- if message['role'] == 'assistant' %}{{ '### Response:\\n' }}{% endif %}
{{- message['content'] | trim }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '\\n\\n### Response:\\n' }}{% endif %}""",
    "chatml": """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' + message['content'] + '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}""",
    "exaone": """\
{%- for message in messages %}
{%- if loop.first and message['role'] != 'system' %}{{ '[|system|][|endofturn|]\\n' }}{% endif %}
{{- '[|' + message['role'] + '|]' + message['content'] }}
{{- '\\n' if message['role'] == 'user' else '[|endofturn|]\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '[|assistant|]' }}{% endif %}""",
    "llama3": """\
{{- bos_token }}
{%- for message in messages %}
{{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim + '<|eot_id|>' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{% endif %}""",
    "mistral": """\
{%- set has_system = messages and messages[0]['role'] == 'system' %}
{%- set turns = messages[1:] if has_system else messages %}
{{- bos_token }}
{%- for message in turns %}
{%- if message['role'] != ('user' if loop.index0 is even else 'assistant') %}
{{- raise_exception('After an optional system message, the roles have to alternate: user, assistant, user, ...') }}
{%- endif %}
{%- if message['role'] == 'user' %}
{{- ' [INST] ' + (messages[0]['content'] + '\\n\\n' if has_system and loop.first else '') }}
{{- message['content'] + ' [/INST]' }}
{%- else %}
{{- ' ' + message['content'] + eos_token }}
{%- endif %}
{%- endfor %}""",
}


def chat_template(setting: str, models: Mapping[str, Checkpoint]) -> str | None:
    """The template that a recipe's `chat_template` means: `auto` (the one most models have, the earlier model's among
    equals; None when none has any), the name of a built-in, or a template in Jinja."""
    if setting == "auto":
        templates = [template for template in map(stored_template, models.values()) if template]
        return Counter(templates).most_common(1)[0][0] if templates else None
    if setting in BUILT_IN:
        return BUILT_IN[setting]
    if "{" not in setting:
        raise RequestError(
            f"While choosing the chat template: '{setting}' is neither a known name nor a Jinja template. "
            f"{did_you_mean(setting, ['auto', *sorted(BUILT_IN)])}"
        )
    _require_syntax(setting)
    return setting


def stored_template(checkpoint: Checkpoint) -> str | None:
    """A model's own (default) template, from its files: the newest place first, as transformers looks."""
    files = tokenizer_files(checkpoint)
    if "chat_template.jinja" in files:
        return _text(files["chat_template.jinja"], checkpoint.name).strip() or None
    for name in ("tokenizer_config.json", "chat_template.json"):
        stored = read_json(files[name]).get("chat_template") if name in files else None
        if isinstance(stored, list):
            default = [one.get("template") for one in stored if isinstance(one, dict) and one.get("name") == "default"]
            stored = default[-1] if default else None
        if isinstance(stored, str) and stored.strip():
            return stored.strip()
    return None


def _text(path: Path, model: str) -> str:
    try:
        return read_text(path)
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"While reading {path.name} of {model}: byte {error.start} is not UTF-8. Get the file again from where the "
            "model came."
        ) from error


def write_chat_template(folder: Path, template: str) -> list[Path]:
    """Make it the folder's only chat template. Those named beside the default one belong to another format and go."""
    config_file = folder / "tokenizer_config.json"
    written = [folder / "chat_template.jinja"]
    written[0].write_text(template, encoding="utf-8")
    config = read_json(config_file)
    if config.pop("chat_template", None) is not None:
        config_file.write_text(json.dumps(config, indent=2, ensure_ascii=False) + "\n", encoding="utf-8")
        written.append(config_file)
    (folder / "chat_template.json").unlink(missing_ok=True)
    shutil.rmtree(folder / "additional_chat_templates", ignore_errors=True)
    return written


def _require_syntax(template: str) -> None:
    """Refuse what no Jinja is. It is parsed and neither rendered nor compiled, which could go on forever."""
    try:
        from jinja2 import Environment, TemplateSyntaxError
        from jinja2.ext import Extension, loopcontrols
    except ImportError as error:
        raise IsomergeError(
            f"While checking the chat template: this needs jinja2, and {why_not_imported('jinja2', error)}."
        ) from error

    class Generation(Extension):
        """The tag by which transformers marks what a model has said."""

        tags = {"generation"}  # noqa: RUF012  as jinja2 has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(["name:endgeneration"], drop_needle=True)

    try:
        Environment(extensions=[loopcontrols, Generation]).parse(template)
    except TemplateSyntaxError as error:
        raise RequestError(
            f"While reading the chat template: line {error.lineno} is not valid Jinja ({error.message}). "
            "Correct the template, or name a built-in one: " + ", ".join(sorted(BUILT_IN)) + "."
        ) from error
    except RecursionError as error:
        raise RequestError("While reading the chat template: it is nested too deep. Write it flatter.") from error
