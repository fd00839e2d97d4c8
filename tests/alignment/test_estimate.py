"""What an alignment will take: operations against those that torch counts, memory against that of a real alignment."""

from __future__ import annotations

import json
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode
from transformers import ViTConfig, ViTForImageClassification

import isomerge
from commands import verb
from isomerge.alignment import estimate
from isomerge.alignment.estimate import Speed, counted, estimate_alignment
from isomerge.alignment.evidence import Pair, stream_cross, unit_blocks
from isomerge.alignment.scope import Scope
from isomerge.alignment.solve_pair import rotates_the_stream
from isomerge.alignment.units import Unit
from isomerge.architectures import describe
from isomerge.checkpoint.files import SafetensorsFile
from isomerge.engine import Threads
from isomerge.symmetry.architecture import RESIDUAL
from isomerge.symmetry.binding import BoundModel
from isomerge.symmetry.transform import Transform
from isomerge.threads import parallel
from models import model

FULL = Scope("full")
ROOM = 8 << 30


def bound(name: str, scope: Scope = FULL) -> BoundModel:
    found = describe(isomerge.open_checkpoint(model(name)), untie=rotates_the_stream(scope))
    return replace(found, architecture=scope.restrict(found.architecture))


@pytest.mark.parametrize("name", ["vit", "llama", "bert", "gpt2"])
def test_operations_are_those_that_torch_counts(name: str) -> None:
    """Of the products of all units, and of those over the stream: what is left out are vectors."""
    own = bound(name)
    pair = Pair(own.raw, own.raw, dict(own.layouts), own.architecture)
    spaces = own.architecture.spaces
    units = [Unit(s, spaces) for s, g in spaces.items() if not g.per and s != RESIDUAL]
    nowhere = Transform(spaces)
    with FlopCounterMode(display=False) as products:
        for unit in units:
            if any(group.movable for group in unit.spaces.values()):
                unit_blocks(pair, unit.members, nowhere, diagonal=unit.diagonal)
    matrices = [n for n, layout in own.layouts.items() if RESIDUAL in layout.spaces() and len(layout.shape) > 1]
    with FlopCounterMode(display=False) as over_the_stream:
        for tensor in matrices:
            stream_cross(pair, tensor, nowhere, RESIDUAL)
    work = counted(own)
    assert work.evidence == pytest.approx(products.get_total_flops(), rel=0.02)
    assert work.turning == over_the_stream.get_total_flops() > 0


def test_what_may_not_move_costs_nothing() -> None:
    work = counted(bound("vit", Scope("full", only="attention")))
    assert work.turning == 0 and work.width == 0 and not work.rotates
    assert 0 < work.evidence < counted(bound("vit")).evidence
    assert counted(bound("vit", Scope("full", layers="0"))).units == counted(bound("vit")).units / 2


def test_seconds_are_those_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Twice as slow a machine takes twice as long, and two workers share all but the stream's own rotations."""
    slow = Speed(2e-9, 4e-9, 2e-9, 2.0, 2e-3, 2.0, 0.2)
    monkeypatch.setattr(estimate, "OVERHEAD", 0.0)
    monkeypatch.setattr(estimate.system, "processors", lambda: 2)
    opened, found = isomerge.open_checkpoint(model("vit")), []
    for speed in (slow, Speed(*(value / 2 for value in vars(slow).values()))):
        monkeypatch.setattr(estimate, "measured_speed", lambda speed=speed: speed)
        found.append([estimate_alignment(opened, FULL, threads=t, budget=ROOM) for t in (1, 2, 3)])
    for one, other in zip(*found, strict=True):
        assert one.strangers_seconds == pytest.approx(2 * other.strangers_seconds)
        assert one.siblings_seconds == pytest.approx(2 * other.siblings_seconds)
    shared, alone = counted(bound("vit")).seconds(slow)
    assert found[0][1].strangers_seconds == pytest.approx(shared / 2 + alone) and alone > 0
    assert found[0][2].strangers_seconds == found[0][1].strangers_seconds  # there are two processors


