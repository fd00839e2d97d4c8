"""Ridge regressions whose memory does not depend on how much data they see: sums in float64, then one solve."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from isomerge.running.gram import GramSums

UNBELIEVED = 1e-3  # rows on which a parent is believed less are left out of its regressions
RIDGE = 1e-2
RIDGES = (1e-3, 1e-2, 1e-1, 1.0)
"""What a ridge is chosen from."""
ASIDE = 8
"""One row of so many chooses the ridge: the last of every batch, as rows come example by example."""


@dataclass(frozen=True)
class RegressionResult:
    """The change of the weights, and what is left to explain before and after it, relative to the target's size."""

    change: Tensor
    before: float
    after: float
    ridge: float


class RidgeRegression:
    """min over D of ‖X D − R‖² + ‖Λ^½ D‖², with Λ = diag(ridge·G_jj + floor·mean diag G) and G = XᵀX.

    R is what the weights in place leave unexplained, so D is the change of the weights: pulling it to zero is pulling
    the weights to those in place, and R = 0 leaves them bit for bit.
    """

    def __init__(self) -> None:
        self.inputs = GramSums()
        self.cross = torch.zeros(())
        self.residual = self.target = 0.0  # ‖R‖² and ‖T‖²

    def add(self, inputs: Tensor, residual: Tensor, target: Tensor) -> None:
        """Rows of X (n, in), R and T (n, out)."""
        x, r = inputs.double(), residual.double()
        if self.inputs.count == 0:
            self.cross = x.new_zeros(x.shape[1], r.shape[1])
        self.inputs.add(x)
        self.cross.addmm_(x.T, r)
        self.residual += square_norm(residual)
        self.target += square_norm(target)

    @property
    def rows(self) -> int:
        return self.inputs.count

    @property
    def gram(self) -> Tensor:
        return self.inputs.product

    def solve(self, ridge: float, floor: float) -> RegressionResult:
        change = ridge_solution(self.gram, self.cross, ridge, floor)
        left, scale = self.left(change), self.target or 1.0
        return RegressionResult(change, (self.residual / scale) ** 0.5, (left / scale) ** 0.5, ridge)

    def left(self, change: Tensor) -> float:
        """‖X D − R‖²"""
        explained = 2 * (change * self.cross).sum() - (change * (self.gram @ change)).sum()
        return max(0.0, self.residual - float(explained))


class RidgeSearch(RidgeRegression):
    """The same, with the ridge of `RIDGES` that predicts rows best which it was not solved on. Then all rows count."""

    def __init__(self) -> None:
        super().__init__()
        self._aside = RidgeRegression()

    def add(self, inputs: Tensor, residual: Tensor, target: Tensor) -> None:
        super().add(inputs, residual, target)
        if few := len(inputs) // ASIDE:
            self._aside.add(inputs[-few:], residual[-few:], target[-few:])

    def best_ridge(self, floor: float) -> float:
        aside = self._aside
        if not aside.rows:
            return RIDGE
        gram, cross = self.gram - aside.gram, self.cross - aside.cross
        return min(RIDGES, key=lambda ridge: aside.left(ridge_solution(gram, cross, ridge, floor)))


def ridge_solution(gram: Tensor, cross: Tensor, ridge: float, floor: float) -> Tensor:
    diagonal = gram.diagonal()
    penalty = ridge * diagonal + floor * diagonal.mean()
    return solve_positive(gram + torch.diag(penalty), cross)


def solve_regression(sums: RidgeRegression, ridge: float | None, floor: float) -> RegressionResult:
    """With the ridge that is given, or the best of several."""
    if ridge is None:
        ridge = sums.best_ridge(floor) if isinstance(sums, RidgeSearch) else RIDGE
    return sums.solve(ridge, floor)


