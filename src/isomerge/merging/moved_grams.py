"""Gram matrices of a model that was moved by symmetries: they move with it, exactly.

What a linear map reads moves as x' = M x + c. M is the element on the map's input axis, between the gains of the two
models' norms where the map reads through one; c is what norms and value biases hand on in one gauge and not in the
other. With Σ x and the count beside Σ x xᵀ all of it is known:

    Σ x' = M Σx + n c          Σ x' x'ᵀ = M (Σ x xᵀ) Mᵀ + (M Σx) cᵀ + c (M Σx)ᵀ + n c cᵀ

Diagonal Fisher information does not move so: its sum of squares per weight says nothing of the products between
weights that a rotation mixes. It has to be measured on the moved model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from isomerge.calibration import Gram, Statistics
from isomerge.checkpoint import Checkpoint
from isomerge.errors import RequestError
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.run.rows import GramSource, TensorSource
from isomerge.merging.run.sources import Stored
from isomerge.symmetry.canonical import SMALL_GAIN, Canonical, Fold
from isomerge.symmetry.moved import MovedModel
from isomerge.symmetry.patterns import Layout, Segment


def gram_sources(
    statistics: Sequence[Statistics],
    names: Sequence[str],
    models: Sequence[Checkpoint],
    aligned: AlignedTensors | None,
    *,
    measured_aligned: bool = False,
    solve_biases: bool = False,
) -> list[GramSource | None]:
    """For each model, the Gram matrix of what a tensor of the result reads, moved as the model is; None for no linear
    map.

    `names` are those in the result, which with alignment are the anchor's. `measured_aligned`: the statistics are of
    the aligned models already. `solve_biases`: a bias has the Gram matrix of its weight, and each comes with the other.
    """
    moved_by = None if measured_aligned else aligned
    if not solve_biases:
        return [_gram_source(*each, moved_by) for each in zip(statistics, names, models, strict=True)]

    def tensor_of(model: Checkpoint, name: str) -> TensorSource:
        return Stored(model, name) if aligned is None else aligned.source(model, name)

    maps = statistics[0].info.get("maps", {})
    bias_of = {weight: entry["bias"] for weight, entry in maps.items() if entry.get("bias")}
    weight_of = {bias: weight for weight, bias in bias_of.items()}
    sources: list[GramSource | None] = []
    for measured, name, model in zip(statistics, names, models, strict=True):
        source = _gram_source(measured, weight_of.get(name, name), model, moved_by)
        partner = weight_of.get(name) or bias_of.get(name)
        known = partner in (model.tensors if aligned is None else aligned.plan)
        if source is not None and partner is not None and known:
            source = replace(source, other=tensor_of(model, partner), is_bias=name in weight_of)
        sources.append(source if known or name not in weight_of else None)
    return sources


def _gram_source(
    statistics: Statistics, weight: str, model: Checkpoint, aligned: AlignedTensors | None
) -> GramSource | None:
    name, place = _place(aligned, weight) if aligned is not None else (None, 0)
    if aligned is None or name is None:
        files: tuple[str, ...] = (weight,)
        gram = partial(statistics.gram, weight)
    else:
        move = aligned.moves[model]
        files = move.model.files.get(name, (name,))
        gram = partial(_moved_gram, move, statistics, name, place)
    if not all(statistics.has_gram(file) for file in files):
        return None
    entry = statistics.info["maps"][files[0]]
    count = entry["count"] if len(files) == 1 else gram().count
    label = f"the Gram matrix of '{files[place]}' in {statistics.name}"
    return GramSource(count, entry["transposed"], label, partial(_finite_product, gram, label), partial(_total, gram))


def _moved_gram(move: MovedModel, statistics: Statistics, name: str, place: int) -> Gram:
    return grams_of(move, statistics, name)[place]


def _finite_product(gram: Callable[[], Gram], label: str) -> Tensor:
    product = gram().product
    if not bool(product.isfinite().all()):
        raise RequestError(f"Merging: {label} is not finite. Measure it again.")
    return product


def _total(gram: Callable[[], Gram]) -> Tensor:
    return gram().total


def _place(aligned: AlignedTensors, weight: str) -> tuple[str | None, int]:
    """The specification's name of a tensor of the result, and which of its files it is."""
    own = aligned.own.model
    for name in own.layouts:
        files = own.files.get(name, (name,))
        if weight in files:
            return name, files.index(weight)
    return None, 0


def moved_grams(move: MovedModel, statistics: Statistics) -> Statistics:
    """All Gram matrices of a file for the moved model, under the moved model's names."""
    tensors: dict[str, Tensor] = {}
    maps: dict[str, Any] = {}
    for name in move.model.layouts:
        files = move.model.files.get(name, (name,))
        if not all(statistics.has_gram(file) for file in files):
            continue
        for file, gram in zip(files, grams_of(move, statistics, name), strict=True):
            tensors |= {f"gram:{file}": gram.product, f"sum:{file}": gram.total}
            entry = statistics.info["maps"][file]
            maps[file] = {key: value for key, value in entry.items() if key != "same"} | {"count": gram.count}
    return Statistics.of(
        tensors, {**statistics.info, "what": ["gram"], "maps": maps, "aligned": True}, statistics.closed
    )


