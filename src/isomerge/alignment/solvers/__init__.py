"""Solvers: each sees a cross-covariance C = B Aᵀ (source × anchor) and nothing of the architecture.

A returned element acts on the source: matrices `B ← g B`, permutations `B ← B[perm]`, rotary numbers `q ← c q`.
`by_group.py` says which solver serves which group.
"""
