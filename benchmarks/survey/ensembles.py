"""Ensembles: what several models predict together

Three image classifiers trained apart (40 epochs each), combined in every way; weights and stack are fitted on 600
validation images. Snapshots: one training of 40 epochs whose rate falls to zero and restarts three times, each end a
member. Fast geometric: 16 more epochs from one of the three, the rate up and down in a triangle, a member at each low.
Members: how many models an answer takes; epochs: of all training together. The merges into one model are the control.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from setting import Models, Row, fit, loaded, main, new_model, rows_of

import isomerge

EPOCHS, CYCLES = 40, 4
HIGH, LOW, LENGTH = 1e-3, 1e-5, 4
"""Of a triangle: its rates, and its length in epochs."""
COMBINATIONS = ("probability", "logit", "vote", "weighted", "stacked")


def rows(models: Models, seed: int) -> Iterator[Row]:
    apart = [str(folder) for folder in models.strangers]
    yield {"row": "one model (mean)", **mean_score(models, apart), "members": 1, "epochs": EPOCHS}
    for name, align in (("plain mean", False), ("aligned mean", True)):
        out = models.folder / name
        isomerge.merge(apart, align=align).save(out, report=False, lock=False)
        yield {"row": f"control: {name}", **models.score(out), "members": 1, "epochs": EPOCHS * len(apart)}
    for way in COMBINATIONS:
        held_out = models.data("validation") if way in ("weighted", "stacked") else None
        found = isomerge.ensemble(apart, models.data("test"), combination=way, held_out=held_out)
        yield {"row": f"trained apart: {way}", **scored(found), "members": len(apart), "epochs": EPOCHS * len(apart)}
    for name, run, epochs in (
        ("snapshots", snapshots(models, seed), EPOCHS),
        ("fast geometric", fast_geometric(models, seed), EPOCHS + CYCLES * LENGTH),
    ):
        found = isomerge.ensemble([str(run)], models.data("test"))
        last = models.score(run / f"checkpoint-{CYCLES}")
        yield {"row": f"{name}: the last alone", **last, "members": 1, "epochs": epochs}
        yield {"row": f"{name}: probability", **scored(found), "members": CYCLES, "epochs": epochs}
        out = models.folder / f"mean of {name}"
        steps = [str(run / f"checkpoint-{step}") for step in range(1, CYCLES + 1)]
        isomerge.merge(steps).save(out, report=False, lock=False)
        yield {"row": f"control: plain mean of {name}", **models.score(out), "members": 1, "epochs": epochs}


def scored(found: Any) -> dict[str, float]:
    return {"accuracy": 100 * found.ensemble["metric"], "loss": found.ensemble["loss"]}


def mean_score(models: Models, folders: list[str]) -> dict[str, float]:
    scores = [models.score(folder) for folder in folders]
    return {key: sum(score[key] for score in scores) / len(scores) for key in scores[0]}


def training_data(models: Models) -> Any:
    return rows_of({"pixel_values": models.pixels["train"], "labels": models.labels["train"]}, 32)


def snapshots(models: Models, seed: int) -> Path:
    """A cosine to zero four times over, in as many epochs as one model has."""
    run, model = models.folder / "snapshots", new_model(100 * seed)
    for cycle in range(1, CYCLES + 1):
        fit(model, training_data(models), EPOCHS // CYCLES, 2e-3, 10 * seed + cycle)
        model.save_pretrained(run / f"checkpoint-{cycle}")
    return run


def fast_geometric(models: Models, seed: int) -> Path:
    """The rate falls from HIGH to LOW and rises again; the model at each low is one."""
    run, model = models.folder / "fast geometric", loaded(models.strangers[0]).train()
    batches, generator = training_data(models), torch.Generator().manual_seed(seed)
    steps = LENGTH * sum(1 for _ in batches(torch.Generator()))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1.0, weight_decay=0.1)
    half = steps // 2
    schedule = torch.optim.lr_scheduler.LambdaLR(
        optimizer, lambda step: LOW + (HIGH - LOW) * abs(step % steps - half) / half
    )
    done = 0
    for _ in range(CYCLES * LENGTH):
        for batch in batches(generator):
            optimizer.zero_grad()
            model(**batch).loss.backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            done += 1
            if done % steps == half:
                model.save_pretrained(run / f"checkpoint-{done // steps + 1}")
    return run


if __name__ == "__main__":
    main(__doc__, rows, (("accuracy", 1), ("loss", 3), ("members", 0), ("epochs", 0)), strangers=3)
