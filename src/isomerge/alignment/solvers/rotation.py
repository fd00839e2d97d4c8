"""Rotations: the orthogonal element that best moves source units onto anchor units, by the polar factor."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.symmetry.groups import Group

_SMALLEST = 1e-4  # three steps map singular values in [_SMALLEST, 1] into [0.999, 1]; smaller ones lag behind
_CPU_LIMIT = 96  # above this size LAPACK's SVD runs near matmul speed and the iteration gains nothing on a CPU
_TOLERANCE = 1e-12


def _schedule(low: float) -> list[tuple[float, float, float]]:
    """QDWH weights (a, b, c) of x (a + b x²) / (1 + c x²), the best such map of [low, 1] towards 1, repeated."""
    weights = []
    while low < 0.99:
        d = (4 * (1 - low**2) / low**4) ** (1 / 3)
        root = (1 + d) ** 0.5
        a = root + 0.5 * (8 - 4 * d + 8 * (2 - low**2) / (low**2 * root)) ** 0.5
        b = (a - 1) ** 2 / 4
        c = a + b - 1
        weights.append((a, b, c))
        low = low * (a + b * low**2) / (1 + c * low**2)
    return weights


_WEIGHTS = _schedule(_SMALLEST)


def polar(C: Tensor, *, method: str = "auto") -> Tensor:
    """The orthogonal R nearest to C: `R = U Vᵀ` for the SVD `C = U S Vᵀ`, so RᵀC is symmetric and positive.

    C: (..., e, e); R comes back in float64. `method` is "svd", "qdwh" (matmul and Cholesky only; every result is
    checked, members that fail — singular or with a condition number above about 1e4 — are solved by SVD) or "auto":
    qdwh on accelerators and for small matrices on a CPU, where it takes about 3/4 of the time; SVD otherwise.
    Where C is singular R is one of many: see `partial_isometry` for the unique part.

    >>> polar(torch.tensor([[0.0, 2.0], [-3.0, 0.0]])).round().tolist()
    [[0.0, 1.0], [-1.0, 0.0]]

    Reference: Nakatsukasa, Bai, Gygi, "Optimizing Halley's iteration for computing the matrix polar decomposition",
    SIAM J. Matrix Anal. Appl. 31 (2010); Newton-Schulz finish: Higham, "Functions of Matrices" (2008), chapter 8.
    """
    if C.ndim < 2 or C.shape[-1] != C.shape[-2]:
        raise ValueError(f"The polar factor needs square matrices (..., e, e), but the shape is {tuple(C.shape)}.")
    if method not in ("auto", "svd", "qdwh"):
        raise ValueError(f"Unknown polar method '{method}'. Known values: auto, svd, qdwh.")
    C = finite(C)
    size = C.shape[-1]
    if method == "svd" or (method == "auto" and C.device.type == "cpu" and size > _CPU_LIMIT) or C.numel() == 0:
        return _by_svd(C)
    # Blocks of 512 KB keep a CPU core inside its own cache; an accelerator wants them large but bounded.
    block = max(1, (2**16 if C.device.type == "cpu" else 2**26) // size**2)
    flat = C.reshape(-1, size, size)
    return torch.cat([_by_qdwh(flat[i : i + block]) for i in range(0, len(flat), block)]).reshape(C.shape)


def finite(C: Tensor) -> Tensor:
    """C in float64, or a ValueError that says why no rotation can be found: LAPACK's own message would not."""
    if not bool(torch.isfinite(C).all()):
        raise ValueError(
            f"A rotation was asked for from a cross-covariance of shape {tuple(C.shape)} that holds NaN or infinite "
            "values. Check the two checkpoints (or the calibration data) for non-finite numbers."
        )
    return C.to(torch.float64)


def _by_svd(C: Tensor) -> Tensor:
    U, _, Vh = torch.linalg.svd(C)
    return torch.matmul(U, Vh)


def _by_qdwh(C: Tensor) -> Tensor:
    """C: (m, e, e). Every factor applied is a positive function of CᵀC, so a converged X has XᵀC ≥ 0 by itself."""
    eye: Tensor = torch.eye(C.shape[-1], dtype=C.dtype, device=C.device).expand_as(C)
    C = C / C.abs().amax((-2, -1), keepdim=True)  # powers of tiny or huge entries must not leave the number range
    gram = C.mT @ C
    norm2 = torch.linalg.matrix_norm(gram)[:, None, None]  # ≥ σ_max², and sharper than the norm of C
    X: Tensor = C * norm2.rsqrt()
    for step, (a, b, c) in enumerate(_WEIGHTS):
        Z = torch.add(eye, gram * (c / norm2)) if step == 0 else torch.baddbmm(eye, X.mT, X, alpha=c)
        L = torch.linalg.cholesky_ex(Z)[0]
        X = torch.baddbmm(X, X, torch.cholesky_inverse(L), beta=b / c, alpha=a - b / c)
    for _ in range(4):
        E = torch.baddbmm(eye, X.mT, X, alpha=-1)
        error = torch.linalg.matrix_norm(E)
        worst = float(error.nan_to_num(0.0).max())
        E = torch.baddbmm(E, E, E, beta=0.5, alpha=0.375) if worst > 1e-8 else E.mul_(0.5)
        X = torch.baddbmm(X, X, E)
        if worst < 1e-5:  # the step just taken leaves error³, below rounding
            break
    # ‖XᵀC − CᵀX‖ seen through eight random directions: the full product would cost a tenth of the whole solve.
    probe = torch.randn(C.shape[-1], 8, generator=torch.Generator().manual_seed(0), dtype=C.dtype).to(C.device)
    skew = torch.linalg.matrix_norm(X.mT @ (C @ probe) - C.mT @ (X @ probe)) / (8**0.5 * torch.linalg.matrix_norm(C))
    failed = ~((error < 1e-5) & (skew < _TOLERANCE))  # "not passed" also catches NaN, the mark of a zero member
    if bool(failed.any()):
        X[failed] = _by_svd(C[failed].nan_to_num_(0.0))
    return X


