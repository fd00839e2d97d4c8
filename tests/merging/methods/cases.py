"""Running a method on tensors that are there, and what every method is tried with."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

from isomerge.merging.methods import METHODS
from isomerge.merging.run.rows import GramSource, InMemory, TensorGroup, TensorSource

IMPORTANCE = {"ewc", "elastic_weight_removal", "fisher"}

# What a method cannot run without.
NEEDED: dict[str, Any] = {"nearswap": {"t": 0.5}}

# One more way to run each method that has options worth trying beside the defaults.
ALSO: dict[str, list[dict[str, Any]]] = {
    "breadcrumbs": [{"density": 0.6, "gamma": 0.1}, {"density": 0.95, "gamma": 0.2, "paper": True}],
    "breadcrumbs_ties": [{"density": 0.6, "gamma": 0.1, "rescale": True}],
    "ace": [{"threshold": 0.0}],
    "consensus_ties": [{"density": 0.5, "normalize": True}, {"elect": False}],
    "core_space": [{"inner": "task_arithmetic"}],
    "emr": [{"lambda": 0.5}],
    "karcher": [{"max_iter": 3}],
    "knots": [{"density": 0.4}, {"inner": "tsv"}],
    "localize_and_stitch": [{"density": 0.4}],
    "model_stock": [{"filter_wise": True}],
    "multislerp": [{"normalize_weights": False}],
    "nuslerp": [{"nuslerp_flatten": False}, {"nuslerp_flatten": False, "nuslerp_row_wise": True}],
    "ram": [{"epsilon": 0.3}],
    "ramplus_tl": [{"epsilon": 0.3}],
    "sce": [{"select_topk": 0.4}, {"select_topk": 0.4, "paper": True}],
    "ties": [{"density": 0.4}, {"density": 0.4, "rescale": True, "normalize": False, "lambda": 0.7}],
    "tsv": [{"share": 0.25}],
}
CASES = [(name, {**NEEDED.get(name, {}), **options}) for name in METHODS for options in ({}, *ALSO.get(name, []))]
CASE_NAMES = [f"{name}-{'-'.join(options)}" for name, options in CASES]


def count(name: str, wanted: int = 3) -> int:
    """As many models as wanted, or as a method takes."""
    method = METHODS[name]
    return max(method.least, wanted if method.most is None else min(wanted, method.most))


def merge(
    name: str,
    models: list[Tensor],
    base: Tensor | None = None,
    *,
    importance: list[Tensor] | None = None,
    block_elements: int = 2**19,
    tensor: str = "layer.weight",
    seed: int = 0,
    device: str = "cpu",
    **options: Any,
) -> Tensor:
    """The merged tensor; a base that the method does not know is left out."""
    option_tensors: dict[str, list[TensorSource]] = {}
    if name in ("regmean", "esm"):
        alike = name == "esm"  # which looks at each input of each model, so that they cannot change places
        option_tensors = {"statistics": [gram(model, alike) for model in models] if models[0].dim() > 1 else []}
    if name in IMPORTANCE:
        weights = importance or [torch.ones_like(model) for model in [*models, models[0]]]
        option_tensors = {"importance": [InMemory(w) for w in weights[:-1]], "base_importance": [InMemory(weights[-1])]}
    if name == "rewarded_soup" and "weight" not in options:
        options["weight"] = [1 / len(models)] * len(models)
    known = base is not None and METHODS[name].base != "ignored"
    group = TensorGroup(
        tensor,
        [InMemory(model) for model in models],
        InMemory(base) if known and base is not None else None,
        option_tensors=option_tensors,
        seed=seed,
        device=device,
        block_elements=block_elements,
    )
    combine = METHODS[name](group, **options)
    pieces = [combine(block) for block in group.blocks()]
    if not pieces:
        return torch.empty(group.shape, dtype=group.dtype)
    return torch.cat([piece.reshape(-1) for piece in pieces]).reshape(group.shape)


def gram(model: Tensor, alike: bool = False) -> TensorSource:
    """As if every model had seen the same data, whose inputs do not go together; `alike`: and are all as large."""
    inputs = model[0].numel() if len(model) else model.flatten(1).shape[1]
    product = torch.diag(torch.arange(1.0, inputs + 1.0, dtype=torch.float64))
    product = torch.eye(inputs, dtype=torch.float64) if alike else product
    return GramSource(100, False, "a Gram matrix", lambda: product, lambda: product.sum(0))


def tensors(shape: tuple[int, ...], models: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> list[Tensor]:
    """Some models and, last, their base; no two changes are of the same size."""
    numbers = np.random.default_rng(seed)
    base = numbers.standard_normal(shape)
    every = [base + numbers.standard_normal(shape) * 0.5 for _ in range(models)]
    return [torch.tensor(array, dtype=dtype) for array in [*every, base]]
