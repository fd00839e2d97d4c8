"""The models that Table 1 merges, with what was measured of each on its own training set.

Measuring takes as long as merging, and several merges use it, so it is kept beside the model. What a matching moves is
measured again: Gram matrices move with the model, Fisher information does not.
"""

from __future__ import annotations

import json
import math
import re
import tempfile
from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from corpora import CORPORA
from encoding import Inputs
from language import Job, Plan, State, fine_tune, new_model, state_of
from torch import Tensor

if TYPE_CHECKING:
    from isomerge import Alignment
    from isomerge.calibration import Statistics
    from isomerge.checkpoint.memory import MemoryCheckpoint


@lru_cache(maxsize=1)
def inputs_for(base: str, data: Path | None, plan: Plan) -> Inputs:
    return Inputs(base, data, plan.examples, plan.tested, plan.length)


# --- kept beside a model ----------------------------------------------------------------------------------------------
def made(wanted: tuple[Job, bool]) -> None:
    """A model, and what is measured of it if that is wanted, where they are not there yet."""
    job, is_measured = wanted
    if not job.done:
        forget([job])  # it was of a model that is there no more
    fine_tune(job)
    if is_measured and not measured_file(job).is_file():
        config = json.loads((job.folder / "config.json").read_text())
        parent = Parent(job, state_of(job.folder), config)
        gram, fisher = parent.gram(), parent.fisher()
        _joined(_tensors(gram) | _tensors(fisher), gram, fisher).save(measured_file(job))


def measured_file(job: Job) -> Path:
    return job.folder / f"measured-{job.plan.grams}-{job.plan.informed}.safetensors"


def forget(jobs: Iterable[Job]) -> None:
    """What was measured takes twice the room of the models."""
    for job in jobs:
        measured_file(job).unlink(missing_ok=True)


def start_of(job: Job) -> MemoryCheckpoint:
    """What all models of a seed were fine-tuned from, with the head that they began with."""
    return _start_of(job.base, CORPORA[job.corpus].task, job.seed, job.plan.layers)


@lru_cache(maxsize=1)
def _start_of(base: str, task: str, seed: int, layers: int | None) -> MemoryCheckpoint:
    from isomerge.checkpoint.memory import MemoryCheckpoint, quiet_transformers

    with tempfile.TemporaryDirectory() as folder, quiet_transformers():  # saved, so that names are those of the files
        new_model(base, task, seed, layers).save_pretrained(folder)
        return MemoryCheckpoint("base", state_of(Path(folder)), json.loads((Path(folder) / "config.json").read_text()))


# --- as they are merged -----------------------------------------------------------------------------------------------
@dataclass(frozen=True)
class Parent:
    """A model as it goes into a merge."""

    job: Job
    state: State
    config: dict[str, Any]
    seen: Statistics | None = None
    """Gram matrices and Fisher information; None before they are measured."""

    @property
    def corpus(self) -> str:
        return self.job.corpus

    @property
    def checkpoint(self) -> MemoryCheckpoint:
        from isomerge.checkpoint.memory import MemoryCheckpoint

        return MemoryCheckpoint(self.corpus, self.state, self.config)

    @property
    def information(self) -> float:
        """The sum over all weights."""
        assert self.seen is not None
        return sum(float(value.double().sum()) for value in self.seen.fisher.values())

    def gram(self) -> Statistics:
        return self._calibrated(self.job.plan.grams, what={"gram"})

    def fisher(self, only: str | None = None) -> Statistics:
        return self._calibrated(self.job.plan.informed, what={"fisher"}, fisher="empirical", only=only)

    def _calibrated(self, count: int, **options: Any) -> Statistics:
        from isomerge.calibration import calibrate

        job = self.job
        batches = inputs_for(job.base, job.data, job.plan).passes(job.corpus, count)
        return calibrate(self.checkpoint, batches, device=job.device, **options)


def parent_of(job: Job, *, measured: bool = True) -> Parent:
    from isomerge.calibration import Statistics, open_statistics

    plain = Parent(job, state_of(job.folder), json.loads((job.folder / "config.json").read_text()))
    if not measured:
        return plain
    from safetensors.torch import load_file

    file = measured_file(job)  # mapped into memory: processes that read it share it
    return replace(plain, seen=Statistics.of(load_file(file), open_statistics(file).info))


def moved(parent: Parent, anchor: Parent, matching: dict[str, Any]) -> tuple[Parent, tuple[float, float]]:
    """A model next to another one, and their relative distance before and after.

    Where nothing needs to move, the model itself.
    """
    import isomerge
    from isomerge.calibration import Statistics
    from isomerge.merging.moved_grams import moved_grams

    assert parent.seen is not None
    alignment: Alignment = isomerge.align(parent.checkpoint, anchor.checkpoint, device=parent.job.device, **matching)
    before, after, size = (sum(each[k] for each in alignment.distances().values()) for k in range(3))
    distance = (math.sqrt(before / size), math.sqrt(after / size))
    if alignment.siblings:
        return parent, distance
    move = alignment.moved()
    changed = {name: tensor.cpu() for name, tensor in move.changed()}
    there = replace(parent, state={**parent.state, **changed}, seen=None)
    # Of other tensors nothing changes, and it is the same function: so do neither their inputs nor their gradients.
    stored, info = parent.seen.stored, parent.seen.info
    readers = {name: entry for name, entry in info["maps"].items() if name in changed}
    gram = moved_grams(move, Statistics(stored, {**info, "maps": readers}))
    fisher = there.fisher("^(?:" + "|".join(re.escape(name) for name in changed) + ")$")
    kept = {name: stored.peek(name) for name in stored.tensors}
    return replace(there, seen=_joined(kept | _tensors(gram) | _tensors(fisher), parent.seen, gram)), distance


def _tensors(measured: Statistics) -> dict[str, Tensor]:
    """In float32: sums over examples are made in float64, but what they weigh needs no more digits."""
    return {name: measured.stored.peek(name).float() for name in measured.stored.tensors}


def _joined(tensors: dict[str, Tensor], *infos: Statistics) -> Statistics:
    """Described by all of these; of a map that two know, the last says it."""
    from isomerge.calibration import Statistics

    info: dict[str, Any] = {}
    maps: dict[str, Any] = {}
    for each in infos:
        info |= each.info
        maps |= each.info.get("maps", {})
    return Statistics.of(tensors, {**info, "maps": maps, "what": ["fisher", "gram"]})  # examples: the last one's
