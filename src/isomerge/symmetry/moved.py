"""A model moved by a transform, tensor by tensor; its function does not change."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.checkpoint import CastReport, TensorInfo, cast, require_finite
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical
from isomerge.symmetry.transform import Transform, random_transform
from isomerge.threads import ahead, thread_count


@dataclass(frozen=True)
class MovedModel:
    """A model, its canonical form, the transform that moves it, and the gauge to write it in (None: canonical)."""

    model: BoundModel
    transform: Transform
    canonical: Canonical
    gauge: Canonical | None
    threads: int | None = None

    def tensor(self, name: str) -> Tensor:
        """The moved tensor in float64, by its name in the specification."""
        return self._moved(name) if self.gauge is None else self.gauge.in_gauge(name, self._moved)

    def _moved(self, name: str) -> Tensor:
        return self.transform.act(self.canonical.tensor(name), self.model.layouts[name])

    def stays(self, name: str) -> bool:
        """No space moves this tensor and no gauge touches it: its bytes are copied."""
        if name not in self.model.files or self.transform.elements.keys() & self.model.layouts[name].spaces():
            return False
        if name.endswith("bias") or self.canonical.folds:  # a bias may take up what another tensor's gauge gives away
            return not self.canonical.moving
        return True

    def plan(self, dtype: torch.dtype | None) -> dict[str, TensorInfo]:
        """Names, shapes and dtypes to be written, in the order they are made."""
        stored = self.model.checkpoint.tensors
        plan = {}
        for name in sorted(self.model.layouts):
            source = name if name in self.model.files else self.model.architecture.tied[name][0]
            for file in self.model.files.get(name, (name,)):
                info = stored[file if file in stored else self.model.files[source][0]]
                plan[file] = TensorInfo(info.shape, dtype or info.dtype)
        return plan | {name: stored[name] for name in self.model.extra}

    def changed(self) -> Iterator[tuple[str, Tensor]]:
        """Only the tensors that change, on the device they were worked on, in their stored dtypes."""
        plan = self.plan(None)
        names = [name for name in sorted(self.model.layouts) if not self.stays(name)]

        def made(name: str) -> list[tuple[str, Tensor]]:
            parts = self.model.split(name, self.tensor(name))
            return [(file, part.to(plan[file].dtype)) for file, part in parts.items()]

        # An accelerator works by itself: whoever tells it what to do next takes turns on Python's lock.
        workers = self.threads if self.model.device == "cpu" else min(2, thread_count(self.threads))
        for parts in ahead(made, names, workers):
            yield from parts

    def state_dict(self, dtype: torch.dtype | None = None) -> dict[str, Tensor]:
        """Every tensor under its name on disk, in its stored dtype or in `dtype`."""
        return dict(self.produce(self.plan(dtype), lambda *_: None))

    def produce(
        self, plan: Mapping[str, TensorInfo], report: Callable[[str, CastReport], None]
    ) -> Iterator[tuple[str, Tensor]]:
        """Every tensor of the moved model, in the plan's order and dtypes; what a cast loses goes to `report`."""
        for made in ahead(lambda name: self.made(name, plan), sorted(self.model.layouts), self.threads):
            for file, (tensor, lost) in made.items():
                report(file, lost)
                yield file, tensor.cpu()
        for name in self.model.extra:
            yield name, self.model.checkpoint.read(name)

    def made(self, name: str, plan: Mapping[str, TensorInfo]) -> dict[str, tuple[Tensor, CastReport]]:
        """A tensor's parts on disk, rounded to the written dtype, and what that lost."""
        if self.stays(name):
            parts = {file: self._copied(file) for file in self.model.files[name]}
        else:
            parts = self.model.split(name, self.tensor(name))
        return {file: cast(part, plan[file].dtype) for file, part in parts.items()}

    def _copied(self, file: str) -> Tensor:
        tensor = self.model.checkpoint.read(file)
        require_finite(file, tensor, self.model.checkpoint)
        return tensor


def scrambled(model: BoundModel, seed: int = 0, *, gauges: bool = True) -> MovedModel:
    """The model moved by a random element of every space that can move, written in its own gauge. Streams stay where a
    norm's bias would have to be divided by a gain of zero."""
    movable = model.architecture.movable()
    if Canonical(model, movable, gauges=gauges).undividable():
        movable = [space for space in movable if space not in set(model.architecture.streams)]
    transform = random_transform(model.architecture.spaces, seed, only=movable)
    canonical = Canonical(model, transform.elements, gauges=gauges)
    gauge = None if canonical.fragile_gains() else canonical
    return MovedModel(model, transform, canonical, gauge)
