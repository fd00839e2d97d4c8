"""Weighted: the mean probability, with weights that held-out data makes likeliest."""

from __future__ import annotations

from torch import Tensor

from isomerge.ensembling.combinations.combination import LEAST, Shares, combination
from isomerge.ensembling.combinations.probability import probability

ROUNDS = 5000
GAP = 1e-7


@combination(finds="weights", reference="https://doi.org/10.1111/j.2517-6161.1977.tb01600.x")
def weighted(logs: Tensor, shares: Shares) -> Tensor:
    """Weighted mean probability: p = Σ w_m p_m, the w given, or found on held-out data.

    Worth it where members differ in quality. Equal ones get nearly equal weights.
    """
    return probability(logs, shares)


def find_weights(likelihoods: Tensor) -> Tensor:
    """w (members,) from log p_m(y_n) (members, rows): w = argmax Σ_n log Σ_m w_m p_m(y_n), by expectation
    maximisation.

    That is concave on the simplex, so what is still to be gained is at most max_m mean_n p_m(y_n) / p(y_n) − 1.
    """
    logs = likelihoods.double().clamp_min(LEAST)
    own = logs.new_full((len(logs), 1), 1 / len(logs)).log()
    for _ in range(ROUNDS):
        together = (logs + own).logsumexp(0)
        gains = (logs - together).exp().mean(1)  # the gradient; it is 1 where a weight stays
        own = own + gains.log()[:, None]
        own = own - own.logsumexp(0)
        if float(gains.max()) - 1 <= GAP:
            break
    return own[:, 0].exp()
