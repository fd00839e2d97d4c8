"""Models that were trained apart and are merged as they are: the merge succeeds, and what it makes does not work."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping

import numpy as np

from isomerge.checkpoint import Checkpoint
from isomerge.merge.recipe import Input, ModelReference, RecipePlan, TensorPlan
from isomerge.report.measured import place_of
from isomerge.report.relations import sampled_rows

UNRELATED = 0.1
"""The cosine of strangers is about 0. Level `full` brought those we measured to 0.27 and more."""


def name_strangers(plan: RecipePlan, models: Mapping[ModelReference, Checkpoint]) -> list[str]:
    """A note for each model that has strangers among those it is merged with.

    Three layers are looked at, some rows of each matrix. Vocabulary tables say more of tokens than of kinship, and
    where different layers meet (in stacks) nothing can be said.
    """
    sums: dict[tuple[ModelReference, ModelReference], list[float]] = {}
    for reference, other, a, b in _compared(plan, models):
        found = sums.setdefault((reference, other), [0.0, 0.0, 0.0])
        for place, (x, y) in enumerate(((a, b), (a, a), (b, b))):
            found[place] += float(np.einsum("n,n->", x, y))
    strangers: dict[ModelReference, list[str]] = {}
    for (reference, other), (product, *squares) in sums.items():
        cosine = product / size if (size := float(np.sqrt(np.prod(squares)))) > 0 else 1.0
        if abs(cosine) < UNRELATED:
            strangers.setdefault(reference, []).append(f"{other} (cosine {round(cosine, 2) + 0.0:.2f})")
    return [
        f"{' and '.join(others)} {'has' if len(others) == 1 else 'have'} nothing in common with the layers of "
        f"{reference}, where siblings have a cosine near 1. Merged as they are, such models hardly work: align them at "
        "level full (--align, or align: in the recipe). `isomerge check` tells more"
        for reference, others in strangers.items()
    ]


Array = np.ndarray[tuple[int], np.dtype[np.float64]]


def _compared(
    plan: RecipePlan, models: Mapping[ModelReference, Checkpoint]
) -> Iterator[tuple[ModelReference, ModelReference, Array, Array]]:
    """Some elements of a matrix of two models, the first of them its base or the first that it is made from."""
    meeting = {name: found for name, one in plan.tensors.items() if len(found := _meeting(one, models)) > 1}
    for name in in_few_layers(meeting):
        first, *others = [(given.model, _elements(models[given.model], given.tensor, name)) for given in meeting[name]]
        for other, values in others:
            yield first[0], other, first[1], values


def in_few_layers(names: Iterable[str]) -> list[str]:
    """Those of the first layer, of one in the middle and of the last.

    >>> in_few_layers([f"layers.{number}.weight" for number in range(9)] + ["head.weight"])
    ['layers.0.weight', 'layers.4.weight', 'layers.8.weight']
    """
    inside = [name for name in names if place_of(name)[1] >= 0]
    layers = sorted({place_of(name)[:2] for name in inside})
    seen = {layers[place] for place in (0, len(layers) // 2, -1)} if layers else set()
    return [name for name in inside if place_of(name)[:2] in seen]


def _meeting(plan: TensorPlan, models: Mapping[ModelReference, Checkpoint]) -> list[Input]:
    """The inputs of a matrix inside a layer that count, one for each model; none where they are not the same matrix."""
    weights = plan.options.get("weight")
    zero = [isinstance(weights, (list, tuple)) and weights[place] == 0 for place in range(len(plan.inputs))]
    counted = [given for given, left_out in zip(plan.inputs, zero, strict=True) if not left_out]
    every = [given for given in (plan.base, *counted) if given is not None and given.model in models]
    infos = [models[given.model].tensors[given.tensor] for given in every]
    if len({place_of(given.tensor)[1:] for given in every}) != 1 or len({info.shape for info in infos}) != 1:
        return []
    if len(infos[0].shape) < 2 or not all(info.dtype.is_floating_point for info in infos):
        return []
    return list({given.model: given for given in every}.values())


def _elements(checkpoint: Checkpoint, tensor: str, name: str) -> Array:
    """The same places in every model, whatever it calls the tensor."""
    rows = sampled_rows(name, checkpoint.tensors[tensor].shape)
    return np.concatenate([checkpoint.read_rows(tensor, *some).double().cpu().numpy().ravel() for some in rows])
