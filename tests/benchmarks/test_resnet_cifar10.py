"""The ResNet benchmark on a pair whose answer is known: a model and a scrambled copy of it have no barrier."""

from __future__ import annotations

import sys
from pathlib import Path

import torch
from torch import nn

sys.path.append(str(Path(__file__).resolve().parents[2] / "benchmarks"))
import resnet_cifar10 as bench

from isomerge.architectures import describe
from isomerge.checkpoint import open_checkpoint
from isomerge.symmetry.moved import scrambled


def test_a_scrambled_copy_has_a_barrier_that_alignment_removes(tmp_path: Path) -> None:
    data = tuple(each[:256] for each in bench.digits()[0])
    first = tmp_path / "first"
    model = bench.train(data, 1, 0, epochs=12)
    model.save_pretrained(first)
    second = tmp_path / "second"
    moved = scrambled(describe(open_checkpoint(first)), 3).state_dict()
    model.load_state_dict(moved, strict=False)
    model.save_pretrained(second)
    rows = dict(bench.rows(tmp_path / "aligned", [first, second], data, data))
    assert rows["aligned, full"]["barrier"] < 1e-3 < rows["plain mean"]["barrier"]
    assert abs(rows["aligned, full"]["accuracy"] - rows["one parent (mean of both)"]["accuracy"]) < 1e-9


def test_fresh_statistics_are_the_mean_over_batches() -> None:
    norm = nn.BatchNorm2d(3)
    images = torch.randn(500, 3, 4, 4) * 2 + 5
    bench.with_fresh_statistics(_Seen(norm), images)
    parts = images.split(250)
    assert torch.allclose(norm.running_mean, torch.stack([p.mean((0, 2, 3)) for p in parts]).mean(0), atol=1e-5)
    assert torch.allclose(norm.running_var, torch.stack([p.var((0, 2, 3)) for p in parts]).mean(0), rtol=1e-4)


class _Seen(nn.Module):
    """A model of one batch norm, called as the stock classes are."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm = norm

    def forward(self, pixel_values: torch.Tensor) -> torch.Tensor:
        return self.norm(pixel_values)
