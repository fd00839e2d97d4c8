"""Figure 3: the Euclidean distance of two models after different ways of matching them.

python benchmarks/paper/figure3.py --scale small --data DATA --work DIR
"""

from __future__ import annotations

import math
from functools import partial
from typing import TYPE_CHECKING, Any

from crew import shared, side_by_side
from merges import Pair, matched
from runner import Mean, Plot, Result, Run, Table, main
from vision import Vision

if TYPE_CHECKING:
    from fusing import State

NOTHING = "no matching"
KEPT = "weight matching, the stream kept"
PAPERS = ("rotation (attention)", "rotation (attention), with scales")
WAYS: dict[str, dict[str, Any] | None] = {
    NOTHING: None,
    "Git Re-Basin, weight matching": {"level": "permutation"},
    "Git Re-Basin, activation matching": {
        "level": "permutation", "data": True, "evidence": "activations", "measure": "l2",
    },
    KEPT: {"level": "permutation", "layers": "all"},
    "OT fusion, feed-forwards": {"transported": True},
    PAPERS[0]: {"level": "rotation", "only": "attention"},
    PAPERS[1]: {"level": "rotation", "only": "attention", "scale": True},
    "rotation, feed-forwards too": {"level": "rotation"},
    "rotation, feed-forwards too, with scales": {"level": "rotation", "scale": True},
    "full": {"level": "full"},
}  # fmt: skip
PERMUTING = ("Git Re-Basin, weight matching", "Git Re-Basin, activation matching", "OT fusion, feed-forwards")


def script(run: Run) -> Result:
    vision = Vision(run)
    run.note("The distance is that of all weights of the two models, the anchor as it was trained.")
    run.note(
        "Git Re-Basin matches heads and the units inside them together here, and the residual stream weighs every part "
        "the same; it is the level `permutation`, from weights or from activations."
    )
    run.note("OT fusion is applied to feed-forwards only, as in the paper, by activations with hard plans.")
    run.note("The level `full` also moves the residual stream, scales and norm gains, which the paper leaves alone.")
    if shared() and not run.dry:  # every pair in a process of its own; what follows finds its cells
        missing = [pair for pair in vision.pairs if not all(run.known(key(name, pair)) for name in WAYS)]
        if missing and not run.finished:
            _ = vision.images  # decoded and kept before processes want them
        side_by_side(run, measure_pair, [(run, pair) for pair in missing])
    found = {name: distances(vision, name) for name in WAYS}
    before = found[NOTHING]
    rows: list[list[str | Mean]] = [[name, value, relative(value, before)] for name, value in found.items()]
    table = Table("Distance of the moved model from the anchor", ["matching", "distance", "of no matching"], rows)
    plot = Plot(
        "Euclidean distance of the end models",
        list(found),
        {"distance": [value.mean for value in found.values()]},
        kind="bars",
        errors={"distance": [value.error for value in found.values()]},
    )
    return Result([table], [plot], [] if run.dry else claims(found))


def measure_pair(job: tuple[Run, Pair]) -> None:
    """Every way for one pair, into the cells."""
    run, pair = job
    vision = Vision(run)
    for name in WAYS:
        measure(vision, name, pair)


def distances(vision: Vision, name: str) -> Mean:
    return Mean([measure(vision, name, pair)["distance"] for pair in vision.pairs], 2)


def measure(vision: Vision, name: str, pair: Pair) -> dict[str, Any]:
    return vision.run.cell(key(name, pair), partial(one, vision, pair, name))


def key(name: str, pair: Pair) -> str:
    return f"{name} {pair[0]}-{pair[1]}"


def one(vision: Vision, pair: Pair, name: str) -> dict[str, float]:
    options = WAYS[name]
    if options is not None and "layers" in options:  # naming layers leaves the residual stream alone
        options = {**options, "layers": f"0-{vision.layers - 1}"}
    if options is not None and options.get("transported"):
        state = carried(vision, pair)
    else:
        moved = matched(vision, pair, options)[1]
        state = {name: moved.read(name) for name in moved.tensors}
    return {"distance": distance(state, vision.state(pair[0]))}


def carried(vision: Vision, pair: Pair) -> State:
    """The second model in the units of the first, alone."""
    import isomerge

    anchor, source = matched(vision, pair, None)
    batches = vision.batches(vision.counts.transport)
    found = isomerge.merge(
        [anchor, source], method="ot_fusion", weights=[0, 1], data=batches, only="ffn", device=vision.run.device
    )
    return found.state_dict()


def distance(state: State, other: State) -> float:
    squares = [
        float((state[name].double() - tensor.double()).square().sum())
        for name, tensor in other.items()
        if tensor.is_floating_point()
    ]
    return math.sqrt(math.fsum(squares))


def relative(value: Mean, before: Mean) -> Mean:
    pairs = zip(value.values, before.values, strict=True)
    return Mean([100 * a / b for a, b in pairs if a is not None and b], 2, " %")


def claims(found: dict[str, Mean]) -> list[str]:
    before = found[NOTHING]
    best = min(PERMUTING, key=lambda name: found[name].mean)
    rotation, scaled = (found[name] for name in PAPERS)
    whole = found["rotation, feed-forwards too"]
    nearer = {True: "held", False: "did not hold"}
    return [
        f"Rotation brings models nearer than permutation: {nearer[rotation.mean < found[best].mean]} for attention "
        f"alone and {nearer[whole.mean < found[best].mean]} with feed-forwards too; of the distance as trained they "
        f"leave {relative(rotation, before)} and {relative(whole, before)}, the best permutation ({best}) "
        f"{relative(found[best], before)}.",
        f"With the residual stream kept, as rotation keeps it: {nearer[whole.mean < found[KEPT].mean]}; rotation with "
        f"feed-forwards leaves {relative(whole, before)}, permutation {relative(found[KEPT], before)}.",
        f"Scales bring them nearer still: {nearer[scaled.mean < rotation.mean]}; from {before.mean:.6g} to "
        f"{rotation.mean:.6g} without and {scaled.mean:.6g} with them (attention alone).",
        f"The level `full` leaves {relative(found['full'], before)}.",
    ]


if __name__ == "__main__":
    main("figure3", "How near matching brings two models", "Figure 3 of the founding paper", script)
