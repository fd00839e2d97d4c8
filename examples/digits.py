"""Make what the tutorial merges: two image classifiers trained from different seeds, and the images to measure them on.

    python examples/digits.py            # model-a, model-b and digits/ in this folder; half a minute on one core

The digits come with scikit-learn (8 × 8 pixels), so nothing is downloaded. `model-a` and `model-b` are folders as
`save_pretrained` writes them, with the preprocessing their images need. `digits/` has the parts train and test, and in
each a folder per class.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from PIL import Image
from sklearn import datasets

from isomerge.demonstration import digits as task

torch.set_num_threads(1)  # models so small get slower by more: their threads wait for each other
BRIGHTEST = 240  # of a picture; a pixel of the data set goes from 0 to 16, and 16 × 15 keeps every value exact


def main(out: Path) -> None:
    images, labels = datasets.load_digits(return_X_y=True)
    order = torch.randperm(
        len(images), generator=torch.Generator().manual_seed(0)
    )  # the split the models are trained on
    for place, number in enumerate(order.tolist()):
        folder = out / "digits" / ("train" if place < task.TRAIN else "test") / str(labels[number])
        folder.mkdir(parents=True, exist_ok=True)
        pixels = (images[number].reshape(8, 8) * (BRIGHTEST // 16)).astype("uint8")
        Image.fromarray(pixels).save(folder / f"{number:04}.png")
    seen = torch.tensor(images[order[: task.TRAIN]]).float() / 16
    for seed, name in enumerate(("model-a", "model-b")):
        print(f"training {name}")
        model = task.train(task.new_model(seed), seed, task.load_digits(), epochs=task.EPOCHS)
        model.save_pretrained(out / name)
        settings = {
            "do_resize": False, "do_rescale": True, "rescale_factor": 1 / BRIGHTEST, "do_normalize": True,
            "image_mean": [float(seen.mean())], "image_std": [float(seen.std())], "size": {"height": 8, "width": 8},
        }  # fmt: skip
        (out / name / "preprocessor_config.json").write_text(json.dumps(settings, indent=2) + "\n")


if __name__ == "__main__":
    main(Path(sys.argv[1] if len(sys.argv) > 1 else "."))
