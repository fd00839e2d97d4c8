"""The counts of a vocabulary merge: what is shared, what is missing where, which rows no token names."""

from __future__ import annotations

from collections.abc import Mapping
from itertools import pairwise
from typing import Any

from isomerge.checkpoint.base import name_some
from isomerge.merging.vocabulary.rules import ModelTokens, TokenRule

MOST_RANGES = 20  # a record is for reading; more than these are only counted


def count(
    tokens: Mapping[str, int],
    vocabularies: Mapping[str, ModelTokens],
    rules: Mapping[str, TokenRule],
    *,
    source: str,
    base: str | None,
    donor: str,
    joined: list[str],
    size: int,
    keeps_rows: bool,
) -> dict[str, Any]:
    """A plain object for the record: numbers, a few names and notes in words."""
    held = {name: set(vocabulary.with_row) for name, vocabulary in vocabularies.items()}
    everywhere = set.intersection(*held.values())
    only = {
        name: len(own - set().union(*(other for n, other in held.items() if n != name))) for name, own in held.items()
    }
    models = {}
    for name, vocabulary in vocabularies.items():
        beyond = vocabulary.without_row
        models[name] = {
            "tokens": len(held[name]),
            "rows": vocabulary.rows,
            "rows_without_token": vocabulary.rows - len(set(vocabulary.with_row.values())),
            "ranges_without_token": unnamed_ranges(vocabulary)[:MOST_RANGES],
            "tokens_without_row": len(beyond),
            "missing_from_model": sum(token not in held[name] for token in tokens),
            "missing_from_output": sum(token not in tokens for token in held[name]),
        }
    return {
        "source": source,
        "donor": donor,
        "tokens": len(tokens),
        "rows": size,
        "rows_without_token": size - len(tokens),
        "shared": len(everywhere),
        "only_in": only,
        "joined": len(joined),
        "new": [token for token in rules if all(token not in own for own in held.values())],
        "filled": _filled(tokens, held, rules, base),
        "models": models,
        "notes": _notes(tokens, vocabularies, held, size, keeps_rows) + _about_joined(joined, donor),
    }


def unnamed_ranges(vocabulary: ModelTokens) -> list[list[int]]:
    """The rows that no token names, as [first, last + 1).

    >>> unnamed_ranges(ModelTokens({"a": 0, "b": 3}, rows=6))
    [[1, 3], [4, 6]]
    """
    ids = [-1, *sorted(set(vocabulary.with_row.values())), vocabulary.rows]
    return [[before + 1, after] for before, after in pairwise(ids) if after - before > 1]


def _about_joined(joined: list[str], donor: str) -> list[str]:
    if not joined:
        return []
    return [
        f"{len(joined)} ordinary tokens of other models joined the tokenizer of '{donor}' as added tokens: wherever "
        f"one stands in a text, also inside a word, it is found before the tokenizer's own rules ({name_some(joined)})"
    ]


def _filled(
    tokens: Mapping[str, int], held: Mapping[str, set[str]], rules: Mapping[str, TokenRule], base: str | None
) -> dict[str, int]:
    """Of the tokens some model lacks (or a rule forces): how many rows came from where."""
    filled = {"rule": 0, "base": 0, "one_model": 0, "mean": 0, "zero": 0}
    for token in tokens:
        having = [name for name, own in held.items() if token in own]
        rule = rules.get(token)
        if len(having) == len(held) and not (rule and rule.force):
            continue
        if rule and rule.source:
            filled["rule"] += 1
        elif base in having:
            filled["base"] += 1
        else:
            filled[{0: "zero", 1: "one_model"}.get(len(having), "mean")] += 1
    return filled


def _notes(
    tokens: Mapping[str, int],
    vocabularies: Mapping[str, ModelTokens],
    held: Mapping[str, set[str]],
    size: int,
    keeps_rows: bool,
) -> list[str]:
    notes = []
    for name, vocabulary in vocabularies.items():
        padding = vocabulary.rows - len(held[name])
        if padding and not keeps_rows:
            notes.append(f"{padding} of {vocabulary.rows} rows of '{name}' belong to no token and were left out")
        beyond = vocabulary.without_row
        if beyond:
            notes.append(
                f"{len(beyond)} tokens of the tokenizer of '{name}' lie beyond its {vocabulary.rows} rows, so it has "
                f"no row for them: {name_some(beyond)}"
            )
        lost = sorted(held[name] - set(tokens))
        if lost:
            notes.append(f"{len(lost)} tokens of '{name}' are not in the output: {name_some(lost)}")
    if size > len(tokens):
        rows = size - len(tokens)
        what = "were kept as they are" if keeps_rows else "were filled with the mean of the others"
        notes.append(f"{rows} rows of the output belong to no token and {what}")
    return notes
