"""What was measured stays when a page is written again, and is shown with the digits that it needs."""

from __future__ import annotations

import json
import os
import shutil
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge.reporting.charts import Line, digits_between, line_chart, ticks_between
from reporting.outputs import Page, made, page_of, said, verb
from reporting.test_page import CURVE, PLANE

NEAR = {**CURVE, "ensemble": None, "aligned": None,
        "points": [{"t": t / 4, "loss": 4.1628 + 1e-5 * t * t, "metric": None} for t in range(5)]}  # fmt: skip
NEAR_PLANE = {
    **PLANE,
    "loss": [[4.16281 + 1e-5 * (3 * row + column) for column in range(3)] for row in range(3)],
    "models": [{**m, "loss": 4.1628 + 1e-5 * n} for n, m in enumerate(PLANE["models"])],
}


@pytest.fixture
def out(tmp_path: Path) -> Path:
    shutil.copytree(made("ties"), tmp_path / "out")
    return tmp_path / "out"


def file(out: Path, curve: dict[str, Any]) -> Path:
    path = out.parent / "measured.json"
    path.write_text(json.dumps(curve))
    return path


def curves(page: Path) -> list[Any]:
    return list(Page(page.read_text()).record["measurements"])


def test_curves_stay_and_others_join_them(out: Path) -> None:
    said("report", out, "--measured", file(out, CURVE))
    assert "Between two models" in said("report", out)["sections"] and curves(out / "report.html") == [CURVE]
    said("report", out, "--measured", file(out, PLANE))
    said("verify", out, "--quick")
    assert curves(out / "report.html") == [CURVE, PLANE]
    said("report", out, "--no-curves", "--measured", file(out, PLANE))
    assert curves(out / "report.html") == [PLANE]
    assert "Between three models" not in said("report", out, "--no-curves")["sections"]


def test_a_curve_of_the_same_things_takes_the_place_of_the_old_one(out: Path) -> None:
    data = {"name": "images", "sha256": "abc"}
    old, new = ({**CURVE, "data": data, "barrier": barrier} for barrier in (1.0, 2.0))
    others = [{**old, "models": ["a", "c"]}, {**old, "data": {**data, "sha256": "def"}}, {**old, "aligned": None}]
    isomerge.report(out, measured=[old, *others, PLANE])
    isomerge.report(out, measured=[new])
    assert curves(out / "report.html") == [*others, PLANE, new]


def test_pages_of_older_versions_lend_their_curves(out: Path) -> None:
    text = (out / "report.html").read_text().replace('"measurements": []', f'"curves": [{json.dumps(CURVE)}]')
    (out / "report.html").write_text(text)
    isomerge.report(out)
    assert curves(out / "report.html") == [CURVE]


def test_a_new_file_has_the_curves_of_the_folder_and_an_old_one_its_own(out: Path, tmp_path: Path) -> None:
    isomerge.report(out, measured=[CURVE])
    isomerge.report(out, out=tmp_path / "page.html", measured=[PLANE])
    assert curves(tmp_path / "page.html") == [CURVE, PLANE] and curves(out / "report.html") == [CURVE]
    isomerge.report(out, out=tmp_path / "page.html")
    assert curves(tmp_path / "page.html") == [CURVE, PLANE]


def test_pages_of_others_lend_no_curves(out: Path, tmp_path: Path) -> None:
    isomerge.report(out, measured=[CURVE])
    isomerge.report(made("align"), out=out / "report.html")
    assert curves(out / "report.html") == [], "a page of other weights"
    for strange in ("<html>mine</html>", '<script id="record">{"curves": 5}</script>', '<script id="record">[]'):
        (out / "report.html").write_text(strange)
        isomerge.report(out)
        assert curves(out / "report.html") == []


SCORE = {
    "model": "out",
    "task": "image",
    "loss": 1.0,
    "metric": 0.9,
    "metric_name": "accuracy",
    "higher_is_better": True,
}


