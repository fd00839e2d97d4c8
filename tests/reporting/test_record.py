"""isomerge.json: its numbers against the files they speak of, and when it is written."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file

import isomerge
from reporting.outputs import made, record_of, said, verb, workshop
from samples import in_two_documents

SIX_DIGITS = 6e-6  # relative: half of the last digit that is kept, and a little


def weights(folder: Path) -> dict[str, np.ndarray]:
    return {name: array.astype(np.float64) for name, array in load_file(folder / "model.safetensors").items()}


def joined(state: dict[str, np.ndarray], wanted: str) -> np.ndarray:
    return np.concatenate([array.ravel() for name, array in sorted(state.items()) if wanted in name])


def matrices(folder: Path) -> dict[str, np.ndarray]:
    """What a cosine is of: the gains of norms are near one in every model."""
    return {name: array for name, array in weights(folder).items() if array.ndim > 1}


def cosine(a: np.ndarray, b: np.ndarray) -> float:
    return float(a @ b / np.linalg.norm(a) / np.linalg.norm(b))


@pytest.mark.parametrize("layer", [0, 1])
def test_task_vectors_of_a_layer_are_as_in_the_files(layer: int) -> None:
    measured = record_of(made("ties"))["measured"]
    assert (measured["base"], measured["reference"], measured["compared"]) == ("first", "first", ["second", "third"])
    assert measured["fraction"] == 1.0, "tiny tensors are taken whole"
    base, one, other = (joined(weights(workshop() / n), f"layer.{layer}.") for n in ("first", "second", "third"))
    row = next(row for row in measured["layers"] if row["layer"] == layer)
    b, o, t = (joined(matrices(workshop() / n), f"layer.{layer}.") for n in ("first", "second", "third"))
    assert row["cosine"]["after"] == pytest.approx(cosine(o - b, t - b), rel=SIX_DIGITS)
    assert row["conflict"]["after"] == pytest.approx(np.mean((one - base) * (other - base) < 0), rel=SIX_DIGITS)
    expected = [np.linalg.norm(m - b) / np.linalg.norm(b) for m in (o, t)]
    assert row["distance"]["after"] == pytest.approx(expected, rel=SIX_DIGITS)
    assert row["cosine"]["before"] is None and row["distance"]["before"] == [None, None], "nothing was aligned"


def test_alignment_inside_a_merge_is_measured_before_and_after() -> None:
    """After: against the folder that `isomerge align` writes, which is what such a merge averages."""
    measured = record_of(made("aligned-merge"))["measured"]
    folders = (workshop() / "first", workshop() / "second", made("align"))
    for row in measured["layers"]:
        if row["layer"] < 0:
            continue
        a, s, m = (joined(matrices(folder), f"layer.{row['layer']}.") for folder in folders)
        size = np.linalg.norm(a)
        assert row["distance"]["before"][0] == pytest.approx(np.linalg.norm(s - a) / size, rel=SIX_DIGITS)
        assert row["distance"]["after"][0] == pytest.approx(np.linalg.norm(m - a) / size, rel=1e-5)
        assert row["cosine"]["before"] == pytest.approx(cosine(s, a), rel=SIX_DIGITS)
        assert row["cosine"]["after"] == pytest.approx(cosine(m, a), rel=1e-4)


@pytest.mark.parametrize("kind", ["aligned-merge", "align"])
def test_spaces_say_what_they_gain(kind: str) -> None:
    """The matrices that a feed-forward space touches are the two feed-forward maps of its layer."""
    record = record_of(made(kind))
    anchor, source, moved = (weights(f) for f in (workshop() / "first", workshop() / "second", made("align")))
    touched = [n for n in anchor if n.startswith("vit.encoder.layer.1.") and
               n.endswith(("intermediate.dense.weight", "1.output.dense.weight"))]  # fmt: skip
    assert len(touched) == 2
    before, after, size = (
        np.sqrt(sum(np.sum((x[n] - (0 if x is anchor else anchor[n])) ** 2) for n in touched))
        for x in (source, moved, anchor)
    )
    row = next(row for row in record["measured"]["spaces"] if row["name"] == "ffn.1")
    assert (row["layer"], row["kind"]) == (1, "ffn")
    assert row["distance"]["before"] == [pytest.approx(before / size, rel=1e-5)]
    assert row["distance"]["after"] == [pytest.approx(after / size, rel=1e-5)]
    assert row["gain"] == [pytest.approx(1 - after**2 / before**2, rel=1e-4)]
    (model,) = record["alignment"]["models"]
    moves = {space["name"]: space for space in model["spaces"]}
    assert 0 <= moves["ffn.1"]["displacement"] <= 1 and 0 < moves["ffn.1"]["moved"] <= 1
    assert moves["qk.0"]["displacement"] is None and moves["qk.0"]["moved"] is True


def test_the_record_is_the_same_every_time_and_with_any_number_of_threads(tmp_path: Path) -> None:
    models = [workshop() / "first", workshop() / "second"]
    for out, threads in (("one", 1), ("two", 4)):
        isomerge.merge(models, align=True, threads=threads).save(tmp_path / out)
    assert (tmp_path / "one" / "isomerge.json").read_bytes() == (tmp_path / "two" / "isomerge.json").read_bytes()


def test_what_an_interrupted_run_had_finished_is_measured_as_well() -> None:
    from isomerge.merging.outcome.relations import InputRelations

    merged = isomerge.merge([workshop() / "first", workshop() / "second"], align=True)
    watching, later = InputRelations(merged), InputRelations(merged)
    for job in merged.jobs:
        for _ in job.pieces():
            pass
        watching.take(job.name, watching.look(job))
        job.release()
    assert watching.record([]) == later.record(merged.jobs) is not None


def test_the_run_adds_time_memory_and_checks() -> None:
    run = record_of(made("ties"))["run"]
    assert run["seconds"] > 0 and run["peak_memory_bytes"] > 1e6 and run["tensors"] == 40
    assert {check["name"] for check in run["checks"]} >= {"opens", "structure"}


def test_no_report_writes_neither_and_force_removes_the_old_ones(tmp_path: Path) -> None:
    out = tmp_path / "out"
    said("merge", "first", "second", "-o", out)
    assert (out / "isomerge.json").is_file() and (out / "report.html").is_file()
    said("merge", "first", "second", "-o", out, "--force", "--no-report")
    assert not (out / "isomerge.json").exists() and not (out / "report.html").exists()
    told = verb("report", out)
    assert told.exit_code == 2 and "report=False" in told.stderr


def test_the_record_of_an_input_is_not_copied(tmp_path: Path) -> None:
    """A merged model merged again has a record of its own, or none."""
    shutil.copytree(made("ties"), tmp_path / "again")
    isomerge.merge([tmp_path / "again", workshop() / "first"]).save(tmp_path / "out", report=False)
    isomerge.align(tmp_path / "again", workshop() / "first").save(tmp_path / "aligned", verify=False, report=False)
    for folder in ("out", "aligned"):
        assert not {"isomerge.json", "report.html"} & {p.name for p in (tmp_path / folder).iterdir()}


def test_recipes_that_stack_layers_or_go_from_one_model_to_another_are_measured(tmp_path: Path) -> None:
    first, second = workshop() / "first", workshop() / "second"
    isomerge.merge([first, second], method="slerp", base=first, t=0.5).save(tmp_path / "slerp")
    measured = record_of(tmp_path / "slerp")["measured"]
    assert measured["base"] is None and measured["pairs"][0]["cosine"]["after"] is not None
    slices = [{"sources": [{"model": str(m), "layer_range": [0, 2]}]} for m in (first, second)]
    isomerge.merge_recipe({"merge_method": "passthrough", "slices": slices}).save(tmp_path / "stack")
    assert record_of(tmp_path / "stack")["measured"] is None, "no tensor has two models to compare"
    assert json.loads(verb("report", tmp_path / "stack", "--json").stdout)["page"]


def test_two_documents_are_measured_with_what_the_first_makes(tmp_path: Path) -> None:
    first, second, third = (workshop() / n for n in ("first", "second", "third"))
    isomerge.merge_recipe(in_two_documents(first, second, third)).save(tmp_path / "out")
    (pair,) = record_of(tmp_path / "out")["measured"]["pairs"]
    one, other, last = (joined(matrices(f), ".layer.") for f in (first, second, third))
    assert pair["models"][0] == "inner"
    assert pair["cosine"]["after"] == pytest.approx(cosine((one + other) / 2, last), rel=1e-5)
