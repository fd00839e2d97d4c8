"""Weighted means: plain ones, soups, and averages over the checkpoints of one training run, oldest first."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence

from torch import Tensor

from isomerge.merging.methods.block_sums import mixture
from isomerge.merging.methods.method import OptionError, PerModel, each, method
from isomerge.merging.run.rows import Combine, RowBlock, TensorGroup


@method(reference="https://arxiv.org/abs/2203.05482")
def linear(group: TensorGroup, *, weight: PerModel[float] = each(1.0), normalize: bool = True) -> Combine:
    """Weighted average: Σ w_k W_k, the weights divided by their sum.

    Options:
        weight: how much of each model
        normalize: divide the weights by their sum
    """
    total = sum(weight) if normalize else 1.0
    if abs(total) < 1e-12:
        raise OptionError(
            f"the weights {weight} add up to zero. Give others, or normalize: false.", "weight", "normalize"
        )
    return mixture([w / total for w in weight])


@method(reference="https://arxiv.org/abs/2203.05482")
def uniform_soup(group: TensorGroup) -> Combine:
    """The mean of all models: Σ W_k / K."""
    return mixture([1 / group.models] * group.models)


@method(reference="https://arxiv.org/abs/2306.04488")
def rewarded_soup(group: TensorGroup, *, weight: PerModel[float]) -> Combine:
    """Models trained on different rewards, mixed by how much each reward matters: Σ w_k W_k with Σ w_k = 1, w_k ≥ 0.

    Options:
        weight: the preference for each model's reward; they add up to 1
    """
    if abs(sum(weight) - 1) > 1e-6 or min(weight) < 0:
        raise OptionError(
            f"the weights of rewarded_soup are preferences, not negative and adding up to 1, but {weight} add up to "
            f"{sum(weight):g}. Correct them, or use linear, which divides by the sum.",
            "weight",
        )
    return mixture(weight)


@method(reference="https://arxiv.org/abs/1803.05407")
def swa(group: TensorGroup, *, start: int = 0, every: int = 1) -> Combine:
    """Stochastic weight averaging: the mean of every n-th checkpoint from a start on.

    Options:
        start: how many of the first checkpoints to leave out
        every: take one in so many, the last one always
    """
    if not 0 <= start < group.models or every < 1:
        raise OptionError(
            f"swa with start {start} and every {every} leaves none of {group.models} checkpoints.", "start", "every"
        )
    last = group.models - 1
    return _weighted([float(i >= start and (last - i) % every == 0) for i in range(group.models)])


@method(reference="https://arxiv.org/abs/2411.18704")
def ema(group: TensorGroup, *, decay: float = 0.9) -> Combine:
    """Exponential moving average: m ← decay · m + (1 − decay) · W over the checkpoints, starting at the first.

    Options:
        decay: how much of the average stays at each step, from 0 to below 1
    """
    if not 0 <= decay < 1:
        raise OptionError(f"the decay of ema is from 0 to below 1, not {decay}.", "decay")
    new = [1.0] + [1 - decay] * (group.models - 1)
    return _weighted([share * decay ** (group.models - 1 - i) for i, share in enumerate(new)])


@method(reference="https://arxiv.org/abs/2209.14981")
def lawa(group: TensorGroup, *, window: int = 6) -> Combine:
    """Latest weight averaging: the mean of the last checkpoints.

    Options:
        window: how many; all if there are fewer
    """
    if window < 1:
        raise OptionError(f"a window of {window} checkpoints is empty. Give 1 or more.", "window")
    return _weighted([float(i >= group.models - window) for i in range(group.models)])


def tail(group: TensorGroup, *, fraction: float = 0.5) -> Combine:
    """Tail averaging: the mean of the last share of the checkpoints, at least one.

    Options:
        fraction: which share, above 0 and up to 1
    """
    if not 0 < fraction <= 1:
        raise OptionError(f"a fraction of {fraction} is not above 0 and up to 1.", "fraction")
    count = max(1, math.ceil(fraction * group.models - 1e-9))
    return _weighted([float(i >= group.models - count) for i in range(group.models)])


sma = method(name="sma", reference="https://arxiv.org/abs/1610.03774")(tail)
tail_average = method(name="tail_average", reference="https://arxiv.org/abs/1610.03774")(tail)


@method(reference="https://arxiv.org/abs/2411.18704")
def geometric(group: TensorGroup, *, decay: float = 0.5) -> Combine:
    """Each checkpoint counts `decay` times as much as the one after it: Σ decay^(K−1−k) W_k, divided by the sum.

    Options:
        decay: how much of the weight of the next checkpoint, from 0 (only the last) to 1 (all the same)
    """
    if not 0 <= decay <= 1:
        raise OptionError(f"a decay of {decay} is not from 0 to 1.", "decay")
    return _weighted([decay ** (group.models - 1 - i) for i in range(group.models)])


@method(reference="https://arxiv.org/abs/2507.17634")
def wsm(
    group: TensorGroup, *, power: float = 0.5, cosine: bool = False, rate: PerModel[float | None] = each(None)
) -> Combine:
    """Warm up, stay, merge: what a decay of the learning rate over the checkpoints would have given.

    Scaling the j-th step between K checkpoints by w_j is the mean Σ c_j W_j with c_j = w_j − w_{j+1}, w_0 = 1 and
    w_K = 0. Between them, at u = j / K, w_j is 1 − u^p or (1 + cos πu) / 2, or it is given.

    Options:
        power: how the rate falls: 1 in a straight line, which is the plain mean; 0.5 fast at first, as 1 − √u
        cosine: the rate falls along half a cosine instead
        rate: any other decay: the learning rate that the step to each checkpoint would have had; of the first, the run's
    """  # noqa: E501
    if not 0 < power < math.inf:
        raise OptionError(f"a power of {power} is no decay; it is above 0.", "power")
    rates = _falling(rate) or [
        (1 + math.cos(math.pi * u)) / 2 if cosine else 1 - u**power
        for u in (place / group.models for place in range(group.models))
    ]
    return mixture([own - later for own, later in itertools.pairwise([*rates, 0.0])])


def _falling(rates: Sequence[float | None]) -> list[float]:
    """As shares of the first; nothing where none is given."""
    if all(rate is None for rate in rates):
        return []
    known = [rate for rate in rates if rate is not None]
    if len(known) < len(rates) or known != sorted(known, reverse=True) or not 0 <= known[-1] <= known[0] < math.inf:
        raise OptionError(f"the rates {rates} of wsm do not decay. Give each one, none above that before.", "rate")
    if known[0] == 0:
        raise OptionError("the first rate of wsm is the run's own learning rate, and not 0.", "rate")
    return [rate / known[0] for rate in known]


def _weighted(weights: Sequence[float]) -> Combine:
    total = sum(weights)
    return mixture([w / total for w in weights])


@method(most=1)
def passthrough(group: TensorGroup, *, scale: PerModel[float | None] = each(None)) -> Combine:
    """The only model's tensors, unchanged or multiplied by a number: for stacking layers of several models.

    Options:
        scale: what to multiply by; none leaves every bit as it is
    """

    def combine(block: RowBlock) -> Tensor:
        tensor = block.tensors[0]
        return tensor if scale[0] is None else tensor * scale[0]

    return combine
