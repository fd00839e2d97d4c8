"""What the tokenizers of models have in common, from their files alone."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import name_some
from isomerge.json_files import read_text
from isomerge.merging.vocabulary.files import declared_rows, has_tokenizer, read_json, tokenizer_files, tokens_in_files
from isomerge.results import Result

MOST_NAMED = 5


@dataclass(frozen=True)
class TokenizerFacts:
    """One model's vocabulary, special tokens and chat template."""

    has_files: bool
    tokens: dict[str, int] | None
    digest: str | None  # of a vocabulary that only its own library can read
    special: dict[str, str]
    template: str | None
    rows: int | None

    @classmethod
    def of(cls, checkpoint: Checkpoint) -> TokenizerFacts:
        files = tokenizer_files(checkpoint)
        tokens = tokens_in_files(checkpoint) if files else None
        config = read_json(files["tokenizer_config.json"]) if "tokenizer_config.json" in files else {}
        stated = read_json(files["special_tokens_map.json"]) if "special_tokens_map.json" in files else {}
        special = {
            key: _content(value)
            for key, value in sorted({**stated, **config}.items())
            if key.endswith("_token") and isinstance(value, (str, dict))
        }
        return cls(
            has_tokenizer(checkpoint), tokens, None if tokens else _digest(files), special,
            _template(files, config), declared_rows(checkpoint.config),
        )  # fmt: skip


@dataclass
class TokenizerComparison(Result):
    """What differs from the first model. A bool is None where the files cannot tell."""

    same: bool | None = None
    vocabulary: bool | None = None
    special_tokens: bool | None = None
    chat_template: bool | None = None
    differences: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    shared: float | None = None
    """The share of all tokens that both have, where it is least."""


def _content(value: Any) -> str:
    return str(value.get("content")) if isinstance(value, dict) else str(value)


def _digest(files: dict[str, Path]) -> str | None:
    """A vocabulary in a format of its own is the same when its bytes are."""
    own = [
        path for name, path in sorted(files.items()) if name.endswith((".model", ".spm", ".tiktoken", "tekken.json"))
    ]
    return hashlib.sha256(b"".join(path.read_bytes() for path in own)).hexdigest() if own else None


def _template(files: dict[str, Path], config: dict[str, Any]) -> str | None:
    if "chat_template.jinja" in files:
        return read_text(files["chat_template.jinja"], errors="replace")
    stored = read_json(files["chat_template.json"]).get("chat_template") if "chat_template.json" in files else None
    template = stored or config.get("chat_template")
    return str(template) if template else None


def compare_tokenizers(checkpoints: Sequence[Checkpoint]) -> TokenizerComparison:
    known = [TokenizerFacts.of(c) for c in checkpoints]
    if not any(one.has_files for one in known):
        rows = {one.rows for one in known if one.rows is not None}
        return TokenizerComparison(notes=["no model has tokenizer files beside its weights"] if rows else [])
    first, name = known[0], checkpoints[0].name
    differences: list[str] = []
    vocabulary: bool | None = True
    shared: float | None = 1.0
    for checkpoint, one in zip(checkpoints[1:], known[1:], strict=True):
        differing, same, part = _vocabularies(name, first, checkpoint.name, one)
        differences += differing
        vocabulary = None if same is None or vocabulary is None else vocabulary and same
        shared = None if part is None or shared is None else min(shared, part)
        if one.has_files and first.has_files:
            differences += _specials(name, first, checkpoint.name, one)
    lacking = [c.name for c, one in zip(checkpoints, known, strict=True) if not one.has_files]
    notes = [f"{name_some(lacking)} has no tokenizer files beside its weights"] if lacking else []
    templates = {one.template for one in known if one.has_files}
    special = len({tuple(one.special.items()) for one in known if one.has_files}) == 1
    if len(templates) > 1:
        without = [c.name for c, one in zip(checkpoints, known, strict=True) if one.has_files and one.template is None]
        differences.append("the chat templates differ" + (f": {name_some(without)} has none" if without else ""))
    same = None if vocabulary is None else vocabulary and special and len(templates) == 1
    return TokenizerComparison(
        same=same, vocabulary=vocabulary, special_tokens=special, chat_template=len(templates) == 1,
        differences=differences, notes=notes, shared=shared,
    )  # fmt: skip


def _vocabularies(
    name: str, first: TokenizerFacts, other: str, one: TokenizerFacts
) -> tuple[list[str], bool | None, float | None]:
    """What differs, whether the two are the same, and which share of all tokens both have."""
    if not (first.has_files and one.has_files):
        return [], None, None
    if first.tokens is None or one.tokens is None:
        if first.digest is None or one.digest is None:
            return [], None, None
        same = first.digest == one.digest
        return ([] if same else [f"{name} and {other}: the vocabulary files differ"]), same, None
    if first.tokens == one.tokens:
        return [], True, 1.0
    a, b = set(first.tokens), set(one.tokens)
    differences = []
    for who, only in ((name, sorted(a - b)), (other, sorted(b - a))):
        if only:
            differences.append(f"{len(only)} tokens are only in {who}: {name_some(only, MOST_NAMED)}")
    moved = sorted(token for token in a & b if first.tokens[token] != one.tokens[token])
    if moved:
        differences.append(f"{len(moved)} tokens have other ids in {name} and {other}: {name_some(moved, MOST_NAMED)}")
    return differences, False, len(a & b) / len(a | b)


def _specials(name: str, first: TokenizerFacts, other: str, one: TokenizerFacts) -> list[str]:
    differences = []
    for role in sorted({*first.special, *one.special}):
        a, b = first.special.get(role), one.special.get(role)
        if a != b:
            differences.append(f"{role} is {a or 'not set'} in {name} and {b or 'not set'} in {other}")
    return differences