def rotation(C: Tensor) -> Tensor:
    """The orthogonal g that maximises `tr(g C)`, the agreement of gB with A for `C = B Aᵀ`: `g = polar(C)ᵀ`.

    C: (..., e, e), source × anchor. Reference: Schönemann (1966); Theorem 4.1 of the founding paper.

    >>> B = torch.eye(2, dtype=torch.float64)
    >>> A = torch.tensor([[0.0, 1.0], [-1.0, 0.0]], dtype=torch.float64)
    >>> torch.allclose(rotation(B @ A.T) @ B, A)
    True
    """
    return polar(C).mT


def nuclear_norm(C: Tensor) -> Tensor:
    """`‖C‖_* = max_g tr(g C)` over orthogonal g: what a pair of heads scores once it is rotated. C: (..., e, e).

    >>> nuclear_norm(torch.diag(torch.tensor([3.0, -4.0]))).item()
    7.0
    """
    C = finite(C)
    if C.device.type == "cpu":
        values: Tensor = torch.linalg.svdvals(C)
        return values.sum(-1)
    return (polar(C) * C).sum((-2, -1))  # matmul only, where singular values are slow


def rotation_fixing_ones(C: Tensor) -> Tensor:
    """The orthogonal g with `g 1 = 1` that maximises `tr(g C)`: `g = polar(P C P + s uuᵀ)ᵀ`, any s > 0.

    `u = 1/√d`, `P = I − uuᵀ`: the rotations a LayerNorm without gain commutes with (SliceGPT, Ashkboos et al. 2024).
    With g = uuᵀ + PgP the objective is constant + tr(g PCP), so the problem is a rotation on the complement of u.

    >>> g = rotation_fixing_ones(torch.randn(5, 5, dtype=torch.float64))
    >>> torch.allclose(g.sum(1), torch.ones(5, dtype=torch.float64))
    True
    """
    C = _complement_of_ones(finite(C))
    d = C.shape[-1]
    # s at the size of a typical singular value, so that it does not worsen the condition number
    s = torch.linalg.matrix_norm(C) / d**0.5
    s = torch.where(s > 0, s, torch.ones_like(s))
    return polar(C + s[..., None, None] / d).mT


def partial_isometry(C: Tensor, rtol: float = 1e-10) -> Tensor:
    """`g = V_r U_rᵀ` over the singular values above `rtol · σ_max`: the part of the rotation that C determines.

    Unlike the full polar factor of a singular C it is unique; `g gᵀ` projects onto the space found, whose dimension is
    `g.square().sum()`. C: (..., e, e). Reference: Golub and Van Loan, "Matrix Computations", §6.4.

    >>> partial_isometry(torch.diag(torch.tensor([2.0, 0.0]))).tolist()
    [[1.0, 0.0], [0.0, 0.0]]
    """
    U, S, Vh = torch.linalg.svd(finite(C))
    keep = S.gt(rtol * S[..., :1]).to(U.dtype)  # Not ge, or a matrix of all zeros would keep everything.
    return torch.matmul(Vh.mT, keep[..., :, None] * U.mT)


def partial_isometry_fixing_ones(C: Tensor, rtol: float = 1e-10) -> Tensor:
    """`partial_isometry(P C P) + uuᵀ`: unique, and it still keeps the all-ones vector, `g 1 = 1`.

    >>> partial_isometry_fixing_ones(torch.zeros(2, 2)).tolist()
    [[0.5, 0.5], [0.5, 0.5]]
    """
    g = partial_isometry(_complement_of_ones(finite(C)), rtol)
    return _complement_of_ones(g) + 1.0 / C.shape[-1]


def _complement_of_ones(C: Tensor) -> Tensor:
    """P C P by means, without forming P."""
    C = C - C.mean(-1, keepdim=True)
    return C - C.mean(-2, keepdim=True)


def solve_rotation(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    """`rotation`; also for an invertible space: balanced or not, what is left to solve there is orthogonal."""
    C = C.double()
    g = rotation(C)
    return g, (g @ C).diagonal(dim1=-2, dim2=-1).sum(-1)


def score_rotation(group: Group, C: Tensor, unsigned: Tensor | None) -> Tensor:
    """What the best rotation earns, without building it."""
    return nuclear_norm(C)


def solve_rotation_fixing_ones(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    C = C.double()
    g = rotation_fixing_ones(C)
    return g, (g @ C).diagonal(dim1=-2, dim2=-1).sum(-1)
