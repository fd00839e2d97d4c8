"""What isomerge writes and reads again: transforms, statistics, curves, records, pages, lock files, points."""

from __future__ import annotations

import json
import re
from functools import cache
from pathlib import Path

import torch

from fuzz import mutators as m
from fuzz.readers.registry import Seed, reader


@cache
def _transform() -> list[Seed]:
    import isomerge
    from models import model, scratch

    seeds = []
    for name in ("llama", "bert"):
        aligned = isomerge.align(model(name, 1, torch.float32), anchor=model(name, 0, torch.float32))
        stored = scratch() / f"{name}.safetensors"
        aligned.save_transform(stored)
        seeds.append({"transform.safetensors": stored.read_bytes(), name: b""})
    return seeds


def _moved_by(folder: Path) -> tuple[Path, Path]:
    """The source and the anchor of the transform in a folder."""
    from models import model

    name = "llama" if (folder / "llama").exists() else "bert"
    return model(name, 1, torch.float32), model(name, 0, torch.float32)


@reader("transform", _transform, {"transform.safetensors": m.mutate_safetensors},
        safetensors="transform.safetensors")  # fmt: skip
def read_transform(folder: Path) -> None:
    from isomerge.alignment.storage import load_transform
    from isomerge.checkpoint import open_checkpoint

    models = [open_checkpoint(one) for one in _moved_by(folder)]
    load_transform(folder / "transform.safetensors", *models)


@reader("apply", _transform, {"transform.safetensors": m.mutate_safetensors})
def read_and_apply(folder: Path) -> None:
    """A stored transform, and the model that it moves."""
    import isomerge

    source, _ = _moved_by(folder)
    moved = isomerge.align(source, transform=folder / "transform.safetensors", threads=1).moved()
    for name, _ in moved.changed():
        assert name


def _statistics() -> list[Seed]:
    import isomerge
    from models import model, scratch

    folder = model("llama", 0, torch.float32)
    batches = [{"input_ids": torch.arange(8).reshape(2, 4)}]
    for what in (("gram",), ("gram", "activations", "units", "fisher")):
        isomerge.calibrate(folder, batches, what=what).save(scratch() / f"statistics-{len(what)}.safetensors")
    return [{"statistics.safetensors": path.read_bytes()} for path in sorted(scratch().glob("statistics-*"))]


@reader("statistics", _statistics, {"statistics.safetensors": m.mutate_safetensors},
        safetensors="statistics.safetensors")  # fmt: skip
def read_statistics(folder: Path) -> None:
    from isomerge.calibration.statistics import open_statistics

    statistics = open_statistics(folder / "statistics.safetensors")
    statistics.to_dict()
    for weight in statistics.weights:
        statistics.gram(weight).shifted(torch.zeros(1)).mean.sum()
    for site in statistics.info.get("sites", {}):
        statistics.moment(site)
    for weight in statistics.info.get("units", {}):
        statistics.units(weight)
    statistics.fisher.keys()


@cache
def _ensembles() -> list[Seed]:
    import isomerge
    from models import model, scratch
    from samples import digits

    models = [model("vit", seed, torch.float32) for seed in (0, 1)]
    seeds = []
    for name in ("weighted", "stacked"):
        made = isomerge.make_ensemble(models, name, held_out={"path": digits(), "limit": 20})
        seeds.append({"ensemble.json": made.save(scratch() / name, force=True).read_bytes()})
    for seed in seeds:  # whose members stay where they are
        record = json.loads(seed["ensemble.json"])
        for member, path in zip(record["members"], models, strict=True):
            member["model"] = str(path)
        seed["ensemble.json"] = json.dumps(record).encode()
    return seeds


@reader("ensemble", _ensembles, {"ensemble.json": m.mutate_json})
def read_ensemble(folder: Path) -> None:
    import isomerge

    ensemble = isomerge.load_ensemble(folder)
    ensemble(pixel_values=torch.zeros(1, 3, 8, 8))


