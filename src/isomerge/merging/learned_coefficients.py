"""Coefficients that are learned by gradient, through the merge:

    W(λ)_p = base_p + Σ_k λ_k,g(p) (W_k − base)_p,    λ ← λ − rate · ∂ objective(W(λ)) / ∂λ

with one coefficient for each model and group of tensors: all of them, those of a layer, or each. Without a base the
coefficients are of the models themselves: shares (positive, with the sum 1 in a group), or free. Only the coefficients
are learned, so a few hundred examples are enough. All models are in memory, and the merged one with its gradients.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.func import functional_call

from isomerge.arguments import require_choice
from isomerge.data.base import Batch
from isomerge.errors import RequestError
from isomerge.kinship import place_of
from isomerge.merging.layerwise.layerwise_merge import held_by, stock_module
from isomerge.merging.layerwise.parent_views import State
from isomerge.merging.layerwise.parents import ParentModels, read_parents
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.running.gradient_descent import descend
from isomerge.running.passes import DataPass, examples_in
from isomerge.running.stock import inputs_of, run_module

GROUPS = ("model", "layer", "tensor")
HELD = 2**28
"""Bytes of data that are kept in memory from pass to pass."""
WHOLE = "all tensors"
T = TypeVar("T")


@dataclass(frozen=True)
class ModelSpan:
    """One stock module, and all models that the coefficients can make of it."""

    module: Any
    base: State
    """By the module's names; empty where the coefficients are of the models themselves."""
    parts: dict[str, Tensor]
    """(models, …): what each adds to the base, or the models themselves."""
    groups: list[str]
    group_of: dict[str, int]
    """Of every tensor."""

    @property
    def models(self) -> int:
        return len(next(iter(self.parts.values())))

    def weights(self, coefficients: Tensor) -> State:
        """`coefficients`: (models, groups)."""
        mixed = {
            name: torch.tensordot(coefficients[:, self.group_of[name]].to(part.dtype), part, 1)
            for name, part in self.parts.items()
        }
        return {name: self.base[name] + tensor if self.base else tensor for name, tensor in mixed.items()}

    def parent(self, number: int) -> State:
        """The weights of one of the models."""
        return {
            name: self.base[name] + part[number] if self.base else part[number] for name, part in self.parts.items()
        }

    def run(self, weights: State, batch: Batch) -> Mapping[str, Any]:
        """What the model of these weights gives, with gradients."""

        def call(**inputs: Any) -> Any:
            return functional_call(self.module, weights, (), inputs)

        outputs: Mapping[str, Any] = run_module(call, inputs_of(batch, self.module), "the merged model")
        return outputs


Objective = Callable[[ModelSpan, State, Batch, Sequence[float]], Tensor]
"""What is to be low for weights on a batch; the last is how much each model counts on it."""
Descent = Callable[[Sequence[Tensor], Callable[[Any], Tensor], Iterator[Any], int, float, Callable[[int], None]], None]
"""Lowers a loss by changing parameters: of batches, steps, rate and report, as `descend` has them."""
ADAM: Descent = partial(descend, sizes=[1.0])


@dataclass(frozen=True)
class OwnedData:
    """A data set, and how much each model counts on it."""

    examples: DataPass
    shares: Sequence[float]


