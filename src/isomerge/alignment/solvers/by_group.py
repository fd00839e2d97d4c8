"""The one table that says which solver serves which group; `isomerge list solvers` prints it.

A solver gets the group, the cross-covariance C of (pairs, n, n), source × anchor, summed over every tensor the space
touches, and `unsigned`, the part of it that comes from axes without a sign (or None). It returns the best element for
each pair and what it earns, Σ ⟨g·B, A⟩.

Orders can be found in other ways, too: the table ORDER_SOLVERS has the words of `solver`.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from torch import Tensor

from isomerge.alignment.solvers.annealing import annealed_orders
from isomerge.alignment.solvers.assignment import (
    assign_spoiling,
    solve_by_orders,
    solve_permutation,
    solve_permutation_roughly,
    solve_signed_permutation,
)
from isomerge.alignment.solvers.rotary import balance_rotary, rotary_scaled, score_rotary, solve_rotary
from isomerge.alignment.solvers.rotation import (
    partial_isometry,
    partial_isometry_fixing_ones,
    score_rotation,
    solve_rotation,
    solve_rotation_fixing_ones,
)
from isomerge.alignment.solvers.scale import balance_factor, balance_matrix, head_scale, score_scale, solve_scale
from isomerge.alignment.solvers.sinkhorn import sinkhorn_orders
from isomerge.symmetry.groups import Group


@dataclass(frozen=True)
class GroupSolver:
    """How the best element of a group is found. Only `solve` is needed; the others are for groups that have a use."""

    summary: str
    solve: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]]
    score: Callable[[Any, Tensor, Tensor | None], Tensor] | None = None
    """What the best element earns, where that is cheaper than building it."""
    in_place: Callable[[Tensor], tuple[Tensor, Tensor]] | None = None
    """`solve` for one large C of (n, n), used as the workspace."""
    roughly: Callable[[Any, Tensor, Tensor | None], tuple[Tensor, Tensor]] | None = None
    """`solve`, nearly, where that is much faster: for sweeps that are followed by another one."""
    start: Callable[[Tensor], Tensor] | None = None
    """The part of an element that a rank-deficient C of (n, n) determines: a first guess for the stream."""
    balance: Callable[[Any, Tensor, Tensor], tuple[Tensor, int]] | None = None
    """The element that makes two factors X and Y weigh the same, and how many of its parts had to be skipped."""
    rescale: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor] | None = None
    """The best size after a rotation, from ‖Q_B‖², ⟨Q_B, Q_A⟩, ⟨K_B, K_A⟩ and ‖K_B‖² (level `rotation`)."""
    any_order: bool = False
    """The group has every order of its units, so another of the ORDER_SOLVERS may find it."""


@dataclass(frozen=True)
class OrderSolver:
    """A way to find orders of units that users choose by name."""

    summary: str
    orders: Callable[[Tensor], Tensor] | None = None
    """The orders for scores of (pairs, n, n); None: as the table of groups says."""


def _solve_identity(group: Group, C: Tensor, unsigned: Tensor | None) -> tuple[Tensor, Tensor]:
    total = C.double() if unsigned is None else C.double() + unsigned
    return group.identity(C.shape[:1]).to(C.device), total.diagonal(dim1=-2, dim2=-1).sum(-1)


def _head_scale(q_norm2: Tensor, qq: Tensor, kk: Tensor, k_norm2: Tensor) -> Tensor:
    return head_scale(q_norm2, qq, kk, k_norm2, signed=True)


def _rotary_scaled(q_norm2: Tensor, qq: Tensor, kk: Tensor, k_norm2: Tensor) -> Tensor:
    return rotary_scaled(qq, kk, q_norm2, k_norm2)


SOLVERS: dict[str, GroupSolver] = {
    "identity": GroupSolver("nothing to solve: the space stays as it is", _solve_identity),
    "permutation": GroupSolver(
        "linear assignment, exact, with an exit when the best partners already form one",
        solve_permutation,
        in_place=assign_spoiling,
        roughly=solve_permutation_roughly,
        any_order=True,
    ),
    "signed permutation": GroupSolver("assignment on |C|, then signs", solve_signed_permutation, any_order=True),
    "rotation": GroupSolver(
        "orthogonal Procrustes, by the polar factor",
        solve_rotation,
        score=score_rotation,
        start=partial_isometry,
        rescale=_head_scale,
    ),
    "rotation fixing 1": GroupSolver(
        "the polar factor that keeps the all-ones vector, as LayerNorm asks",
        solve_rotation_fixing_ones,
        start=partial_isometry_fixing_ones,
        rescale=_head_scale,
    ),
    "invertible": GroupSolver(
        "factors balanced to equal Gram matrices, then a rotation",
        solve_rotation,
        score=score_rotation,
        balance=balance_matrix,
        rescale=_head_scale,
    ),
    "rotary": GroupSolver(
        "moduli balanced, then one phase or sign per rotary pair",
        solve_rotary,
        score=score_rotary,
        balance=balance_rotary,
        rescale=_rotary_scaled,
    ),
    "scale": GroupSolver(
        "one factor per unit that gives both sides equal norms",
        solve_scale,
        score=score_scale,
        balance=balance_factor,
    ),
    "signed scale": GroupSolver(
        "the same, then one sign per unit", solve_scale, score=score_scale, balance=balance_factor
    ),
    "signs": GroupSolver("one sign per unit", solve_scale, score=score_scale),
}


ORDER_SOLVERS: dict[str, OrderSolver] = {
    "assignment": OrderSolver("orders by linear assignment, exact: the default of solver"),
    "sinkhorn": OrderSolver("orders by soft assignment, cooled and made hard", sinkhorn_orders),
    "annealing": OrderSolver("orders by simulated annealing: swaps of two units", annealed_orders),
    "graph": OrderSolver("orders of all spaces at once by graph matching, at level permutation"),
}


def score(group: Group, C: Tensor, unsigned: Tensor | None = None, *, by: str = "assignment") -> Tensor:
    """What the best element earns for each pair, without building it where that is cheaper."""
    solver = SOLVERS[group.name]
    return solver.score(group, C, unsigned) if solver.score else solve(group, C, unsigned, by=by)[1]


def solve(
    group: Group,
    C: Tensor,
    unsigned: Tensor | None = None,
    *,
    spoil: bool = False,
    roughly: bool = False,
    by: str = "assignment",
) -> tuple[Tensor, Tensor]:
    """The best element for each pair, and what it earns. `spoil` lets the solver use C as its workspace; `roughly` is
    content with nearly the best; `by` names how orders are found.

    >>> import torch
    >>> from isomerge.symmetry.groups import Permutation
    >>> element, earned = solve(Permutation(2), torch.tensor([[[0.0, 5.0], [4.0, 1.0]]]))
    >>> element.tolist(), earned.tolist()
    ([[1, 0]], [9.0])
    """
    solver, orders = SOLVERS[group.name], ORDER_SOLVERS[by].orders
    if orders is not None and solver.any_order:
        return solve_by_orders(group, C, unsigned, orders)
    if roughly and solver.roughly:
        return solver.roughly(group, C, unsigned)
    if spoil and solver.in_place and unsigned is None and len(C) == 1:
        element, earned = solver.in_place(C[0])
        return element[None], earned[None]
    return solver.solve(group, C, unsigned)
