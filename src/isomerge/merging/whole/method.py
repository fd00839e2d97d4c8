"""What a whole-model method is, and how a function becomes one."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.merging.methods.method import Base, Option, read_options

if TYPE_CHECKING:
    from isomerge.merging.data_sets import DataSet

DataUse = Literal["one", "together", "each", "optional"]


@dataclass(frozen=True)
class Work:
    """What a whole-model method gets."""

    models: Sequence[Checkpoint]
    """In the recipe's order; the first gives config, names and dtypes."""
    data: Sequence[DataSet]
    """One, several to be taken together, or one per model, as the method says; none where it can do without."""
    align: Mapping[str, Any] | None
    """Options of `isomerge.align`, the data among them; None: take the models as they are."""
    device: str = "cpu"
    progress: Callable[[int, int, str], None] | None = None


@dataclass(frozen=True)
class Solved:
    """What it gives back: a model in memory, to be rounded once when it is written."""

    tensors: Mapping[str, Tensor]
    """By name on disk, in the precision they were solved in."""
    plan: Mapping[str, TensorInfo]
    """Shapes and dtypes as they are written."""
    config_changes: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, Any] | None = None
    notes: Sequence[str] = ()
    record: dict[str, Any] = field(default_factory=dict)
    """What else the report of the merge should say."""
    parents: Sequence[int] | None = None
    """Places of the models that are in the result; None: all of them."""


@dataclass(frozen=True)
class WholeMethod:
    """A whole-model method with what recipes, the command line and the documentation need to know of it."""

    name: str
    function: Callable[..., Solved]
    data: DataUse
    """One data set for all models; one or several, taken together; one for each model; or one for all, or none."""
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
    base: Base = "ignored"

    def __call__(self, work: Work, options: Mapping[str, Any]) -> Solved:
        return self.function(work, **{option.argument: options[option.name] for option in self.options})


WHOLE: dict[str, WholeMethod] = {}


def whole_method(
    *,
    data: DataUse,
    passes: str,
    least: int = 2,
    most: int | None = None,
    reference: str = "",
    name: str | None = None,
    labels: bool = False,
    any_width: bool = False,
) -> Callable[[Callable[..., Solved]], WholeMethod]:
    """Enter a function `(work, *, options…) -> Solved`; options and their descriptions as for `method`."""

    def enter(function: Callable[..., Solved]) -> WholeMethod:
        document = inspect.getdoc(function) or ""
        known = name or function.__name__
        WHOLE[known] = WholeMethod(
            known, function, data, passes, least, most, read_options(function, document), document.split("\n", 1)[0],
            reference, labels, any_width,
        )  # fmt: skip
        return WHOLE[known]

    return enter
