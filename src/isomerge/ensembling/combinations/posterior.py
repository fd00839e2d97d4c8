"""Posterior: at every token, the members are weighted by how likely they found the text before it."""

from __future__ import annotations

from torch import Tensor

from isomerge.ensembling.combinations.combination import LEAST, Shares, combination
from isomerge.ensembling.combinations.probability import probability


@combination(reads=True, reference="https://doi.org/10.1214/ss/1009212519")
def posterior(logs: Tensor, shares: Shares) -> Tensor:
    """Posterior mixture: p(x_t) = Σ w_m(t) p_m(x_t), w_m(t) ∝ π_m Π_{s<t} p_m(x_s).

    The Bayesian mixture of the members, as distributions over whole texts, with the prior π: on any text its loss is
    above that of the best member by at most log(1/π) in all. For members that know different texts.
    """
    return probability(logs, shares)


def beliefs(heard: Tensor, before: Tensor) -> Tensor:
    """(members, rows, tokens): log π_m + Σ_{s≤t} log p_m(x_s), up to a constant for each row and token.

    `heard`: log p_m(x_t) of each token as it is read, 0 where it was not predicted; `before`: (members, rows).
    """
    return (before[..., None] + heard.double().clamp_min(LEAST).cumsum(-1)).log_softmax(0)