def _curves() -> list[Seed]:
    points = [{"t": t / 4, "loss": 1.0 + t, "metric": 0.5} for t in range(5)]
    parents = [{"model": name, "loss": 1.0, "metric": 0.5} for name in "ab"]
    line = {
        "points": points, "barrier": 0.5, "metric_barrier": None, "parents": parents, "models": ["a", "b"],
        "ensemble": {"loss": 1.0, "metric": 0.7}, "task": "image", "notes": ["a note"], "seconds": 1.5,
        "metric_name": "accuracy", "higher_is_better": True, "examples": 10,
        "data": {"name": "digits", "sha256": "0" * 64, "size": 10, "kind": "images"},
        "aligned": {"points": points, "barrier": 0.1, "metric_barrier": 0.0, "parents": parents, "ensemble": None,
                    "level": "full", "verdict": "aligned", "notes": []},
    }  # fmt: skip
    straight = {"points": points, "highest": 5.0, "barrier": 0.5, "metric_barrier": None, "perturbed": points}
    trained = {
        **straight, "method": "simplex", "models": ["a", "b"], "straight": straight, "level": "full", "notes": [],
        "metric_name": "accuracy", "ensemble": {"loss": 1.0, "metric": 0.7}, "training": {"steps": 4},
        "samples": {"points": [{"weights": [0.5, 0.5], "loss": 1.0, "metric": 0.5}], "ensemble": None},
    }  # fmt: skip
    plane = {
        "x": [-1.0, 0.0, 1.0], "y": [0.0, 1.0], "loss": [[1.0, 2.0, None], [3.0, 2.0, 1.0]],
        "metric": [[0.1, 0.2, 0.3], [0.1, 0.2, 0.3]], "notes": [], "task": "image",
        "models": [{"model": name, "x": 0.0, "y": 1.0, "loss": 1.0, "metric": 0.2} for name in "abc"],
    }  # fmt: skip
    score = {
        "model": "a", "task": "image", "loss": 1.0, "metric": 0.5, "metric_name": "accuracy", "higher_is_better": True,
        "metrics": {"accuracy": 0.5}, "examples": 9, "data": {"name": "d", "sha256": "0" * 64}, "notes": [],
    }  # fmt: skip
    points = [{"parameters": {"t": t}, "loss": 1.0, "metric": 0.5} for t in (0.0, 1.0)]
    sweep = {
        "models": ["a", "b"], "method": "linear", "parameters": [{"name": "t", "values": [0.0, 1.0]}], "by": "loss",
        "metric_name": "accuracy", "points": points, "best": points[0], "test": {"best": {"loss": 1.0, "metric": 0.5}},
    }  # fmt: skip
    return [{"curve.json": json.dumps(one).encode()} for one in (line, trained, plane, score, sweep)]


@reader("barrier", _curves, {"curve.json": m.mutate_json})
def read_barrier(folder: Path) -> None:
    from isomerge.reporting.measurements import read_measurement
    from isomerge.reporting.sections import cards, sections
    from isomerge.reporting.verdict import verdict

    merged = {"kind": "merge", "method": "linear", "inputs": [{"reference": name, "role": "model"} for name in "ab"]}
    measured = [read_measurement(folder / "curve.json")]
    for name in "ac":
        assert sections(merged, None, measured) and verdict(merged, measured, name)
        cards(merged, measured, name)


@cache
def _records() -> list[Seed]:
    from typer.testing import CliRunner

    from isomerge.checkpoint.lock import LOCK
    from isomerge.cli.app import app
    from isomerge.reporting.page import report
    from models import model, scratch

    pair = [str(model("llama", seed, torch.float32)) for seed in (0, 1)]
    verbs, seeds = CliRunner(), []
    for out, words in {
        "linear": ["merge", *pair],
        "aligned": ["merge", *pair, "--align"],
        "ties": ["merge", pair[1], "--base", pair[0], "--method", "ties"],
        "align": ["align", *pair],
    }.items():
        folder = scratch() / f"record-{out}"
        done = verbs.invoke(app, [*words, "-o", str(folder)])
        assert done.exit_code == 0, (out, done.output)
        report(folder, measured=[json.loads(curve["curve.json"]) for curve in _curves()])
        kept = [folder / name for name in ("isomerge.json", "report.html", LOCK)]
        seeds.append({path.name: path.read_bytes() for path in kept if path.is_file()})
    return seeds


def _with_and_without_page() -> list[Seed]:
    """A page that is there already is read too, which takes longer than all the rest: one of them has it."""
    bare = [{name: content for name, content in seed.items() if name != "report.html"} for seed in _records()]
    return [_records()[0], *bare]


@reader("record", _with_and_without_page, {"isomerge.json": m.mutate_json})
def read_record(folder: Path) -> None:
    from isomerge.reporting.page import report

    report(folder, out=folder / "page.html")


def _short_pages() -> list[Seed]:
    """A whole one, and others without most of their drawings, which nobody reads again."""
    import jinja2  # noqa: F401  without it there are none

    pages = [seed["report.html"] for seed in _records() if "report.html" in seed]
    short = [re.sub(rb"<svg.*?</svg>|<style.*?</style>|<tr>.*?</tr>", b"", page, flags=re.DOTALL) for page in pages]
    return [{"report.html": page} for page in (pages[:1] + short)]


@reader("page", _short_pages, {"report.html": m.mutate_page})
def read_page(folder: Path) -> None:
    from isomerge.reporting.kept_measurements import page_measurements

    page_measurements(folder / "report.html")


@reader("lock", _records, {"isomerge.lock.json": m.mutate_json})
def read_locks(folder: Path) -> None:
    from isomerge.reporting.page import lock_summary

    lock_summary(folder)


def _points() -> list[Seed]:
    row = {"key": "0" * 64, "loss": 1.0, "metric": 0.5, "seconds": 1.0, "broken": [], "metric_name": "accuracy",
           "higher_is_better": True, "examples": 10}  # fmt: skip
    text = "".join(json.dumps({**row, "key": f"{n:064}"}) + "\n" for n in range(3))
    return [{"points.jsonl": text.encode()}]


def _saved_name() -> str:
    from isomerge.choices import POINTS

    return POINTS


@reader("points", lambda: [{_saved_name(): _points()[0]["points.jsonl"]}], {_saved_name(): m.mutate_jsonl})
def read_points(folder: Path) -> None:
    from isomerge.sweeping.saved_points import SavedPoints

    saved = SavedPoints(folder, {})
    for known in list(saved._known.values()):  # what `find` makes of each
        dict.fromkeys(known["broken"], 0.0)
