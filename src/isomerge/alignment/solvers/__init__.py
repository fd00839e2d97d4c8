"""Solvers: each sees a cross-covariance C = B Aᵀ (source × anchor) and nothing of the architecture.

A returned element acts on the source: matrices `B ← g B`, permutations `B ← B[perm]`, rotary numbers `q ← c q`.
"""

from __future__ import annotations

from isomerge.alignment.solvers.assignment import assign, assign_batch, assign_spoiling
from isomerge.alignment.solvers.balance import balance, balance_scale
from isomerge.alignment.solvers.identity import identity_is_optimal
from isomerge.alignment.solvers.polar import polar
from isomerge.alignment.solvers.procrustes import (
    nuclear_norm,
    partial_isometry,
    partial_isometry_fixing_ones,
    rotation,
    rotation_fixing_ones,
)
from isomerge.alignment.solvers.rotary import rotary_phase, rotary_scaled, rotary_sign
from isomerge.alignment.solvers.scale import head_scale
from isomerge.alignment.solvers.signed import assign_signed

SOLVERS: dict[str, str] = {
    "assign": "permutation by linear assignment, exact, with an exit when the best partners already form one",
    "assign_batch": "the same for a stack of score matrices, with their scores",
    "assign_spoiling": "the same for one large matrix, used as its own workspace",
    "identity_is_optimal": "proof, without computing C, that no order and no sign of units beats the identity",
    "assign_signed": "signed permutation: assignment on |C|, then signs",
    "rotation": "rotation by the polar factor (orthogonal Procrustes)",
    "rotation_fixing_ones": "rotation that keeps the all-ones vector, as LayerNorm asks",
    "partial_isometry": "the part of a rotation that a rank-deficient C determines",
    "partial_isometry_fixing_ones": "the same, and it keeps the all-ones vector",
    "rotary_phase": "one phase per rotary frequency",
    "rotary_scaled": "one complex number with free modulus per rotary frequency",
    "rotary_sign": "one sign per rotary pair, where queries and keys are normalised",
    "head_scale": "one scale per head or unit, by the paper's quartic",
    "balance": "symmetric matrix that gives both factors of a head equal Gram matrices",
    "balance_scale": "one scale per unit or pair that gives both sides equal norms",
}

__all__ = [
    "SOLVERS",
    "assign",
    "assign_batch",
    "assign_signed",
    "assign_spoiling",
    "balance",
    "balance_scale",
    "head_scale",
    "identity_is_optimal",
    "nuclear_norm",
    "partial_isometry",
    "partial_isometry_fixing_ones",
    "polar",
    "rotary_phase",
    "rotary_scaled",
    "rotary_sign",
    "rotation",
    "rotation_fixing_ones",
]
