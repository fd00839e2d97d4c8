"""What a fine-tune changed, in the basis of another base.

    τ' = g(base + τ) − g(base),   g: base → new base,

both written in the gauge of the new base. g is solved between the two bases, of which neither has the new skill, and
then moves the fine-tune too. A base that was only trained further is a sibling: g is the identity, and τ' = τ.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial

import torch
from torch import Tensor

from isomerge.alignment.api import align
from isomerge.alignment.compatibility import require_same_spaces
from isomerge.alignment.family import AlignedFamily
from isomerge.alignment.result import Alignment
from isomerge.architectures import describe
from isomerge.checkpoint import Checkpoint, TensorInfo
from isomerge.checkpoint.base import name_some
from isomerge.checkpoint.memory import MemoryCheckpoint
from isomerge.errors import RequestError
from isomerge.kinship import are_related
from isomerge.merging.aligned_tensors import AlignedTensors
from isomerge.merging.layerwise.parents import least_cosine
from isomerge.merging.merge_inputs import MergedWeights, MergeInputs
from isomerge.merging.run.rows import TensorSource
from isomerge.merging.run.sources import Computed
from isomerge.merging.vocabulary.files import other_ids

Mask = Callable[[str, Tensor], Tensor]
"""May change τ' of a tensor, which it gets with its name, before it is added."""


@dataclass(frozen=True)
class MovedChange:
    """The fine-tune and its base, next to the new base; tensors are computed when they are asked for."""

    tuned: Checkpoint
    base: Checkpoint
    onto: Checkpoint
    aligned: AlignedTensors

    @property
    def siblings(self) -> bool:
        """Nothing moves: the new base lies where the old one is."""
        return not any(member.transform.elements for member in self.aligned.family.members)

    def of(self, file: str) -> Tensor:
        """τ' of one tensor, by its name in the new base, in float64."""
        tuned, base = (_whole(self.aligned.source(one, file)) for one in (self.tuned, self.base))
        return tuned.double() - base.double()

    def added(self, scale: float, mask: Mask | None = None) -> dict[str, TensorSource]:
        """new base + scale · τ', tensor by tensor."""
        return {file: self._added(file, info, scale, mask) for file, info in self.aligned.plan.items()}

    def _added(self, file: str, info: TensorInfo, scale: float, mask: Mask | None) -> TensorSource:
        if not info.dtype.is_floating_point:  # copied
            return self.aligned.source(self.onto, file)
        return Computed(info, f"tensor '{file}' and what is added to it", partial(self._sum, file, scale, mask))

    def _sum(self, file: str, scale: float, mask: Mask | None) -> Tensor:
        change = self.of(file)
        own = _whole(self.aligned.source(self.onto, file)).double()
        return own + scale * (change if mask is None else mask(file, change))


def unmoved(change: MovedChange, scale: float) -> Checkpoint:
    """new base + scale · τ, as other tools would do it."""
    state = {}
    for name in change.onto.tensors:
        own = change.onto.read(name)
        if own.is_floating_point():
            added = change.tuned.read(name).double() - change.base.read(name).double()
            own = (own.double() + scale * added).to(torch.float64 if own.dtype == torch.float64 else torch.float32)
        state[name] = own
    return MemoryCheckpoint(f"{change.onto.name} and the change", state, dict(change.onto.config), beside=change.onto)


def in_memory(onto: Checkpoint, found: MergedWeights) -> Checkpoint:
    """What was found as a model to be run: in float32, or float64 where the new base is."""
    wide = any(info.dtype == torch.float64 for info in onto.tensors.values())
    state = {}
    for file, given in found.tensors.items():
        tensor = given if isinstance(given, Tensor) else _whole(given)
        state[file] = tensor.to(torch.float64 if wide else torch.float32) if tensor.is_floating_point() else tensor
    return MemoryCheckpoint(f"{onto.name} with the change", state, {**onto.config, **found.config_changes}, beside=onto)


def _whole(source: TensorSource) -> Tensor:
    tensor = source.rows(0, source.info.shape[0] if source.info.shape else 1)
    if hasattr(source, "release"):
        source.release()
    return tensor.cpu()


def moved_change(inputs: MergeInputs, level: str) -> MovedChange:
    """Align the base to the new base by their weights, and let the fine-tune move with it. `inputs.models`: the
    fine-tune and its base."""
    tuned, base = inputs.models
    onto = inputs.base
    assert onto is not None
    kept = inputs.kept.within("bases") if inputs.kept is not None else None
    found = align(base, onto, level=level, device=inputs.device, resume=kept, progress=inputs.progress)
    family = AlignedFamily([_same_move(found, tuned), found], onto, "anchor", found.seconds)
    return MovedChange(tuned, base, onto, AlignedTensors(family, onto))


def _same_move(alignment: Alignment, tuned: Checkpoint) -> Alignment:
    """The fine-tune moved by what moves its base."""
    bound = describe(tuned, untie=alignment.untied)
    require_same_spaces(bound, alignment.source)
    spaces = alignment.source.architecture.spaces
    bound = replace(bound, architecture=replace(bound.architecture, spaces=spaces))
    return replace(alignment, source=bound, _distances={}, _lost={})


def when_unmeasured(change: MovedChange) -> list[str]:
    """What can be said of a change that was carried without data."""
    if change.siblings:
        why = "the new base is a sibling of the old one, so the change is added as it is, which mostly works"
    elif are_related(least_cosine([change.base, change.onto])):
        why = "the bases are related, and the change is moved by their alignment"
    else:
        why = (
            "the bases were trained apart, and without data often less than half of the skill arrives, or nothing; "
            "`data` of the task, which needs no labels, brings more"
        )
    return [f"nothing was measured, as there is no data: {why}"]


def require_fitting(tuned: Checkpoint, base: Checkpoint, onto: Checkpoint) -> bool:
    """Raise where the three models do not fit together; whether the new base is of another width or depth."""
    kinds = [str(model.config.get("model_type")) for model in (base, tuned, onto)]
    shapes = [{name: info.shape for name, info in model.tensors.items()} for model in (base, tuned, onto)]
    act = "Carrying a fine-tune to another base"
    for key, place, other in (("base", 1, tuned), ("onto", 2, onto)):
        if kinds[place] != kinds[0]:
            raise RequestError(
                f"{act}: {other.name} is of type '{kinds[place]}' and {base.name} of type '{kinds[0]}'. Name models of "
                "one architecture.",
                keys=(key,),
            )
    if odd := _differing(shapes[0], shapes[1]):
        raise RequestError(
            f"{act}: {tuned.name} and {base.name} differ in the names or shapes of {name_some(odd)}. Name the base "
            "that the fine-tune was made from, with the same head and vocabulary.",
            keys=("base",),
        )
    if moved := other_ids([base, onto]):
        raise RequestError(
            f"{act}: {'; '.join(moved)}, so what was learned of a token would go to another one. Name a new base with "
            "the same tokenizer.",
            keys=("onto",),
        )
    return bool(_differing(shapes[0], shapes[2]))


def _differing(one: Mapping[str, tuple[int, ...]], other: Mapping[str, tuple[int, ...]]) -> list[str]:
    return [name for name in sorted(one.keys() | other.keys()) if one.get(name) != other.get(name)]
