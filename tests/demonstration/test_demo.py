"""The demo's claims: alignment opens the line between models, features merge three, and the outputs are native."""

from __future__ import annotations

import hashlib
import json
import shlex
import shutil
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
import torch
from blake3 import blake3
from safetensors.numpy import load_file
from typer.testing import CliRunner

import isomerge
from demonstration.short_demo import Made, short_demo
from isomerge.cli.app import app
from reporting.outputs import page_of

pytest.importorskip("sklearn")
transformers = pytest.importorskip("transformers")

WAYS = ("none", "permutation", "rotation", "full", "reconstruct", "joint")
MODELS = ("models/seed-0", "models/seed-1", "models/seed-2", "pair-0/aligned") + tuple(
    f"{group}/{way}" for group in ("pair-0", "three") for way in WAYS
)


@pytest.fixture(scope="module")
def made() -> Made:
    return short_demo(epochs=12)


@pytest.fixture(scope="module")
def out(made: Made) -> Path:
    return made.out


@pytest.fixture(scope="module")
def record(made: Made) -> dict[str, Any]:
    return made.record


@pytest.fixture(scope="module")
def loaded(out: Path) -> dict[str, Any]:
    """Every model, each in the stock class, nothing missing, unexpected or reshaped."""
    found = {}
    for name in MODELS:
        model, info = transformers.ViTForImageClassification.from_pretrained(out / name, output_loading_info=True)
        assert not any(info[key] for key in ("missing_keys", "unexpected_keys", "mismatched_keys")), name
        found[name] = model.eval()
    return found


def logits(model: Any) -> torch.Tensor:
    from isomerge.demonstration.digits import load_digits

    with torch.no_grad():
        return model(load_digits().test_images).logits


@pytest.mark.slow
def test_full_alignment_beats_the_plain_average_by_far(record: dict[str, Any]) -> None:
    (pair,) = record["pairs"]
    assert min(pair["parents"]) > 0.9
    assert pair["full"] > pair["none"] + 0.2
    assert pair["full"] > pair["rotation"] + 0.2
    assert record["curves"][0]["barrier"]["full"] < 0.5 * record["curves"][0]["barrier"]["none"]


@pytest.mark.slow
def test_three_models_merge_by_features_where_their_average_fails(record: dict[str, Any]) -> None:
    found = {row["way"]: row for row in record["groups"][1]["rows"]}
    assert list(found) == ["seed 0", "seed 1", "seed 2", "ensemble", *WAYS]
    assert found["full"]["accuracy"] > found["none"]["accuracy"] + 0.2
    for way in ("reconstruct", "joint"):
        assert found[way]["accuracy"] > found["full"]["accuracy"]
        assert found[way]["loss"] < found["full"]["loss"]
        layers = record["groups"][1]["layers"][way]
        assert len(layers) == 9 and all(row["residual_after"] < row["residual_before"] for row in layers)


@pytest.mark.slow
def test_the_aligned_model_computes_what_the_source_computes(loaded: dict[str, Any]) -> None:
    before, after = logits(loaded["models/seed-1"]), logits(loaded["pair-0/aligned"])
    assert torch.allclose(before, after, atol=1e-4)


@pytest.mark.slow
def test_the_averages_are_the_means_of_what_was_written(loaded: dict[str, Any]) -> None:
    def state(name: str) -> dict[str, torch.Tensor]:
        return loaded[name].state_dict()

    for merged, models in (
        ("pair-0/none", ("models/seed-0", "models/seed-1")),
        ("pair-0/full", ("models/seed-0", "pair-0/aligned")),
        ("three/none", ("models/seed-0", "models/seed-1", "models/seed-2")),
    ):
        for name, tensor in state(merged).items():
            mean = torch.stack([state(model)[name] for model in models]).mean(0)
            assert torch.allclose(tensor, mean, atol=1e-5), (merged, name)


