"""A base and one other model: take over what is near, or what matters."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import kth_smallest
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


@method(base="required", least=1, most=1, reference="https://arcee.ai")
def arcee_fusion(group: TensorGroup) -> Combine:
    """Add to the base those changes whose importance is an outlier: at least the median + 1.5 times the middle half.

    The importance of a change is |W − base| · KL(softmax(row of W) ‖ softmax(row of base)).
    """
    quarters = [int(share * (group.elements - 1)) for share in (0.25, 0.5, 0.75)] if group.elements else []
    (quartiles,) = kth_smallest(group, lambda block: _importance(block).unsqueeze(0), [quarters])
    threshold = quartiles[1] + 1.5 * (quartiles[2] - quartiles[0]) if quartiles else 0.0

    def combine(block: RowBlock) -> Tensor:
        (vector,) = task_vectors(block)
        return onto_base(block, vector.mul_((_importance(block) >= threshold).to(vector.dtype)))

    return combine


def _importance(block: RowBlock) -> Tensor:
    assert block.base is not None, "the method is entered with base='required'"
    model, small = block.tensors[0], 1e-8
    p, q = (tensor.softmax(dim=-1).add_(small) for tensor in (model, block.base))
    divergence = torch.sum(p * torch.log(p / q), dim=-1, keepdim=model.dim() > 0)
    return (model - block.base).abs_() * divergence