PEAK = """
import json, sys, threading, time
import torch, isomerge, isomerge.merging.api, scipy.optimize
from isomerge import system
from isomerge.alignment.estimate import estimate_alignment
from isomerge.alignment.scope import Scope
source, anchor = (isomerge.open_checkpoint(folder) for folder in sys.argv[1:3])
said = estimate_alignment(source, Scope("full"), threads=2, budget=8 << 30).peak_memory_bytes - system.present_memory()
start, peak, going = system.anonymous_memory(), [0], [True]
def watch():
    while going:
        peak[0] = max(peak[0], system.anonymous_memory() - start)
        time.sleep(0.002)
threading.Thread(target=watch, daemon=True).start()
isomerge.align(source, anchor, threads=2)
going.clear()
print(json.dumps([said, peak[0]]))
"""


@pytest.mark.slow
def test_the_memory_is_that_of_an_alignment_within_a_fifth(tmp_path: Path) -> None:
    if isomerge.system.anonymous_memory() is None:
        pytest.skip("this system does not tell how much a process has allocated")
    shape = {"hidden_size": 320, "num_hidden_layers": 3, "num_attention_heads": 10, "intermediate_size": 1280}
    config = ViTConfig(**shape, image_size=16, patch_size=4)
    for seed in (0, 1):
        torch.manual_seed(seed)
        ViTForImageClassification(config).save_pretrained(tmp_path / str(seed))
    command = [sys.executable, "-c", PEAK, str(tmp_path / "1"), str(tmp_path / "0")]
    done = subprocess.run(command, capture_output=True, text=True, check=True)
    said, peak = json.loads(done.stdout.splitlines()[-1])
    assert 0.8 < said / peak < 1.2


def recipe(**align: object) -> dict[str, object]:
    models = [{"model": str(model("llama", seed))} for seed in (0, 1, 2)]
    return {"merge_method": "linear", "models": models, "align": align or True}


def test_a_plan_tells_what_the_alignment_takes_and_reads_no_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise AssertionError("a weight was read")

    two = recipe()
    given = two | {"models": two["models"][:2]}  # type: ignore[index]
    for name in ("read", "read_rows"):
        monkeypatch.setattr(SafetensorsFile, name, refuse)
    one, both = (isomerge.plan(each).aligning for each in (given, two))
    assert one is not None and both is not None and 0 < one.siblings_seconds < one.strangers_seconds
    assert both.strangers_seconds == pytest.approx(2 * one.strangers_seconds)
    found = isomerge.plan(given | {"align": None})
    assert found.aligning is None and not found.alignment


def test_what_is_not_in_the_estimate_is_said() -> None:
    found = isomerge.plan(recipe(many="universe"))
    assert found.aligning is None and "this way to align" in found.notes[-1]
    assert isomerge.plan(recipe(solver="sinkhorn")).aligning is None


def test_less_memory_keeps_less() -> None:
    """Every number of both models in float64, which small ones are solved in, or none."""
    opened = isomerge.open_checkpoint(model("vit"))
    much, little = (estimate_alignment(opened, FULL, threads=1, budget=size) for size in (ROOM, 0))
    kept = 2 * 8 * sum(torch.Size(info.shape).numel() for info in opened.tensors.values())
    assert much.peak_memory_bytes - little.peak_memory_bytes == pytest.approx(kept, abs=4 << 20)


def test_no_more_workers_than_fit_are_started(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their number changes no bit."""
    opened = isomerge.open_checkpoint(model("vit"))
    each = 16 * max(torch.Size(info.shape).numel() for info in opened.tensors.values())
    each = max(each, 12 * counted(bound("vit")).scores ** 2)
    monkeypatch.setattr(estimate.system, "present_memory", lambda: 0)
    alone = estimate_alignment(opened, FULL, threads=1, budget=0).peak_memory_bytes
    for more, workers in ((0, 1), (2 * each, 3), (2 * each - 1, 2), (-(10**9), 1), (10**9, 8)):
        found = estimate.fitting_workers(opened, FULL, threads=8, memory=alone + more, budget=0)
        assert found == workers
    asked: list[int] = []
    monkeypatch.setattr(Threads, "parallel", lambda self, threads, **_: (asked.append(threads), parallel(threads))[1])
    source, anchor = model("vit", 1), model("vit")
    little, much = (isomerge.align(source, anchor, threads=3, max_memory=size) for size in (alone, None))
    assert asked == [1, 3]
    pairs = [(a, b) for a, b in zip(little.state_dict().values(), much.state_dict().values(), strict=True)]
    assert all(torch.equal(a, b) for a, b in pairs)


def test_the_table_names_both_times() -> None:
    first, second = model("llama", 0), model("llama", 1)
    shown = verb("plan", first, second, "--align").stdout
    assert "models trained apart" in shown and "siblings" in shown
