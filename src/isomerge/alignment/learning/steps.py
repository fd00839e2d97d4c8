"""Learn an alignment further: steps of Adam from what the sweep found, and the best point on inputs held out."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from isomerge.alignment.compatibility import require_one_stream
from isomerge.alignment.learning.gains import LearnedGains
from isomerge.alignment.learning.learned_transform import LearnedTransform
from isomerge.alignment.learning.path_loss import PathLoss
from isomerge.alignment.learning.path_model import PathModel
from isomerge.alignment.preparation import PreparedModel
from isomerge.alignment.result import Alignment
from isomerge.checkpoint import Checkpoint
from isomerge.checkpoint.base import Progress
from isomerge.data import open_data
from isomerge.data.base import Batch, Batches
from isomerge.errors import RequestError
from isomerge.running.passes import DataPass, examples_in
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.transform import Transform
from isomerge.threads import Run, parallel

RATES = {"turn": 0.01, "change": 0.03, "modulus": 0.03, "phase": 0.03, "size": 0.03, "gain": 0.1, "scores": 0.02}
"""The first step of each kind of parameter: entries of matrices near the identity, logarithms, radians, cosines."""
BETAS = (0.9, 0.99)
WARM_UP = 20
SPREAD = 0.05
"""Steps look at shares drawn from ½ ± this."""
LOOKS = 5
"""How often the midpoint is measured on inputs held out."""
HELD_OUT = 8
"""One batch of so many is held out …"""
MOST_HELD_OUT = 8
"""… and at most so many."""
MOST_DATA = 1 << 30
"""Bytes of inputs that are kept to learn from."""
UNCHANGED = 1e-3
"""As much may the scores of the moved source differ from its own, in float32."""


@dataclass
class LearnRequest:
    """What the user asked for."""

    steps: int
    data: Any
    limit: int | None = None
    seed: int = 0
    device: str = "cpu"
    threads: int | None = None
    progress: Progress | None = None
    towards: str = "predictions"

    def batches(self, anchor: Checkpoint) -> tuple[list[Batch], list[Batch], list[str]]:
        """Inputs to learn from, inputs to judge by, and what to know about them."""
        labels = self.towards == "labels"
        opened = None if callable(self.data) else open_data(self.data)
        given = self.data if opened is None else opened.passes(anchor, limit=self.limit, labels=labels)
        return gathered(given, self.limit, self.device, labels=labels)


def learned(alignment: Alignment, request: LearnRequest) -> Alignment:
    """The alignment with its transform learned further, or as it was where that did not help; the notes say which."""
    if not alignment.transform.elements:
        note = "nothing was learned: no space of these models moves"
        return replace(alignment, solver_notes=[*alignment.solver_notes, note])
    anchor = alignment.anchor
    assert anchor is not None
    act = f"Aligning {alignment.source.name} with learn={request.steps}"
    require_one_stream(anchor.architecture, act, "Leave learn out.", keys=("learn",))
    with parallel(request.threads) as run:
        sides = [_prepared(model, alignment, run) for model in (alignment.source, anchor)]
    start = _in_balance(sides, alignment.transform)
    gains = None if alignment.fragile else LearnedGains(sides[1].canonical, sides[1].balance, request.device)
    path = PathModel(anchor, _ends(sides, start, {} if gains is None else gains.means), request.device)
    train, held_out, notes = request.batches(anchor.checkpoint)
    moving = _learning(alignment)
    transform = LearnedTransform(
        start.spaces, moving, anchor.layouts, (path.ends[0], path.ends[1]), request.device, gains
    )
    search = Search(PathLoss(path, labels=request.towards == "labels"), transform, held_out, request)
    before, after = search.run(train)
    record: dict[str, Any] = {
        "steps": request.steps, "towards": request.towards, "seed": request.seed, "batches": len(train),
        "held_out": len(held_out),
        "loss_before": before, "loss_after": min(before, after), "kept": False, "change_at_end": None,
    }  # fmt: skip
    found = _restricted(_out_of_balance(sides, start.then(transform.exact())), alignment.transform)
    if after < before:
        record["change_at_end"] = search.change_at_end()
        record["kept"] = record["change_at_end"] <= UNCHANGED and _is_member(found)
    told = replace(alignment, learned=record, solver_notes=[*alignment.solver_notes, *notes, _told(record)])
    if not record["kept"]:
        return told
    gauge = None if gains is None or not gains.folds else gains.gauge(alignment.anchor_gauge())
    return replace(told, transform=found, gauge=gauge)


def _learning(alignment: Alignment) -> list[str]:
    """What moves and learns. Orders do where nothing else may move: beside rotations, changing them costs more than it
    gives, as every change undoes what the rotations have learned for the units in their old places."""
    spaces, moving = alignment.transform.spaces, alignment.transform.elements
    smooth = [space for space in moving if not spaces[space].reorders]
    return smooth if any(spaces[space].element == "matrix" for space in smooth) else list(moving)


def _told(record: dict[str, Any]) -> str:
    before, steps = record["loss_before"], record["steps"]
    if not record["kept"]:
        return f"learned for {steps} steps, which helped nothing on inputs held out ({before:.4f}): the start is kept"
    what = "loss is {:.4f}" if record["towards"] == "labels" else "predictions are {:.4f} from the models' own"
    now, change = what.format(record["loss_after"]), "was" if record["towards"] == "labels" else "were"
    return f"learned for {steps} steps: on inputs held out the midpoint's {now}, and {change} {before:.4f} before"


# --- coordinates ------------------------------------------------------------------------------------------------------
def _prepared(model: BoundModel, alignment: Alignment, run: Run) -> PreparedModel:
    """Canonical and balanced as far as the alignment moves it, so that the mean of both is that of the files."""
    moving, scope = alignment.transform.elements, alignment.scope
    prepared = PreparedModel(model, moving, gauges=scope.gauges, precision=torch.float64)
    if scope.gauges and scope.rescales:
        prepared.balance_spaces(moving, run)
    return prepared


def _in_balance(sides: Sequence[PreparedModel], transform: Transform) -> Transform:
    """The transform between the balanced forms, where no direction of a head is larger than another for no reason."""
    return sides[0].balance.inverse().then(transform).then(sides[1].balance)


def _out_of_balance(sides: Sequence[PreparedModel], transform: Transform) -> Transform:
    return sides[0].balance.then(transform).then(sides[1].balance.inverse())


def _ends(
    sides: Sequence[PreparedModel], start: Transform, means: Mapping[str, Tensor]
) -> tuple[dict[str, Tensor], dict[str, Tensor]]:
    """The anchor with its readers' means, and the source moved by the start, by the specification's names."""
    source, anchor = sides
    moved = {name: start.act(source.tensor(name), layout) for name, layout in source.model.layouts.items()}
    return {name: anchor.tensor(name) + means.get(name, 0) for name in anchor.model.layouts}, moved


def _restricted(found: Transform, known: Transform) -> Transform:
    return Transform(known.spaces, {s: found.elements[s].contiguous() for s in known.elements}).without_identities()


def _is_member(transform: Transform) -> bool:
    return all(transform.spaces[space].contains(element) for space, element in transform.elements.items())


# --- data -------------------------------------------------------------------------------------------------------------
def gathered(
    batches: Batches, limit: int | None, device: str, *, labels: bool = False
) -> tuple[list[Batch], list[Batch], list[str]]:
    """Batches to learn from and batches held out, on the device; more than fits is left out, and that is noted."""
    found: list[Batch] = []
    used, notes = 0, []
    for batch in DataPass(batches, device=device, dtype=torch.float32, limit=limit, labels=labels, hashed=False):
        if labels and "labels" not in batch:
            raise RequestError(
                "Learning an alignment towards labels: the data have none. Name their column or folder, or learn "
                "towards the predictions of the two models, which needs none.",
                keys=("data", "learn_towards"),
            )
        used += sum(tensor.nbytes for tensor in batch.values())
        if found and used > MOST_DATA:
            notes.append(f"learned from the first {sum(map(examples_in, found)):,} examples: more are not kept")
            break
        found.append(batch)
    train, held_out = divided(found)
    return train, held_out[:: math.ceil(len(held_out) / MOST_HELD_OUT)], notes


def divided(batches: Sequence[Batch]) -> tuple[list[Batch], list[Batch]]:
    """One batch of eight is held out; of few batches, one example of eight of each."""
    if len(batches) >= HELD_OUT:
        chosen = range(HELD_OUT - 1, len(batches), HELD_OUT)
        return [b for n, b in enumerate(batches) if n not in chosen], [batches[n] for n in chosen]
    if sum(map(examples_in, batches)) < 2 * HELD_OUT:
        raise RequestError(
            f"Learning an alignment: {sum(map(examples_in, batches))} examples are too few to learn from and to judge "
            f"by. Give at least {2 * HELD_OUT}.",
            keys=("data", "limit"),
        )
    sizes = [math.ceil(examples_in(batch) / HELD_OUT) for batch in batches]
    train = [{k: v[n:] for k, v in b.items()} for b, n in zip(batches, sizes, strict=True)]
    held_out = [{k: v[:n] for k, v in b.items()} for b, n in zip(batches, sizes, strict=True)]
    return [batch for batch in train if examples_in(batch)], held_out


def shuffled(batches: Sequence[Batch], seed: int) -> Iterator[Batch]:
    """Over and over, each time in another order; the same orders for a seed."""
    draw = torch.Generator().manual_seed(seed)
    while True:
        for place in torch.randperm(len(batches), generator=draw).tolist():
            yield batches[place]


# --- steps ------------------------------------------------------------------------------------------------------------
@dataclass
class Search:
    """Steps from the identity, and the best point so far on inputs held out."""

    loss: PathLoss
    transform: LearnedTransform
    held_out: Sequence[Batch]
    request: LearnRequest

    def run(self, train: Sequence[Batch]) -> tuple[float, float]:
        """The midpoint's loss on inputs held out, before and at the best point; the transform is left at that."""
        steps, draw = self.request.steps, torch.Generator().manual_seed(self.request.seed)
        parameters = list(self.transform.parameters())
        optimiser = torch.optim.Adam([{"params": [p], "first": RATES[n]} for _, n, p in parameters], betas=BETAS)
        before = best = self.loss.mean(self.held_out, None)
        state = self.transform.state()
        looks = {round(steps * (look + 1) / LOOKS) for look in range(LOOKS)}
        for step, batch in enumerate(itertools.islice(shuffled(train, self.request.seed), steps)):
            share = 0.5 * (1 + math.cos(math.pi * step / steps)) * min(1.0, (step + 1) / WARM_UP)
            for group in optimiser.param_groups:
                group["lr"] = group["first"] * share
            between = 0.5 + SPREAD * (2 * float(torch.rand((), generator=draw)) - 1)
            with torch.enable_grad():
                value = self.loss.of(batch, between, self.transform.now(), quick=True)
            optimiser.zero_grad(set_to_none=True)
            value.backward()
            optimiser.step()
            for order in self.transform.orders.values():
                order.step(step + 1, steps, look=step + 1 in looks)
            if step + 1 in looks and (now := self._look()) < best:
                best, state = now, self.transform.state()
            if self.request.progress:
                self.request.progress(step + 1, steps, "learning")
        self.transform.restore(state)
        return before, best

    @torch.no_grad()
    def _look(self) -> float:
        return self.loss.mean(self.held_out, self.transform.now())

    @torch.no_grad()
    def change_at_end(self) -> float:
        return self.loss.change_at_end(self.held_out[0], self.transform.now())
