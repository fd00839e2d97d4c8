"""Means on a sphere, computed on coefficients.

Every point such a mean passes through is a combination of the inputs, so all norms and angles follow from the inputs'
Gram matrix: vectors of billions of elements become vectors of as many numbers as there are models.
"""

from __future__ import annotations

import numpy as np

Coefficients = np.ndarray
"""(models,): the vector Σ c_k W_k."""


class Span:
    """The combinations of some vectors whose Gram matrix is known."""

    def __init__(self, gram: list[list[float]]) -> None:
        self.gram = np.array(gram, dtype=np.float64)
        self.norms = np.sqrt(np.maximum(np.diag(self.gram), 0))

    def product(self, one: Coefficients, other: Coefficients) -> float:
        return float(one @ self.gram @ other)

    def norm(self, vector: Coefficients) -> float:
        return float(np.sqrt(max(self.product(vector, vector), 0.0)))

    def units(self, epsilon: float = 0.0) -> np.ndarray:
        """(models, models): each row is one input divided by its norm (+ epsilon); zero where it is zero."""
        lengths = self.norms + epsilon
        return np.diag(np.where(self.norms > 0, 1 / np.where(lengths > 0, lengths, 1), 0.0))
