"""report.html: it shows the record and nothing else, asks nobody for anything, and takes no name for markup."""

from __future__ import annotations

import importlib.util
import json
import re
import shutil
import sys
import types
from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.reporting.card import card_page
from isomerge.reporting.measured import space_place
from isomerge.reporting.page import render, write_report
from reporting.heat_cells import cell_numbers
from reporting.outputs import Page, adapters, made, page_of, record_of, said, verb, workshop

KINDS = ["ties", "aligned-merge", "align", "reconstruct", "adapters"]
SECTIONS = {
    "ties": {"relations", "recipe", "lineage", "integrity", "run", "notes"},
    "aligned-merge": {"alignment", "relations", "recipe", "lineage", "integrity", "run"},
    "align": {"alignment", "relations", "request", "lineage", "integrity", "run"},
    "reconstruct": {"alignment", "relations", "method", "recipe", "lineage", "integrity", "run", "notes"},
    "adapters": {"adapters", "lineage", "run"},
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_holds_the_record_and_has_its_sections(kind: str) -> None:
    page = page_of(made(kind))
    assert page.record["record"] == record_of(made(kind))
    assert {known["id"] for tag, known in page.elements if tag == "section"} == SECTIONS[kind]
    assert page.open == [], "every element is closed"


@pytest.mark.parametrize("kind", KINDS)
def test_the_page_asks_nobody_for_anything(kind: str) -> None:
    page = page_of(made(kind))
    for tag, known in page.elements:
        assert "src" not in known and "srcset" not in known, tag
        assert tag not in ("iframe", "object", "embed", "base", "img")
        if tag == "link":
            assert known["href"] == "data:,"
    assert not re.search(r"@import|url\(|fetch\(|XMLHttpRequest|WebSocket", page.text)
    policy = next(known["content"] for tag, known in page.elements if known.get("http-equiv"))
    assert policy is not None and policy.startswith("default-src 'none'")


@pytest.mark.parametrize("kind", ["aligned-merge", "align"])
def test_the_heat_maps_show_the_distances_of_the_record(kind: str) -> None:
    page, record = page_of(made(kind)), record_of(made(kind))
    spaces = record["measured"]["spaces"]
    table = page.tables["Distance of second from first, per layer and space"]
    kinds = table[0][1:]
    shown = {(row[0], kind): cell for row in table[1:] for kind, cell in zip(kinds, row[1:], strict=True)}
    for space in spaces:
        label = "outside" if space["layer"] < 0 else f"layer {space['layer']}"
        before, after = (space["distance"][side][0] for side in ("before", "after"))
        *numbers, change = cell_numbers(shown[label, space["kind"]])
        assert numbers == pytest.approx([before, after], rel=0.006), space["name"]
        assert change == pytest.approx(100 * (after / before - 1), abs=0.51)
    assert sum(cell != "–" for cell in shown.values()) == len(spaces)
    moves = {row[0]: row for row in page.tables["Every space of second"][1:]}
    for move in record["alignment"]["models"][0]["spaces"]:
        assert float(moves[move["name"]][2].split()[0]) == pytest.approx(100 * float(move["moved"]), abs=0.06)


def test_layers_come_in_their_order_and_two_stacks_are_two_sets_of_rows() -> None:
    from isomerge.reporting.relation_sections import alignment_section

    names = [f"{stack}.ffn.{layer}" for stack in ("encoder", "decoder") for layer in range(12)] + ["residual"]
    spaces = [
        {"name": n, **space_place(n), "distance": {"before": [1.0], "after": [0.5]}, "gain": [0.75]}
        for n in sorted(names)
    ]
    measured = {"reference": "a", "compared": ["b"], "spaces": spaces}
    found = alignment_section({"alignment": {"anchor": "a", "models": []}, "measured": measured})
    assert found is not None
    first = found.blocks[1]
    labels = [label for label, _, _ in first.rows]
    assert labels == [f"{stack} {n}" for stack in ("decoder", "encoder") for n in range(12)] + ["outside"]
    assert list(first.columns) == ["ffn", "residual"]


def test_charts_have_words_and_their_numbers_in_a_table() -> None:
    page, record = page_of(made("ties")), record_of(made("ties"))
    labels = [str(known["aria-label"]) for tag, known in page.elements if tag == "svg"]
    (lineage,) = [label for label in labels if label.startswith("Lineage")]
    assert "first (base), second (model), third (model); ties; the output is" in lineage
    assert len(labels) == 3 and sum("over layer" in label and "lowest" in label for label in labels) == 2
    table = page.tables["Cosine between the task vectors, per layer"]
    layers = [row for row in record["measured"]["layers"] if row["layer"] >= 0]
    assert [float(row[3]) for row in table[1:]] == pytest.approx([r["cosine"]["after"] for r in layers], rel=0.006)


def test_lineage_and_lock_are_those_of_the_lock_file() -> None:
    folder = made("ties")
    page, lock = page_of(folder), json.loads((folder / "isomerge.lock.json").read_text())
    (caption,) = [c for c in page.tables if c.startswith("The inputs")]
    rows = page.tables[caption][1:]
    assert [row[0] for row in rows] == [entry["reference"] for entry in lock["inputs"]] == ["first", "second", "third"]
    assert [row[1] for row in rows] == ["base", "model", "model"] and all(len(row[4]) == 64 for row in rows)
    assert lock["output"]["sha256"] in page.words
    assert page.record["lock"]["tensors"] == len(lock["output"]["tensors"])


def test_lines_of_running_text_are_not_called_examples(tmp_path: Path) -> None:
    images = {"name": "images", "kind": "images", "examples": 3, "size": 9, "sha256": "abc"}
    texts = [{**images, "name": "a.txt", "kind": "corpus", "examples": 1, "size": 1}, {**images, "kind": "images"}]
    for data, used in ((texts, ["–", "3"]), ([images], ["3"])):
        write_report(tmp_path, {"kind": "merge", "inputs": [], "data": data})
        ((caption, table),) = [(c, t) for c, t in page_of(tmp_path).tables.items() if c.startswith("The data")]
        assert [row[1] for row in table[1:]] == used and ("lines are counted" in caption) is (len(data) == 2)


def test_the_card_calls_no_lines_examples() -> None:
    inputs = [{"reference": "first", "revision": None, "role": "model", "card": {}}]
    facts = dict.fromkeys(("name", "donor", "method", "summary", "recipe", "sha256", "version"), "first")
    data = [{"name": name, "kind": name, "examples": 1, "size": 40, "sha256": "abc"} for name in ("corpus", "images")]
    card = card_page({**facts, "inputs": inputs, "paper": None, "alignment": None, "data": data})
    assert "| corpus | text of 40 lines |" in card and "| images | 1 |" in card


def test_page_and_card_of_joint_features_describe_them(tmp_path: Path) -> None:
    features = {"stream": "joint", "chosen": {"ffn.0": [3, 1], "head.0": [1, 3]},
                "lost": {"stream": {"a": 0.1, "b": 0.3}, "chosen": {"ffn.0": 0.5}}}  # fmt: skip
    record = {"kind": "merge", "method": "reconstruct", "inputs": [], "features": features}
    write_report(tmp_path, record)
    facts = dict.fromkeys(("name", "donor", "method", "summary", "recipe", "sha256", "version"), "x")
    more: dict[str, Any] = {"inputs": [], "paper": None, "alignment": None, "data": []}
    card = card_page({**facts, **more, "features": features})
    for text in (" ".join(page_of(tmp_path).words), card):
        assert "Joint features: the width of one model is filled from the features of all models" in text
        assert "in the order of the inputs: 50 %, 50 %." in text
        assert "20.0 % of the stream and 50.0 % of what heads and units compute" in text
    assert "eatures:" not in card_page({**facts, **more, "features": None})
    features["stream"] = "mean"
    assert "The stream holds the mean of the models' features" in card_page({**facts, **more, "features": features})


def test_flags_in_running_text_stay_whole_and_text_stays_text(tmp_path: Path) -> None:
    note = "the part <b> was used; --test-split names another, -o too, well-known -- it is"
    write_report(tmp_path, {"kind": "merge", "inputs": [], "notes": [note]})
    page = page_of(tmp_path)
    assert note in "".join(page.words) and not [tag for tag, _ in page.elements if tag == "b"]
    flags = [part.split("<")[0] for part in page.text.split('<span class="flag">')[1:]]
    assert flags[-2:] == ["--test-split", "-o"]


def test_adapters_show_the_cosine_of_their_updates() -> None:
    import torch
    from safetensors.torch import load_file

    files = [load_file(workshop() / name / "adapter_model.safetensors") for name in adapters()]
    name = "model.layers.1.self_attn.q_proj"
    deltas = [
        (f[f"base_model.model.{name}.lora_B.weight"] @ f[f"base_model.model.{name}.lora_A.weight"]).double().ravel()
        for f in files
    ]
    row = next(row for row in record_of(made("adapters"))["targets"] if row["name"] == name)
    assert row["cosine"] == pytest.approx(float(torch.cosine_similarity(*deltas, dim=0)), rel=1e-5)
    assert row["layer"] == 1


def test_names_are_text_and_never_markup(tmp_path: Path) -> None:
    name = "<img src=x onerror=alert(1)>&\"'"
    for model, copy in (("first", name), ("second", "b")):
        shutil.copytree(workshop() / model, tmp_path / copy)
    said("merge", name, "b", "--align", "-o", "out", folder=tmp_path)
    page = page_of(tmp_path / "out")
    assert not [tag for tag, _ in page.elements if tag == "img"]
    assert any(name in words for words in page.words)
    assert page.record["record"]["inputs"][0]["reference"] == name


def test_no_text_can_end_the_embedded_record(tmp_path: Path) -> None:
    attack = "</script><script>alert(1)</script><!--"
    write_report(tmp_path, {"kind": "merge", "inputs": [], "notes": [attack], "method": attack})
    page = page_of(tmp_path)
    assert sum(tag == "script" for tag, _ in page.elements) == 2
    assert page.record["record"]["notes"] == [attack] and any(attack in words for words in page.words)


CURVE = {
    "models": ["a", "b"], "metric_name": "accuracy", "barrier": 0.5, "ensemble": {"loss": 0.2, "metric": 0.9},
    "points": [{"t": t / 4, "loss": 1.0 + t, "metric": 0.5} for t in range(5)],
    "notes": ["the part 'test' was used; --split names another, --test-split too"],
    "aligned": {"level": "full", "barrier": 0.1,
                "points": [{"t": t / 4, "loss": 1.0, "metric": None} for t in range(5)]},
}  # fmt: skip
PLANE = {
    "models": [{"model": m, "x": x, "y": y, "loss": 1.0} for m, x, y in (("a", 0, 0), ("b", 1, 0), ("c", 0, 1))],
    "x": [-0.5, 0.5, 1.5], "y": [-0.5, 0.5, 1.5], "loss": [[1.0, 2.0, None], [3.0, 4.0, 5.0], [6.0, 7.0, 8.0]],
}  # fmt: skip


def test_curves_and_planes_are_drawn_and_listed(tmp_path: Path) -> None:
    for name, content in (("curve.json", CURVE), ("plane.json", PLANE)):
        (tmp_path / name).write_text(json.dumps(content))
    flags = ["--measured", tmp_path / "curve.json", "--measured", tmp_path / "plane.json"]
    told = said("report", made("ties"), "-o", tmp_path / "page.html", *flags)
    assert told["page"] == str(tmp_path / "page.html")
    page = Page((tmp_path / "page.html").read_text())
    assert page.record["measurements"] == [CURVE, PLANE]
    rows = page.tables["loss between the models"][1:]
    assert [float(row[1]) for row in rows] == [1, 2, 3, 4, 5] and {float(row[2]) for row in rows} == {1.0}
    places = page.tables["Loss on the plane through three models"][1:]
    assert len(places) == 9 and places[2][2] == "–"
    assert sum(known.get("class") == "place" for _, known in page.elements) == 9
    assert (made("ties") / "report.html").read_text() != page.text, "the page in the folder was left as it is"


def broken(tmp_path: Path, content: str | None) -> Path:
    if content is not None:
        (tmp_path / "isomerge.json").write_text(content)
    return tmp_path


@pytest.mark.parametrize(
    ("content", "code", "words"),
    [
        (None, 2, "no output of isomerge"),
        ('{"format": 1', 1, "cut off or not JSON"),
        ('{"format": 1, "kind": "cake"}', 1, "not a record of isomerge"),
        ('{"format": 99, "kind": "merge"}', 1, "Install a newer isomerge"),
    ],
)
def test_what_is_no_output_is_told(content: str | None, code: int, words: str, tmp_path: Path) -> None:
    told = verb("report", broken(tmp_path, content))
    assert told.exit_code == code and words in told.stderr, told.stderr
    assert not (tmp_path / "report.html").exists()


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--measured", "nowhere.json"], "there is no such file"),
        (["--measured", "first/config.json"], "it has no points of a barrier, curve or sweep, and no score"),
        (["--measured", "first/model.safetensors"], "it is not JSON"),
        (["-o", "nowhere/page.html"], "there is no folder nowhere"),
        (["-o", "first"], "it is a folder"),
        (["--measured", "gone.json"], "it is a link to"),
    ],
)
def test_wrong_flags_are_told(flags: list[str], words: str) -> None:
    link = workshop() / "gone.json"
    if not link.is_symlink():
        link.symlink_to("nowhere")
    told = verb("report", made("ties"), *flags)
    assert told.exit_code == 2 and words in told.stderr, told.stderr