def grams_of(move: MovedModel, statistics: Statistics, name: str) -> list[Gram]:
    """For each file of a weight of the specification (several for stacked experts), what the moved model reads."""
    grams = [statistics.gram(file) for file in move.model.files.get(name, (name,))]
    grams = _transformed(move, name, [_in_canonical_form(move.canonical, name, gram) for gram in grams])
    return [_in_gauge(move.gauge, name, gram) for gram in grams] if move.gauge is not None else grams


def _in_canonical_form(canonical: Canonical, name: str, gram: Gram) -> Gram:
    """What the map reads once the norm in front of it is folded and the value bias taken out."""
    fold = canonical.reader_fold.get(name)
    if fold is not None:
        gain = canonical.gain(fold.norm)
        _require_gains(gain, fold, canonical, name)
        shift = canonical.shift(fold.norm.name) if fold.bias_too else None
        gram = gram if shift is None else gram.shifted(-shift)
        gram = gram.scaled(1 / gain)
    bias = _passing_through(canonical, name)
    if bias is not None:
        gram = gram.shifted(-bias)
    model = canonical.model
    if name not in model.files and name in model.architecture.tied:
        factor = model.architecture.tied[name][1]  # the model that is untied multiplies the table and not its input
        gram = gram.scaled(torch.full_like(gram.total, 1 / factor))
    return gram


def _in_gauge(gauge: Canonical, name: str, gram: Gram) -> Gram:
    """… and what it reads behind the anchor's norm, with the anchor's value bias."""
    fold = gauge.reader_fold.get(name)
    if fold is not None:
        gram = gram.scaled(gauge.gain(fold.norm))
        shift = gauge.shift(fold.norm.name) if fold.bias_too else None
        gram = gram if shift is None else gram.shifted(shift)
    bias = _passing_through(gauge, name)
    return gram if bias is None else gram.shifted(bias)


def _require_gains(gain: Tensor, fold: Fold, canonical: Canonical, name: str) -> None:
    if bool(((gain.abs() < SMALL_GAIN * gain.abs().median()) | (gain == 0)).any()):
        raise RequestError(
            f"Moving the Gram matrix of '{name}' of {canonical.model.name}: some gains of '{fold.norm.name}' are "
            "nearly zero, so the data behind it do not say what the stream was. Align the models first (isomerge "
            "align), measure again, then merge."
        )


def _passing_through(canonical: Canonical, name: str) -> Tensor | None:
    """The value bias that attention adds to the input of this output projection, where it is a gauge."""
    gauge = next((g for g in canonical.values if g.output == name), None)
    if gauge is None:
        return None
    axis, reader, vector = canonical.value_as_read(gauge, canonical._own("bias", gauge.bias))
    result = torch.zeros(canonical.model.layouts[name].shape[axis], dtype=torch.float64)
    reader.put(result, 0, vector.to(result))
    return result


def _transformed(move: MovedModel, name: str, grams: list[Gram]) -> list[Gram]:
    """Moved by the element on the input axis; stacked experts change places too."""
    layout = move.model.layouts[name]
    read = [0] if grams[0].transposed else list(range(1, len(layout.axes)))
    axes, shape = tuple(_inputs(layout.axes[k]) for k in read), tuple(layout.shape[k] for k in read)
    stack = move.model.stacks.get(name)
    if stack is not None and read == [stack]:
        return _transformed_stack(move, axes[0][0], grams)
    if stack is not None:
        grams = [grams[k] for k in _order(move, layout.axes[stack][0], len(grams))]
    vector, matrix = Layout("", shape, axes), Layout("", shape * 2, axes * 2)
    act = move.transform.act
    return [
        replace(
            gram,
            total=act(gram.total.reshape(shape), vector).reshape(-1),
            product=act(gram.product.reshape(shape * 2), matrix).reshape(gram.product.shape),
        )
        for gram in grams
    ]


def _inputs(axis: Sequence[Segment]) -> tuple[Segment, ...]:
    """What is read moves by the dual of the columns that read it."""
    return tuple(replace(s, atoms=tuple(replace(a, dual=not a.dual) for a in s.atoms)) for s in axis)


def _order(move: MovedModel, segment: Segment, count: int) -> list[int]:
    space = segment.atoms[0].space
    if not move.transform.moves(space):
        return list(range(count))
    order = move.transform.spaces[space].order(move.transform.element(space))
    assert order is not None
    return [int(k) for k in order]


def _transformed_stack(move: MovedModel, segment: Segment, grams: list[Gram]) -> list[Gram]:
    """Each expert has its own inputs: the stack's units move together, once, and each expert's own on both sides."""
    outer = frozenset({segment.atoms[0].space})

    def act(values: Tensor, skip: frozenset[str] = frozenset()) -> Tensor:
        moved = move.transform.act_on_segment(values.reshape(*segment.sizes, -1), segment, skip=skip)
        return moved.reshape(values.shape)

    totals = act(torch.stack([gram.total for gram in grams]).unsqueeze(-1)).squeeze(-1)
    products = act(torch.stack([gram.product for gram in grams]))
    products = act(products.transpose(1, 2).contiguous(), outer)
    moved = [grams[k] for k in _order(move, segment, len(grams))]
    return [replace(g, total=t, product=p) for g, t, p in zip(moved, totals, products, strict=True)]
