"""What a data method is, and how a function becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from isomerge.errors import RequestError
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.methods.method import Base, Option, read_options

if TYPE_CHECKING:
    from isomerge.merging.recipe import Recipe

DataNeed = Literal["one", "together", "each", "task", "optional", "any"]
"""One data set for all models; one or several, taken together; one for each model; one for each and last that of the
task; one for all, or none; or any of one, several or none."""


@dataclass(frozen=True)
class DataMethod:
    """A data method with what recipes, the command line and the documentation need to know of it."""

    name: str
    function: Callable[..., MergedWeights]
    data: DataNeed
    passes: str
    """How often the models run over the data, in words."""
    least: int
    most: int | None
    options: tuple[Option, ...]
    summary: str
    reference: str
    labels: bool = False
    """It needs labels, and is best given data that no model was trained on."""
    any_width: bool = False
    """Models may be of other widths than the first, which the result is like."""
    any_depth: bool = False
    """… and have other numbers of layers, or other vocabularies."""
    old_options: Mapping[str, str] = field(default_factory=dict)
    """Earlier name of an option -> its name."""
    base: Base = "ignored"
    """'optional': the base gives the shape of the result, and where it starts."""
    any_architecture: bool = False
    """Models may be of any architecture: nothing but their predictions counts."""
    parts: bool = False
    """It takes parts of its models as they are, or makes one model of another: nothing is aligned, the base may be one
    of the models, and the result has a shape of its own."""

    def __call__(self, inputs: MergeInputs, options: Mapping[str, Any]) -> MergedWeights:
        return self.function(inputs, **{option.argument: options[option.name] for option in self.options})

    def options_in(self, recipe: Recipe) -> dict[str, Any]:
        """One value per option, or a list of one per model; nothing in a whole model varies with the layer."""
        shared = recipe.parameters or {}
        values: dict[str, Any] = {}
        for option in self.options:
            value = shared.get(option.name, option.default)
            each = [(entry.parameters or {}).get(option.name, value) for entry in recipe.models or ()]
            values[option.name] = each if option.per_model else value
        weights = values.get("weight")
        if weights is not None and not sum(weights) > 0:
            raise RequestError(f"Merging with {self.name}: the weights {weights} need a positive sum.")
        return values


DATA_METHODS: dict[str, DataMethod] = {}


def data_method(
    *,
    data: DataNeed,
    passes: str,
    least: int = 2,
    most: int | None = None,
    reference: str = "",
    name: str | None = None,
    labels: bool = False,
    any_width: bool = False,
    any_shape: bool = False,
    any_architecture: bool = False,
    parts: bool = False,
    base: Base = "ignored",
    old_options: Mapping[str, str] | None = None,
) -> Callable[[Callable[..., MergedWeights]], DataMethod]:
    """Enter a function `(inputs, *, options…) -> MergedWeights`; options and their descriptions as for `method`."""

    def enter(function: Callable[..., MergedWeights]) -> DataMethod:
        document = inspect.getdoc(function) or ""
        known = name or function.__name__
        DATA_METHODS[known] = DataMethod(
            known, function, data, passes, least, most, read_options(function, document), document.split("\n", 1)[0],
            reference, labels, any_width or any_shape or any_architecture, any_shape or any_architecture,
            dict(old_options or {}), base, any_architecture, parts,
        )  # fmt: skip
        return DATA_METHODS[known]

    return enter