def test_a_folder_of_several_aligned_models_names_them(tmp_path: Path) -> None:
    told = said("align", "second", "first", "third", "-o", tmp_path / "out")
    assert [Path(page).parent.name for page in told["report"]] == ["second", "third"]
    answer = verb("report", tmp_path / "out")
    assert answer.exit_code == 2 and "but in second, third" in answer.stderr
    assert said("report", tmp_path / "out" / "third")["kind"] == "align"


def test_without_jinja2_the_numbers_are_told_and_the_extra_is_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made("ties"), tmp_path / "out")
    (tmp_path / "out" / "report.html").unlink()
    monkeypatch.setitem(sys.modules, "jinja2", None)
    told = verb("report", tmp_path / "out")
    assert told.exit_code == 0 and 'pip install "isomerge[report]"' in told.stdout and "cosine" in told.stdout
    assert not (tmp_path / "out" / "report.html").exists()
    record = said("merge", "first", "second", "-o", tmp_path / "merged")
    assert record["report"] is None and any("isomerge[report]" in note for note in record["notes"])


def test_the_library_writes_the_same_page(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(workshop())  # commands name the folder as seen from where the page is written
    told: dict[str, Any] = isomerge.report(made("ties"), out=tmp_path / "page.html")
    assert (tmp_path / "page.html").read_text() == (made("ties") / "report.html").read_text()
    monkeypatch.chdir(workshop().parent)
    isomerge.report(made("ties"), out=tmp_path / "from-above.html")
    page = Page((tmp_path / "from-above.html").read_text())
    place = made("ties").relative_to(workshop().parent)
    assert f"isomerge eval {place} --data DATA --json > {place}/eval.json" in "".join(page.words)
    assert (
        told["kind"] == "merge"
        and "Lineage" in told["sections"]
        and told["summary"]["file integrity"].startswith("good")
    )


def test_a_record_with_next_to_nothing_still_has_a_page() -> None:
    record = {"kind": "merge", "isomerge": "0.1.0", "format": 1}
    page = render("x", {"record": record, "lock": None, "measurements": []})
    assert page is not None and "<h1>x</h1>" in page


def test_a_jinja2_that_cannot_be_imported_is_told_from_a_missing_one(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    shutil.copytree(made("ties"), tmp_path / "out")
    (tmp_path / "out" / "report.html").unlink()
    broken = types.ModuleType("jinja2")  # as if one of its files were damaged: it has no Environment
    broken.__spec__ = importlib.util.find_spec("jinja2")
    monkeypatch.setitem(sys.modules, "jinja2", broken)
    written = isomerge.report(tmp_path / "out")
    assert written.page is None and "is installed but cannot be imported" in written.notes[0]
    monkeypatch.setitem(sys.modules, "jinja2", None)
    (note,) = isomerge.report(tmp_path / "out").notes
    assert "is not installed" in note and '"isomerge[report]"' in note
