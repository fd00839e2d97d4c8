"""How the tensors of the output are made."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from isomerge.errors import RequestError, near_miss
from isomerge.merging.recipe.model_reference import ModelReference
from isomerge.results import Result


@dataclass(frozen=True)
class TensorInput:
    """One model's tensor."""

    model: ModelReference
    tensor: str
    """Its name in that model's checkpoint."""


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the output is made."""

    name: str
    inputs: tuple[TensorInput, ...]
    base: TensorInput | None
    method: str
    options: dict[str, Any]
    """Per-model options are lists in the order of the inputs. Defaults are filled in."""
    origins: dict[str, str]
    """Where each value came from: by option, or by 'option of model' where the models differ."""
    vocabulary: bool = False
    """Axis 0 counts the tokens."""
    longest: TensorInput | None = None
    """Of tables of different length the one whose rows follow those that all have; None where they are equally long."""

    @property
    def every(self) -> list[TensorInput]:
        """The inputs, then the base if there is one."""
        return [*self.inputs, *([self.base] if self.base else [])]


@dataclass(frozen=True)
class RecipePlan:
    """How the output is made."""

    tensors: dict[str, TensorPlan]
    donor: ModelReference
    """Whose config and side files the output gets."""
    config_changes: dict[str, Any] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)
    tables: list[str] = field(default_factory=list)
    """Those of the notes that say whose rows tables of different length have."""
    tokens_of: ModelReference | None = None
    """Whose tokenizer belongs to the vocabulary tables, where they differ in length; None: the donor's."""


@dataclass
class TensorExplanation(Result):
    """The inputs and effective options of one tensor of the output, and the lines of the recipe that set them."""

    tensor: str
    method: str
    inputs: list[dict[str, str]]
    base: dict[str, str] | None
    options: dict[str, Any]
    vocabulary: bool


def explain(plan: RecipePlan, tensor: str) -> TensorExplanation:
    """What happens to one tensor, and which line of the recipe says so."""
    if tensor not in plan.tensors:
        hint = near_miss(tensor, plan.tensors)
        raise RequestError(
            f"While explaining tensor '{tensor}': the output has no such tensor among its {len(plan.tensors)}. {hint}"
        )
    one = plan.tensors[tensor]
    options = {}
    for option, value in one.options.items():
        own = {i.model: one.origins.get(f"{option} of {i.model}") for i in one.inputs}
        origin = one.origins.get(option) or {str(model): text for model, text in own.items()}
        options[option] = {"value": value, "origin": origin}
    return TensorExplanation(
        tensor=tensor,
        method=one.method,
        inputs=[_named(given) for given in one.inputs],
        base=_named(one.base) if one.base else None,
        options=options,
        vocabulary=one.vocabulary,
    )


def _named(given: TensorInput) -> dict[str, str]:
    return {"model": str(given.model), "tensor": given.tensor}
