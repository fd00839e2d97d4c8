"""Averages along a training run

One run of 30 epochs at a constant learning rate, stored after every epoch; averages of its last ten checkpoints or of
its steps; and, as control, the same run with a learning rate that decays. Lookahead has a run of its own, with the same
images in the same order. Populations have three members from one initialisation that see other orders of the images;
they cost three times as much training. The validation images choose where something is chosen.

When to use it: after a constant learning rate any mean of the last checkpoints is worth a decay (2 to 3 points above
the last checkpoint), and which mean makes no difference that three seeds show. Choosing the window on validation or
averaging predictions lowers the loss a little. A population gains half a point more, for three times the training.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from setting import Models, Row, main, new_model
from torch import Tensor
from torch.utils.data import IterableDataset

import isomerge
from isomerge.training import (
    AverageCheckpoints,
    Lookahead,
    PopulationAverage,
    ValidationWindow,
    hierarchical_average,
)

EPOCHS, SIZE, RATE, LAST, DRAWS, MEMBERS = 30, 32, 2e-3, 10, 8, 3


class Images(IterableDataset[dict[str, Tensor]]):
    """The training images, in another order every epoch."""

    def __init__(self, models: Models, order: int) -> None:
        self.pixels, self.labels, self.order = models.pixels["train"], models.labels["train"], order

    @property
    def steps(self) -> int:
        return len(self.labels) // SIZE

    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        draw = torch.Generator().manual_seed(self.order)
        for _ in range(EPOCHS):
            for number in torch.randperm(len(self.labels), generator=draw)[: self.steps * SIZE].tolist():
                yield {"pixel_values": self.pixels[number], "labels": self.labels[number]}


def trainer(
    models: Models, folder: Path, seed: int, *callbacks: Any, order: int = 0, schedule: str = "constant", decay: int = 0
) -> Any:
    """A stock Trainer that writes a checkpoint and evaluates after every epoch."""
    from transformers import PrinterCallback, Trainer, TrainingArguments

    data = Images(models, 1000 * seed + order)
    held_out = [
        {"pixel_values": x, "labels": y}
        for x, y in zip(models.pixels["validation"], models.labels["validation"], strict=True)
    ]
    settings = TrainingArguments(
        output_dir=str(folder), per_device_train_batch_size=SIZE, per_device_eval_batch_size=600, report_to=[],
        max_steps=EPOCHS * data.steps, learning_rate=RATE, weight_decay=0.1, lr_scheduler_type=schedule,
        lr_scheduler_kwargs={"num_decay_steps": decay * data.steps, "decay_type": "linear"} if decay else {},
        save_strategy="steps", save_steps=data.steps, save_only_model=True, eval_strategy="steps",
        eval_steps=data.steps, logging_strategy="no", disable_tqdm=True, use_cpu=True,
    )  # fmt: skip
    made = Trainer(
        new_model(100 * seed), settings, train_dataset=data, eval_dataset=held_out, callbacks=list(callbacks)
    )
    made.remove_callback(PrinterCallback)
    return made


def train(*run: Any, **how: Any) -> Path:
    """The folder of a run; what it ended with is in `end`."""
    made = trainer(*run, **how)
    made.train()
    made.save_model(str(run[1] / "end"))
    return Path(run[1])


def checkpoints(folder: Path) -> list[Path]:
    """Oldest first."""
    return sorted(folder.glob("checkpoint-*"), key=lambda path: int(path.name.partition("-")[2]))


def population(models: Models, folder: Path, seed: int, callbacks: Any) -> list[Path]:
    """Members side by side, in threads; their Trainers are made before any starts."""
    made = [
        trainer(models, folder / f"run-{n}", seed, *callbacks(folder / "shared", str(n)), order=n)
        for n in range(MEMBERS)
    ]
    threads = [threading.Thread(target=one.train) for one in made]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    for one in made:
        one.save_model(f"{one.args.output_dir}/end")
    return [Path(one.args.output_dir) for one in made]


def rows(models: Models, seed: int) -> Iterator[Row]:
    ema = AverageCheckpoints("ema", every=1, decay=0.99, out=models.folder / "ema")
    window = ValidationWindow(out=models.folder / "window")
    run = train(models, models.folder / "run", seed, ema, window)
    every = checkpoints(run)
    yield {"row": "last checkpoint", **models.score(every[-1])}
    best = min(every, key=lambda folder: models.score(folder, "validation")["loss"])
    yield {"row": "best checkpoint on validation", **models.score(best)}
    yield from stored(models, every)
    yield {"row": "EMA of every step (0.99)", **models.score(models.folder / "ema")}
    yield {"row": "SWAD of every step", **models.score(models.folder / "window")}
    slow = train(models, models.folder / "lookahead", seed, Lookahead(every=5, share=0.5))
    yield {"row": "Lookahead (5, 0.5)", **models.score(slow / "end")}
    yield {"row": "control: decay over the last ten epochs", **models.score(
        train(models, models.folder / "decay", seed, schedule="warmup_stable_decay", decay=LAST) / "end"
    )}  # fmt: skip
    yield {"row": "control: cosine decay over all epochs", **models.score(
        train(models, models.folder / "cosine", seed, schedule="cosine") / "end"
    )}  # fmt: skip
    yield from populations(models, seed)


def stored(models: Models, every: Sequence[Path]) -> Iterator[Row]:
    """What is made of the checkpoints on disk."""
    last = [str(folder) for folder in every[-LAST:]]
    labelled = {"data": models.data("validation")}
    ways: dict[str, dict[str, Any]] = {
        "mean of the last ten (LAWA, SWA, SWAG's mean)": {"method": "lawa", "window": LAST},
        "EMA of the checkpoints (0.9)": {"method": "ema"},
        "WSM, 1 − √u": {"method": "wsm"},
        "WSM, cosine": {"method": "wsm", "cosine": True},
        "WSM, 1 − u²": {"method": "wsm", "power": 2.0},
        "TWA on the training images": {"method": "twa", "data": models.data("train")},
        "TWA on validation": {"method": "twa", **labelled},
    }
    for name, options in ways.items():
        yield {"row": name, **models.score(merged(models, last, **options))}
    yield {
        "row": "SWAD of the checkpoints",
        **models.score(merged(models, list(map(str, every)), method="swad", **labelled)),
    }
    draws = [merged(models, last, method="swag", rank=LAST, seed=number) for number in range(DRAWS)]
    scores = [models.score(draw) for draw in draws]
    yield {"row": "SWAG, one draw (mean of 8)", **{key: sum(s[key] for s in scores) / DRAWS for key in scores[0]}}
    yield {"row": "SWAG, mean prediction of 8 draws", **together(models, draws)}
    yield {"row": "mean prediction of the last ten", **together(models, list(map(Path, last)))}


def populations(models: Models, seed: int) -> Iterator[Row]:
    ways: dict[str, Any] = {
        "three apart": lambda folder, name: [],
        "PAPA (0.1 every 10 steps)": lambda folder, name: [
            PopulationAverage(folder, name, MEMBERS, every=10, pull=0.1)
        ],
        "HWA (every epoch, last ten)": lambda folder, name: hierarchical_average(
            folder, name, MEMBERS, every=len(models.labels["train"]) // SIZE, window=LAST
        ),
    }
    for name, callbacks in ways.items():
        runs = population(models, models.folder / name, seed, callbacks)
        ends = [run / "end" for run in runs]
        scores = [models.score(end) for end in ends]
        yield {"row": f"{name}: one member", **{key: sum(s[key] for s in scores) / MEMBERS for key in scores[0]}}
        if name.startswith("HWA"):
            yield {"row": f"{name}: its average", **models.score(runs[0] / "averaged")}
        else:
            yield {"row": f"{name}: mean of the members", **models.score(merged(models, list(map(str, ends))))}
            yield {"row": f"{name}: their mean prediction", **together(models, ends)}


def merged(models: Models, folders: Sequence[str], **options: Any) -> Path:
    out = models.folder / f"merged-{len(list(models.folder.glob('merged-*')))}"
    isomerge.merge(folders, **options).save(out, report=False, lock=False)
    return out


def together(models: Models, folders: Sequence[Path]) -> dict[str, float]:
    mean = torch.stack([models.logits(folder).softmax(-1) for folder in folders]).mean(0).log()
    loss = float(torch.nn.functional.nll_loss(mean.double(), models.labels["test"]))
    return {"accuracy": models.accuracy(mean), "loss": loss}


if __name__ == "__main__":
    main(__doc__, rows, strangers=0, siblings=0)
