"""How one tensor of the output is made."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from isomerge.merging.recipe.reference import ModelReference


@dataclass(frozen=True)
class Input:
    """One model's tensor."""

    model: ModelReference
    tensor: str
    """Its name in that model's checkpoint."""


@dataclass(frozen=True)
class TensorPlan:
    """How one tensor of the output is made."""

    name: str
    inputs: tuple[Input, ...]
    base: Input | None
    method: str
    options: dict[str, Any]
    """Per-model options are lists in the order of the inputs. Defaults are filled in."""
    origins: dict[str, str]
    """Where each value came from: by option, or by 'option of model' where the models differ."""
    vocabulary: bool = False
    """Axis 0 counts the tokens."""
