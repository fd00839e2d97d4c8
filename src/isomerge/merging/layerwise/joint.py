"""Joint features, from data: the stream that holds most of all parents' streams, and the units that explain most."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from isomerge.merging.layerwise.assembly import ChosenUnits, FeatureAssembly, JointStream, taken
from isomerge.merging.layerwise.feature_choice import choose, place
from isomerge.merging.layerwise.parent_views import positions
from isomerge.merging.layerwise.ridge import solve_positive
from isomerge.merging.layerwise.solver import bias_name
from isomerge.merging.layerwise.stage_runner import StageRunner, require_finite_rows
from isomerge.merging.layerwise.stages import Stage
from isomerge.running.call_recorder import WeightCall
from isomerge.running.gram import GramSums
from isomerge.running.padding import PaddingMask
from isomerge.running.passes import DataPass
from isomerge.running.predictions import rows_of
from isomerge.symmetry.architecture import RESIDUAL, layer_of, part_of
from isomerge.symmetry.binding import BoundModel

TINY = 1e-11  # keeps a regression on units that are never on solvable
SAMPLE, SAMPLE_OF_A_BATCH = 2048, 128  # rows on which to say how much of the stream is lost, for each layer
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
        stream = replace(stream, lost={assembly.described(name): share for name, share in stream.lost.items()})
    chosen: dict[str, ChosenUnits] = {}
    parents = fresh()
    for number, (stage, name, space) in enumerate(spaces):
        chosen[space] = _choose(parents, stage, name, space, examples, assembly, stream)
        report(len(sums) + number + 1, total)
    return replace(assembly, stream=stream, chosen=chosen)


# --- the stream -------------------------------------------------------------------------------------------------------
def find_stream(
    parents: Sequence[StageRunner],
    stages: Sequence[Stage],
    examples: DataPass,
    weights: Sequence[float],
    bound: BoundModel,
    report: Callable[[int], None],
) -> JointStream:
    """The subspace of the parents' streams side by side, √w_m s_m, that keeps most of their energy. `bound` is the
    merged model's, whose width it has.

    Every token counts the same, as every norm makes it.
    """
    sums, width = GramSums(), bound.architecture.spaces[RESIDUAL].size
    scales: list[float] = []
    samples: dict[str, list[Tensor]] = {}
    for number, stage in enumerate(stages):
        kept = samples.setdefault(stage.names[0], [])
        for calls, valid in _uses(parents, stage, examples):
            rows = [rows_of(call.sum, valid) for call in calls]
            for parent, own in zip(parents, rows, strict=True):
                require_finite_rows(own, stage.names[0], parent.name)
            scales = stream_scales(weights, [own.shape[1] for own in rows], width)
            wide = torch.cat([own.double() * scale for own, scale in zip(rows, scales, strict=True)], 1)
            wide = wide / torch.linalg.vector_norm(wide, dim=1, keepdim=True).clamp_min(1e-30)
            sums.add(wide)
            if len(kept) * SAMPLE_OF_A_BATCH < SAMPLE:
                kept.append(wide[:: math.ceil(max(1, len(wide)) / SAMPLE_OF_A_BATCH)].float())
        report(number + 1)
    widths = [own.shape[1] for own in rows]
    stream = stream_of(sums.product, widths, weights, bound)
    basis = torch.cat([into.T / scale for into, scale in zip(stream.into, scales, strict=True)])
    lost = {}
    for name, kept in samples.items():
        wide = torch.cat(kept).double()
        lost[name] = max(0.0, 1 - float((wide @ basis).square().sum() / wide.square().sum().clamp_min(1e-30)))
    return replace(stream, lost=lost)


def stream_scales(weights: Sequence[float], widths: Sequence[int], width: int) -> list[float]:
    """What the streams are multiplied by, side by side: √w_m, and what makes up for the widths, so that the root mean
    square of the merged stream, by which norms divide, is theirs in the mean."""
    return [weight**0.5 * (width / own) ** 0.5 for weight, own in zip(weights, widths, strict=True)]


def stream_of(energy: Tensor, widths: Sequence[int], weights: Sequence[float], bound: BoundModel) -> JointStream:
    """The stream of most energy, Σ x xᵀ of streams side by side. The basis is the one nearest to the weighted mean, so
    parents that agree give just that."""
    width = bound.architecture.spaces[RESIDUAL].size
    scales = stream_scales(weights, widths, width)
    eye = torch.eye(width, dtype=energy.dtype, device=energy.device)
    # A LayerNorm takes the mean over the units away: that direction stays itself, and all others are free.
    fixed = torch.full_like(eye[:, :1], width**-0.5)
    fixed = fixed if bound.architecture.spaces[RESIDUAL].fixes_ones else fixed[:, :0]
    free = torch.linalg.eigh(eye - fixed @ fixed.T).eigenvectors[:, fixed.shape[1] :]
    shares = [weight**0.5 for weight in weights]
    mean = torch.cat([_rows(free, own, bool(fixed.numel())) * s for own, s in zip(widths, shares, strict=True)])
    energy = energy + PULL * energy.trace() / width * (mean @ mean.T)
    ones = [torch.full_like(fixed[:1], own**-0.5).expand(own, -1) for own in widths]
    kept = torch.cat([one * share for one, share in zip(ones, shares, strict=True)])
    if fixed.numel() and set(widths) != {width}:  # none of the room is for the parents' own mean over their units
        apart = torch.block_diag(*ones)
        energy = energy + TINY * energy.trace() * (torch.eye(len(energy)).to(energy) - apart @ apart.T)
    room = min(free.shape[1], sum(widths) - fixed.shape[1] * len(widths))
    basis = torch.linalg.eigh(energy).eigenvectors[:, -room:]
    basis = torch.cat([basis, basis.new_zeros(len(basis), free.shape[1] - room)], 1)
    left, _, right = torch.linalg.svd(basis.T @ mean)
    basis = basis @ (left @ right) @ free.T + kept @ fixed.T
    parts = basis.split(list(widths))
    return JointStream(
        [p.T * s for p, s in zip(parts, scales, strict=True)], [p / s for p, s in zip(parts, scales, strict=True)]
    )


def _rows(matrix: Tensor, count: int, centred: bool) -> Tensor:
    """The first rows, with zeros where there are no more; `centred`: of sum zero, which all rows of it are."""
    missing = count - len(matrix)
    if missing == 0:
        return matrix
    rows = matrix[:count] if missing < 0 else torch.cat([matrix, matrix.new_zeros(missing, matrix.shape[1])])
    return rows - rows.mean(0) if centred else rows


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
    described = assembly.described(name)
    has_bias = bias_name(name) in dict(parents[0].model.named_parameters())
    moments = GramSums(centred=has_bias)  # a bias takes care of what is constant
    for calls, valid in _uses(parents, stage, examples, name):
        rows = [rows_of(call.input, valid) for call in calls]
        for runner, own in zip(parents, rows, strict=True):
            require_finite_rows(own, described, runner.name)
        moments.add(torch.cat(rows, 1))
        transposed, widths = calls[0].transposed, [own.shape[1] for own in rows]
    written = []
    for m, runner in enumerate(parents):
        weight = runner.linear_weight(name, transposed).double()  # (in, out)
        written.append(weight @ stream.into[m].T.to(weight) if stream is not None else weight * assembly.weights[m])
    layout = assembly.bound.layouts[described]
    axis = next(k for k, axis in enumerate(layout.axes) if axis[0].atoms[0].space == space)
    at = _flat([positions(segment, layout.shape[axis]) for segment in layout.axes[axis]])
    size, width = at.shape
    tables = [_flat(view.units(described, assembly.bound, axis)) for view in assembly.views]
    offsets = itertools.accumulate([0, *widths[:-1]])
    columns = torch.cat([torch.where(t >= 0, t + k, t).flatten() for t, k in zip(tables, offsets, strict=True)])
    gram = taken(taken(moments.products(), 0, columns), 1, columns)
    every, mean = taken(torch.cat(written), 0, columns), taken(moments.mean(), 0, columns)
    counts = [len(table) for table in tables]
    kept = choose(gram, every, width, size) if sum(counts) > size else torch.arange(sum(counts))
    parent, unit = place(kept.cpu(), counts, size)
    weight, shift, lost = _written(gram, every, mean, _columns_of(parent, unit, counts, width).to(gram.device))
    placed = weight.new_zeros(size * width, weight.shape[1])
    placed[at[parent >= 0].flatten().to(weight.device)] = weight
    return ChosenUnits(
        parent, unit, described, (placed if transposed else placed.T).cpu(), shift.cpu() if has_bias else None, lost
    )


def _flat(tables: Sequence[Tensor]) -> Tensor:
    """(units, columns of one)."""
    return torch.cat([table.reshape(len(table), -1) for table in tables], 1)


def _columns_of(parent: Tensor, unit: Tensor, counts: Sequence[int], width: int) -> Tensor:
    """The columns of the units that were placed, in the order of their places, among all columns."""
    starts = torch.tensor([0, *itertools.accumulate(counts)])
    groups = (starts[parent] + unit)[parent >= 0]
    return ((groups * width)[:, None] + torch.arange(width)).flatten()


def _written(gram: Tensor, every: Tensor, mean: Tensor, kept: Tensor) -> tuple[Tensor, Tensor, float]:
    """The weights of those that stay, which also say what the others wrote, as far as they can; what is then missing
    in the mean; and the share of the energy of all that is lost."""
    rest = torch.ones(len(gram), dtype=torch.bool, device=gram.device)
    rest[kept] = False
    among = gram[kept][:, kept]
    among = among + TINY * torch.diag(among.diagonal() + among.diagonal().mean())
    cross = gram[kept][:, rest] @ every[rest]
    told = solve_positive(among, cross)
    weight = every[kept] + told
    others = every[rest]
    left = float((others * (gram[rest][:, rest] @ others)).sum() - (cross * told).sum())
    total = float((every * (gram @ every)).sum())
    return weight, mean @ every - mean[kept] @ weight, min(1.0, max(0.0, left / total)) if total > 0 else 0.0


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
