"""Units of several models become units of one

Two image classifiers trained apart, and a wider one of the same depth (stream 96 instead of 64). Zipping, matching to
units that may become more, and plans by inner geometry, beside the plain mean, the mean after alignment, optimal
transport by common activations, and merging by features (which needs heads of one size, so not in the last rows). Data:
the 697 training images, without labels. `units` is the width of the feed-forwards.

When to use them: for models trained apart, `reconstruct` is better than any of these. After an alignment, none of the
matchings is clearly better than the aligned mean; they are for models that lack an alignment (`ot_fusion`), for other
widths, for several tasks in one body (`zipit`, outputs apart) and for room to keep units without a partner (`pfnm`).
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from setting import Models, Row, main, new_model, trained

import isomerge

ONE_WIDTH: Mapping[str, Mapping[str, Any]] = {
    "plain mean": {"method": "linear"},
    "aligned mean": {"method": "linear", "align": True},
    "ot_fusion": {"method": "ot_fusion"},
    "ot_fusion, gromov": {"method": "ot_fusion", "solver": "gromov"},
    "ot_fusion, gromov, inner 0.5": {"method": "ot_fusion", "solver": "gromov", "inner": 0.5},
    "ot_fusion, gromov, barycentre": {"method": "ot_fusion", "solver": "gromov", "towards": "barycentre"},
    "aligned, zipit": {"method": "zipit", "align": True},
    "aligned, zipit across models only": {"method": "zipit", "align": True, "within": 0, "repeats": 0},
    "aligned, zipit up to the first layer": {"method": "zipit", "align": True, "up_to": 1},
    "zipit without alignment": {"method": "zipit"},
    "aligned, fedma, no more units": {"method": "fedma", "align": True, "largest": 1},
    "aligned, fedma": {"method": "fedma", "align": True},
    "aligned, pfnm": {"method": "pfnm", "align": True},
    "aligned, pfnm, full strength": {"method": "pfnm", "align": True, "strength": "full"},
    "reconstruct": {"method": "reconstruct"},
}
TWO_WIDTHS: Mapping[str, Mapping[str, Any]] = {
    "ot_fusion": {"method": "ot_fusion"},
    "ot_fusion, gromov": {"method": "ot_fusion", "solver": "gromov"},
    "ot_fusion, gromov, inner 0.5": {"method": "ot_fusion", "solver": "gromov", "inner": 0.5},
    "ot_fusion, gromov, barycentre": {"method": "ot_fusion", "solver": "gromov", "towards": "barycentre"},
}


def rows(models: Models, seed: int) -> Iterator[Row]:
    wide = models.folder / "wide"
    shape = {"hidden_size": 96, "intermediate_size": 192}
    trained(new_model(100 * seed + 30, **shape), models.pixels["train"], models.labels["train"], 40, 2e-3, seed, wide)
    first = models.strangers[0]
    yield measured(models, "one width: first model", first)
    yield from merged(models, "one width", models.strangers, ONE_WIDTH)
    yield measured(models, "two widths: the wider model", wide)
    yield from merged(models, "two widths", (first, wide), TWO_WIDTHS)


def merged(models: Models, kind: str, folders: Sequence[Path], ways: Mapping[str, Mapping[str, Any]]) -> Iterator[Row]:
    for number, (name, options) in enumerate(ways.items()):
        out = models.folder / f"{kind} {number}"
        data = None if options == {"method": "linear"} else models.data("train")
        isomerge.merge([str(f) for f in folders], data=data, **options).save(out, report=False, lock=False)
        yield measured(models, f"{kind}: {name}", out)


def measured(models: Models, name: str, folder: Path) -> Row:
    units = json.loads((folder / "config.json").read_text())["intermediate_size"]
    return {"row": name, **models.score(folder), "units": units}


if __name__ == "__main__":
    main(__doc__, rows, (("accuracy", 1), ("loss", 3), ("units", 0)))
