"""Image classifiers that each saw half of the classes, for benchmarks/skills.py."""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from fusing import State, train_all
from torch import Tensor
from vit_cifar10 import Plan, read_images, train

from isomerge.running.stock import load_stock

SHAPE = {"hidden_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4, "intermediate_size": 384}
PLAN = Plan({**Plan().shape, **SHAPE}, epochs=30, batch=256, warm_up=300, rate=1e-3)
CLASSES = {"low": range(5), "high": range(5, 10)}
SURE = 0.1
"""Nats of entropy that make a member of the ensemble e times less believed."""


class ImageSkills:
    """The trained models, their images and how they are measured."""

    def __init__(self, given: argparse.Namespace) -> None:
        self.given, self.draw = given, 0
        self.plan = dataclasses.replace(PLAN, epochs=given.epochs or PLAN.epochs)
        self.home = given.work / "skills-images"
        self.folders = {name: self.home / name for name in CLASSES}
        self.images = {split: self._divided(*both) for split, both in read_images(given.images, self.plan).items()}

    def _divided(self, pixels: Tensor, labels: Tensor) -> dict[str, tuple[Tensor, Tensor]]:
        parts = {name: torch.isin(labels, torch.tensor(list(own))) for name, own in CLASSES.items()}
        return {name: (pixels[own], labels[own]) for name, own in parts.items()}

    def train(self) -> None:
        jobs = [
            (folder, self.plan, *self.images["train"][name], seed, self.given.device)
            for seed, (name, folder) in enumerate(self.folders.items())
            if not (folder / "model.safetensors").exists()
        ]
        train_all(train, jobs, self.given.together)

    def data(self, name: str, count: int) -> Callable[[], Iterator[dict[str, Tensor]]]:
        """Training images, drawn once for each `draw`."""
        pixels = self.images["train"][name][0]
        chosen = pixels[torch.randperm(len(pixels), generator=torch.Generator().manual_seed(1 + self.draw))[:count]]
        return lambda: ({"pixel_values": part.float()} for part in chosen.split(125))

    def model(self, state: State) -> Any:
        config = json.loads((next(iter(self.folders.values())) / "config.json").read_text())
        return load_stock(config, {name: tensor.float() for name, tensor in state.items()}).to(self.given.device)

    def results(
        self, models: Sequence[Any], names: Sequence[str], *, posterior: bool = False
    ) -> list[dict[str, float]]:
        """Of the mean probability of the models, or weighted by how sure each is of its answer."""

        def evidence(pixels: Tensor, scores: Tensor) -> Tensor:
            return (scores.exp() * scores).sum(-1) / SURE if posterior else torch.zeros_like(scores[..., 0])

        return self._weighted(models, names, evidence)

    def routed(self, models: Sequence[Any], names: Sequence[str], count: int) -> list[dict[str, float]]:
        """Of the models, each weighted by how likely an image is to be of its half: a logistic regression on what all
        models make of `count` images of each half. It sees no class, only whose images these are."""
        from sklearn.linear_model import LogisticRegressionCV
        from sklearn.pipeline import make_pipeline
        from sklearn.preprocessing import StandardScaler

        seen = [
            torch.cat([self._features(models, one["pixel_values"]) for one in self.data(n, count)()]) for n in names
        ]
        owners = torch.arange(len(names)).repeat_interleave(torch.tensor([len(part) for part in seen]))
        router = make_pipeline(StandardScaler(), LogisticRegressionCV(Cs=8, scoring="neg_log_loss", max_iter=1000))
        router.fit(torch.cat(seen).numpy(), owners.numpy())

        def evidence(pixels: Tensor, scores: Tensor) -> Tensor:
            likely = router.predict_log_proba(self._features(models, pixels).numpy())
            return torch.from_numpy(likely).T.to(scores)

        return self._weighted(models, names, evidence)

    @torch.no_grad()
    def _features(self, models: Sequence[Any], pixels: Tensor) -> Tensor:
        """What the classifiers of all models read, side by side."""
        pixels = pixels.to(self.given.device)
        return torch.cat([model.base_model(pixel_values=pixels).last_hidden_state[:, 0] for model in models], 1).cpu()

    @torch.no_grad()
    def _weighted(
        self, models: Sequence[Any], names: Sequence[str], evidence: Callable[[Tensor, Tensor], Tensor]
    ) -> list[dict[str, float]]:
        """Of the probability that a mixture gives, in which a model counts by its evidence (models, images)."""
        found = []
        for name in names:
            pixels, labels = (part[: self.given.limit] for part in self.images["test"][name])
            parts = []
            for some in pixels.split(500):
                some = some.float().to(self.given.device)
                scores = torch.stack([model(pixel_values=some).logits.log_softmax(-1) for model in models])
                parts.append((scores + evidence(some, scores).log_softmax(0)[..., None]).logsumexp(0).cpu())
            scores = torch.cat(parts)
            loss = torch.nn.functional.nll_loss(scores, labels)
            found.append({"loss": float(loss), "accuracy": float((scores.argmax(-1) == labels).float().mean())})
        return found
