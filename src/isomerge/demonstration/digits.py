"""Handwritten digits (8 × 8 pixels, inside scikit-learn), a small stock image classifier trained on them, and what lies
between two or three such classifiers.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from isomerge.connectivity.plane import plane

TRAIN = 1297  # of 1797 images; the other 500 are the test set
EPOCHS = 40
BATCH = 64
LEARNING_RATE = 4e-3
WEIGHT_DECAY = 1.0  # strong, as the data are few: parents are better for it, and so is their average


@dataclass(frozen=True)
class Digits:
    """Images (n, 1, 8, 8), standardised, and labels (n,); the split is the same for every model."""

    train_images: Tensor
    train_labels: Tensor
    test_images: Tensor
    test_labels: Tensor


def load_digits() -> Digits:
    from sklearn import datasets

    data = datasets.load_digits()
    images = torch.tensor(data.images, dtype=torch.float32)[:, None]
    labels = torch.tensor(data.target)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    train, test = order[:TRAIN], order[TRAIN:]
    mean, spread = images[train].mean(), images[train].std()
    images = (images - mean) / spread
    return Digits(images[train], labels[train], images[test], labels[test])


def new_model(seed: int) -> Any:
    """A model drawn from the seed: 2 layers of width 64, 4 heads, 4 patches and a class token; 69,000 parameters."""
    from transformers import ViTConfig, ViTForImageClassification

    shape: dict[str, Any] = {
        "image_size": 8, "patch_size": 4, "num_channels": 1, "num_labels": 10, "hidden_size": 64,
        "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 128,
        "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0,
    }  # fmt: skip
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return ViTForImageClassification(ViTConfig(**shape))


def train(
    model: Any, seed: int, digits: Digits, *, epochs: int = EPOCHS, tick: Callable[[], None] = lambda: None
) -> Any:
    """Train in place; the seed sets the order of the images. `tick` is called after every epoch."""
    generator = torch.Generator().manual_seed(seed)
    batches = TRAIN // BATCH
    matrices = [p for p in model.parameters() if p.ndim > 1]
    vectors = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": matrices, "weight_decay": WEIGHT_DECAY}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LEARNING_RATE, betas=(0.9, 0.98))
    schedule = torch.optim.lr_scheduler.OneCycleLR(
        optimizer, LEARNING_RATE, total_steps=epochs * batches, pct_start=0.15
    )
    model.train()
    for _ in range(epochs):
        order = torch.randperm(TRAIN, generator=generator)
        for batch in torch.split(order[: batches * BATCH], BATCH):
            loss = F.cross_entropy(model(digits.train_images[batch]).logits, digits.train_labels[batch])
            optimizer.zero_grad()
            torch.autograd.backward(loss)
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
        tick()
    return model.eval()


@torch.no_grad()
def predict(model: Any, digits: Digits) -> Tensor:
    """Probabilities on the test set, (500, 10)."""
    logits: Tensor = model(digits.test_images).logits
    return logits.softmax(-1)


def accuracy(probabilities: Tensor, digits: Digits) -> float:
    return float((probabilities.argmax(-1) == digits.test_labels).double().mean())


def loss(probabilities: Tensor, digits: Digits) -> float:
    """Mean cross-entropy in nats."""
    return float(F.nll_loss(probabilities.double().clamp_min(1e-12).log(), digits.test_labels))


# --- the line between two models, and the plane through three ---------------------------------------------------------
POINTS = 21  # on the line between two models, both ends included
GRID = 15  # places each way on the plane


def between(a: Any, b: Any, digits: Digits) -> dict[str, list[float]]:
    """Loss and accuracy of (1 − t) a + t b at evenly spaced t from 0 to 1."""
    probe = copy.deepcopy(a)
    first, last = a.state_dict(), b.state_dict()
    line: dict[str, list[float]] = {"loss": [], "accuracy": []}
    for n in range(POINTS):
        probe.load_state_dict(_mixed(first, last, n / (POINTS - 1)))
        probabilities = predict(probe, digits)
        line["loss"].append(loss(probabilities, digits))
        line["accuracy"].append(accuracy(probabilities, digits))
    return line


def _mixed(first: Mapping[str, Any], last: Mapping[str, Any], t: float) -> dict[str, Any]:
    return {name: ((1 - t) * first[name].double() + t * last[name].double()).float() for name in first}


def loss_plane(models: Mapping[str, Path], digits: Digits) -> dict[str, Any]:
    """The loss on the plane through three models, by name: the record of `isomerge.connectivity.plane`."""
    record = plane(*models.values(), loss=lambda model: loss(predict(model, digits), digits), points=GRID)
    corners = [
        {"model": name, **{key: corner[key] for key in ("x", "y", "loss")}}
        for name, corner in zip(models, record["models"], strict=True)
    ]
    return {"models": corners, **{key: record[key] for key in ("x", "y", "loss")}}
