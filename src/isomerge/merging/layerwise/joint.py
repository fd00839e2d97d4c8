"""Joint features, from data: the stream that holds most of all parents' streams, and the units that explain most."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor

from isomerge.merging.layerwise.assembly import ChosenUnits, FeatureAssembly, JointStream, positions
from isomerge.merging.layerwise.feature_choice import choose, place
from isomerge.merging.layerwise.ridge import solve_positive
from isomerge.merging.layerwise.solver import bias_name
from isomerge.merging.layerwise.stage_runner import StageRunner, require_finite_rows, rows_of
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.call_recorder import WeightCall
from isomerge.running.gram import GramSums
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.symmetry.architecture import RESIDUAL, layer_of, part_of
from isomerge.symmetry.binding import BoundModel

TINY = 1e-11  # keeps a regression on units that are never on solvable
PULL = 1e-6  # of the mean energy: directions without evidence stay those of the mean

Report = Callable[[int, int], None]


def turns(bound: BoundModel) -> bool:
    """May the residual stream be written in any basis?"""
    return RESIDUAL in bound.architecture.spaces and bound.architecture.spaces[RESIDUAL].rotates


def choosable(bound: BoundModel) -> dict[str, str]:
    """Space of units or heads -> the one weight that writes what they give to the stream.

    A space qualifies if all else that touches it makes these units from the stream: a head that other layers share, or
    whose scores pass a norm all heads have in common, does not.
    """
    spaces = bound.architecture.spaces
    shared = {
        layer_of(name)
        for name, group in spaces.items()
        if part_of(name) == "attention" and not group.per and group.movable and (group.signed or not group.reorders)
    }
    writer_of = {}
    for space, group in spaces.items():
        if not group.reorders or group.signed or group.per or space == RESIDUAL:
            continue
        if part_of(space) == "attention" and layer_of(space) in shared:
            continue
        inner = {name for name in spaces if bound.architecture.root(name) == space}
        touching = [n for n, layout in bound.layouts.items() if layout.spaces() & inner]
        writers = [n for n in touching if bound.layouts[n].axis_of(RESIDUAL, dual=False) is not None]
        if len(writers) == 1 and all(_made_from_the_stream(bound, n, inner) for n in touching if n not in writers):
            writer_of[space] = writers[0]
    return writer_of


def _made_from_the_stream(bound: BoundModel, name: str, inner: set[str]) -> bool:
    layout = bound.layouts[name]
    if name in bound.stacks or len(layout.axes) > 2:
        return False
    own = [axis for axis in layout.axes if all(s.atoms[0].space in inner for s in axis)]
    rest = [axis for axis in layout.axes if axis not in own]
    return len(own) == 1 and all(len(a) == 1 and a[0].atoms[0].space == RESIDUAL and a[0].atoms[0].dual for a in rest)


def all_joint(bound: BoundModel) -> bool:
    """Nothing is left for an alignment to do."""
    spaces, known = bound.architecture.spaces, choosable(bound)
    return turns(bound) and all(
        bound.architecture.root(name) in known or name == RESIDUAL for name, group in spaces.items() if group.movable
    )


def find_assembly(
    fresh: Callable[[], Sequence[StageRunner]],
    stages: Sequence[Stage],
    examples: DataPass,
    assembly: FeatureAssembly,
    report: Report,
) -> FeatureAssembly:
    """Two passes over the data. `fresh` gives the parents with an empty cache, since each pass starts at the front."""
    bound, weights = assembly.bound, assembly.weights
    sums = [stage for stage in stages if stage.kind == "sum"] if turns(bound) else []
    writers = {weight: space for space, weight in choosable(bound).items()}
    spaces = [
        (stage, name, writers[assembly.described(name)])
        for stage in stages
        for name in stage.names
        if assembly.described(name) in writers
    ]
    total = len(sums) + len(spaces)
    stream = None
    if sums:
        stream = find_stream(fresh(), sums, examples, weights, bound, lambda number: report(number, total))
    chosen: dict[str, ChosenUnits] = {}
    parents = fresh()
    for number, (stage, name, space) in enumerate(spaces):
        chosen[space] = _choose(parents, stage, name, space, examples, assembly, stream)
        report(len(sums) + number + 1, total)
    return FeatureAssembly(bound, weights, stream, chosen, assembly.names)


# --- the stream -------------------------------------------------------------------------------------------------------
def find_stream(
    parents: Sequence[StageRunner],
    stages: Sequence[Stage],
    examples: DataPass,
    weights: Sequence[float],
    bound: BoundModel,
    report: Callable[[int], None],
) -> JointStream:
    """The subspace of the parents' streams side by side, √w_m s_m, that keeps most of their energy.

    Every token counts the same, as every norm makes it. The basis is the one nearest to the weighted mean, so parents
    that agree give just that.
    """
    sums = GramSums()
    scales = [weight**0.5 for weight in weights]
    for number, stage in enumerate(stages):
        for calls, valid in _uses(parents, stage, examples):
            rows = [rows_of(call.sum, valid) for call in calls]
            for parent, own in zip(parents, rows, strict=True):
                require_finite_rows(own, stage.names[0], parent.name)
            wide = torch.cat([own.double() * scale for own, scale in zip(rows, scales, strict=True)], 1)
            wide = wide / torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp_min(1e-30)
            sums.add(wide)
        report(number + 1)
    energy = sums.product
    width = energy.shape[0] // len(parents)
    eye = torch.eye(width, dtype=energy.dtype, device=energy.device)
    # A LayerNorm takes the mean over the units away: that direction stays itself, and all others are free.
    fixed = torch.full_like(eye[:, :1], width**-0.5)
    fixed = fixed if bound.architecture.spaces[RESIDUAL].fixes_ones else fixed[:, :0]
    free = torch.linalg.eigh(eye - fixed @ fixed.T).eigenvectors[:, fixed.shape[1] :]
    mean, kept = (torch.cat([part * scale for scale in scales]) for part in (free, fixed))
    energy = energy + PULL * energy.trace() / width * (mean @ mean.T)
    basis = torch.linalg.eigh(energy).eigenvectors[:, -free.shape[1] :]
    left, _, right = torch.linalg.svd(basis.T @ mean)
    basis = basis @ (left @ right) @ free.T + kept @ fixed.T
    parts = basis.split(width)
    return JointStream(
        [p.T * s for p, s in zip(parts, scales, strict=True)], [p / s for p, s in zip(parts, scales, strict=True)]
    )


# --- units and heads --------------------------------------------------------------------------------------------------
def _choose(
    parents: Sequence[StageRunner],
    stage: Stage,
    name: str,
    space: str,
    examples: DataPass,
    assembly: FeatureAssembly,
    stream: JointStream | None,
) -> ChosenUnits:
    parameters = [dict(parent.model.named_parameters()) for parent in parents]
    has_bias = bias_name(name) in parameters[0]
    moments = GramSums(centred=has_bias)  # a bias takes care of what is constant
    for calls, valid in _uses(parents, stage, examples, name):
        rows = [rows_of(call.input, valid) for call in calls]
        for runner, own in zip(parents, rows, strict=True):
            require_finite_rows(own, assembly.described(name), runner.name)
        moments.add(torch.cat(rows, 1))
        transposed = calls[0].transposed
    written = []
    for m, held in enumerate(parameters):
        weight = held[name].double()
        weight = weight if transposed else weight.T  # (in, out)
        written.append(weight @ stream.into[m].T.to(weight) if stream is not None else weight * assembly.weights[m])
    layout = assembly.bound.layouts[assembly.described(name)]
    axis = next(k for k, axis in enumerate(layout.axes) if axis[0].atoms[0].space == space)
    at = torch.cat([positions(s, layout.shape[axis]).reshape(s.sizes[0], -1) for s in layout.axes[axis]], 1)
    size, width = at.shape
    columns = torch.cat([at.flatten() + m * size * width for m in range(len(parents))]).to(written[0].device)
    gram, every, mean = moments.products()[columns][:, columns], torch.cat(written)[columns], moments.mean()[columns]
    parent, unit = place(choose(gram, every, width, size).cpu(), size)
    kept = (((parent * size + unit) * width)[:, None] + torch.arange(width)).flatten().to(gram.device)
    # What the others wrote, as far as those that stay can say it.
    rest = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    rest[kept] = False
    among = gram[kept][:, kept]
    among = among + TINY * torch.diag(among.diagonal() + among.diagonal().mean())
    weight = every[kept] + solve_positive(among, gram[kept][:, rest] @ every[rest])
    shift = (mean @ every - mean[kept] @ weight).cpu() if has_bias else None
    placed = torch.empty_like(weight)
    placed[at.flatten().to(weight.device)] = weight
    return ChosenUnits(parent, unit, assembly.described(name), (placed if transposed else placed.T).cpu(), shift)


def _uses(
    parents: Sequence[StageRunner], stage: Stage, examples: DataPass, name: str | None = None
) -> Iterator[tuple[list[WeightCall], Tensor | None]]:
    """What every parent does at a stage, batch by batch, and which rows count."""
    for number, batch in enumerate(examples):
        runs = [parent.run([stage], batch, number)[stage] for parent in parents]
        padding = PaddingMask(batch, parents[0].model)
        for calls in zip(*runs, strict=True):
            if calls[0].weight == (name or stage.names[0]):
                yield list(calls), padding.of_side(calls[0].rows, encoder=calls[0].encoded)