class OwnedRegression:
    """A regression whose outputs may belong to one parent each: such an output is solved on the rows where that parent
    is believed, and weighted by how much it is."""

    def __init__(self, owners: Tensor | None, part: type[RidgeRegression] = RidgeRegression) -> None:
        """`owners`: for every output its parent; None: one regression for all."""
        self._columns = [] if owners is None else [(int(m), (owners == m).nonzero()[:, 0]) for m in owners.unique()]
        self._parts = [part() for _ in range(max(1, len(self._columns)))]
        self._count = 0 if owners is None else len(owners)
        self._width = 0

    def add(self, inputs: Tensor, residual: Tensor, target: Tensor, believed: Tensor | None) -> None:
        """`believed` (parents, n)."""
        self._width = inputs.shape[1]
        if not self._columns:
            self._parts[0].add(inputs, residual, target)
            return
        assert believed is not None
        for (parent, columns), part in zip(self._columns, self._parts, strict=True):
            at = columns.to(residual.device)
            scale = believed[parent].sqrt().to(inputs)[:, None]
            kept = scale[:, 0] > UNBELIEVED**0.5
            if bool(kept.any()):
                scale = scale[kept]
                part.add(inputs[kept] * scale, residual[kept][:, at] * scale, target[kept][:, at] * scale)

    @property
    def rows(self) -> int:
        """Of the output that saw fewest; one whose parent is believed nowhere stays as it is."""
        return min((part.rows for part in self._parts if part.rows), default=0)

    @property
    def width(self) -> int:
        return self._width

    def solve(self, ridge: float | None, floor: float) -> RegressionResult:
        solved = [solve_regression(part, ridge, floor) if part.rows else None for part in self._parts]
        if not self._columns:
            assert solved[0] is not None
            return solved[0]
        like = next((one.change for one in solved if one is not None), torch.zeros((), dtype=torch.float64))
        change = like.new_zeros(self._width, self._count)
        before = after = scale = largest = 0.0
        for (_, columns), part, one in zip(self._columns, self._parts, solved, strict=True):
            if one is not None:
                largest = max(largest, one.ridge)
                change[:, columns.to(change.device)] = one.change
                before, after = before + one.before**2 * part.target, after + one.after**2 * part.target
                scale += part.target
        return RegressionResult(change, (before / (scale or 1.0)) ** 0.5, (after / (scale or 1.0)) ** 0.5, largest)


class GainRegression:
    """The same for a norm: one gain (and bias) per coordinate, on the normalised input x̂."""

    def __init__(self) -> None:
        self.rows = 0
        self.sums = torch.zeros(())  # (5, d): x̂², x̂, x̂R, R, R²
        self.target = 0.0

    def add(self, normed: Tensor, residual: Tensor, target: Tensor) -> None:
        x, r = normed.double(), residual.double()
        self.rows += x.shape[0]
        parts = (x * x, x, x * r, r, r * r)
        self.sums = self.sums.to(x.device) + torch.stack([part.sum(0) for part in parts])
        self.target += square_norm(target)

    def solve(self, ridge: float, floor: float, *, bias: bool) -> RegressionResult:
        """The change as (1 or 2, d): of the gains, then of the biases."""
        xx, x, xr, r, rr = self.sums
        ones = torch.full_like(xx, self.rows)
        gram = torch.stack([torch.stack([xx, x]), torch.stack([x, ones])]).permute(2, 0, 1)  # (d, 2, 2)
        cross = torch.stack([xr, r]).T[:, :, None]
        if not bias:
            gram, cross = gram[:, :1, :1], cross[:, :1]
        diagonal = gram.diagonal(dim1=1, dim2=2)
        penalty = torch.diag_embed(ridge * diagonal + floor * diagonal.mean(1, keepdim=True))
        change = torch.linalg.pinv(gram + penalty, hermitian=True) @ cross
        explained = 2 * (change * cross).sum() - (change * (gram @ change)).sum()
        before, scale = float(rr.sum()), self.target or 1.0
        left = max(0.0, before - float(explained))
        return RegressionResult(change[:, :, 0].T, (before / scale) ** 0.5, (left / scale) ** 0.5, ridge)


def square_norm(values: Tensor) -> float:
    return float(torch.linalg.vector_norm(values, dtype=torch.float64)) ** 2


def solve_positive(matrix: Tensor, right: Tensor) -> Tensor:
    """matrix⁻¹ right for a symmetric positive matrix; where it is singular, the solution of least norm."""
    # Channels of very different size are brought to one scale first: it costs nothing and saves digits.
    scale = matrix.diagonal().clamp_min(0).sqrt()
    scale = torch.where(scale > 0, scale, torch.ones_like(scale))
    scaled = matrix / scale[:, None] / scale
    factor, failed = torch.linalg.cholesky_ex(scaled)
    if not failed and float(factor.diagonal().min()) > 1e-7:
        return torch.cholesky_solve(right / scale[:, None], factor) / scale[:, None]
    values, vectors = torch.linalg.eigh(matrix)
    kept = values > values[-1] * matrix.shape[0] * torch.finfo(matrix.dtype).eps
    inverse = torch.where(kept, 1 / values.where(kept, torch.ones_like(values)), torch.zeros_like(values))
    solution: Tensor = vectors @ (inverse[:, None] * (vectors.T @ right))
    return solution
