"""The whole way: a tiny model is made, traced, proposed for and proven; out comes a specification with its reasons."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from isomerge.architectures.inferring.influence import Tracer
from isomerge.architectures.inferring.proof import EXACT, Proven, patterns_of, prove
from isomerge.architectures.inferring.proposals import Proposal, Proposals
from isomerge.architectures.inferring.sandbox import Sandbox
from isomerge.architectures.inferring.stream import norms_with_readers
from isomerge.architectures.inferring.tiny import tiny_configs
from isomerge.architectures.inferring.units import Units
from isomerge.errors import IsomergeError
from isomerge.evaluation.symmetry_proof import Unprovable
from isomerge.symmetry.architecture import RESIDUAL, Architecture
from isomerge.symmetry.binding import bind_model
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.groups import Group, Rotation, RotationFixingOnes
from isomerge.symmetry.moved import MovedModel
from isomerge.symmetry.transform import random_transform


@dataclass
class Inference:
    """What is proven of a tiny model."""

    sandbox: Sandbox
    units: Units
    proven: list[Proven]
    architecture: Architecture
    notes: list[str] = field(default_factory=list)
    attentions: int = 0  # products of attention in one forward pass


def first_tiny(config: Mapping[str, Any]) -> Sandbox:
    """A tiny model of the same kind, by the first way of shrinking that its class can be made and run with."""
    reasons = []
    for small in tiny_configs(config):
        try:
            return Sandbox(small)
        except Unprovable as error:
            reasons.append(str(error))
    raise Unprovable(f"no tiny model of it could be made ({reasons[0]})")


def infer(sandbox: Sandbox) -> Inference:
    """Everything that can be proven of the stock class of a tiny model."""
    tracer = Tracer(sandbox)
    tracer.run()
    units = Units(sandbox, tracer)
    proposals = Proposals(units)
    alternatives = proposals.all()
    proven = [found for found in (prove(sandbox, options) for options in alternatives) if found is not None]
    proven = _without_overlap(proven, proposals.notes)
    notes = [f"{space} in {p.proposal.where}: {reason}" for p in proven for space, reason in p.reasons.items()]
    architecture = assemble(sandbox, proven)
    if (stream := next((p for p in proven if p.proposal.kind == "residual"), None)) is not None:
        architecture, reason = _rotated(sandbox, units, stream, architecture)
        notes.append(f"{RESIDUAL} as a rotation: {reason}")
    if (difference := scrambled_difference(sandbox, architecture, None)) > EXACT * 10:
        notes.append(f"all spaces together change the outputs by {difference:.0e}: nothing is moved")
        architecture = architecture.frozen(architecture.spaces)
    notes += proposals.notes
    return Inference(sandbox, units, proven, replace(architecture, notes=notes), notes, tracer.base.attentions)


def _without_overlap(proven: Sequence[Proven], notes: list[str]) -> list[Proven]:
    """An axis that two parts share belongs to the first."""
    taken: set[tuple[str, int]] = set()
    kept = []
    for found in sorted(proven, key=lambda p: p.proposal.kind != "residual"):
        if taken & found.proposal.axes.keys():
            notes.append(f"{found.proposal.where}: shares a tensor's axis with another part, and stays")
            continue
        if found.groups:
            taken |= found.proposal.axes.keys()
        kept.append(found)
    return kept


def assemble(sandbox: Sandbox, proven: Sequence[Proven]) -> Architecture:
    """One specification of all that is proven; every other tensor is free."""
    spaces: dict[str, Group] = {}
    axes: dict[tuple[str, int], str] = {}
    for found in proven:
        if found.groups:
            spaces |= found.proposal.spaces(found.groups)
            axes |= found.proposal.axes
    floats = {n: t for n, t in sandbox.state.items() if t.is_floating_point()}
    tensors = {n: " ".join("_" * t.ndim) for n, t in floats.items()} | patterns_of(axes, sandbox.state)
    return Architecture(spaces=spaces, tensors=tensors, family=str(sandbox.config.get("model_type")))


def _rotated(sandbox: Sandbox, units: Units, stream: Proven, architecture: Architecture) -> tuple[Architecture, str]:
    """The residual stream with a rotation, if that is proven."""
    norms, reason = norms_with_readers(units, stream.proposal)
    if reason:
        return architecture, f"identity: {reason}"
    size = architecture.spaces[RESIDUAL].size if RESIDUAL in architecture.spaces else 0
    groups: tuple[Group, ...] = (Rotation(size), RotationFixingOnes(size))
    for group in groups if size else ():
        centred = any(n.kind == "layer" for n in norms)
        writers = _writers(sandbox, stream.proposal, {n.name for n in norms}) if centred else ()
        trial = replace(architecture, spaces={**architecture.spaces, RESIDUAL: group}, norms=norms, writers=writers)
        for candidate in (trial, replace(trial, writers=())):
            difference = scrambled_difference(sandbox, candidate, [RESIDUAL])
            if difference <= EXACT:
                return candidate, f"{group.name}, proven"
    return architecture, f"identity: changes the outputs by {difference:.0e}" if size else "identity"


def _writers(sandbox: Sandbox, stream: Proposal, norms: set[str]) -> tuple[str, ...]:
    """Tensors with the stream on an axis that is written: their mean over it never arrives."""
    return tuple(
        name for (name, _), pattern in sorted(stream.axes.items())
        if pattern == RESIDUAL and not (sandbox.state[name].ndim == 1 and name.removesuffix(".bias") in norms)
    )  # fmt: skip


def scrambled_difference(sandbox: Sandbox, architecture: Architecture, only: Sequence[str] | None) -> float:
    """How far random elements of the spaces move the outputs, gauges included, relative to their size."""
    try:
        model = bind_model(sandbox.checkpoint, architecture)
        wanted = [s for s in model.architecture.movable() if only is None or s in only]
        transform = random_transform(model.architecture.spaces, 1, wanted)
        moved = MovedModel(model, transform, Canonical(model, transform.elements), None)
        state = moved.state_dict(torch.float64)
    except (IsomergeError, AssertionError, RuntimeError):
        return float("inf")
    return sandbox.difference({n: t for n, t in state.items() if n in sandbox.state})
