"""The gauges of a model with their dimensions: how many ways its weights can change and its function not.

Together with the continuous dimensions of the groups they count the kernel of the map from parameters to outputs, at
almost every point:

    dim ker ∂output/∂parameters  =  Σ spaces dim(group) · elements  +  Σ gauges

| gauge | dimension |
|---|---|
| gain of a norm, which its readers can take | d |
| bias of a norm, which its readers can take | d |
| the part of a reader that a LayerNorm never excites (along 1, or along 1/γ after a norm on the stream) | its outputs |
| a key bias (not under rotary positions); a value bias, where the output projection has a bias | their entries |
| the mean of a writer over the stream's units, which every LayerNorm drops | its columns |
| a vector between tables that are always added | d, less 1 where the means are counted already |
| a vector added to every row of a router, or of a table of position biases | its columns (of a bias: 1) |
| a gain on what a branch adds; the size of a convolution in front of a batch norm | its units |

A LayerNorm's output spans no more than the complement of one direction, so a reader *without* a bias has one all the
same: what it makes of that direction is constant. Such a reader can take the norm's bias too.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

from isomerge.symmetry.architecture import (
    BatchNorm,
    BranchScale,
    KeyBias,
    Norm,
    RowShift,
    Shift,
    StreamNorm,
    ValueBias,
    is_stream,
)
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import dimension


def gauges(model: BoundModel) -> list[tuple[str, int]]:
    """(what is free, its dimension) for every gauge of a bound model.

    A stream that is itself the output (bare encoders) keeps only the gauges inside attention.
    """
    found = [*_attention(model)]
    for stream in model.architecture.streams:
        found += [*_norms(model, stream), *_means(model, stream), *_shifts(model, stream), *_scales(model, stream)]
    return [(name, size) for name, size in found if size]


def gauge_dimension(model: BoundModel) -> int:
    return sum(size for _, size in gauges(model))


def group_dimension(model: BoundModel) -> int:
    spaces, layouts = model.architecture.spaces, model.layouts.values()
    touched = {space for layout in layouts for space in layout.spaces()}
    return sum(dimension(spaces, space) for space in sorted(touched))


def _attention(model: BoundModel) -> Iterator[tuple[str, int]]:
    for gauge in model.architecture.gauges:
        if isinstance(gauge, KeyBias) and _has_bias(model, gauge.bias):
            yield f"key bias {gauge.bias}", _entries(model, gauge.bias, gauge.space, dual=True)
        if isinstance(gauge, ValueBias) and _has_bias(model, gauge.bias) and model.bias_of(gauge.output):
            yield f"value bias {gauge.bias}", _entries(model, gauge.bias, gauge.space, dual=False)


def _has_bias(model: BoundModel, bias: str) -> bool:
    """A bias of its own, or the constant a LayerNorm's bias makes in its weight."""
    weight = bias.removesuffix("bias") + "weight"
    return bias in model.layouts or any(
        isinstance(n, Norm) and n.kind == "layer" and weight in n.readers and n.name + ".bias" in model.layouts
        for n in model.architecture.norms
    )


def _entries(model: BoundModel, bias: str, space: str, *, dual: bool) -> int:
    """How many output units of the bias's weight end in this space."""
    layout = model.layouts[bias if bias in model.layouts else bias.removesuffix("bias") + "weight"]
    last = [(s.atoms[-1], math.prod(s.sizes)) for axis in layout.axes for s in axis]
    return sum(size for atom, size in last if atom.space == space and atom.dual == dual)


def _norms(model: BoundModel, stream: str) -> Iterator[tuple[str, int]]:
    folded = {fold.norm.name for fold in Canonical(model, model.architecture.movable()).folds}
    for norm in model.architecture.norms:
        own = _streams(model, norm.name + ".weight")
        if stream not in own and (own or stream != model.architecture.streams[0]):  # a norm inside a layer: once
            continue
        readers = [r for r in norm.readers if r in model.layouts]
        last = isinstance(norm, StreamNorm) and norm.writer is None and bool(readers)
        if norm.name in folded or last:
            yield f"gain of {norm.name}", _size(model, norm.name + ".weight")
        if norm.name in folded or last or (isinstance(norm, StreamNorm) and _can_pass_on(model, norm)):
            yield f"bias of {norm.name}", _size(model, norm.name + ".bias")
        if norm.kind == "layer" if isinstance(norm, Norm) else True:
            plain = norm.name + ".bias" not in model.layouts  # nothing constant comes out, so no bias has to take it
            for reader in readers:
                if (plain or model.bias_of(reader)) and stream in _streams(model, reader, dual=True):
                    yield f"silent direction of {reader}", _size(model, reader) // _size(model, norm.name + ".weight")


def _can_pass_on(model: BoundModel, norm: StreamNorm) -> bool:
    """A bias on the stream goes on to its readers and to the next writer, if all of them have a bias to take it."""
    return norm.writer in model.layouts and all(model.bias_of(r) for r in norm.readers if r in model.layouts)


def _means(model: BoundModel, stream: str) -> Iterator[tuple[str, int]]:
    for writer in model.architecture.writers:
        if stream in _streams(model, writer):
            yield f"mean of {writer}", _size(model, writer) // model.architecture.spaces[stream].size


def _scales(model: BoundModel, stream: str) -> Iterator[tuple[str, int]]:
    """Of a batch norm the statistics are no parameters: gain and bias make up for a convolution's size."""
    for gauge in model.architecture.gauges:
        if isinstance(gauge, BranchScale) and stream in _streams(model, gauge.name):
            yield f"gain {gauge.name}", _size(model, gauge.name)
        if isinstance(gauge, BatchNorm) and stream == model.architecture.streams[0]:
            yield f"size of {gauge.writer}", _size(model, gauge.name + ".weight")


def _shifts(model: BoundModel, stream: str) -> Iterator[tuple[str, int]]:
    """k tables that are added have k − 1 vectors between them. A tied table is read by the head as well, so it cannot
    take part; in a LayerNorm model such a table is missing among the writers."""
    width = model.architecture.spaces[stream].size
    for tables in _connected(model):
        if stream not in _streams(model, tables[0]):
            continue
        centred = [t for t in tables if t in model.architecture.writers]
        free, size = (centred, width - 1) if centred else (tables, width)
        yield "shift between " + ", ".join(free), (len(free) - 1) * size
    for gauge in model.architecture.gauges if stream == model.architecture.streams[0] else ():
        if isinstance(gauge, RowShift) and gauge.weight in model.layouts:
            yield f"shift of the rows of {gauge.weight}", math.prod(model.layouts[gauge.weight].shape[1:])


def _connected(model: BoundModel) -> list[list[str]]:
    """The tables of all shifts, gathered where they share one."""
    groups: list[list[str]] = []
    for gauge in model.architecture.gauges:
        if isinstance(gauge, Shift) and all(t in model.layouts for t in gauge.tables):
            joined = [g for g in groups if set(g) & set(gauge.tables)]
            groups = [g for g in groups if g not in joined]
            groups.append(list(dict.fromkeys([*(t for g in joined for t in g), *gauge.tables])))
    return groups


def _size(model: BoundModel, name: str) -> int:
    return math.prod(model.layouts[name].shape) if name in model.layouts else 0


def _streams(model: BoundModel, name: str, *, dual: bool = False) -> set[str]:
    """The streams that a tensor writes, or reads."""
    axes = model.layouts[name].axes if name in model.layouts else ()
    atoms = {atom for axis in axes for segment in axis for atom in segment.atoms if atom.dual == dual}
    return {atom.space for atom in atoms if is_stream(atom.space)}
