"""Two models on the same data: how the activations of one go with those of the other, site by site.

    crossed = cross_statistics("model-b", "model-a", batches)          # first the source, then the anchor
    for site, moments in crossed.of("ffn.0"):
        moments.cross                # Σ x_B x_Aᵀ, (width, width): rows are the source's units, columns the anchor's
        moments.covariance()         # the same about the means, divided by the count
        moments.correlation()        # … and by both standard deviations; 0 for a unit that never changes
        moments.information()        # the mutual information of two Gaussian variables of that correlation, in nats
        site.sizes, site.spaces      # how to split either axis: (heads, inner) for ("head.0", "vo.0")

Sites and their names: `isomerge.calibration.sites`.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from isomerge.architectures import describe
from isomerge.calibration.sites import ROLES, Site, sites_of
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.base import Progress, name_some
from isomerge.errors import IsomergeError, RequestError
from isomerge.running.activation_watch import ActivationWatch
from isomerge.running.passes import DataPass, as_batches
from isomerge.running.stock import StockModel

MOST_NATS = 8.0
"""Of mutual information: equal units would have infinitely much."""


@dataclass
class CrossMoments:
    """Sums over samples of the source's x_B and the anchor's x_A, in float64."""

    count: int
    sum_b: Tensor
    sum_a: Tensor
    squares_b: Tensor
    squares_a: Tensor
    cross: Tensor
    """Σ x_B x_Aᵀ"""

    @classmethod
    def empty(cls, width_b: int, width_a: int, device: str) -> CrossMoments:
        shapes = ((width_b,), (width_a,), (width_b,), (width_a,), (width_b, width_a))
        return cls(0, *(torch.zeros(*shape, dtype=torch.float64, device=device) for shape in shapes))

    def add(self, b: Tensor, a: Tensor) -> None:
        """Rows of both models for the same samples."""
        b, a = b.double(), a.double()
        self.count += len(b)
        self.sum_b += b.sum(0)
        self.sum_a += a.sum(0)
        self.squares_b += b.square().sum(0)
        self.squares_a += a.square().sum(0)
        self.cross += b.T @ a

    def covariance(self) -> Tensor:
        return (self.cross - self.sum_b[:, None] * self.sum_a / self.count) / self.count

    def correlation(self) -> Tensor:
        scale = self._deviation(self.sum_b, self.squares_b)[:, None] * self._deviation(self.sum_a, self.squares_a)
        return torch.where(scale > 0, self.covariance() / torch.where(scale > 0, scale, 1), 0)

    def information(self) -> Tensor:
        """Mutual information in nats of every pair of units, as if Gaussian: −½ log(1 − ρ²), at most MOST_NATS.

        With the sign of ρ: no order turns a unit round, so units that oppose each other are no match.
        """
        correlation = self.correlation()
        unexplained = (1 - correlation.square()).clamp(min=math.exp(-2 * MOST_NATS))
        return -0.5 * unexplained.log() * correlation.sign()

    def _deviation(self, total: Tensor, squares: Tensor) -> Tensor:
        mean = total / self.count
        variance = squares / self.count - mean.square()
        # What is left of a constant after cancellation is rounding and not a deviation.
        return torch.where(variance > 1e-12 * squares / self.count, variance, 0).sqrt()

    def to(self, device: str) -> CrossMoments:
        parts = (self.sum_b, self.sum_a, self.squares_b, self.squares_a, self.cross)
        return CrossMoments(self.count, *(part.to(device) for part in parts))


@dataclass
class CrossStatistics:
    """Cross moments of every site."""

    sites: dict[str, Site]
    """As in the anchor."""
    moments: dict[str, CrossMoments]
    data_sha256: str
    examples: int
    notes: list[str] = field(default_factory=list)

    def of(self, space: str, roles: Iterable[str] = ROLES) -> list[tuple[Site, CrossMoments]]:
        """The sites whose activations live on a space (perhaps together with other spaces), in network order."""
        wanted = set(roles)
        return [
            (site, self.moments[name])
            for name, site in self.sites.items()
            if space in site.spaces and site.role in wanted and name in self.moments
        ]

    def __iter__(self) -> Iterator[str]:
        return iter(self.moments)


def cross_statistics(
    source: Any,
    anchor: Any,
    batches: Any,
    *,
    spaces: Iterable[str] | None = None,
    roles: Iterable[str] = ROLES,
    device: str = "cpu",
    limit: int | None = None,
    progress: Progress | None = None,
) -> CrossStatistics:
    """Run both models on the same batches and sum x_B x_Aᵀ at every site, in one pass.

    Models are folders, hub ids, modules or checkpoints of one architecture; `batches` is a function that gives them, or
    an opened data set. `spaces` and `roles` choose sites. Memory
    holds both models, the sums, and the activations of one batch.
    """
    stocks = [StockModel.load(open_checkpoint(model), device) for model in (source, anchor)]
    bounds = [describe(stock.checkpoint) for stock in stocks]
    chosen = None if spaces is None else list(spaces)
    sites = [sites_of(b, s, spaces=chosen, roles=roles) for b, s in zip(bounds, stocks, strict=True)]
    common = [name for name in sites[1] if name in sites[0]]
    if not common:
        raise RequestError(
            f"Comparing activations of {stocks[0].checkpoint.name} and {stocks[1].checkpoint.name}: they have no site "
            "in common. Use two models of one architecture that isomerge knows."
        )
    moments: dict[str, CrossMoments] = {}
    seen: list[dict[str, list[Tensor]]] = [{}, {}]
    watches = [_watching(s, f, common, into) for s, f, into in zip(stocks, sites, seen, strict=True)]
    given = as_batches(batches, stocks[1].checkpoint, limit=limit, device=device)
    reading = DataPass(
        given, device=device, dtype=stocks[1].dtype, limit=limit, progress=progress, what="comparing activations"
    )
    for batch in reading:
        for watch in watches:
            watch.run(batch)
        for name in list(seen[1]):
            b, a = torch.cat(seen[0].pop(name)), torch.cat(seen[1].pop(name))
            if len(a) != len(b):
                raise IsomergeError(f"Comparing activations at '{name}': {len(b)} samples in one and {len(a)} in the "
                                    "other model. Their blocks do not run in the same order.")  # fmt: skip
            if name not in moments:
                moments[name] = CrossMoments.empty(b.shape[1], a.shape[1], device)
            moments[name].add(b, a)
    notes = [f"no activations were seen at '{name}'" for name in common if name not in moments]
    shown = {space for name in moments for space in sites[1][name].spaces}
    hidden = [space for space in chosen or bounds[1].architecture.movable() if space not in shown]
    if hidden:
        notes.append(
            f"there are no activations to compare for {name_some(hidden, 6)} (such as the units of experts, each of "
            "which sees other tokens in each model): only the weights tell how they go together"
        )
    return CrossStatistics(
        {name: sites[1][name] for name in common if name in moments},
        {name: moments[name].to("cpu") for name in common if name in moments},
        reading.sha256, reading.examples,
        [*notes, *(batches.notes if given is not batches else [])],
    )  # fmt: skip


def _watching(
    stock: StockModel, sites: dict[str, Site], names: list[str], into: dict[str, list[Tensor]]
) -> ActivationWatch:
    watch = ActivationWatch(stock)
    for name in names:
        watch.listen(
            sites[name].module, name, sites[name].values,
            lambda rows, name=name: into.setdefault(name, []).append(rows),  # type: ignore[misc]
        )  # fmt: skip
    return watch
