"""Take over what is nearly the same."""

from __future__ import annotations

from torch import Tensor

from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", least=1, most=1, reference="https://huggingface.co/alchemonaut/QuartetAnemoi-70B-t0.0001")
def nearswap(group: TensorGroup, *, t: float) -> Combine:
    """Move each weight of the base towards the other model by t, or all the way where the two are nearer than that.

    Options:
        t: the distance up to which the other model's weight replaces the base's
    """

    def combine(block: RowBlock) -> Tensor:
        (vector,) = task_vectors(block)
        share = t / vector.abs().clamp_min_(1e-6)
        return onto_base(block, vector.mul_(share.clamp_(0, 1)))

    return combine