@pytest.mark.slow
def test_the_numbers_are_those_of_the_models_on_disk(record: dict[str, Any], loaded: dict[str, Any]) -> None:
    from isomerge.demonstration.digits import load_digits

    labels = load_digits().test_labels
    predicted = {name: logits(model).double() for name, model in loaded.items()}
    for group in record["groups"]:
        for row in group["rows"]:
            if row["way"] == "ensemble":
                members = [predicted[f"models/seed-{seed}"].softmax(-1) for seed in group["seeds"]]
                own = (sum(members) / len(members)).log()
            else:
                own = predicted[row["folder"]]
            assert row["accuracy"] == pytest.approx((own.argmax(1) == labels).double().mean().item()), row
            assert row["loss"] == pytest.approx(torch.nn.functional.cross_entropy(own, labels).item(), rel=1e-4), row
    rows = {row["way"]: row["accuracy"] for row in record["groups"][0]["rows"]}
    (pair,) = record["pairs"]
    assert pair["parents"] == [rows["seed 0"], rows["seed 1"]]
    assert all(pair[way] == rows[way] for way in ("ensemble", *WAYS))


@pytest.mark.slow
def test_the_plane_goes_through_the_models_and_no_hill_lies_between_aligned_ones(record: dict[str, Any]) -> None:
    plane, curve = record["plane"], record["curves"][0]
    a, b, c = plane["models"]
    assert [a["loss"], b["loss"]] == pytest.approx([curve["loss"]["none"][0], curve["loss"]["none"][-1]], abs=1e-5)
    assert c["loss"] == pytest.approx(b["loss"], abs=1e-4), "moved, it computes the same"

    def nearest(x: float, y: float) -> float:
        column = min(range(len(plane["x"])), key=lambda n: abs(plane["x"][n] - x))
        row = min(range(len(plane["y"])), key=lambda n: abs(plane["y"][n] - y))
        return plane["loss"][row][column]

    hill = nearest((a["x"] + b["x"]) / 2, 0.0)
    valley = nearest((a["x"] + c["x"]) / 2, (a["y"] + c["y"]) / 2)
    assert valley < 0.5 * hill


@pytest.mark.slow
def test_both_ends_of_every_line_are_the_parents(record: dict[str, Any]) -> None:
    (pair,), (curve,) = record["pairs"], record["curves"]
    assert curve["t"][0] == 0 and curve["t"][-1] == 1 and len(curve["t"]) >= 11
    for level, line in curve["accuracy"].items():
        assert [line[0], line[-1]] == pytest.approx(pair["parents"], abs=0.0021), level  # one image of 500 may tip over
    for level, line in curve["loss"].items():
        assert [line[0], line[-1]] == pytest.approx([curve["loss"]["none"][0], curve["loss"]["none"][-1]], abs=1e-4), (
            level
        )


@pytest.mark.slow
def test_the_files_hold_the_record_a_picture_and_a_page(record: dict[str, Any], out: Path) -> None:
    stored = json.loads((out / "isomerge.json").read_text())
    assert {key: stored[key] for key in stored if key not in ("format", "isomerge", "kind")} == {
        key: record[key] for key in record if key != "report"
    }
    assert stored["kind"] == "demo" and Path(record["report"]) == out / "report.html"
    assert ElementTree.parse(out / "curve.svg").getroot().tag.endswith("svg")


