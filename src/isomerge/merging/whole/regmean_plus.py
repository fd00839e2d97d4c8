"""RegMean++: regression on the inputs that the merged model itself has by then."""

from __future__ import annotations

from isomerge.merging.methods.method import PerModel, each
from isomerge.merging.whole.method import Solved, Work, whole_method
from isomerge.merging.whole.reconstruct import solved


@whole_method(
    name="regmean++",
    data="each",
    passes="the merged model over every model's data, once per linear map",
    reference="https://arxiv.org/abs/2508.03121",
)
def regmean_plus(
    work: Work, *, weight: PerModel[float] = each(1.0), off_diagonal: float = 0.9, floor: float = 1e-6
) -> Solved:
    """As regmean, layer after layer, with the inputs that the merged model has on each model's own data.

    Options:
        weight: how much each model's data count, divided by their sum
        off_diagonal: what off-diagonal entries of the Gram matrices are multiplied by
        floor: what is added to their diagonal, as a share of its mean
    """
    return solved(work, method="regmean++", weights=weight, off_diagonal=off_diagonal, floor=floor)
