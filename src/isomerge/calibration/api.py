"""`calibrate`: one pass for activations and Gram matrices, one for Fisher information."""

from __future__ import annotations

from collections.abc import Collection, Iterable
from typing import Any

from torch import Tensor, nn

from isomerge.architectures import describe
from isomerge.arguments import require_choice, require_shared_types, require_types
from isomerge.calibration.experts import listen_to_experts
from isomerge.calibration.fisher import diagonal_fisher
from isomerge.calibration.sites import sites_of
from isomerge.calibration.statistics import Statistics
from isomerge.checkpoint import Checkpoint, open_checkpoint
from isomerge.checkpoint.base import Progress, name_some
from isomerge.checkpoint.hashing import hash_tensors, tensors_digest
from isomerge.checkpoint.permissions import closed_by
from isomerge.choices import STATISTICS
from isomerge.data import open_data
from isomerge.data.base import Batches, Data, DataSource
from isomerge.data.task_heads import task_of
from isomerge.errors import RequestError
from isomerge.name_patterns import NamePattern
from isomerge.progress_bars import Shown, callback, shows_progress
from isomerge.running.activation_watch import ActivationWatch, SameInput
from isomerge.running.gram import GramSums, UnitSums
from isomerge.running.linear_maps import LinearMap, outputs_as_rows
from isomerge.running.passes import BATCH_SIZE, DataPass, as_batches
from isomerge.running.stock import StockModel


@shows_progress
def calibrate(
    model: Any,
    data: DataSource,
    *,
    what: Iterable[str] = ("gram",),
    fisher: str = "true",
    samples: int = 1,
    only: str | None = None,
    device: str = "cpu",
    limit: int | None = None,
    batch_size: int = BATCH_SIZE,
    seed: int = 0,
    progress: Shown = None,
) -> Statistics:
    """Measure a model on data: what `isomerge.open_data` takes, opened data, or a function that gives batches.

    Memory does not grow with the data. `what` is any of: `gram` (Σ x xᵀ of every linear map's input), `activations`
    (the same at every site of the specification's spaces), `units` (mean and spread of every linear map's outputs),
    `fisher` (diagonal Fisher information, `true` or `empirical`). `only` is a pattern that names of weights must
    contain, for all of these but `activations`. `limit` is the most examples to read.

    >>> statistics = calibrate("model-a", batches, what={"gram"})
    >>> written = statistics.save("statistics.safetensors")
    """
    progress = callback(progress)
    require_types(
        fisher=(fisher, str), samples=(samples, int), only=(only, str, None), batch_size=(batch_size, int)
    )  # fmt: skip
    require_shared_types(limit=limit, seed=seed, device=device, progress=progress)
    wanted = _wanted(what)
    given = data if callable(data) else open_data(data)
    opened = given if isinstance(given, Data) else None
    limit = opened.limit if opened is not None and limit is None else limit
    checkpoint = open_checkpoint(model)
    _require_readable(checkpoint, opened)
    stock = StockModel.load(checkpoint, device)
    names = _tensors(stock, only) if "fisher" in wanted else None
    needs_labels = "fisher" in wanted and fisher == "empirical"
    batches = as_batches(
        given, checkpoint, limit=limit, labels=needs_labels, seed=seed, device=device, batch_size=batch_size
    )
    tensors: dict[str, Tensor] = {}
    info: dict[str, Any] = {
        "model": checkpoint.name,
        "model_sha256": tensors_digest(hash_tensors(checkpoint, threads=1)),
        "what": sorted(wanted),
    }
    if only is not None:
        info["only"] = only
    if opened is not None:
        info |= {"data": opened.name, "source_sha256": opened.sha256}
    if wanted - {"fisher"}:
        reading = _activations(stock, batches, wanted, only, limit, progress, tensors, info)
        info |= {"data_sha256": reading.sha256, "examples": reading.examples}
    if "fisher" in wanted:
        information, record, reading = diagonal_fisher(
            stock, batches, kind=fisher, samples=samples, seed=seed, names=names, limit=limit, progress=progress
        )
        tensors |= information
        info |= {"fisher": record, "data_sha256": reading.sha256, "examples": reading.examples}
    if opened is not None and opened.notes:
        info["notes"] = list(opened.notes)
    closed = closed_by([checkpoint], opened.stamps if opened is not None else ())
    return Statistics.of({name: tensor.cpu() for name, tensor in tensors.items()}, info, closed)


def _wanted(what: Iterable[str]) -> set[str]:
    require_types(what=(what, Iterable))
    wanted = {what} if isinstance(what, str) else set(what)
    for one in sorted(wanted):
        require_choice("what", one, STATISTICS)
    if not wanted:
        raise RequestError(f"what is empty. Known values: {', '.join(STATISTICS)}.", keys=("what",))
    return wanted


def _activations(
    stock: StockModel,
    batches: Batches,
    wanted: set[str],
    only: str | None,
    limit: int | None,
    progress: Progress | None,
    tensors: dict[str, Tensor],
    info: dict[str, Any],
) -> DataPass:
    """One pass, without gradients; sums and what they mean go into `tensors` and `info`."""
    watch = ActivationWatch(stock)
    weights = _weights(stock, only)
    collectors: list[GramCollector | MomentCollector | UnitCollector] = []
    if "gram" in wanted:
        collectors.append(GramCollector(watch, weights))
    if "activations" in wanted:
        collectors.append(MomentCollector(watch))
    if "units" in wanted:
        collectors.append(UnitCollector(watch, weights))
    reading = DataPass(
        batches, device=stock.device, dtype=stock.dtype, limit=limit, progress=progress, what="measuring activations"
    )
    for batch in reading:
        watch.run(batch)
    for collector in collectors:
        collector.record(tensors, info)
    return reading


