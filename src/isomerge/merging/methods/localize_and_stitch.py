"""Localize and stitch: of each model only the few weights that its skill needs."""

from __future__ import annotations

from torch import Tensor

from isomerge.merging.methods.method import PerModel, each, method
from isomerge.merging.methods.pruning import largest
from isomerge.merging.methods.task_vectors import onto_base
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(base="required", reference="https://arxiv.org/abs/2408.13656")
def localize_and_stitch(group: TensorGroup, *, density: PerModel[float] = each(0.05), lambda_: float = 1.0) -> Combine:
    """Keep the few largest changes of each model, and average them only where several models keep theirs.

    base + λ Σ M_k τ_k / Σ M_k, M_k being 1 at the largest changes of model k and 0 elsewhere.

    Options:
        density: which share of each task vector is kept, the largest first
        lambda: how much of the stitched changes is added to the base
    """
    localized = largest(group, density)

    def combine(block: RowBlock) -> Tensor:
        vectors = localized.vectors(block)
        keepers = vectors.sign().abs_().sum(dim=0).clamp_min_(1)
        return onto_base(block, vectors.sum(dim=0).div_(keepers).mul_(lambda_))

    return combine
