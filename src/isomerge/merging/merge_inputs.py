"""What a method that runs whole models is given, and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from torch import Tensor

from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.base import Progress
from isomerge.checkpoint.kept import KeptWork
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.run.rows import TensorSource

if TYPE_CHECKING:
    from isomerge.merging.recipe_data import DataSet
    from isomerge.merging.vocabulary import Vocabulary


@dataclass(frozen=True)
class ExpertRequest:
    """One expert of a mixture that is to be built."""

    model: int
    """The place of the model whose feed-forwards it is."""
    positive: Sequence[str] = ()
    negative: Sequence[str] = ()
    noise: float = 0.0
    """Of this size is added to its weights."""
    scale: float = 1.0
    """Of what it adds to the stream."""


@dataclass(frozen=True)
class MergeInputs:
    """What a data method gets."""

    models: Sequence[Checkpoint]
    """In the recipe's order; the first gives config, names and dtypes, where there is no base."""
    data: Sequence[DataSet]
    """As the method declares its need; empty where it can do without and none is given."""
    align: Callable[[], AlignedTensors | None] | None = None
    """Aligns the models, at the first call only; None: take them as they are."""
    device: str = "cpu"
    progress: Progress | None = None
    owners: Sequence[Sequence[int]] = ()
    """For each data set, the places of the models that name it; empty: all of them."""
    base: Checkpoint | None = None
    """What the recipe names as base, for methods that have a use for it: mostly the model that the others came from."""
    kept: KeptWork | None = None
    """Where to keep finished parts for a run that is made again; None: nowhere."""
    experts: Sequence[ExpertRequest] = ()
    """Those that a recipe of a mixture names."""
    shared_expert: ExpertRequest | None = None
    """The one that every token is to be sent to."""
    seed: int = 0

    def aligned(self) -> AlignedTensors | None:
        """The models next to the first, where that is asked for and there are several."""
        return self.align() if self.align is not None else None

    def shares(self, weights: Sequence[float]) -> list[float]:
        """Weights that sum to 1."""
        return [float(weight) / sum(map(float, weights)) for weight in weights]

    def report(self, done: int, total: int, stage: str) -> None:
        if self.progress is not None:
            self.progress(done, total, stage)


@dataclass(frozen=True)
class MergedWeights:
    """What it gives back: a model, to be rounded once when it is written."""

    tensors: Mapping[str, Tensor | TensorSource]
    """By name on disk, in the precision they were solved in; or what makes them when they are written."""
    plan: Mapping[str, TensorInfo]
    """Shapes and dtypes as they are written."""
    config_changes: dict[str, Any] = field(default_factory=dict)
    alignment: dict[str, Any] | None = None
    notes: Sequence[str] = ()
    record: dict[str, Any] = field(default_factory=dict)
    """What else the report of the merge should say."""
    parents: Sequence[int] | None = None
    """Places of the models that are in the result; None: all of them."""
    vocabulary: Vocabulary | None = None
    """Of a result with another tokenizer than its donor of config and side files."""
