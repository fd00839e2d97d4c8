"""How the models of a merge relate, seen while their tensors are at hand: reading or moving them again would cost."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from isomerge.checkpoint import Checkpoint
from isomerge.kinship import Relation, Rows, relation
from isomerge.merging.plan.tensor_plan import TensorInput, TensorPlan
from isomerge.merging.run.jobs import Job
from isomerge.merging.run.rows import TensorSource
from isomerge.reporting.measured import measured, touched_files

if TYPE_CHECKING:
    from isomerge.merging.outcome.merged import Merged


class InputRelations:
    """Collects one `Relation` per tensor from the jobs of a merge."""

    def __init__(self, merged: Merged) -> None:
        self._inputs: Mapping[str, Checkpoint] = merged.inputs
        self._plans: Mapping[str, TensorPlan] = merged.tensor_plans.tensors
        self._anchor = merged.alignment["anchor"] if merged.alignment else None
        every = dict.fromkeys(given.model for plan in self._plans.values() for given in plan.every)
        self._models = [str(model) for model in every]
        anchors = [name for name, checkpoint in self._inputs.items() if checkpoint.name == self._anchor]
        bases = dict.fromkeys(plan.base.model for plan in self._plans.values() if plan.base)
        self._reference = next(iter([*anchors, *map(str, bases), *self._models]))
        """What distances are measured from: the anchor, else the base, else the first model."""
        self._donor = merged.donor
        self._found: dict[str, Relation] = {}
        self._seen: set[str] = set()

    def record(self, jobs: Sequence[Job]) -> dict[str, Any] | None:
        """The numbers of a report; None where there was nothing to compare. Jobs that an interrupted run had finished
        are looked at now."""
        for job in jobs:
            if job.name not in self._seen:
                self.take(job.name, self.look(job))
                job.release()
        if not self._found:
            return None
        base = next((base for plan in self._plans.values() if (base := _base_of(plan))), None)
        spaces = touched_files(self._donor)
        return measured(self._found, models=self._models, reference=self._reference, base=base, spaces=spaces)

    def take(self, name: str, found: Relation | None) -> None:
        """What a look at this tensor's job has found."""
        self._seen.add(name)
        if found is not None:
            self._found[name] = found

    def look(self, job: Job) -> Relation | None:
        """How the models relate in this tensor; None where there is nothing to compare."""
        plan = self._plans.get(job.name)
        if plan is None or not job.info.dtype.is_floating_point:
            return None
        named = {str(given.model): given for given in plan.every}
        if len(named) < 2:
            return None
        merged = self._as_merged(job, plan)
        stored = self._as_stored(named, job.merged_shape) if self._anchor is not None or merged is None else None
        if self._anchor is None:  # nothing moved: how the models are stored is how they are merged
            merged, stored = merged or stored, None
        if merged is None and stored is None:
            return None
        reference = self._reference if self._reference in named else None
        return relation(job.name, job.merged_shape, stored, merged, reference=reference, base=_base_of(plan))

    def _as_merged(self, job: Job, plan: TensorPlan) -> dict[str, Rows] | None:
        """The rows that the method was given; None for a method that is given whole models."""
        sources: list[TensorSource] = [*job.sources, *([job.base] if job.base is not None else [])]
        every = plan.every
        if job.method is None or len(sources) != len(every):
            return None
        return {str(given.model): source.rows for given, source in zip(every, sources, strict=True)}

    def _as_stored(self, named: Mapping[str, TensorInput], shape: tuple[int, ...]) -> dict[str, Rows] | None:
        """The rows of the files; None where one of the models is made by this recipe, or has another shape."""
        rows: dict[str, Rows] = {}
        for name, given in named.items():
            checkpoint = self._inputs.get(name)
            if checkpoint is None or given.tensor not in checkpoint.tensors:
                return None
            if checkpoint.tensors[given.tensor].shape != shape:
                return None
            rows[name] = _reader(checkpoint, given.tensor)
        return rows


def _base_of(plan: TensorPlan) -> str | None:
    """Whose subtraction makes task vectors. Where one model goes towards another, as in slerp, the two are compared."""
    base = str(plan.base.model) if plan.base else None
    return base if len({str(given.model) for given in plan.inputs} - {base}) > 1 else None


def _reader(checkpoint: Checkpoint, tensor: str) -> Rows:
    return lambda start, stop: checkpoint.read_rows(tensor, start, stop)
