"""Probability: the mean of the members' probabilities."""

from __future__ import annotations

from torch import Tensor

from isomerge.ensembling.combinations.combination import Shares, combination


@combination(averages=True, reference="https://arxiv.org/abs/1612.01474")
def probability(logs: Tensor, shares: Shares) -> Tensor:
    """Mean probability: p = Σ w_m p_m.

    The usual ensemble, and the one to begin with. Its loss is never above the members' mean loss.
    """
    return (logs + shares.logs(logs)).logsumexp(0)
