"""What headers, config.json and model cards say: one architecture, one size, floating-point weights, one base?"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

import yaml

from isomerge.alignment.compatibility import problems_between
from isomerge.checkpoint import Checkpoint, is_harmless_buffer, open_checkpoint, require_floating
from isomerge.checkpoint.base import main_dtype, name_some
from isomerge.checkpoint.config_meaning import TELLING, unequal
from isomerge.data.corpus import LANGUAGE
from isomerge.data.task_heads import heads_apart, label_names, task_of
from isomerge.errors import IsomergeError, RequestError
from isomerge.json_files import read_text
from isomerge.merging.plan.model_parts import of_another_class, tie_flag
from isomerge.merging.plan.models import open_model as open_reference
from isomerge.merging.recipe import ModelReference
from isomerge.yaml_files import load

MOST_SHAPES = 10  # in one message
RIGHT_ANGLE = 0.15  # what two fine-tunes learned is nearly orthogonal, up to this share


def open_model(model: Any) -> Checkpoint:
    """A checkpoint by its headers; a text may be `model@revision+adapter`."""
    if not isinstance(model, (str, os.PathLike)):
        return open_checkpoint(model)
    try:
        reference = ModelReference.parse(os.fspath(model))
    except ValueError as error:
        raise RequestError(f"Checking: {error}.") from error
    return open_reference(reference)


def misfits(checkpoints: Sequence[Checkpoint], *, named: bool = True) -> list[str]:
    """Why these can be neither aligned nor averaged, all reasons at once; `named`: with the models concerned."""
    problems = []
    for checkpoint in checkpoints:
        try:
            require_floating(checkpoint)
        except IsomergeError as error:
            problems.append(str(error))
    first = checkpoints[0]
    for other in checkpoints[1:]:
        pair = f"{first.name} and {other.name}: " if named else ""
        problems += [f"{pair}{problem}" for problem in problems_between(first, other)]
    if not problems:
        for other in checkpoints[1:]:
            problems += _shape_problems(first, other)
    if not problems and not any(set(first.tensors) & set(other.tensors) for other in checkpoints[1:]):
        renamed = of_another_class(first.tensors, checkpoints[1].tensors)
        other_class = f"{checkpoints[1].name} {renamed}"
        problems.append(other_class if renamed else f"{first.name} shares no tensor's name with the others")
    return problems


def _shape_problems(first: Checkpoint, second: Checkpoint) -> list[str]:
    """Tensors that differ in more than the length of a table, or that only one model has as weights."""
    problems = []
    for name in sorted(set(first.tensors) & set(second.tensors)):
        a, b = first.tensors[name].shape, second.tensors[name].shape
        fractions = {c.name: c.tensors[name].dtype.is_floating_point for c in (first, second)}
        if len(set(fractions.values())) > 1 and not is_harmless_buffer(name):
            whole = next(model for model, has in fractions.items() if not has)
            problems.append(f"{name} holds whole numbers in {whole} and fractions in the other")
        if len(a) != len(b) or (a != b and a[1:] != b[1:]):
            problems.append(f"{name} has shape {tuple(a)} in {first.name} and {tuple(b)} in {second.name}")
    return [
        *problems[:MOST_SHAPES],
        *([f"and {len(problems) - MOST_SHAPES} more"] if len(problems) > MOST_SHAPES else []),
    ]


def dtype_of(checkpoint: Checkpoint) -> str:
    """The dtype that most bytes of a checkpoint have."""
    return str(main_dtype(checkpoint.tensors.values()) or "none").removeprefix("torch.")


def outputs_of(config: Mapping[str, Any]) -> int:
    """How many answers a model chooses from: tokens or classes.

    >>> outputs_of({"architectures": ["LlamaForCausalLM"], "vocab_size": 32000})
    32000
    >>> outputs_of({"architectures": ["ViTForImageClassification"], "id2label": {"0": "cat", "1": "dog", "2": "cow"}})
    3
    """
    text = config.get("text_config") if isinstance(config.get("text_config"), Mapping) else config
    words = (text or {}).get("vocab_size")
    if task_of(config) in LANGUAGE and type(words) is int:
        return max(2, words)
    return max(2, len(label_names(config)))


def header_facts(checkpoints: Sequence[Checkpoint]) -> tuple[dict[str, Any], list[str]]:
    """Dtypes and ties of each model for the record, and what is worth a word."""
    dtypes = {c.name: dtype_of(c) for c in checkpoints}
    tied = {c.name: tie_flag(c.config) for c in checkpoints}
    notes = []
    if len(set(dtypes.values())) > 1:
        notes.append("stored in different dtypes: " + _each(dtypes))
    if len(set(tied.values())) > 1:
        ties = {name: {True: "tied", False: "not tied", None: "not said"}[flag] for name, flag in tied.items()}
        notes.append("input and output table are tied in some and not in others: " + _each(ties))
    for other in checkpoints[1:]:
        for one, two in ((checkpoints[0], other), (other, checkpoints[0])):
            only = sorted(n for n in set(one.tensors) - set(two.tensors) if not is_harmless_buffer(n))
            if only:
                notes.append(f"{len(only)} tensors are only in {one.name} and not in {two.name}: {name_some(only, 3)}")
    classes = {c.name: ", ".join(c.config.get("architectures") or []) or "not said" for c in checkpoints}
    if len(set(classes.values())) > 1:
        notes.append("different classes: " + _each(classes))
    for other in checkpoints[1:]:
        apart = heads_apart(checkpoints[0].config, other.config)
        notes += [f"task heads of {checkpoints[0].name} and {other.name}: {apart}"] if apart else []
        told = unequal(checkpoints[0].config, other.config, TELLING, defaults=True)
        notes += [
            f"{text} in {checkpoints[0].name} and {other.name}: a merged model has only one of them" for text in told
        ]
    facts = {"dtypes": dtypes, "tied": tied, "classes": classes}
    return facts, list(dict.fromkeys(notes))


def _each(values: dict[str, str]) -> str:
    return ", ".join(f"{name} {value}" for name, value in values.items())


# --- who may be whose ancestor ----------------------------------------------------------------------------------------
def stated_base(checkpoints: Sequence[Checkpoint]) -> str | None:
    """The one base that the model cards of all these name."""
    stated = [_card(c).get("base_model") for c in checkpoints]
    bases = {tuple(map(str, base)) if isinstance(base, list) else (str(base or ""),) for base in stated}
    only = bases.pop() if len(bases) == 1 else ()
    return str(only[0]) if len(only) == 1 and only[0] else None


def _card(checkpoint: Checkpoint) -> dict[str, Any]:
    """The head of README.md."""
    if checkpoint.folder is None:
        return {}
    path = checkpoint.folder / "README.md"
    try:
        text = read_text(path)
        parts = text.split("---\n", 2) if text.startswith("---\n") else []
        head = load(parts[1]) if len(parts) == 3 else {}
    except (OSError, ValueError, yaml.YAMLError):
        return {}
    return head if isinstance(head, dict) else {}


def likely_base(count: int, apart: Mapping[tuple[int, int], float]) -> int | None:
    """The model that lies where the base of all others would: `apart` are squared distances.

    Fine-tunes of one base move in directions of their own, so |A − B|² ≈ |A − base|² + |B − base|².

    >>> likely_base(3, {(0, 1): 1.0, (0, 2): 1.0, (1, 2): 2.0})
    0
    >>> likely_base(3, {(0, 1): 2.0, (0, 2): 2.0, (1, 2): 2.0}) is None
    True
    """
    if count < 3:
        return None
    fits = [k for k in range(count) if all(_right_angle(k, pair, apart) for pair in apart if k not in pair)]
    return fits[0] if len(fits) == 1 else None


def _right_angle(k: int, pair: tuple[int, int], apart: Mapping[tuple[int, int], float]) -> bool:
    i, j = pair
    legs = apart[min(i, k), max(i, k)] + apart[min(j, k), max(j, k)]
    return legs > 0 and abs(apart[pair] - legs) <= RIGHT_ANGLE * legs
