"""What the files of models say about their vocabularies, without loading a tokenizer."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from isomerge import json_files
from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.checkpoint.tokenizer_file import read_tokenizer
from isomerge.json_files import read_text

TOKENIZER_FILE = re.compile(
    r"tokenizer.*|special_tokens_map\.json|added_tokens\.json|vocab\.(json|txt|bpe)|merges\.txt|tekken\.json"
    r"|chat_template\.(jinja|json)|additional_chat_templates/.*|tokenization_.*\.py|.*\.(spm|tiktoken)|spiece\.model"
    r"|sentencepiece.*\.model|bpe\.codes|dict\.txt"
)
# Any one of these holds a vocabulary; the others only say something about it.
VOCABULARY_FILES = re.compile(
    r"tokenizer\.(json|model)|vocab\.(json|txt)|tekken\.json|.*\.(spm|tiktoken)|spiece\.model|sentencepiece.*\.model"
    r"|tokenizer_config\.json"
)


def is_tokenizer_file(name: str) -> bool:
    """Whether a side file belongs to the tokenizer, and would be stale beside another one.

    >>> is_tokenizer_file("tokenizer.model"), is_tokenizer_file("generation_config.json")
    (True, False)
    """
    return TOKENIZER_FILE.fullmatch(name) is not None


def tokenizer_files(checkpoint: Checkpoint) -> dict[str, Path]:
    """The tokenizer's files by name; those of a hub checkpoint are fetched. Empty for a checkpoint in memory."""
    if checkpoint.folder is None:
        return {}
    named = {path.relative_to(checkpoint.folder).as_posix(): path for path in checkpoint.side_files()}
    return {name: path for name, path in named.items() if is_tokenizer_file(name)}


def has_tokenizer(checkpoint: Checkpoint) -> bool:
    return any(VOCABULARY_FILES.fullmatch(name) for name in tokenizer_files(checkpoint))


def tokens_in_files(checkpoint: Checkpoint) -> dict[str, int] | None:
    """Token string → id from tokenizer.json, or from vocab.json or vocab.txt; None when neither is there."""
    files = tokenizer_files(checkpoint)
    if "tokenizer.json" in files:
        try:
            return dict(read_tokenizer(files["tokenizer.json"]).numbers())
        except (OSError, ValueError):
            return None  # whether it loads is found out by loading it
    added = _numbers(files["added_tokens.json"]) if "added_tokens.json" in files else {}
    if "vocab.json" in files:
        return {**_numbers(files["vocab.json"]), **added}
    if "vocab.txt" in files:
        # Not splitlines, which ends a line at characters that are tokens too.
        lines = read_text(files["vocab.txt"], errors="replace").removesuffix("\n").split("\n")
        return {**{token: place for place, token in enumerate(lines)}, **added}
    return None


def _numbers(path: Path) -> dict[str, int]:
    """A table of tokens; what is no number in it is left out."""
    return {token: number for token, number in read_json(path).items() if type(number) is int}


def declared_rows(config: Mapping[str, Any]) -> int | None:
    """config.json's vocab_size, at the top or in the part about text.

    >>> declared_rows({"text_config": {"vocab_size": 10}, "vision_config": {}})
    10
    """
    for part in (config, config.get("text_config")):
        if isinstance(part, Mapping) and isinstance(part.get("vocab_size"), int):
            return int(part["vocab_size"])
    nested = [
        p["vocab_size"] for p in config.values() if isinstance(p, Mapping) and isinstance(p.get("vocab_size"), int)
    ]
    return int(nested[0]) if len(nested) == 1 else None


def read_json(path: Path) -> dict[str, Any]:
    """{} for what is no JSON object: whether a tokenizer loads is found out by loading it."""
    try:
        content = json_files.read_json(path)
    except (OSError, ValueError):
        return {}
    return content if isinstance(content, dict) else {}


NUMBERED = ("tokenizer.json", "vocab.json", "vocab.txt", "added_tokens.json")
SHOWN = 3


def other_ids(models: Sequence[Checkpoint]) -> list[str]:
    """One sentence for each model that disagrees with one before it, as far as files tell.

    A model without such files, and tokens that only one model has, are no disagreement.
    """
    sentences: list[str] = []
    before: list[tuple[str, dict[str, int]]] = []
    for name, tokens in _numberings(models):
        for earlier, known in before:
            moved = [] if known is tokens else sorted(t for t, id in tokens.items() if known.get(t, id) != id)
            if moved:
                count = f"{len(moved)} tokens have" if len(moved) > 1 else "a token has"
                ids = "other ids" if len(moved) > 1 else "another id"
                sentences.append(f"{count} {ids} in {name} than in {earlier} ({name_some(moved, SHOWN)})")
                break
        before.append((name, tokens))
    return sentences


def other_tokens(models: Sequence[Checkpoint], rows: int) -> list[str]:
    """One sentence for each model that has another token than one before it under an id below `rows`, as far as files
    tell."""
    sentences: list[str] = []
    before: list[tuple[str, dict[int, str]]] = []
    for name, tokens in _numberings(models):
        named = {id: token for token, id in tokens.items() if id < rows}
        for earlier, known in before:
            other = sorted(id for id, token in named.items() if known.get(id, token) != token)
            if other:
                first = f"{other[0]} is {known[other[0]]!r} and {named[other[0]]!r}"
                sentences.append(f"{earlier} and {name} have different tokens under {len(other)} ids (id {first})")
                break
        before.append((name, named))
    return sentences


def _numberings(models: Sequence[Checkpoint]) -> Iterator[tuple[str, dict[str, int]]]:
    """Each model's tokens; those of equal files are read once, since a large vocabulary takes a while."""
    read: dict[tuple[tuple[str, bytes], ...], dict[str, int] | None] = {}
    for model in models:
        files = tokenizer_files(model)
        content = tuple((n, hashlib.sha256(files[n].read_bytes()).digest()) for n in NUMBERED if n in files)
        if content not in read:
            read[content] = tokens_in_files(model)
        tokens = read[content]
        if tokens is not None:
            yield model.name, tokens
