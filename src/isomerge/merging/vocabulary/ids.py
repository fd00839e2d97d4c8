"""Models that give the same tokens other ids. Merged row by row, the row of one token would meet that of another."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence

from isomerge.checkpoint.base import Checkpoint, name_some
from isomerge.merging.vocabulary.files import tokenizer_files, tokens_in_files

NUMBERED = ("tokenizer.json", "vocab.json", "vocab.txt", "added_tokens.json")
SHOWN = 3


def other_ids(models: Sequence[Checkpoint]) -> list[str]:
    """One sentence for each model that disagrees with one before it, as far as files tell.

    A model without such files, and tokens that only one model has, are no disagreement.
    """
    told: list[str] = []
    before: list[tuple[str, dict[str, int]]] = []
    for name, tokens in _numberings(models):
        for earlier, known in before:
            moved = [] if known is tokens else sorted(t for t, id in tokens.items() if known.get(t, id) != id)
            if moved:
                count = f"{len(moved)} tokens have" if len(moved) > 1 else "a token has"
                ids = "other ids" if len(moved) > 1 else "another id"
                told.append(f"{count} {ids} in {name} than in {earlier} ({name_some(moved, SHOWN)})")
                break
        before.append((name, tokens))
    return told


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
