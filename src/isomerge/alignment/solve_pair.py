"""Align one model to another: describe, prepare, sweep, decide what stays."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.activations import ActivationRequest, Activations
from isomerge.alignment.chains import leaders
from isomerge.alignment.compatibility import require_compatible, require_same_spaces, require_solver
from isomerge.alignment.evidence import Pair, common_part, only_noise
from isomerge.alignment.head_scales import rescaled_all
from isomerge.alignment.preparation import PreparedModel
from isomerge.alignment.result import Alignment
from isomerge.alignment.rounds import Sweeper, Tick, no_tick
from isomerge.alignment.scope import Scope
from isomerge.alignment.siblings import NOTE, in_place
from isomerge.alignment.streams import solve_all
from isomerge.architectures import describe, describe_like
from isomerge.checkpoint.base import Checkpoint
from isomerge.checkpoint.config_meaning import TELLING, unequal
from isomerge.checkpoint.kept import KeptWork
from isomerge.symmetry.architecture import RESIDUAL, Architecture, is_stream
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run

GAUGE = "gauge:"
FEWER_DIGITS = 1 << 22  # parameters from which all sweeps but the last are in float32
NO_GAIN = 1e-9  # of the median: what is divided by less has no digits left


def solve_pair(
    source: Checkpoint,
    anchor: Checkpoint,
    scope: Scope,
    *,
    run: Run,
    sweeps: int = 15,
    solver: str = "assignment",
    budget: int = 8 << 30,
    device: str = "cpu",
    tick: Tick = no_tick,
    untie: bool | None = None,
    request: ActivationRequest | None = None,
) -> Alignment:
    """The transform that brings `source` next to `anchor`. `budget` bounds what may be kept between sweeps (bytes).

    `request` names data whose activations decide for some spaces.

    A rotation of the stream needs input and output table apart: by default (`untie=None`) they are untied for that and
    tied again if nothing rotates; True and False decide beforehand.
    """
    apart = rotates_the_stream(scope) if untie is None else untie
    models = describe_all([source, anchor], scope, apart, device)
    require_solver(solver, models[0].architecture, activations=request is not None)
    if scope.level == "full" and request is None and untie is None:
        reasons = in_place(models[0], models[1], run, tick)
        if reasons is not None:
            stored = describe_all([source, anchor], scope, False, device) if apart else models
            return _all_stay(stored, scope, reasons)
    sides = prepare_all(models, scope, run, budget)
    activations = None
    if request is not None:
        activations = request.evidence_for(source, anchor, models[0], (sides[0].balance, sides[1].balance))
    alignment = _solve(sides, scope, run, sweeps, solver, tick, activations)
    elements = alignment.transform.elements
    streams = [s for s in models[0].architecture.spaces if is_stream(s)]  # those that are held among them
    if untie is None and alignment.untied and all(_needs_no_rotation(elements.get(s)) for s in streams):
        if alignment.stays.keys() >= {*streams} and activations is None:  # looked at, and not merely held
            return _as_they_are(alignment, describe_all([source, anchor], scope, False, device), sides)
        return solve_pair(
            source, anchor, scope, run=run, sweeps=sweeps, solver=solver, budget=budget, device=device, tick=tick,
            untie=False, request=request,
        )  # fmt: skip
    return alignment


def _as_they_are(alignment: Alignment, models: list[BoundModel], sides: list[PreparedModel]) -> Alignment:
    """The same for models whose tables stay tied: of a stream that stays, nothing depends on how they are stored.

    Tied, it could only change its order and signs, which are rotations that gained nothing.
    """
    source, anchor = models
    moving = source.architecture.movable()
    stays = {space: reason for space, reason in alignment.stays.items() if space in moving}
    transform = Transform(source.architecture.spaces, alignment.transform.elements)
    notes = _notes(source, anchor, sides)
    return Alignment(source, anchor, alignment.scope, transform, stays, alignment.objective, notes)


def _all_stay(models: list[BoundModel], scope: Scope, reasons: dict[str, str]) -> Alignment:
    source, anchor = models
    moving = source.architecture.movable()
    stays = {space: reason for space, reason in reasons.items() if space in moving}
    notes = [*_notes(source, anchor, []), NOTE]
    return Alignment(source, anchor, scope, Transform(source.architecture.spaces), stays, solver_notes=notes)


def solve_to_anchor(
    checkpoints: list[Checkpoint], anchor: Checkpoint, scope: Scope, *, kept: KeptWork | None = None, **options: Any
) -> list[Alignment]:
    """Every model to one anchor, all tied or all untied, so that any of the outputs can be averaged."""

    def solve(number: int, **more: Any) -> Alignment:
        checkpoint, name = checkpoints[number], f"align-{number}{'-untied' if more else ''}"
        known = kept_alignment(kept, name, checkpoint, anchor, scope, options.get("device", "cpu"))
        if known is not None:
            return known
        alignment = solve_pair(checkpoint, anchor, scope, **options, **more)
        if kept is not None:
            keep_alignment(kept, name, alignment)
        return alignment

    alignments = [solve(number) for number in range(len(checkpoints))]
    if len({s.untied for s in alignments}) == 1:
        return alignments
    return [s if s.untied else solve(number, untie=True) for number, s in enumerate(alignments)]


def keep_alignment(kept: KeptWork, name: str, alignment: Alignment) -> None:
    """Keep what was solved; the models themselves are described again."""
    elements = alignment.transform.elements
    record = {
        "spaces": repr(sorted(alignment.transform.spaces.items())), "untied": alignment.untied,
        "stays": alignment.stays, "objective": alignment.objective, "notes": alignment.solver_notes,
        "order": list(elements), "complex": [s for s, e in elements.items() if e.is_complex()],
        "devices": {s: str(e.device) for s, e in elements.items()}, "learned": alignment.learned,
    }  # fmt: skip
    tensors = {s: torch.view_as_real(e) if e.is_complex() else e for s, e in elements.items()}
    kept.store(name, tensors | {GAUGE + key: value for key, value in (alignment.gauge or {}).items()}, record)


def kept_alignment(
    kept: KeptWork | None, name: str, source: Checkpoint, anchor: Checkpoint, scope: Scope, device: str
) -> Alignment | None:
    """What an interrupted run has solved for this pair."""
    part = kept.load(name) if kept is not None else None
    if part is None:
        return None
    tensors, record = part
    models = describe_all([source, anchor], scope, record["untied"], device)
    spaces = models[0].architecture.spaces
    if repr(sorted(spaces.items())) != record["spaces"]:
        return None
    elements = {
        s: (torch.view_as_complex(tensors[s]) if s in record["complex"] else tensors[s]).to(record["devices"][s])
        for s in record["order"]
    }
    transform = Transform(spaces, elements)
    return Alignment(
        models[0], models[1], scope, transform, record["stays"], record["objective"], record["notes"],
        learned=record["learned"],
        gauge={key.removeprefix(GAUGE): value for key, value in tensors.items() if key.startswith(GAUGE)} or None,
    )  # fmt: skip


def rotates_the_stream(scope: Scope) -> bool:
    return scope.level == "full" and scope.layers is None and scope.only in (None, RESIDUAL)


def _needs_no_rotation(element: Tensor | None) -> bool:
    """The stream stays, or only changes the order and signs of its units: a tied table can stay tied."""
    if element is None:
        return True
    size = element.abs()
    return bool(((size < 1e-6) | ((size - 1).abs() < 1e-6)).all())


def describe_all(checkpoints: list[Checkpoint], scope: Scope, untie: bool, device: str = "cpu") -> list[BoundModel]:
    """Models bound to one architecture, with the groups the scope leaves; every misfit is an error."""
    for checkpoint in checkpoints[:-1]:
        require_compatible(checkpoint, checkpoints[-1])
    models = [describe(checkpoints[0], untie=untie)]
    models += [describe_like(models[0], c) or describe(c, untie=untie) for c in checkpoints[1:]]
    for model in models[:-1]:
        require_same_spaces(model, models[-1])
    models = [replace(m, architecture=scope.restrict(m.architecture)) for m in models]
    held = {s for m in models for s, g in m.architecture.spaces.items() if not g.movable}
    alone = {s for m in models for s in m.architecture.spaces if any(s not in n.architecture.spaces for n in models)}
    if alone:  # a leftover pooler, say
        note = f"held at the identity, since not every model has it: {', '.join(sorted(alone))}"
        models = [replace(m, architecture=m.architecture.frozen(alone, note)) for m in models]
        held |= alone
    forms = [Canonical(m, m.architecture.streams, gauges=scope.gauges) for m in models]
    stuck = [f"{name} of {m.name}" for m, form in zip(models, forms, strict=True) for name in form.undividable(NO_GAIN)]
    if stuck:
        note = f"residual stream held at the identity: a gain of {stuck[0]} is too small to divide its bias by"
        held |= {s for m in models for s in m.architecture.streams}
        models = [replace(m, architecture=m.architecture.frozen(m.architecture.streams, note)) for m in models]
    # Sending a tensor to an accelerator costs more than everything done to it there, so it is sent once.
    return [
        replace(m, architecture=m.architecture.frozen(held), device=device, kept=None if device == "cpu" else {})
        for m in models
    ]


def prepare_all(models: list[BoundModel], scope: Scope, run: Run, budget: int) -> list[PreparedModel]:
    """Canonical and, where the level rescales, balanced; kept in memory between sweeps if that fits the budget."""
    moving = models[0].architecture.movable()
    keep = 0 < kept_between_sweeps(models[0].architecture, models) <= budget
    wide = any(m.stored_precision == torch.float64 for m in models)
    precision = torch.float64 if wide else torch.float32
    sides = [PreparedModel(m, moving, gauges=scope.gauges, precision=precision, keep=keep) for m in models]
    if scope.gauges and scope.rescales:
        for side in sides:
            side.balance_spaces(moving, run)
    return sides


def kept_between_sweeps(architecture: Architecture, models: Sequence[BoundModel]) -> int:
    """Bytes of all tensors in both precisions; nothing where one pass over them is enough."""
    return sum(12 * model.parameters() for model in models) if architecture.streams else 0


def _solve(
    sides: list[PreparedModel], scope: Scope, run: Run, sweeps: int, solver: str, tick: Tick,
    activations: Activations | None,
) -> Alignment:  # fmt: skip
    source, anchor = (side.model for side in sides)
    spaces = source.architecture.spaces
    moving = source.architecture.movable()
    common = {n: layout for n, layout in source.layouts.items() if n in anchor.layouts}
    pair = Pair(sides[0].tensor, sides[1].tensor, common, source.architecture)
    folded = set(sides[0].canonical.norm_weight)
    wide = any(side.model.stored_precision == torch.float64 for side in sides)
    small = source.parameters() < FEWER_DIGITS
    rough = pair if wide or small else replace(pair, source=sides[0].single, anchor=sides[1].single, rough=True)
    sweeper = Sweeper(
        pair,
        run,
        tick,
        skip_names=folded,
        device=source.device,
        solver=solver,
        activations=activations,
        rough_pair=rough,
    )
    solved = solve_all(sweeper, sweeps)
    if scope.level == "rotation" and scope.rescales:
        solved = rescaled_all(pair, solved, run)
    total = _unbalanced(sides, solved)
    stays: dict[str, str] = {}
    if scope.level == "full":
        judged = sweeper.judged_by_weights(solved)
        stays = _left_alone(sides, _unbalanced(sides, judged), judged, run)
        stays = _whole_units(stays, total, judged, activations)
        total = Transform(spaces, {s: e for s, e in total.elements.items() if s not in stays})
    total = total.without_identities()
    stays |= {s: "already in its best place" for s in moving if s not in total.elements and s not in stays}
    notes = [*_notes(source, anchor, sides), *(activations.notes if activations else [])]
    return Alignment(source, anchor, scope, total, stays, sweeper.objective, notes)


def _unbalanced(sides: list[PreparedModel], solved: Transform) -> Transform:
    return sides[0].balance.then(solved).then(sides[1].balance.inverse()) if sides[0].balance.elements else solved


def _whole_units(
    stays: dict[str, str], total: Transform, judged: Transform, activations: Activations | None
) -> dict[str, str]:
    """Whether two models are siblings is a question to their weights, whatever decides how strangers are to move.

    So a unit that activations decided moves as a whole, or stays as a whole where its weights would let all of it stay.
    """
    if activations is None:
        return stays
    reasons = dict(stays)
    for root in activations.roots():
        members = [s for s in total.spaces if activations.architecture.root(s) == root]
        moving = [s for s in judged.without_identities().elements if s in members and s not in stays]
        for space in members:
            reasons.pop(space, None)
            if not moving and space in total.elements:
                reasons[space] = "moving it gains no more than noise would"
    return reasons


def _left_alone(sides: list[PreparedModel], total: Transform, solved: Transform, run: Run) -> dict[str, str]:
    """Spaces that need nothing: no unit of theirs moves, and the rest gains no more than noise would let it.

    Compared as they will be written: a stream that stays is not folded, so noise in its norms is none in its readers.
    """
    spaces = total.spaces
    moving = [s for s in spaces if not is_stream(s) or s in total.elements]
    source, anchor = (Canonical(side.model, moving) for side in sides)
    architecture = source.model.architecture
    moved_roots = {architecture.root(s) for s, e in solved.elements.items() if spaces[s].moves_units(e)}
    leader = leaders(architecture, source.model.layouts)
    streams = [s for s in total.elements if is_stream(s)]

    def stays(space: str) -> bool:
        root = architecture.root(space)
        if is_stream(space) or root in moved_roots:
            return False
        own = total.only([space])
        # Units that share tensors are judged next to each other: alone, each would only spoil what they have together.
        roots = {s: r for s in total.elements if not is_stream(r := architecture.root(s))}
        linked = [s for s, other in roots.items() if other != root and leader.get(other) == leader.get(root, root)]
        around = total.only([*streams, *linked])
        names = [name for name in source.model.touching(space) if name in anchor.model.layouts]

        def move(name: str) -> tuple[Tensor, ...]:
            layout = source.model.layouts[name]
            start = around.act(source.tensor(name), layout)
            return common_part(start, own.act(start, layout), anchor.tensor(name))

        return only_noise(spaces, space, map(move, names))

    names = sorted(total.without_identities().elements)
    kept = [s for s, stay in zip(names, run(stays, names), strict=True) if stay]
    return {s: "moving it gains no more than noise would" for s in kept}


def _notes(source: BoundModel, anchor: BoundModel, sides: list[PreparedModel]) -> list[str]:
    notes = [*source.architecture.notes, *source.notes, *(n for n in anchor.notes if n not in source.notes)]
    for side in sides:
        for space, count in side.skipped.items():
            notes.append(f"{side.model.name}: {count} part(s) of {space} are too badly conditioned to balance")
    for name in source.layouts:
        shapes = [model.layouts[name].shape for model in (source, anchor) if name in model.layouts]
        if len(set(shapes)) == 2:
            notes.append(f"{name}: {shapes[0]} and {shapes[1]}; the common part is compared")
    told = unequal(source.checkpoint.config, anchor.checkpoint.config, TELLING, defaults=True)
    notes += [f"{text} in source and anchor: a mean of the two has only one of them" for text in told]
    return list(dict.fromkeys(notes))
