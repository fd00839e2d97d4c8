"""The tokenizer of a model's folder as GGUF's metadata: tokens, kinds, scores or merges, and how text is cut first."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isomerge.json_files import JsonError, read_json

NORMAL, UNKNOWN, CONTROL, USER, UNUSED, BYTE = 1, 2, 3, 4, 5, 6
HEX = re.compile(r"<0x[0-9A-F]{2}>")
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|DIGITS"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
CUTS: Mapping[str, str] = {
    PATTERN.replace("DIGITS", r"\p{N}{1,3}"): "llama-bpe",
    PATTERN.replace("DIGITS", r"\p{N}"): "qwen2",
}
"""What llama.cpp calls a pattern that text is cut by before merging."""


@dataclass
class GgufVocabulary:
    """What is written of a tokenizer; `problem` says why nothing is."""

    model: str = ""
    """"gpt2" (byte-level merges) or "llama" (pieces with scores)."""
    cut: str = "default"
    tokens: list[str] = field(default_factory=list)
    kinds: list[int] = field(default_factory=list)
    scores: list[float] = field(default_factory=list)
    merges: list[str] = field(default_factory=list)
    begins: bool = False
    """Whether text begins with the token of its beginning."""
    spaced: bool | None = None
    """Whether a space is put in front of text; None where its kind does not say."""
    template: str | None = None
    problem: str = ""


def read_vocabulary(folder: Path | None, rows: int, special: Mapping[str, int]) -> GgufVocabulary:
    """Of a folder's tokenizer.json; `rows`: of the embedding, which tokens are filled up to."""
    path = folder / "tokenizer.json" if folder is not None else None
    if path is None or not path.is_file():
        return GgufVocabulary(problem="there is no tokenizer.json beside it")
    try:
        content = read_json(path)
        return _vocabulary(content, rows, special, _settings(path.parent))
    except (OSError, JsonError) as error:
        return GgufVocabulary(problem=f"tokenizer.json: {error}")
    except (AttributeError, KeyError, TypeError, ValueError, IndexError) as error:
        return GgufVocabulary(problem=f"tokenizer.json is not as the tokenizers library writes it ({error})")


def _settings(folder: Path) -> dict[str, Any]:
    """tokenizer_config.json, with a chat template that lies beside it."""
    path = folder / "tokenizer_config.json"
    found = dict(read_json(path)) if path.is_file() else {}
    template = folder / "chat_template.jinja"
    if template.is_file():
        found["chat_template"] = template.read_text(encoding="utf-8")
    return found


def _vocabulary(
    content: Mapping[str, Any], rows: int, special: Mapping[str, int], settings: Mapping[str, Any]
) -> GgufVocabulary:
    model = content["model"]
    if model.get("type", "BPE") != "BPE" or not isinstance(model.get("vocab"), dict):
        return GgufVocabulary(
            problem=f"its tokenizer is of the kind {model.get('type')!r}, and BPE alone can be written"
        )
    pieces = bool(model.get("byte_fallback"))
    made = GgufVocabulary("llama" if pieces else "gpt2")
    if not pieces:
        made.cut = _cut(content.get("pre_tokenizer") or {})
        if not made.cut:
            return GgufVocabulary(
                problem="llama.cpp has no name for the way that its tokenizer cuts text before merging"
            )
    names = {number: token for token, number in model["vocab"].items()}
    added = {int(one["id"]): one for one in content.get("added_tokens", [])}
    names |= {number: one["content"] for number, one in added.items()}
    if names and max(names) >= rows:
        return GgufVocabulary(
            problem=f"its tokenizer has a token with the id {max(names)}, and the embedding {rows} rows"
        )
    merges = [one if isinstance(one, str) else " ".join(one) for one in model.get("merges", [])]
    rank = {first + last: place for place, (first, last) in reversed(list(enumerate(m.split(" ", 1) for m in merges)))}
    unknown = model.get("unk_token")
    for number in range(rows):
        token = names.get(number, f"[PAD{number}]")
        made.tokens.append(token)
        made.kinds.append(_kind(token, number in names, added.get(number), token == unknown, pieces))
        made.scores.append(-float(rank.get(token, len(rank) + number)))
    made.merges = [] if pieces else merges
    made.scores = made.scores if pieces else []
    made.begins = _begins(content.get("post_processor"), names.get(special.get("bos", -1)))
    made.spaced = any(one.get("type") in ("Prepend", "Metaspace") for one in _steps(content)) if pieces else None
    made.template = settings.get("chat_template") if isinstance(settings.get("chat_template"), str) else None
    return made


def _kind(token: str, exists: bool, added: Mapping[str, Any] | None, unknown: bool, pieces: bool) -> int:
    if not exists:
        return UNUSED
    if unknown and pieces:
        return UNKNOWN
    if added is not None:
        return CONTROL if added.get("special") else USER
    return BYTE if pieces and HEX.fullmatch(token) else NORMAL


def _cut(first: Mapping[str, Any]) -> str:
    """llama.cpp's name for a pre-tokenizer of byte-level merges; nothing for one that it has no name for.

    >>> _cut({"type": "ByteLevel", "use_regex": True}), _cut({"type": "Whitespace"})
    ('gpt-2', '')
    """
    steps = first.get("pretokenizers", [first])
    kinds = [step.get("type") for step in steps]
    if kinds == ["ByteLevel"] and steps[0].get("use_regex", True):
        return "gpt-2"
    if kinds == ["Digits", "ByteLevel"] and steps[0].get("individual_digits") and steps[1].get("use_regex", True):
        return "smollm"
    if kinds == ["Split", "ByteLevel"] and not steps[1].get("use_regex", True):
        return CUTS.get(steps[0].get("pattern", {}).get("Regex", ""), "")
    return ""


def _steps(content: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    for key, inner in (("normalizer", "normalizers"), ("pre_tokenizer", "pretokenizers")):
        step = content.get(key) or {}
        yield from step.get(inner, [step])


def _begins(post_processor: Any, beginning: str | None) -> bool:
    """Whether a template puts the token of the beginning in front of a single text."""
    if beginning is None or not post_processor:
        return False
    for step in post_processor.get("processors", [post_processor]):
        single = step.get("single") or []
        if single and json.dumps(single[0]).find(json.dumps(beginning)) >= 0:
            return True
    return False
