"""Whether models can be merged by features, and into the first one's shape: asked before anything runs."""

from __future__ import annotations

from collections.abc import Collection, Sequence

from isomerge.architectures import describe
from isomerge.architectures.sizes import STREAM_IN_NUMBERS
from isomerge.checkpoint import Checkpoint
from isomerge.data.task_heads import heads_apart
from isomerge.errors import RequestError
from isomerge.merging.layerwise.joint import all_joint
from isomerge.merging.layerwise.parent_views import VOCABULARY
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.canonical import Canonical

FREE = {"_labels": "labels", VOCABULARY: "tokens", "_positions": "positions"}


def require_one_task(models: Sequence[Checkpoint]) -> None:
    """Raise where the outputs of the models mean different things."""
    first, *others = models
    for other in others:
        apart = heads_apart(first.config, other.config)
        if apart is not None:
            raise RequestError(
                f"reconstruct: the task heads of {first.name} and {other.name} differ: {apart}. Give models of one "
                "task; if the names mean the same, make them the same in config.json (id2label).",
                keys=("models",),
            )


def require_mergeable(models: Sequence[Checkpoint], matched: Collection[int] = ()) -> None:
    """Raise, with the reason, where joint features cannot bring the models to the shape of the first. `matched`: the
    places of models whose tokens are known in terms of the first one's."""
    first, *others = [describe(model, untie=True) for model in models]
    for bound in (first, *others):
        if not all_joint(bound):
            raise _refused(
                f"in a '{bound.architecture.family}' model not everything can be joint, as norms, tables or heads are "
                "shared", "Give models of one shape"
            )  # fmt: skip
        small = Canonical(bound, [RESIDUAL]).undividable()
        if small:
            raise _refused(f"the gain of {small[0]} of {bound.name} is too small to divide by", "Give another model")
    for place, other in enumerate(others, start=1):
        _require_alike(first, other, {VOCABULARY} if place in matched else set())


def _require_alike(first: BoundModel, other: BoundModel, matched: set[str]) -> None:
    for name, layout in first.layouts.items():
        own = other.layouts.get(name)
        for k, axis in enumerate(layout.axes if own is not None else ()):
            lengths = [one.shape[k] for one in (layout, own) if one is not None]
            free = axis[0].atoms[0].space if axis[0].atoms[0].free else ""
            if free and free not in matched and lengths[0] != lengths[1]:
                what = FREE.get(free, free.strip("_"))
                raise _refused(
                    f"'{name}' has {lengths[0]} {what} in {first.name} and {lengths[1]} in {other.name}",
                    "The task heads have to be of one kind"
                    if what == "labels"
                    else f"Give models with the same {what}",
                )
    groups = [bound.architecture.spaces for bound in (first, other)]
    for space in groups[0].keys() & groups[1].keys():
        sizes = [group[space].size for group in groups]
        if groups[0][space].per and not groups[0][space].reorders and sizes[0] != sizes[1]:
            raise _refused(
                f"heads are of size {sizes[0]} in {first.name} and {sizes[1]} in {other.name}",
                "Only models with heads of one size have attention that means the same",
            )
    widths = {spaces[RESIDUAL].size for spaces in groups}
    if len(widths) > 1 and first.architecture.family in STREAM_IN_NUMBERS:
        raise _refused(
            f"a '{first.architecture.family}' model multiplies by a power of the width of its stream, which differs",
            "Give models of one width",
        )


def _refused(why: str, remedy: str) -> RequestError:
    return RequestError(
        f"reconstruct: models of different shapes cannot be merged here: {why}. {remedy}.", keys=("models",)
    )
