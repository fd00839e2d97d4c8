"""The image classifiers of Tables 2 and 3, Figure 3 and the plane: their weights, their data, how they are judged.

    python benchmarks/paper/vision.py --scale small --data DATA --work DIR       # only train what is missing, and judge

small     ViTs of the paper's shape, trained here on CIFAR-10 from --seeds seeds; or MODELS/vits/0, 1, … where it exists
original  the two ViTs of Imfeld et al. in MODELS/vits/0 and 1, CIFAR-10 from DATA or from the hub
reduced   tiny ViTs on scikit-learn's digits

Half of the test images (at most 2,000) choose between models; the others are what the tables report. Nothing is trained
on either.
"""

from __future__ import annotations

import itertools
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from crew import side_by_side
from runner import Mean, Result, Run, Table, main

if TYPE_CHECKING:
    from fusing import State
    from torch import Tensor
    from vit_cifar10 import Plan

    from isomerge.checkpoint.memory import MemoryCheckpoint

ARCHIVE, FOLDER = "cifar10-jpeg.tar.xz", "cifar10"
DATA_SET = "uoft-cs/cifar10"
ORIGINAL_MODELS = "github.com/graldij/transformer-fusion"
ON_CPU = 1000
"""Test images where there is no GPU: one pass of the larger models over all of them takes minutes."""
VALIDATING = (
    "Accuracies and losses are those of the test images that do not validate: half of them do, and at most 2,000, so "
    "of CIFAR-10's 10,000 the other 8,000 count."
)

Batches = Callable[[], Iterator[dict[str, "Tensor"]]]


@dataclass(frozen=True)
class Counts:
    """How many training images each way to merge may see; none of them sees a label."""

    fisher: int
    regmean: int
    transport: int
    stream: int
    reconstruct: int
    refine: int
    epochs: int


# 200 images: what Imfeld et al. take for activations. 60 epochs: about 74 % on CIFAR-10 as JPEG.
COUNTS = {
    "reduced": Counts(fisher=100, regmean=400, transport=100, stream=256, reconstruct=400, refine=20, epochs=15),
    "small": Counts(fisher=500, regmean=2000, transport=200, stream=512, reconstruct=2000, refine=200, epochs=60),
    "original": Counts(fisher=500, regmean=2000, transport=200, stream=512, reconstruct=8000, refine=200, epochs=100),
}