@pytest.mark.slow
def test_the_numbers_of_the_page_are_those_of_the_record(record: dict[str, Any], out: Path) -> None:
    page, stored = page_of(out), json.loads((out / "isomerge.json").read_text())
    assert page.record["record"] == stored
    for group, caption in zip(
        stored["groups"],
        ("Two models, trained from the seeds 0, 1", "Three models, trained from the seeds 0, 1, 2"),
        strict=True,
    ):
        shown = {row[0]: row[1:] for row in page.tables[caption][1:]}
        assert list(shown) == [row["label"] for row in group["rows"]]
        for row in group["rows"]:
            accuracy, loss, data = shown[row["label"]]
            assert float(accuracy.split()[0]) == pytest.approx(100 * row["accuracy"], abs=0.05)
            assert float(loss) == pytest.approx(row["loss"], rel=0.006)
            assert (data == "images") is row["data"]
    curve = stored["curves"][0]
    for key, caption in (("loss", "loss between the models"), ("accuracy", "accuracy between the models")):
        head, *rows = page.tables[caption]
        assert head == ["t", "as they are", *(f"aligned ({level})" for level in WAYS[1:4])]
        for place, level in enumerate(WAYS[:4], start=1):
            assert [float(row[place]) for row in rows] == pytest.approx(curve[key][level], rel=6e-4, abs=1e-9)
    losses = [float(row[2]) for row in page.tables["Loss on the plane through three models"][1:]]
    assert losses == pytest.approx([value for row in stored["plane"]["loss"] for value in row], rel=6e-4)
    assert f"{curve['barrier']['none']:.2f} → {curve['barrier']['full']:.2f}" in page.words
    assert not any(str(out) in words for words in page.words), "models have short names"


