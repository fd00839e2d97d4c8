"""Architectures without a file: what can be proven of their stock class is used, the rest stays, and the notes say why.

A tiny model of the same kind is made, and its weights are nudged one by one: what moves with what proposes hidden
units, heads, experts and the residual stream. Every space is used only if it is proven on random weights in float64
(`inferring/proof.py`), so a wrong guess costs time and never exactness.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from isomerge.architectures.inferring.infer import first_tiny, infer, scrambled_difference
from isomerge.architectures.inferring.proof import EXACT
from isomerge.architectures.inferring.sandbox import LARGEST, Sandbox
from isomerge.architectures.inferring.tiny import tiny_configs
from isomerge.architectures.inferring.transfer import Shapes, Untransferable, transfer
from isomerge.checkpoint.base import Checkpoint
from isomerge.evaluation.symmetry_proof import Unprovable
from isomerge.symmetry.architecture import RESIDUAL, Architecture, part_of
from isomerge.symmetry.binding import BoundModel, bind_model

PROVEN: dict[str, Architecture] = {}  # a proof holds for every checkpoint with this config.json and these shapes
PARTS = (RESIDUAL, "attention", "ffn", "head")


def describe_inferred(checkpoint: Checkpoint) -> BoundModel:
    """A model without a specification: the proven spaces of its parts, everything else free."""
    headers = [(name, info.shape, str(info.dtype)) for name, info in checkpoint.tensors.items()]
    key = json.dumps([checkpoint.config, headers], sort_keys=True, default=str)
    if key not in PROVEN:
        kind = str(checkpoint.config.get("model_type") or checkpoint.config.get("_class_name") or "?")
        opening = f"'{kind}' has no specification; what follows is proven by running its stock class"
        try:
            found = _found(checkpoint)
        except Unprovable as error:
            notes = [f"'{kind}' has no specification, and nothing is moved: {error}"]
            return bind_model(
                checkpoint, Architecture(spaces={}, tensors=free(shapes_of(checkpoint)), notes=notes, family=kind)
            )
        PROVEN[key] = replace(found, notes=[opening, *found.notes], family=kind)
    return bind_model(checkpoint, PROVEN[key])


def free(shapes: Shapes) -> dict[str, str]:
    """Patterns that say nothing."""
    return {name: " ".join("_" * len(shape)) for name, shape in shapes.items()}


def shapes_of(checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    return {n: tuple(info.shape) for n, info in checkpoint.tensors.items() if info.dtype.is_floating_point}


def _found(checkpoint: Checkpoint) -> Architecture:
    """A specification, proven on the model itself where it is tiny, else on a tiny one like it."""
    if described := checkpoint.config.get("_class_name"):
        raise Unprovable(f"'{described}' is a class of diffusers, in which no symmetry is proven")
    if not checkpoint.config.get("model_type"):
        raise Unprovable("config.json names no model type")
    shapes = shapes_of(checkpoint)
    if sum(math.prod(info.shape) for info in checkpoint.tensors.values()) <= LARGEST:
        architecture = infer(Sandbox(checkpoint.config, folder=checkpoint.folder)).architecture
        return _fitted(architecture, shapes)
    sandbox = first_tiny(checkpoint.config)
    tiny = infer(sandbox).architecture
    small = shapes_of(sandbox.checkpoint)
    notes = [*tiny.notes, "all this on a tiny model of the same kind, with the same names and other sizes"]
    try:
        deep = _deep(tiny, small, sandbox.config, checkpoint.config)
        real = transfer(deep, small, sandbox.config, shapes, checkpoint.config)
    except Untransferable as error:
        raise Unprovable(f"what is proven of a tiny model does not carry over: {error}") from error
    return replace(real, notes=[*notes, *deep.notes[len(tiny.notes) :]])


def _deep(
    tiny: Architecture, small: Shapes, small_config: Mapping[str, Any], config: Mapping[str, Any]
) -> Architecture:
    """The tiny specification with what holds for all layers of the model: a model as deep and as narrow decides."""
    for narrow in tiny_configs(config, all_layers=True):
        try:
            sandbox = Sandbox(narrow)
            break
        except Unprovable:
            continue
    else:
        return tiny  # too large even so: its layers are those of the tiny model, by their names
    whole = transfer(tiny, small, small_config, shapes_of(sandbox.checkpoint), narrow)
    if scrambled_difference(sandbox, whole, None) <= 10 * EXACT:
        return tiny
    held = []
    for part in PARTS:
        spaces = [s for s in whole.spaces if part_of(whole.root(s)) == part and whole.moves(s)]
        if spaces and scrambled_difference(sandbox, whole, spaces) > 10 * EXACT:
            held.append(part)
    frozen = [s for s in tiny.spaces if part_of(tiny.root(s)) in held]
    note = f"{', '.join(held)}: held at the identity, since not every layer of a model of full depth allows it"
    return replace(tiny.frozen(frozen), notes=[*tiny.notes, note])


def _fitted(architecture: Architecture, shapes: Shapes) -> Architecture:
    """The specification for the tensors a file has; if they are not all those of the class, the stream stays."""
    tensors = {name: p for name, p in architecture.tensors.items() if name in shapes}
    extra = free({name: shape for name, shape in shapes.items() if name not in tensors})
    fitted = replace(architecture, tensors=tensors | extra)
    if extra or len(tensors) < len(architecture.tensors):
        held = [s for s in fitted.spaces if part_of(fitted.root(s)) in (RESIDUAL, "head")]
        fitted = fitted.frozen(held, "the file has not exactly the tensors of its class, so the residual stream stays")
    return fitted
