"""Whether a merged model is one of its parents: then nothing was merged, however good its number is."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isomerge.merging.outcome.merged import Merged
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Stored

NEAR = 1e-4
"""Of the distance between the parents; and of a tensor's size, where halves of numbers were rounded."""
ROUNDED = 1e-6


class ParentSearch:
    """Leaves those parents, next to the anchor where models are aligned, that every tensor is equal to. Most points
    are done after a tensor or two."""

    def __init__(self, merged: Merged) -> None:
        self._merged = merged
        plans = merged.tensor_plans.tensors.values()
        self._left = dict.fromkeys(str(given.model) for plan in plans for given in plan.every)
        self._told_apart = False

    def look(self, job: Job, tensor: Tensor) -> None:
        if not self._left or not tensor.is_floating_point() or not tensor.numel():
            return
        try:
            parents = {model: _rows(source, tensor) for model, source in self._sources(job).items()}
        finally:
            job.release()
        for model in list(self._left):
            own = parents.get(model)
            if own is None:
                continue
            apart = max((float((own - other).norm()) for other in parents.values()), default=0.0)
            self._told_apart = self._told_apart or apart > 0
            rounded = (ROUNDED if tensor.dtype.itemsize >= 4 else NEAR) * float(own.norm())
            merged = tensor.double() if tensor.shape == own.shape else tensor[: len(own)].double()
            if not float((merged - own).norm()) <= max(NEAR * apart, rounded):  # NaN is near to nothing
                del self._left[model]

    @property
    def found(self) -> str | None:
        """The first that is left; None also where the parents are all the same."""
        return next(iter(self._left), None) if self._told_apart or len(self._merged.models) == 1 else None

    def _sources(self, job: Job) -> Mapping[str, TensorSource]:
        """What was merged; of methods that run whole models, what is stored."""
        plan = self._merged.tensor_plans.tensors.get(job.name)
        if plan is None:
            return {}
        sources: Sequence[TensorSource] = [*job.sources, *([job.base] if job.base is not None else [])]
        if len(sources) == len(plan.every) and job.method is not None:
            return {str(given.model): source for given, source in zip(plan.every, sources, strict=True)}
        stored = {str(given.model): (self._merged.inputs.get(str(given.model)), given.tensor) for given in plan.every}
        return {
            model: Stored(checkpoint, name)
            for model, (checkpoint, name) in stored.items()
            if checkpoint is not None and checkpoint.tensors[name].shape == job.info.shape
        }


def _rows(source: TensorSource, like: Tensor) -> Tensor:
    """In float64, rounded as the merged tensor is."""
    shape = source.info.shape
    rows = source.rows(0, shape[0] if shape else 1).to(like.device, like.dtype)
    return torch.empty(shape, dtype=torch.float64, device=like.device).copy_(rows.reshape(shape))