@pytest.mark.slow
def test_the_commands_of_the_record_make_the_same_models_again(
    record: dict[str, Any], out: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As somebody would who has the folder: the shell's commands, then the Python."""
    shutil.copytree(out / "models", tmp_path / "models")
    monkeypatch.chdir(tmp_path)
    for command in record["how"]["commands"]:
        program, *words = shlex.split(command)
        done = CliRunner().invoke(app, words)
        assert program == "isomerge" and done.exit_code == 0, done.output
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        exec(record["how"]["python"], {})
    finally:
        torch.set_num_threads(before)
    again = {path.parent.relative_to("again").as_posix(): path for path in Path("again").rglob("model.safetensors")}
    assert again.keys() == {name for name in MODELS if not name.startswith("models/")}
    for name, path in again.items():
        assert path.read_bytes() == (out / name / "model.safetensors").read_bytes(), name


@pytest.mark.slow
def test_the_page_tells_which_seed_and_which_models_everything_came_from(record: dict[str, Any], out: Path) -> None:
    page, how = page_of(out), record["how"]
    trained = page.tables["The trained models; the sha256 is of all tensors together"][1:]
    assert [row[:3] for row in trained] == [[f"model {n}", str(n), f"models/seed-{n}"] for n in range(3)]
    merged = {row[0]: row for row in page.tables["The merged models; the sha256 is of all tensors together"][1:]}
    assert merged.keys() == {f"{group}/{way}" for group in ("pair-0", "three") for way in WAYS}
    assert merged["three/full"][2] == "0, 1, 2"
    for name, row in {**{row[2]: row for row in trained}, **merged}.items():
        assert row[3] == digest(out / name), name
    text = "".join(page.words)
    assert "\n".join(how["commands"]) in text and how["python"] in text
    assert record["run"]["peak_memory_bytes"] > 1e6
    order = [known.get("id") for tag, known in page.elements if tag in ("section", "input")]
    assert order.index("layers") == order.index("method") - 1, "the filter stands where the first layers are"


def digest(folder: Path) -> str:
    """sha256 of the lines "name  BLAKE3 of its bytes", sorted."""
    state = load_file(folder / "model.safetensors")
    lines = [f"{name}  {blake3(array.tobytes()).hexdigest()}\n" for name, array in sorted(state.items())]
    return hashlib.sha256("".join(lines).encode()).hexdigest()


@pytest.mark.slow
def test_the_page_can_be_made_again(out: Path, tmp_path: Path) -> None:
    again = isomerge.report(out, out=tmp_path / "again.html")
    assert again["kind"] == "demo" and "One model out of several" in again["sections"]
    assert (tmp_path / "again.html").read_text() == (out / "report.html").read_text()


@pytest.mark.slow
def test_every_stage_is_told_from_its_start(made: Made) -> None:
    stages: dict[str, list[tuple[int, int]]] = {}
    for done, total, what in made.told:
        stages.setdefault(what.partition(": ")[0], []).append((done, total))
    assert list(stages) == ["training 3 models", "merging models 0, 1", "merging models 0, 1, 2", "measuring"]
    for steps in stages.values():
        assert [done for done, _ in steps] == list(range(len(steps)))
        assert len({total for _, total in steps}) == 1 and steps[-1][0] <= steps[-1][1]


def test_the_bars_of_finished_stages_stay(capsys: pytest.CaptureFixture[str]) -> None:
    from isomerge.cli.demo import _stages

    with _stages() as progress:
        progress(0, 7, "first")
        progress(0, 5, "second: a detail")
        progress(1, 5, "second: another")
    shown = capsys.readouterr()
    assert "7/7" in shown.err and "5/5" in shown.err and "detail" not in shown.err and not shown.out


def test_training_depends_on_the_seed_alone() -> None:
    from isomerge.demonstration.digits import load_digits, new_model, train

    digits = load_digits()
    torch.manual_seed(1)
    first = train(new_model(3), 3, digits, epochs=1).state_dict()
    torch.manual_seed(2)
    again = train(new_model(3), 3, digits, epochs=1).state_dict()
    other = new_model(4).state_dict()
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert any(not torch.equal(first[name], other[name]) for name in first)


def test_no_pairs_is_a_request_that_cannot_be_met(tmp_path: Path) -> None:
    with pytest.raises(isomerge.IsomergeError, match="at least one"):
        isomerge.demo(tmp_path, seeds=0)


def test_a_folder_of_others_is_refused_before_anything_is_trained(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("mine")
    with pytest.raises(isomerge.IsomergeError, match=r"not empty \(thesis.txt\).*set force"):
        isomerge.demo(tmp_path)
    with pytest.raises(isomerge.IsomergeError, match="this is a file"):
        isomerge.demo(tmp_path / "thesis.txt", force=True)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.txt"]


def test_an_earlier_demo_is_replaced_and_nothing_else(tmp_path: Path) -> None:
    from isomerge.choices import DEMO_MARK
    from isomerge.demonstration.run import claim

    out = tmp_path / "out"
    claim(out, ["models", "pair-0", "report.html"])
    for name in ("models/seed-7", "pair-0", "notes"):
        (out / name).mkdir(parents=True)
    (out / "report.html").write_text("old")
    (tmp_path / "outside").mkdir()
    with (out / DEMO_MARK).open("a") as mark:
        mark.write("../outside\n..\n.\n/\n")
    claim(out, ["models"])
    assert sorted(path.name for path in out.iterdir()) == [DEMO_MARK, "notes"]
    assert (tmp_path / "outside").is_dir()
    assert (out / DEMO_MARK).read_text() == "models\n"


def test_force_leaves_what_is_there_now_and_later(tmp_path: Path) -> None:
    from isomerge.demonstration.run import claim

    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine").write_text("mine")
    claim(tmp_path, ["models", "three"], force=True)
    (tmp_path / "three").mkdir()
    claim(tmp_path, ["models", "three"])
    assert not (tmp_path / "three").exists()
    assert (tmp_path / "models" / "mine").read_text() == "mine"


@pytest.mark.slow
def test_five_pairs_of_seeds_all_merge(tmp_path: Path) -> None:
    record = isomerge.demo(tmp_path, seeds=5)
    assert len(record["pairs"]) == 5
    for pair in record["pairs"]:
        assert pair["full"] > 0.85
        assert pair["full"] > pair["none"] + 0.3 and pair["full"] > pair["rotation"] + 0.3
        assert pair["reconstruct"] > 0.95 and pair["joint"] > 0.95
    barriers = [curve["barrier"] for curve in record["curves"]]
    assert sum(b["full"] for b in barriers) < 0.25 * sum(b["none"] for b in barriers)
