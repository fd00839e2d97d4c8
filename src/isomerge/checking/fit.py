"""What headers and config.json say: one architecture, one size, plain floating-point weights?"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from isomerge.alignment.compatibility import problems_between
from isomerge.checkpoint import Checkpoint, is_harmless_buffer, require_floating
from isomerge.checkpoint.base import main_dtype, name_some
from isomerge.errors import IsomergeError
from isomerge.merging.plan.model_parts import of_another_class, tie_flag

MOST_SHAPES = 10  # in one message


def misfits(checkpoints: Sequence[Checkpoint]) -> list[str]:
    """Why these can be neither aligned nor averaged, all reasons at once."""
    found = []
    for checkpoint in checkpoints:
        try:
            require_floating(checkpoint)
        except IsomergeError as error:
            found.append(str(error))
    first = checkpoints[0]
    for other in checkpoints[1:]:
        found += [f"{first.name} and {other.name}: {problem}" for problem in problems_between(first, other)]
    if not found:
        for other in checkpoints[1:]:
            found += _shape_problems(first, other)
    if not found and not any(set(first.tensors) & set(other.tensors) for other in checkpoints[1:]):
        renamed = of_another_class(first.tensors, checkpoints[1].tensors)
        told = (
            f"{checkpoints[1].name} {renamed}" if renamed else f"{first.name} shares no tensor's name with the others"
        )
        found.append(told)
    return found


def _shape_problems(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Tensors that differ in more than the length of a table, or that only one model has as weights."""
    found = []
    for name in sorted(set(first.tensors) & set(second.tensors)):
        a, b = first.tensors[name].shape, second.tensors[name].shape
        fractions = {c.name: c.tensors[name].dtype.is_floating_point for c in (first, second)}
        if len(set(fractions.values())) > 1 and not is_harmless_buffer(name):
            whole = next(model for model, has in fractions.items() if not has)
            found.append(f"{name} holds whole numbers in {whole} and fractions in the other")
        if len(a) != len(b) or (a != b and a[1:] != b[1:]):
            found.append(f"{name} has shape {tuple(a)} in {first.name} and {tuple(b)} in {second.name}")
    return [*found[:MOST_SHAPES], *([f"and {len(found) - MOST_SHAPES} more"] if len(found) > MOST_SHAPES else [])]


def dtype_of(checkpoint: Checkpoint) -> str:
    """The dtype that most bytes of a checkpoint have."""
    return str(main_dtype(checkpoint.tensors.values()) or "none").removeprefix("torch.")


def header_facts(checkpoints: Sequence[Checkpoint]) -> tuple[dict[str, Any], list[str]]:
    """Dtypes and ties of each model for the record, and what is worth a word."""
    dtypes = {c.name: dtype_of(c) for c in checkpoints}
    tied = {c.name: tie_flag(c.config) for c in checkpoints}
    notes = []
    if len(set(dtypes.values())) > 1:
        notes.append("stored in different dtypes: " + _each(dtypes))
    if len(set(tied.values())) > 1:
        told = {name: {True: "tied", False: "not tied", None: "not said"}[flag] for name, flag in tied.items()}
        notes.append("input and output table are tied in some and not in others: " + _each(told))
    for other in checkpoints[1:]:
        for one, two in ((checkpoints[0], other), (other, checkpoints[0])):
            only = sorted(n for n in set(one.tensors) - set(two.tensors) if not is_harmless_buffer(n))
            if only:
                notes.append(f"{len(only)} tensors are only in {one.name} and not in {two.name}: {name_some(only, 3)}")
    classes = {c.name: ", ".join(c.config.get("architectures") or []) or "not said" for c in checkpoints}
    if len(set(classes.values())) > 1:
        notes.append("different classes: " + _each(classes))
    facts = {"dtypes": dtypes, "tied": tied, "classes": classes}
    return facts, list(dict.fromkeys(notes))


def _each(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())
