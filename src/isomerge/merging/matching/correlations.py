"""How the feed-forward units of several models go together on the same data: all with all, each in its own network."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from isomerge.architectures import describe
from isomerge.calibration.sites import Site, sites_of
from isomerge.checkpoint import Checkpoint
from isomerge.errors import IsomergeError
from isomerge.running.activation_watch import ActivationWatch
from isomerge.running.gram import GramSums
from isomerge.running.passes import DataPass
from isomerge.running.stock import StockModel

FLAT = 1e-12  # a variance below this share of the square is rounding: the unit never changes


def unit_correlations(
    models: Sequence[Checkpoint], writers: Mapping[str, str], data: DataPass, device: str
) -> dict[str, Tensor]:
    """Space -> the correlations of its units, the models side by side; 0 for a unit that never changes.

    `writers`: for each space of units the weight that reads them, behind their activation function.
    """
    stocks = [StockModel.load(model, device) for model in models]
    rows: list[dict[str, list[Tensor]]] = [{} for _ in stocks]
    watches = [_watching(stock, writers, into) for stock, into in zip(stocks, rows, strict=True)]
    sums = {space: GramSums(centred=True) for space in writers}
    for batch in data:
        for watch in watches:
            watch.run(batch)
        for space, total in sums.items():
            seen = [torch.cat(into.pop(space)) for into in rows if space in into]
            if len(seen) < len(rows) or len({len(one) for one in seen}) > 1:
                raise IsomergeError(
                    f"Comparing the units of '{space}': the models gave {[len(one) for one in seen]} rows for the same "
                    "batch. Their feed-forwards do not run on the same tokens; use reconstruct."
                )
            total.add(torch.cat(seen, 1))
    return {space: _correlation(total).cpu() for space, total in sums.items()}


def _watching(stock: StockModel, writers: Mapping[str, str], into: dict[str, list[Tensor]]) -> ActivationWatch:
    bound = describe(stock.checkpoint)
    sites = sites_of(bound, stock, spaces=list(writers), roles=["input"])
    watch = ActivationWatch(stock)
    for space, weight in writers.items():
        site: Site = sites[f"{weight}:in"]
        watch.listen(
            site.module, site.name, site.values,
            lambda rows, space=space: into.setdefault(space, []).append(rows),  # type: ignore[misc]
        )  # fmt: skip
    return watch


def _correlation(sums: GramSums) -> Tensor:
    covariance = sums.products() / sums.count
    variance = covariance.diagonal()
    spread = torch.where(variance > FLAT * (variance + sums.mean().square()), variance, 0).sqrt()
    scale = spread[:, None] * spread
    return torch.where(scale > 0, covariance / torch.where(scale > 0, scale, 1), 0)
