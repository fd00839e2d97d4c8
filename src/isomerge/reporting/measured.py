"""What is known of every tensor, gathered by layer, by part of the model and by space: the numbers of a report."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from isomerge.architectures import FAMILIES, describe
from isomerge.checkpoint import Checkpoint
from isomerge.errors import IsomergeError
from isomerge.kinship import SAMPLE, Relation, conflict, cosines, distances, in_layers, place_of

SIDES = ("before", "after")


def measured(
    relations: Mapping[str, Relation],
    *,
    models: Iterable[str],
    reference: str,
    base: str | None,
    spaces: Mapping[str, Iterable[str]],
    seed: int = 0,
) -> dict[str, Any]:
    """`relations` are by tensor; `spaces` has, for each space, the tensors it touches.

    `before` is how the models are stored, `after` how they are merged. Where nothing is aligned the two are the same
    and only `after` is kept; where alignment happens inside a method only `before` is known.
    """
    known = {name: one for name, one in relations.items() if one.sampled}
    compared = [name for name in models if name != reference]
    gather = _gatherer(known, compared)
    by_part: dict[tuple[str, int, str], list[str]] = {}
    by_layer: dict[tuple[str, int], list[str]] = {}
    for name in sorted(known):
        stack, layer, part = place_of(name)
        by_part.setdefault((stack, layer, part), []).append(name)
        by_layer.setdefault((stack, layer), []).append(name)
    return {
        "seed": seed,
        "sample": SAMPLE,
        "fraction": rounded(_share(known.values())),
        "reference": reference,
        "base": base,
        "compared": compared,
        "all": gather(list(known), in_layers(known)),
        "pairs": _pairs([known[name] for name in in_layers(known)]),
        "layers": [{**_label(*key), **gather(names)} for key, names in sorted(by_layer.items())],
        "parts": [{**_label(*key[:2]), "part": key[2], **gather(names)} for key, names in sorted(by_part.items())],
        "spaces": [
            {"name": space, **space_place(space), **gather([n for n in sorted(touched) if n in known])}
            for space, touched in sorted(spaces.items())
            if any(name in known for name in touched)
        ],
    }


def space_place(space: str) -> dict[str, Any]:
    """The layer of a space (−1 where it has none) and what kind of space it is.

    >>> space_place("ffn.3"), space_place("residual")
    ({'layer': 3, 'kind': 'ffn'}, {'layer': -1, 'kind': 'residual'})
    """
    number = re.search(r"(?:^|\.)(\d+)(?=\.|$)", space)
    kind = re.sub(r"\.\d+$", "", space)
    return {"layer": int(number[1]) if number else -1, "kind": re.sub(r"(^|\.)\d+(?=\.|$)", r"\1*", kind)}


def touched_files(checkpoint: Checkpoint) -> dict[str, list[str]]:
    """The tensors on disk that each space touches; nothing for a family without a specification."""
    if checkpoint.config.get("model_type") not in FAMILIES:
        return {}  # what could be inferred would have to be proven by running models
    try:
        bound = describe(checkpoint)
    except IsomergeError:
        return {}  # a merge needs no specification, and neither does its report
    return {
        space: [file for name in bound.touching(space) for file in bound.files.get(name, ())]
        for space in bound.architecture.spaces
    }


def gain(before: float | None, after: float | None) -> float | None:
    """The fall of the squared distance, as a fraction."""
    return None if before is None or after is None or before == 0 else 1 - (after / before) ** 2


def rounded(value: Any) -> Any:
    """Six significant digits: a sample says no more, and the last bits of a sum are nobody's concern.

    >>> rounded({"a": [1.23456789, None]})
    {'a': [1.23457, None]}
    """
    if isinstance(value, Mapping):
        return {key: rounded(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [rounded(item) for item in value]
    return float(f"{value:.6g}") if isinstance(value, float) else value


def _gatherer(known: Mapping[str, Relation], compared: list[str]) -> Callable[..., dict[str, Any]]:
    def gather(names: list[str], kinship: list[str] | None = None) -> dict[str, Any]:
        """`kinship` are the tensors that cosine and distance are of, where not all."""
        everything, chosen = ([known[name] for name in own] for own in (names, kinship or names))
        row: dict[str, Any] = {"elements": sum(one.elements for one in everything)}
        angles = {side: list(cosines(chosen, side).values()) for side in SIDES}
        row["cosine"] = {side: sum(angles[side]) / len(angles[side]) if angles[side] else None for side in SIDES}
        row["conflict"] = {side: conflict(everything, side) for side in SIDES}
        apart = {side: distances(chosen, side) for side in SIDES}
        row["distance"] = {side: [apart[side].get(name) for name in compared] for side in SIDES}
        row["gain"] = [gain(apart["before"].get(name), apart["after"].get(name)) for name in compared]
        return dict(rounded(row))

    return gather


def _pairs(relations: list[Relation]) -> list[dict[str, Any]]:
    sides = {side: cosines(relations, side) for side in SIDES}
    pairs = list(dict.fromkeys(pair for angles in sides.values() for pair in angles))
    return [{"models": list(pair), "cosine": rounded({s: sides[s].get(pair) for s in SIDES})} for pair in pairs]


def _share(relations: Iterable[Relation]) -> float:
    relations = list(relations)
    elements = sum(one.elements for one in relations)
    return sum(one.sampled for one in relations) / elements if elements else 0.0


def _label(stack: str, layer: int) -> dict[str, Any]:
    return {"stack": stack, "layer": layer}