def test_what_was_measured_beside_the_weights_is_on_top(out: Path) -> None:
    (out / "eval.json").write_text(json.dumps(SCORE))
    (out / "eval-1.json").write_text(json.dumps({**SCORE, "model": "somewhere/second", "metric": 1.0}))
    (out / "barrier-notes.json").write_text('{"mine": 1}')
    told = isomerge.report(out)
    assert told.summary["verdict"].startswith("Loses some quality.") and told.summary["accuracy"].startswith("0.9 ")
    assert [note for note in told.notes if "barrier-notes.json" in note], "what is left out is said"
    scores = page_of(out).tables["Scores of models on data"][1:]
    assert [(row[0], float(row[3])) for row in scores] == [("somewhere/second", 1.0), ("out", 0.9)]
    (out / "eval.json").write_text(json.dumps({**SCORE, "metric": 0.1}))
    assert isomerge.report(out).summary["verdict"].startswith("Loses much quality."), (
        "the new score, not that of the page"
    )
    os.utime(out / "eval.json", (1, 1))
    told = isomerge.report(out, keep_curves=False)
    assert "eval.json is older than the weights" in " ".join(told.notes) and "accuracy" not in told.summary


def test_a_folder_is_no_curve(out: Path) -> None:
    told = verb("report", out, "--measured", out)
    words = " ".join(told.stderr.split())
    assert told.exit_code == 2 and "it is a folder" in words and "JSON file" in words and "not JSON" not in words


def shown(svg: str, kind: str) -> list[str]:
    """The text on one axis: numbers of the axis that goes up end where it is."""
    parts = [part.split(">", 1) for part in svg.split("<text ")[1:]]
    return [text.split("<")[0] for head, text in parts if f'text-anchor="{kind}"' in head and "class" not in head]


@pytest.mark.parametrize("spread", [4.0, 0.3, 1e-2, 3e-4, 7e-6])
def test_ticks_differ_whatever_the_spread(spread: float) -> None:
    values = [4.1628 + spread * n / 10 for n in range(11)]
    svg = line_chart("x", [Line("a", list(enumerate(values)))], "t", "loss")
    labels = [float(text) for text in shown(svg, "end")]
    assert len(labels) >= 3 and labels == pytest.approx(ticks_between(values[0], values[-1]), rel=1e-12)
    steps = [b - a for a, b in pairwise(labels)]
    assert min(steps) > 0 and steps == pytest.approx([steps[0]] * len(steps), rel=1e-3)
    tips = [float(part.split('"')[0].split(": ")[1]) for part in svg.split('data-tip="')[1:]]
    assert tips == pytest.approx(values, abs=spread / 100) and len(set(tips)) == 11


def test_values_that_differ_by_rounding_alone_are_one_line() -> None:
    svg = line_chart("x", [Line("a", [(0, 4.1628), (1, 4.1628 + 1e-15)])], "t", "loss")
    assert shown(svg, "end") == ["4.163"] and digits_between([4.1628, 4.1628 + 1e-15, None]) == 4


def test_near_losses_are_told_apart_in_tables_and_on_the_plane(out: Path) -> None:
    isomerge.report(out, measured=[NEAR, NEAR_PLANE])
    page = page_of(out)
    rows = page.tables["loss between the models"][1:]
    expected = [point["loss"] for point in NEAR["points"]]
    assert [float(row[1]) for row in rows] == pytest.approx(expected, abs=1e-6)
    places = [row[2] for row in page.tables["Loss on the plane through three models"][1:]]
    assert len(set(places)) == 9
    told = [words for words in page.words if words.startswith(("weakest tint", "strongest tint"))]
    weak, strong = (float(word) for words in told for word in words.split() if word[0].isdigit())
    assert weak == pytest.approx(4.16281, abs=1e-6) and strong > weak
    tips = [known["data-tip"] for _, known in page.elements if known.get("class") == "place"]
    assert len({str(tip).split("loss ")[1] for tip in tips}) == 9
