"""More than two models: all to a common mean, or to each other, whatever their places in the list."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.cycle import cycle_consistent
from isomerge.alignment.evidence import Pair, common_part
from isomerge.alignment.head_scales import rescaled_all
from isomerge.alignment.preparation import PreparedModel
from isomerge.alignment.result import Alignment
from isomerge.alignment.rounds import Sweeper, Tick, no_tick
from isomerge.alignment.scope import Scope
from isomerge.alignment.solve_pair import describe_all, prepare_all, rotates_the_stream, solve_to_anchor
from isomerge.alignment.streams import solve_all
from isomerge.checkpoint import Checkpoint
from isomerge.symmetry.patterns import Layout
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run

MOST_ROUNDS = 20
STOPS_MOVING = 1e-7  # relative change of the mean below which it has arrived


def nearest_to_mean(checkpoints: list[Checkpoint]) -> int:
    """The model nearest to the mean of all: the founding paper's anchor. Ties go to the earlier one."""
    distances = torch.zeros(len(checkpoints), dtype=torch.float64)
    for name in checkpoints[0].tensors:
        infos = [c.tensors.get(name) for c in checkpoints]
        if len({None if i is None else i.shape for i in infos}) > 1 or not infos[0].dtype.is_floating_point:  # type: ignore[union-attr]
            continue
        tensors = [c.read(name).double() for c in checkpoints]
        mean = torch.stack(tensors).mean(0)
        distances += torch.stack([(t - mean).square().sum() for t in tensors])
    return int(distances.argmin())


def solve_universe(
    checkpoints: list[Checkpoint], scope: Scope, *, run: Run, sweeps: int, solver: str, many: str,
    budget: int, device: str, tick: Tick = no_tick,
) -> tuple[int, list[Alignment]]:  # fmt: skip
    """Every model to one common mean, or with `many="cycle"` to all others. Returns the model whose gauge they are
    written in, and an alignment each. Siblings, which need nothing, are left where they are."""
    medoid = nearest_to_mean(checkpoints)
    rest = [c for k, c in enumerate(checkpoints) if k != medoid]
    options: dict[str, Any] = {"run": run, "sweeps": sweeps, "solver": solver, "tick": tick}
    options |= {"budget": budget, "device": device}
    others = solve_to_anchor(rest, checkpoints[medoid], scope, **options)
    anchor = others[0].anchor
    if anchor is not None and all(not s.transform.elements for s in others):  # siblings: the mean is the plain one
        itself = Alignment(anchor, anchor, scope, Transform(others[0].transform.spaces))
        return medoid, others[:medoid] + [itself] + others[medoid:]
    models = describe_all(checkpoints, scope, rotates_the_stream(scope), device)
    sides = prepare_all(models, scope, run, budget)
    names = {n: lay for n, lay in models[0].layouts.items() if all(n in m.layouts for m in models)}
    # Sums in an order that depends on the models and not on the list make the result independent of it, to the bit.
    order = sorted(range(len(sides)), key=lambda k: _fingerprint(sides[k], names))
    pairs = [Pair(side.tensor, sides[medoid].tensor, names, side.model.architecture) for side in sides]
    folded = set(sides[0].canonical.norm_weight)

    def sweeper(pair: Pair) -> Sweeper:
        return Sweeper(pair, run, tick, skip_names=folded, solver=solver)

    together = cycle_consistent if many == "cycle" else _to_common_mean
    transforms = together(pairs, sweeper, sweeps, order)
    alignments = []
    for side, own in zip(sides, transforms, strict=True):
        total = own
        if scope.level == "rotation" and scope.rescales:
            total = rescaled_all(Pair(side.tensor, sides[medoid].tensor, names, side.model.architecture), own, run)
        if side.balance.elements:
            total = side.balance.then(own).then(sides[medoid].balance.inverse())
        notes = [*side.model.architecture.notes, *side.model.notes]
        total = total.without_identities()
        alignments.append(Alignment(side.model, models[medoid], scope, total, solver_notes=notes))
    return medoid, alignments


def _to_common_mean(
    pairs: Sequence[Pair], sweeper: Callable[[Pair], Sweeper], sweeps: int, order: Sequence[int]
) -> list[Transform]:
    """Start from the medoid, align all models to the same current mean, update it from all at once, until it stops
    moving."""
    mean = {name: pairs[0].anchor(name) for name in pairs[0].layouts}
    best: tuple[float, list[Transform]] | None = None
    for _ in range(MOST_ROUNDS):
        transforms = [solve_all(sweeper(replace(pair, anchor=mean.__getitem__)), sweeps) for pair in pairs]
        mean, change, spread = _new_mean(pairs, transforms, order, mean)
        if best is None or spread < best[0]:
            best = spread, transforms
        if change <= STOPS_MOVING:
            break
    assert best is not None
    return best[1]


def _new_mean(
    pairs: Sequence[Pair], transforms: Sequence[Transform], order: Sequence[int], old: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], float, float]:
    """The mean of all moved models, how far it moved, and how far the models are from it."""
    mean, change, size, spread = {}, 0.0, 0.0, 0.0
    for name, layout in pairs[0].layouts.items():
        moved = common_part(*(transforms[k].act(pairs[k].source(name), layout) for k in order))
        mean[name] = torch.stack(moved).mean(0)
        change += float((mean[name] - common_part(mean[name], old[name])[1]).square().sum())
        size += float(mean[name].square().sum())
        spread += sum(float((m - mean[name]).square().sum()) for m in moved)
    return mean, (change / max(size, 1e-300)) ** 0.5, spread


def _fingerprint(side: PreparedModel, names: Mapping[str, Layout]) -> tuple[float, ...]:
    return tuple(float(side.tensor(name).sum()) for name in list(names)[:8])