class Vision:
    """The models and their data. Images are read when they are first needed, so a finished run reads none."""

    def __init__(self, run: Run) -> None:
        self.run, self.counts = run, COUNTS[run.scale]
        self.kept: dict[str, tuple[list[Any], float]] = {}
        """Matched pairs that several methods start from."""
        self.statistics: dict[str, Any] = {}
        """What was measured of models that several merges begin with."""
        if run.scale == "reduced" and not run.dry:
            _one_thread()
        self.folders = [self._home / str(number) for number in range(max(2, run.seeds))]
        self.trained_here = run.scale != "original" and self._home != self._given
        run.settings["counts"] = vars(self.counts) | {"test": self._most, "models": "given" if self._given else "own"}
        self._explain()
        self._train([(folder, seed) for seed, folder in enumerate(self.folders) if self._is_missing(folder, seed)])

    # --- where things are ---------------------------------------------------------------------------------------------
    @property
    def _given(self) -> Path | None:
        """Those of --models, which are made for CIFAR-10: digits have models of their own."""
        there = self.run.models / "vits" if self.run.models and self.run.scale != "reduced" else None
        return there if there is not None and (there.is_dir() or self.run.scale == "original") else None

    @property
    def _home(self) -> Path:
        return self._given or self.run.work / f"vits-{self.run.scale}"

    @property
    def _most(self) -> int | None:
        """Test images in all; all there are if None."""
        return ON_CPU if self.run.device == "cpu" and self.run.scale != "reduced" else None

    @property
    def plan(self) -> Plan:
        from vit_cifar10 import DIGITS, Plan

        return replace(DIGITS if self.run.scale == "reduced" else Plan(), epochs=self.counts.epochs)

    @property
    def pairs(self) -> list[tuple[int, int]]:
        return list(itertools.combinations(range(len(self.folders)), 2))

    @property
    def layers(self) -> int:
        return int(self._config_or_plan["num_hidden_layers"])

    @property
    def _config_or_plan(self) -> Mapping[str, Any]:
        return self.config if (self.folders[0] / "config.json").exists() else self.plan.shape

    @cached_property
    def config(self) -> dict[str, Any]:
        return json.loads((self.folders[0] / "config.json").read_text())  # type: ignore[no-any-return]

    def _explain(self) -> None:
        run = self.run
        if run.scale == "reduced":
            run.note("Models: 2 layers of width 64 on scikit-learn's digits, instead of 7 of width 384 on CIFAR-10.")
            if run.models and (run.models / "vits").is_dir():
                run.note("The image classifiers of --models are left alone, as they are not made for digits.")
        else:
            run.note(
                "CIFAR-10 is stored as JPEG here, so accuracies cannot be compared with those on the original pixels."
                if run.scale == "small"
                else "The models are those of Imfeld et al., trained by them; the paper used the same."
            )
        if run.scale == "small":
            run.note(
                f"The models are {'those of --models' if self._given else 'trained here from different seeds'}; the "
                "paper takes those of Imfeld et al., whose weights are not on the hub."
            )
        run.note(VALIDATING)
        if self._most:
            run.note(f"Without a GPU only {self._most:,} test images are used, half of them to validate.")
        if len(self.folders) > 2:
            run.note("± is the standard error over pairs. Pairs share models, so it understates the spread.")

    def data(self) -> Path:
        """The archive or folder of images, or a sentence that says what to put where."""
        run = self.run
        if run.data is not None:
            for place in (run.data / ARCHIVE, run.data / FOLDER, run.data):
                if place.is_file() or (place / "train").is_dir():
                    return place
        elif run.scale == "original":
            return self._from_hub()
        where = f"{run.data} has neither of them" if run.data else "--data is not given"
        raise SystemExit(
            f"{run.name}: CIFAR-10 is needed, and {where}. Put {ARCHIVE}, or a folder {FOLDER}/ with "
            "train/<class>/*.png and test/<class>/*.png, into one folder and name that folder with --data."
        )

    def _from_hub(self) -> Path:
        """The data set as folders of PNG files, made once."""
        out = self.run.work / FOLDER
        if not (out / "done").exists():
            self.run.say(f"downloading {DATA_SET}")
            try:
                from datasets import load_dataset
            except ImportError as error:
                raise SystemExit(
                    f"{self.run.name}: reading {DATA_SET} needs the package 'datasets' (pip install isomerge[eval]); "
                    "or name a folder with CIFAR-10 by --data."
                ) from error
            for split, rows in load_dataset(DATA_SET).items():
                names = rows.features["label"].names
                for number, row in enumerate(rows):
                    place = out / split / names[row["label"]] / f"{number:05d}.png"
                    place.parent.mkdir(parents=True, exist_ok=True)
                    row["img"].save(place)
            (out / "done").touch()
        return out

    def _is_missing(self, folder: Path, seed: int) -> bool:
        """Whether a model has to be trained; one that cannot be is refused."""
        run = self.run
        if (folder / "model.safetensors").exists() or (folder / "pytorch_model.bin").exists():
            if run.scale == "small":
                self._require_fitting(folder)
            return False
        if run.scale == "original":
            wanted = (
                f"the two models of Imfeld et al. are not on the hub. Take the archive that the README of "
                f"{ORIGINAL_MODELS} links to, put its folders cifar10_anchor and cifar10_model into one folder as "
                "vits/0 and vits/1, and name that folder with --models"
            )
            if run.dry:
                run.say(f"would need: {wanted}; and {run.data or 'the data set ' + DATA_SET + ' from the hub'}")
                return False
            raise SystemExit(f"{run.name}: {wanted}.")
        if not self.trained_here:
            raise SystemExit(f"{run.name}: there is no model in {folder}. Put one there, or ask for fewer --seeds.")
        if run.dry:
            run.say(f"would train: {folder}, {self.plan.epochs} epochs, seed {seed}")
            return False
        return True

    def _require_fitting(self, folder: Path) -> None:
        file = folder / "config.json"
        given = json.loads(file.read_text()) if file.is_file() else {}
        told = [given.get("image_size", "not named"), given.get("num_channels", 3)]
        size, channels = (self.plan.shape[key] for key in ("image_size", "num_channels"))
        if told[0] not in (size, [size, size]) or told[1] != channels:
            raise SystemExit(
                f"{self.run.name}: the model in {folder} does not fit CIFAR-10, whose images have {size} × {size} "
                f"pixels and {channels} channels: {file} has image_size {told[0]}, num_channels {told[1]}. Put models "
                "for these images there, or leave --models out to train them."
            )

    def _train(self, missing: Sequence[tuple[Path, int]]) -> None:
        """Side by side on a GPU: one model takes about half as long as three."""
        if not missing or self.run.finished:
            return
        self.run.say(f"training {', '.join(str(folder) for folder, _ in missing)}")
        _ = self.images  # decoded and kept before processes want them
        kept = self._kept_images if self._kept_images.exists() else None
        side_by_side(self.run, train_one, [(f, self.plan, kept, seed, self.run.device) for f, seed in missing])

    # --- images and judging -------------------------------------------------------------------------------------------
    @cached_property
    def images(self) -> dict[str, tuple[Tensor, Tensor]]:
        """ "train", "validation" and "test": images as the models want them, and labels."""
        import torch
        from vit_cifar10 import read_images

        if self.run.scale == "reduced":
            found = read_images(None, self.plan)
        else:
            found = self._read()
        x, y = found["test"]
        order = torch.randperm(len(x), generator=torch.Generator().manual_seed(0))[: self._most]
        cut = min(2000, len(order) // 2)
        parts = {"validation": order[:cut], "test": order[cut:]}
        return {"train": found["train"], **{name: (x[part], y[part]) for name, part in parts.items()}}

    def _read(self) -> dict[str, tuple[Tensor, Tensor]]:
        """Decoded once, then kept in --work: four scripts use them."""
        from safetensors.torch import load_file, save_file
        from vit_cifar10 import read_images

        import isomerge

        kept = self._kept_images
        if kept.exists():
            stored = load_file(kept)
            return {split: (stored[f"{split}.x"], stored[f"{split}.y"]) for split in ("train", "test")}
        source, plan = str(self.data()), replace(self.plan, images=4 * ON_CPU if self._few else None)
        if self.run.scale == "original":  # prepared as the models' own folder says
            found = _read_for(isomerge.open_checkpoint(self.folders[0]), source)
        else:
            found = read_images(source, plan)
        save_file(
            {f"{split}.{k}": v.contiguous() for split, xy in found.items() for k, v in zip("xy", xy, strict=True)}, kept
        )
        return found

    @property
    def _few(self) -> bool:
        """Nothing to train, little to judge."""
        return self._most is not None and all((folder / "config.json").exists() for folder in self.folders)

    @property
    def _kept_images(self) -> Path:
        return self.run.work / f"images-{self.run.scale}-{'few' if self._few else 'all'}.safetensors"

    def batches(self, count: int) -> Batches:
        """That many training images, without labels."""
        from vit_cifar10 import calibration

        return calibration(self.images["train"][0])(count)

    def judge(self, states: Sequence[State], split: str = "test") -> dict[str, float]:
        """Accuracy and loss; of several, those of their ensemble."""
        from vit_cifar10 import judge_on

        return judge_on(self.config, *self.images[split], self.run.device)(states)

    def state(self, number: int) -> State:
        from fusing import state_of

        return state_of(self.folders[number])

    def checkpoint(self, state: State, name: str) -> MemoryCheckpoint:
        from isomerge.checkpoint.memory import MemoryCheckpoint

        return MemoryCheckpoint(name, state, self.config)

    def training_seconds(self) -> list[float | None]:
        """From the record of each model, where there is one."""
        from fusing import trained

        return [record.get("seconds") for record in trained(self.folders)]

    def parents(self) -> list[dict[str, Any]]:
        return [self.run.cell(f"parent {n}", partial(self.together, [n])) for n in range(len(self.folders))]

    def together(self, numbers: Sequence[int]) -> dict[str, float]:
        """One of the models, or the ensemble of several."""
        return {**self.judge([self.state(number) for number in numbers]), "images": len(self.images["test"][1])}


def train_one(job: tuple[Path, Plan, Path | None, int, str]) -> None:
    """A model into its folder, from the images kept in a file; without one, from those that need none."""
    from safetensors.torch import load_file
    from vit_cifar10 import read_images, train

    folder, plan, kept, seed, device = job
    if kept is None:
        x, y = read_images(None, plan)["train"]
    else:
        stored = load_file(kept)
        x, y = stored["train.x"], stored["train.y"]
    train(folder, plan, x, y, seed, device)


def _one_thread() -> None:
    """Matrices this small are slower on two threads, and far slower where other work shares the cores."""
    import torch

    torch.set_num_threads(1)


def _read_for(checkpoint: Any, source: str) -> dict[str, tuple[Tensor, Tensor]]:
    import torch

    from isomerge.data import open_data

    found = {}
    for split in ("train", "test"):
        batches = list(open_data(source, split=split).batches(checkpoint, batch_size=1000, labels=True))
        pixels = torch.cat([batch["pixel_values"].half() for batch in batches])
        found[split] = (pixels, torch.cat([batch["labels"] for batch in batches]))
    return found


def script(run: Run) -> Result:
    vision = Vision(run)
    accuracies = [100 * parent["accuracy"] for parent in vision.parents()]
    seconds = vision.training_seconds() if not run.dry else [None] * len(accuracies)
    rows: list[list[str | Mean]] = [
        [str(number), Mean([accuracy], unit=" %"), Mean([time], 0)]
        for number, (accuracy, time) in enumerate(zip(accuracies, seconds, strict=True))
    ]
    return Result([Table("The models that are merged", ["model", "test accuracy", "training, s"], rows)])


if __name__ == "__main__":
    main("vision", "The image classifiers", "§5.1 of the founding paper", script)
