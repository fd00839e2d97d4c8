"""Routers of fewer experts: a row for every group, from the rows of its members or fitted to data."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from isomerge.merging.layerwise.ridge import solve_positive

RIDGE = 1e-3
"""Relative to the mean square of what the router reads."""


def mean_rows(router: Tensor, groups: Sequence[Sequence[int]], use: Sequence[float]) -> Tensor:
    """(groups, width): the mean of the members' rows, each by how much its expert is used."""
    rows = []
    for members in groups:
        weights = torch.tensor([use[k] for k in members], dtype=router.dtype)
        weights = weights / weights.sum() if weights.sum() > 0 else torch.full_like(weights, 1 / len(members))
        rows.append(weights @ router[list(members)])
    return torch.stack(rows)


def fitted_rows(router: Tensor, groups: Sequence[Sequence[int]], inputs: Tensor) -> Tensor:
    """(groups, width): argmin over R of Σ_x ‖R x − t(x)‖² + λ‖R − R₀‖², where t_g(x) = log Σ_{e in g} exp(r_e · x), the
    group's probability under the old router, less the mean of all groups, which softmax does not see. R₀ has the means
    of the members' rows, so that directions the data does not show stay as they were."""
    scores = inputs @ router.T
    target = torch.stack([scores[:, list(members)].logsumexp(1) for members in groups], 1)
    target = target - target.mean(1, keepdim=True)
    start = mean_rows(router, groups, [1.0] * len(router))
    start = start - start.mean(0)
    gram = inputs.T @ inputs
    penalty = RIDGE * gram.diagonal().mean().clamp_min(1e-300)
    matrix = gram + penalty * torch.eye(len(gram), dtype=gram.dtype)
    return start + solve_positive(matrix, inputs.T @ (target - inputs @ start.T)).T
