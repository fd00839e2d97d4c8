"""Figure 4 with models trained apart: the loss of merged image classifiers when only some layers were matched.

    python benchmarks/paper/figure4_images.py --scale small --data DATA --models MODELS --work DIR

The paper's figure has models that were fine-tuned from one base. Those need hardly any matching (Table 1), so what a
layer contributes can hardly be seen there; here it can.
"""

from __future__ import annotations

import statistics
from collections.abc import Sequence
from functools import partial
from typing import Any

from figure4 import by_way, mixed, report_of
from merges import Pair, matched, simple
from runner import Result, Run, main
from vision import Vision

MATCHING = {"level": "rotation", "only": "attention"}


def script(run: Run) -> Result:
    vision = Vision(run)
    found = [run.cell(f"pair {a}-{b}", partial(measure, vision, (a, b))) for a, b in vision.pairs]
    losses = [cell["losses"] for cell in found if "losses" in cell]  # else it is a dry run, or not finished
    return report_of("ViT", vision.layers, {"trained apart": losses}) if losses else Result([])


def measure(vision: Vision, pair: Pair) -> dict[str, Any]:
    plain, moved = (simple(vision, matched(vision, pair, options)) for options in (None, MATCHING))

    def loss(layers: Sequence[int]) -> float:
        return vision.judge([mixed(plain, moved, layers)])["loss"]

    parents = [vision.judge([vision.state(number)])["loss"] for number in pair]
    return {"losses": {"parent": statistics.mean(parents), **by_way(loss, vision.layers)}}


if __name__ == "__main__":
    about = "Matching a subset of layers, of models trained apart"
    main("figure4_images", about, "Figure 4 of the founding paper", script)
