"""A method tried on a few random numbers, to hear what it says about its options before any work is done."""

from __future__ import annotations

import re
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch

from isomerge.errors import RequestError
from isomerge.merging.group import GramSource, Group, InMemory, Source, gram_options
from isomerge.merging.methods import Method
from isomerge.merging.recipe.tensor_plan import TensorPlan

SHAPE = (4, 4)


def rejections(method: Method, tensors: Iterable[TensorPlan]) -> Iterator[str]:
    """Values that only the method can judge: how two options go together, or what weights add up to. Told with the
    first tensor that has them and with where they were written."""
    tried: set[str] = set()
    for one in tensors:
        key = f"{len(one.inputs)} {one.base is None} {one.options}"
        if one.method != method.name or key in tried:
            continue
        tried.add(key)
        problem = rejection(method, one.options, len(one.inputs), one.base is not None)
        if problem is not None:
            named = [option for option in one.options if re.search(rf"\b{re.escape(option)}\b", problem)]
            origins = {o for k, o in one.origins.items() if k.partition(" of ")[0] in named and o != "default"}
            where = f" ({'; '.join(sorted(origins))})" if origins else ""
            yield f"{method.name}, first for {one.name}: {problem.rstrip('.')}{where}"


def rejection(method: Method, options: Mapping[str, Any], models: int, with_base: bool) -> str | None:
    """What the method has against these options; None if it takes them."""
    generator = torch.Generator().manual_seed(0)
    sources = [InMemory(torch.randn(SHAPE, generator=generator)) for _ in range(models)]
    base = InMemory(torch.randn(SHAPE, generator=generator)) if with_base else None
    group = Group("a tensor", sources, base, extras=stand_ins(method, SHAPE, models))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            method(group, **options)(group.whole())
        except RequestError as error:
            return str(error)
    return None


def stand_ins(method: Method, shape: Sequence[int], models: int) -> dict[str, list[Source]]:
    """Something in place of every file that the method's options can name."""
    found: dict[str, list[Source]] = {}
    width = shape[-1]
    for option in method.options:
        if option.kind is not str:
            continue
        count = models if option.per_model else 1
        if option.name in gram_options(method.function):
            gram = GramSource(
                10 * width, False, "a stand-in", lambda: torch.eye(width).double(), lambda: torch.zeros(width).double()
            )
            found[option.name] = [gram] * count
        else:
            found[option.name] = [InMemory(torch.ones(tuple(shape)), "a stand-in")] * count
    return found
