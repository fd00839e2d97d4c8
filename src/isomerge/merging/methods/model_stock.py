"""Model stock: how far to go from the base, read off the angle between the models."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.merging.methods.block_sums import gram, mixture
from isomerge.merging.methods.method import method
from isomerge.merging.methods.task_vectors import onto_base, task_vectors
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup

FLOOR = 1e-6


@method(base="required", least=2, reference="https://arxiv.org/abs/2403.19522")
def model_stock(group: TensorGroup, *, filter_wise: bool = False, paper: bool = False) -> Combine:
    """Go from the base towards the mean of the N models by t = N cos θ / (1 + (N − 1) cos θ), θ between their changes.

    Options:
        filter_wise: an angle for each row instead of one for the tensor
        paper: changes of any size have an angle; otherwise it fades where the norms multiply to less than 1e-6
    """
    floor = 0.0 if paper else FLOOR
    if filter_wise and len(group.shape) > 1:

        def by_row(block: RowBlock) -> Tensor:
            vectors = task_vectors(block)
            wide = vectors.double()
            products = torch.einsum("i...e,j...e->...ij", wide, wide)
            return _moved(block, vectors, _share(products, floor).unsqueeze(-1))

        return by_row
    share = float(_share(torch.tensor(gram(group, deltas=True), dtype=torch.float64), floor))
    return mixture([share / group.models] * group.models, base=1 - share)


def _moved(block: RowBlock, vectors: Tensor, share: Tensor) -> Tensor:
    mean = vectors[0]
    for vector in vectors[1:]:
        mean.add_(vector)
    return onto_base(block, mean.mul_((share / len(vectors)).to(mean.dtype)))


def _share(products: Tensor, floor: float) -> Tensor:
    """t from the inner products (…, models, models). Where it has a pole, opposed changes would be blown up: 0."""
    count = products.shape[-1]
    norms = products.diagonal(dim1=-2, dim2=-1).clamp_min(0).sqrt()
    lengths = norms.unsqueeze(-1) * norms.unsqueeze(-2)
    cosines = torch.where(lengths > 0, products / lengths.clamp_min(floor), 0).clamp(-1, 1)
    first, second = torch.triu_indices(count, count, offset=1)
    cosine = cosines[..., first, second].mean(dim=-1)
    below = 1 + (count - 1) * cosine
    pole = below.abs() < 1e-6
    return torch.where(pole, 0, count * cosine / torch.where(pole, 1, below))
