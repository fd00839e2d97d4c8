"""Logit: the mean of the members' logits, which is the geometric mean of their probabilities."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.ensembling.combinations.combination import LEAST, Shares, combination


@combination(reference="https://doi.org/10.1162/089976602760128018")
def logit(logs: Tensor, shares: Shares) -> Tensor:
    """Mean logit, or geometric mean: p ∝ Π p_m^{w_m}.

    The softmax of the mean logits is this product, as what a softmax takes off its logits is the same for all classes.
    A class that one member rules out is out, so it is sharper than the mean probability.
    """
    total = torch.einsum("m...,m...->...", logs.clamp_min(LEAST), shares.logs(logs).exp().expand_as(logs))
    return total.log_softmax(-1)
