"""Pairs of tiny models, data for them, and what their feed-forward units do, seen by hooks on the stock class."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from torch import Tensor

import isomerge
import models as tiny
import samples as inputs
from isomerge.alignment.scope import Scope
from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.merging.outcome.merged import Merged
from isomerge.symmetry.transform import random_transform
from samples import Batches

FAMILIES = ["vit", "bert", "gpt2", "llama"]
WIDTHS: dict[str, Callable[[int, int], dict[str, Any]]] = {
    "vit": lambda d, n: {"hidden_size": d, "num_attention_heads": 4, "intermediate_size": n},
    "bert": lambda d, n: {"hidden_size": d, "num_attention_heads": 4, "intermediate_size": n},
    "gpt2": lambda d, n: {"n_embd": d, "n_head": 4, "n_inner": n},
    "llama": lambda d, n: {"hidden_size": d, "num_attention_heads": 4, "intermediate_size": n, "head_dim": 8},
}


def model(family: str, seed: int = 0, width: int = 0, units: int = 0, **changes: Any) -> Path:
    sizes = WIDTHS[family](width, units) if width else {}
    return tiny.model(family, seed, **sizes, **changes)


def batches(folder: Path, count: int = 2) -> Batches:
    return inputs.batches(folder, count, size=16)


@cache
def permuted(folder: Path, seed: int = 3) -> Path:
    """The same function with its units, heads and stream in another order."""
    bound = describe(open_checkpoint(folder))
    spaces = Scope("permutation").restrict(bound.architecture)
    transform = random_transform(spaces.spaces, seed, only=spaces.movable())
    changed = {}
    for name in bound.files:
        changed |= bound.split(name, transform.act(bound.raw(name), bound.layouts[name]))
    return tiny.variant(folder, changed, f"permuted-{seed}")


def seen(folder: Path, modules: list[str], data: Batches, *, output: bool = False) -> list[np.ndarray]:
    """What modules of the stock class read (or make), stacked over all tokens: (samples, units)."""
    stock = getattr(transformers, tiny.read_config(folder)["architectures"][0])
    loaded = stock.from_pretrained(folder, dtype=torch.float64, local_files_only=True).eval()
    rows: dict[str, list[Tensor]] = {name: [] for name in modules}
    for name in modules:
        loaded.get_submodule(name).register_forward_hook(
            lambda _, given, made, name=name: rows[name].append((made if output else given[0]).flatten(0, 1))
        )
    with torch.no_grad():
        for batch in data():
            loaded(**batch)
    return [torch.cat(rows[name]).numpy() for name in modules]


def squared_distances(x: np.ndarray, y: np.ndarray) -> np.ndarray:
    """‖x_i − y_j‖² between columns, by the definition."""
    return np.array([[((x[:, i] - y[:, j]) ** 2).sum() for j in range(y.shape[1])] for i in range(x.shape[1])])


def largest_difference(found: dict[str, Tensor], truth: dict[str, Tensor]) -> float:
    assert found.keys() == truth.keys(), set(found) ^ set(truth)
    return max(float((found[n].double() - t.double()).abs().max()) for n, t in truth.items())


def fuse(models: Sequence[Any], data: Any = None, **options: Any) -> Merged:
    """The public call; `align=True` is a rotation by the weights."""
    if options.get("align") is True:
        options["align"] = {"level": "rotation"}
    return isomerge.merge(models, method="ot_fusion", data=data, **options)


def carried(source: Any, anchor: Any, data: Any = None, **options: Any) -> Merged:
    """The source alone, in the units of the anchor."""
    return fuse([anchor, source], data, weights=[0, 1], **options)
