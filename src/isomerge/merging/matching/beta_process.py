"""Units of several models matched to global units, of which there may be more than any model has.

Each global unit θ is drawn from N(0, σ0²), and the unit v that a model has of it from N(θ, σ²); which ones a model has,
a Beta–Bernoulli process says. Given the units that all models but j were matched to (with the sum S_i of those that
became the global unit i, and their number m_i), the units of j are assigned to old and new global units by the
Hungarian algorithm, with the gain

    ‖S_i + v‖² / σ⁴ / (1/σ0² + (m_i + 1)/σ²) − ‖S_i‖² / σ⁴ / (1/σ0² + m_i/σ²) + 2 log(m_i / (J − m_i))    of an old one,
    ‖v‖² / σ⁴ / (1/σ0² + 1/σ²) − 2 log(i J / γ)                                              of the i-th new one.

So, but for the logarithms, two units of equal length become one where their cosine is above 1 / (1 + σ²/σ0²). This
goes around the models until nothing changes. Units are measured by their root mean square, so that σ and σ0 mean the
same everywhere.

References: Yurochkin et al., "Bayesian Nonparametric Federated Learning of Neural Networks" (ICML 2019); Wang et al.,
"Federated Learning with Matched Averaging" (ICLR 2020).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

SWEEPS = 10


@dataclass(frozen=True)
class BetaProcess:
    """The model's parameters, J being the number of models."""

    sigma: float = 1.0
    sigma0: float = 1.0
    gamma: float = 1.0

    def gains(self, sums: Tensor, counts: Tensor, units: Tensor, models: int, new: int) -> Tensor:
        """(units, old and new global units); `sums` (old, features) and `counts` are without this model."""
        noise, prior = self.sigma**-2, self.sigma0**-2
        old, own = sums.square().sum(1), units.square().sum(1)
        together = old + 2 * units @ sums.T + own[:, None]
        matched = together * noise**2 / (prior + (counts + 1) * noise) - old * noise**2 / (prior + counts * noise)
        matched += 2 * (counts / (models - counts)).log()
        alone = own[:, None] * noise**2 / (prior + noise)
        rank = torch.arange(1, new + 1, dtype=units.dtype)
        return torch.cat([matched, alone - 2 * (rank * models / self.gamma).log()], 1)


def match_units(features: Sequence[Tensor], process: BetaProcess, largest: int | None = None) -> list[Tensor]:
    """For each model (units, features) the global unit that each of its units is; at most `largest` of them.

    Those of the first model come first, in its order.

    >>> a = torch.eye(3)
    >>> [found.tolist() for found in match_units([a, a.flip(0)], BetaProcess())]
    [[0, 1, 2], [2, 1, 0]]
    """
    size = torch.cat([units.flatten() for units in features]).double().square().mean().sqrt()
    scaled = [units.double().cpu() / (float(size) or 1.0) for units in features]
    found: dict[int, Tensor] = {}
    for _ in range(SWEEPS):
        before = dict(found)
        for j, units in enumerate(scaled):
            others = _without_gaps({m: own for m, own in found.items() if m != j})
            found = {**others, j: _matched(units, scaled, others, process, largest)}
        found = _first_in_order(found)
        if before and all(torch.equal(before[j], own) for j, own in found.items()):
            break
    return [found[j] for j in range(len(scaled))]


def _matched(
    units: Tensor, scaled: Sequence[Tensor], others: dict[int, Tensor], process: BetaProcess, largest: int | None
) -> Tensor:
    """The global units of one model, given those of others."""
    from scipy.optimize import linear_sum_assignment

    count = max((int(own.max()) + 1 for own in others.values()), default=0)
    sums, counts = units.new_zeros(count, units.shape[1]), units.new_zeros(count)
    for m, own in others.items():
        sums.index_add_(0, own, scaled[m])
        counts.index_add_(0, own, torch.ones_like(own, dtype=counts.dtype))
    new = len(units) if largest is None else min(len(units), largest - count)
    gains = process.gains(sums, counts, units, len(scaled), new)
    return torch.from_numpy(linear_sum_assignment(gains.numpy(), maximize=True)[1])


def _without_gaps(found: dict[int, Tensor]) -> dict[int, Tensor]:
    """Global units that nobody has any more are left out; the others keep their order."""
    if not found:
        return {}
    numbers = torch.cat(list(found.values())).unique(return_inverse=True)[1]
    return dict(zip(found, numbers.split([len(own) for own in found.values()]), strict=True))


def _first_in_order(found: dict[int, Tensor]) -> dict[int, Tensor]:
    """The units of the first model in its order, then all others in theirs."""
    found = _without_gaps(dict(sorted(found.items())))
    count = max(int(own.max()) + 1 for own in found.values())
    rest = torch.ones(count, dtype=torch.bool)
    rest[found[0]] = False
    number = torch.empty(count, dtype=torch.int64)
    number[torch.cat([found[0], rest.nonzero().flatten()])] = torch.arange(count)
    return {m: number[own] for m, own in found.items()}