class CoefficientMerge:
    """A merge whose coefficients are learned."""

    def __init__(
        self, inputs: MergeInputs, start: Sequence[float], by: str, *, labels: bool = False, free: bool = False
    ) -> None:
        """`by`: what has a coefficient of its own. `start`: the first ones, one for each model. `free`: they are no
        shares, with or without a base."""
        require_choice("by", by, GROUPS)
        with_base = inputs.base is not None
        self._inputs, self._as_shares = inputs, not (with_base or free)
        models = [inputs.base, *inputs.models] if inputs.base is not None else list(inputs.models)
        self._parents, states = read_parents(replace(inputs, models=models))
        self.span, self._unheld = _read_span(self._parents, states, by, with_base, inputs.device)
        first = torch.tensor(start, dtype=torch.float64)
        if self._as_shares:
            if not min(start) > 0:
                raise RequestError(
                    f"Learning the coefficients of {len(start)} models: they start from the weights {list(start)}, and "
                    "all of them are numbers above 0. Leave a model out, or name a base.",
                    keys=("weight",),
                )
            first = (first / first.sum()).log()
        self._free = first[:, None].repeat(1, len(self.span.groups)).to(inputs.device)
        owners = inputs.owners or [range(len(inputs.models))] * len(inputs.data)
        self.data = [
            OwnedData(
                DataPass(
                    one.passes(models[0], labels=labels, device=inputs.device), device=inputs.device, labels=labels,
                    hashed=False, budget=HELD // len(inputs.data),
                ),
                [1 / len(own) if m in own else 0.0 for m in range(len(inputs.models))],
            )
            for one, own in zip(inputs.data, owners, strict=True)
        ]  # fmt: skip

    @property
    def coefficients(self) -> Tensor:
        """(models, groups)"""
        return self._free.softmax(0) if self._as_shares else self._free

    @property
    def config(self) -> dict[str, Any]:
        return self._parents.config

    def learn(self, objective: Objective, steps: int, rate: float, descent: Descent = ADAM) -> dict[str, Any]:
        """Lower the objective; what was reached on all data is never higher than at the start. Gives what to report."""
        if steps < 1 or not 0 < rate < torch.inf:
            raise RequestError(
                f"Learning coefficients in {steps} steps at a rate of {rate}: steps is a whole number from 1, and rate "
                "a number above 0.",
                keys=("steps", "rate"),
            )
        kept = self._free.clone()
        before = self.mean(objective)
        rounds: Iterator[tuple[Batch, ...]] = zip(*(_again_and_again(own.examples) for own in self.data), strict=True)
        report = partial(self._inputs.report, total=steps, stage="learning coefficients")
        descent([self._free], partial(self._loss, objective), rounds, steps, rate, report)
        after = self.mean(objective)
        if not after < before:
            self._free, after = kept, before
        return {"steps": steps, "before": before, "after": after}

    @torch.no_grad()
    def mean(self, objective: Objective) -> float:
        """Over all data; each data set counts alike."""
        weights, total = self.span.weights(self.coefficients), 0.0
        for own in self.data:
            value = sum(float(objective(self.span, weights, b, own.shares)) * examples_in(b) for b in own.examples)
            total += value / own.examples.examples / len(self.data)
        return total

    def _loss(self, objective: Objective, batches: Sequence[Batch]) -> Tensor:
        """On one batch of every data set."""
        weights = self.span.weights(self.coefficients)
        pairs = zip(self.data, batches, strict=True)
        return torch.stack([objective(self.span, weights, batch, own.shares) for own, batch in pairs]).mean()

    def result(self, learned: Mapping[str, Any], notes: Sequence[str] = ()) -> MergedWeights:
        """The merged model, and what was learned."""
        module, parents = self.span.module, self._parents
        with torch.no_grad():
            for name, tensor in self.span.weights(self.coefficients).items():
                module.get_parameter(name).copy_(tensor)
        tensors = {name: tensor.detach().cpu() for name, tensor in held_by(module, parents.bound).items()}
        tensors |= self._unheld
        names = [model.name for model in self._inputs.models]
        rows = self.coefficients.T.tolist()
        record = {
            "coefficients": [
                {"group": group, "models": dict(zip(names, own, strict=True))}
                for group, own in zip(self.span.groups, rows, strict=True)
            ],
            "objective": dict(learned),
        }
        said = [f"{name} {_range(own)}" for name, own in zip(names, self.coefficients.tolist(), strict=True)]
        change = f"{learned['kind']} {learned['before']:.4g} → {learned['after']:.4g}"
        first = self._inputs.base or self._inputs.models[0]
        changes = {k: v for k, v in parents.config.items() if first.config.get(k) != v or k not in first.config}
        return MergedWeights(
            {name: tensors[name] for name in parents.plan}, parents.plan, changes, parents.alignment,
            [*parents.notes, *notes, f"learned coefficients: {', '.join(said)}; {change} on the data"], record,
        )  # fmt: skip


def _read_span(
    parents: ParentModels, states: list[State], by: str, with_base: bool, device: str
) -> tuple[ModelSpan, State]:
    """The span, and the tensors of the first model that its class has no use for."""
    first = states[0]
    module = stock_module(parents.config, first, parents.precision, device)
    held = held_by(module, parents.bound)
    unheld = {name: first[name] for name in parents.plan if name not in held}
    found = [dict(module.named_parameters())]
    for number in range(1, len(states)):
        loaded = stock_module(parents.config, states[number], parents.precision, device)
        found.append(dict(loaded.named_parameters()))
        states[number] = {}  # one copy of each model is enough
    base, parts = {}, {}
    for name in list(found[0]):
        tensors = [own[name].data if number == 0 else own.pop(name).data for number, own in enumerate(found)]
        if with_base:
            base[name] = tensors[0].clone()  # the module's own tensor takes the result
            tensors = [tensor - base[name] for tensor in tensors[1:]]
        parts[name] = torch.stack(tensors)
    groups: dict[str, int] = {}
    group_of = {name: groups.setdefault(_group(name, by), len(groups)) for name in parts}
    return ModelSpan(module, base, parts, list(groups), group_of), unheld


def _group(name: str, by: str) -> str:
    """
    >>> _group("vit.layers.3.mlp.fc1.weight", "layer"), _group("classifier.bias", "layer")
    ('vit.layers.3', 'classifier')
    """
    if by == "model":
        return WHOLE
    stack, layer, part = place_of(name)
    return name if by == "tensor" else part if layer < 0 else f"{stack}.{layer}"


def _again_and_again(items: Iterable[T]) -> Iterator[T]:
    return itertools.chain.from_iterable(itertools.repeat(items))


def _range(values: Sequence[float]) -> str:
    """
    >>> _range([0.25]), _range([0.1, 0.5])
    ('0.25', '0.3 (0.1 to 0.5)')
    """
    mean = f"{sum(values) / len(values):.3g}"
    return mean if len(values) == 1 else f"{mean} ({min(values):.3g} to {max(values):.3g})"
