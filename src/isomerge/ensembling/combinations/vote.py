"""Vote: the class that most members choose."""

from __future__ import annotations

import torch
from torch import Tensor

from isomerge.ensembling.combinations.combination import Shares, combination


@combination(weighs=False, reference="https://doi.org/10.1109/34.58871")
def vote(logs: Tensor, shares: Shares) -> Tensor:
    """Majority vote: p = (votes + mean probability) / (M + 1).

    Each member votes for its likeliest class (of equal ones the first). The mean probability counts like one more
    voter, whose vote is divided. It decides between classes with equally many votes and never against a majority, and
    no class has probability zero, so the loss has a value.
    """
    said = logs.exp().mean(0)
    chosen = logs.argmax(-1).movedim(0, -1)
    votes = torch.zeros_like(said).scatter_add_(-1, chosen, torch.ones_like(chosen, dtype=said.dtype))
    return ((votes + said) / (len(logs) + 1)).log()
