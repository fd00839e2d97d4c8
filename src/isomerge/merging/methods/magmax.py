"""The largest change wins."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2407.06322")
def magmax(group: TensorGroup, *, lambda_: float = 1.0) -> Combine:
    """Of each weight take the change of largest magnitude: base + λ τ_k, k = argmax |τ_k|; opposite equals cancel.

    Options:
        lambda: how much of the merged task vector is added to the base
    """

    def combine(block: RowBlock) -> Tensor:
        vectors = task_vectors(block)
        up, down = vectors[0].clone(), vectors[0]
        for vector in vectors[1:]:
            torch.maximum(up, vector, out=up)
            torch.minimum(down, vector, out=down)
        # The sign of up + down says whose magnitude is larger.
        sign = (up + down).sign_()
        merged = up.mul_(sign.clamp_min(0)).sub_(down.mul_(sign.clamp_max(0)))
        return onto_base(block, merged.mul_(lambda_))

    return combine
