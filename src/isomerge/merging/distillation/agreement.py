"""Teachers that disagree: on each batch, the shares whose joint gradient is the shortest (AE-KD, Du et al. 2020).

With probabilities p_m of the teachers and q of the student, the gradient of KL(p_m ‖ q) by the student's scores is
q − p_m, so the shares are those of the mixture that is nearest to the student:

    min_w ‖ q − Σ_m w_m p_m ‖²     where w ≥ 0, Σ_m w_m = 1, w_m ≤ most

A step along it makes no teacher's loss larger, as far as `most` allows: 1 follows whoever is nearest, and 1 / teachers
is the plain mean. Helps where teachers contradict each other; where they agree, all shares do the same.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor


@torch.no_grad()
def agreed_shares(own: Tensor, given: Sequence[Tensor], most: float) -> list[float]:
    """From rows of scores of the student and of each teacher.

    >>> student, near, far = (torch.tensor([[score, 0.0]]) for score in (1.0, 2.0, 3.0))
    >>> agreed_shares(student, [near, far], 1.0)
    [1.0, 0.0]
    """
    away = torch.stack([(own.softmax(-1) - one.softmax(-1)).double().flatten() for one in given])
    return shortest((away @ away.T).cpu().numpy(), most)


def shortest(products: np.ndarray, most: float) -> list[float]:
    """min wᵀGw over shares of at most `most`, from the inner products G of the gradients."""
    from scipy.optimize import minimize  # slow to import

    count = len(products)
    scaled = products / max(float(np.trace(products)), 1e-300)
    found = minimize(
        lambda w: w @ scaled @ w, np.full(count, 1 / count), jac=lambda w: 2 * scaled @ w, method="SLSQP",
        bounds=[(0.0, most)] * count, constraints={"type": "eq", "fun": lambda w: w.sum() - 1, "jac": np.ones_like},
        options={"ftol": 1e-15, "maxiter": 200},
    )  # fmt: skip
    shares = np.clip(found.x, 0.0, most)
    return [round(float(share), 9) for share in shares / shares.sum()]