def _require_readable(checkpoint: Checkpoint, data: Data | None) -> None:
    """Refuse images for a model of texts and the other way round, before the model is loaded."""
    if data is None or data.kind == "batches" or (own := task_of(checkpoint.config)) is None:
        return
    reads = "images" if own == "image" else "texts"
    if (data.kind == "images") != (reads == "images"):
        raise RequestError(
            f"Measuring {checkpoint.name} on {data.name}: the model reads {reads} and the data does not hold any. Name "
            f"data of {reads}."
        )


def _weights(stock: StockModel, only: str | None) -> set[str] | None:
    if only is None:
        return None
    try:
        pattern = NamePattern(only)
    except ValueError as error:
        raise RequestError(
            f"Choosing weights: '{only}' is not a pattern ({error}). Part of a name is enough, as in q_proj."
        ) from error
    names = {*(m.weight for m in stock.maps), *stock.checkpoint.tensors}
    chosen = {name for name in names if pattern.search(name)}
    if not chosen:
        raise RequestError(
            f"Choosing weights of {stock.checkpoint.name}: no name contains '{only}'. Its names are like "
            f"{name_some(sorted(m.weight for m in stock.maps), 3)}."
        )
    return chosen


def _tensors(stock: StockModel, only: str | None) -> set[str] | None:
    """Tensors of the checkpoint that the pattern names; None for all. A table that is not stored is the one it is tied
    to."""
    chosen = _weights(stock, only)
    if chosen is None:
        return None
    tied = {stock.layout.on_disk[source] for name, source in stock.layout.ties.items() if name in chosen}
    stored = (chosen | tied) & stock.checkpoint.tensors.keys()
    parameters = {name for name, _ in stock.module.named_parameters(remove_duplicate=False)}
    in_memory = [stock.layout.in_memory.get(name) for name in stored]  # None: part of a parameter
    if not any(name is None or name in parameters for name in in_memory):
        raise RequestError(
            f"Measuring Fisher information of {stock.checkpoint.name}: no name of a parameter contains '{only}', only "
            f"{name_some(sorted(stored or chosen))}. Name weights."
        )
    return stored


# --- what one pass over activations sums up: each listens while the model runs, then enters its sums ------------------
class GramCollector:
    """Σ x xᵀ and Σ x of every linear map's input. Maps that read the same tensor share one matrix."""

    def __init__(self, watch: ActivationWatch, weights: Collection[str] | None = None) -> None:
        self.sums: dict[str, GramSums] = {}
        self.maps: dict[str, LinearMap] = {}
        self._watch, self._same = watch, SameInput()
        for linear in watch.stock.maps:
            if weights is None or linear.weight in weights:
                self.maps[linear.weight] = linear
                self._listen(linear)
        self.maps |= listen_to_experts(watch, self._add, weights)

    def _listen(self, linear: LinearMap) -> None:
        def look(module: nn.Module, given: Tensor, made: Tensor) -> Tensor | None:
            own = self._same.owner(linear.weight, given) == linear.weight
            return linear.rows_in(module, given) if own else None

        self._watch.listen(linear.module, linear.weight, look, lambda rows: self._add(linear.weight, rows))

    def _add(self, name: str, rows: Tensor) -> None:
        self.sums.setdefault(name, GramSums()).add(rows)

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        tensors |= {f"gram:{name}": sums.product for name, sums in self.sums.items()}
        tensors |= {f"sum:{name}": sums.total for name, sums in self.sums.items()}
        info["maps"] = {
            weight: self._described(linear, owner)
            for weight, linear in self.maps.items()
            if (owner := self._same.owner_of.get(weight, weight)) in self.sums
        }

    def _described(self, linear: LinearMap, owner: str) -> dict[str, Any]:
        entry: dict[str, Any] = {"count": self.sums[owner].count, "transposed": linear.transposed}
        if linear.bias is not None:
            entry["bias"] = linear.bias
        return entry | ({"same": owner} if owner != linear.weight else {})


class MomentCollector:
    """Σ x xᵀ and Σ x at every site of the specification."""

    def __init__(self, watch: ActivationWatch) -> None:
        self.sums: dict[str, GramSums] = {}
        for name, site in sites_of(describe(watch.stock.checkpoint), watch.stock).items():
            sums = self.sums[name] = GramSums(site.width)
            watch.listen(site.module, name, site.values, sums.add)

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        seen = {name: sums for name, sums in self.sums.items() if sums.count}
        tensors |= {f"moment:{name}": sums.product for name, sums in seen.items()}
        tensors |= {f"moment_sum:{name}": sums.total for name, sums in seen.items()}
        info["sites"] = {name: {"count": sums.count} for name, sums in seen.items()}


class UnitCollector:
    """Σ y and Σ y² of every linear map's outputs."""

    def __init__(self, watch: ActivationWatch, weights: Collection[str] | None = None) -> None:
        self.sums: dict[str, UnitSums] = {}
        for linear in watch.stock.maps:
            if weights is None or linear.weight in weights:
                sums = self.sums[linear.weight] = UnitSums()
                watch.listen(
                    linear.module, linear.weight, lambda module, given, made: outputs_as_rows(module, made), sums.add
                )

    def record(self, tensors: dict[str, Tensor], info: dict[str, Any]) -> None:
        seen = {name: sums for name, sums in self.sums.items() if sums.count}
        tensors |= {f"unit_sum:{name}": sums.total for name, sums in seen.items()}
        tensors |= {f"unit_squares:{name}": sums.squares for name, sums in seen.items()}
        info["units"] = {name: {"count": int(sums.count)} for name, sums in seen.items()}
