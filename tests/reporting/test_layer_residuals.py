"""What a merge by features tells on its page: the residuals of the record, by layer and in order."""

from __future__ import annotations

from typing import Any

import pytest

from isomerge.reporting.blocks import FactList, Figure, Heat
from isomerge.reporting.method_sections import method_section
from reporting.heat_cells import cell_numbers
from reporting.outputs import made, page_of, record_of


def solved(*names: str, before: float, after: float, **more: Any) -> dict[str, Any]:
    return {
        "layers": list(names),
        "kind": "inputs",
        "samples": 9,
        "residual_before": before,
        "residual_after": after,
    } | more


def heat_map(layers: list[dict[str, Any]]) -> tuple[Heat, list[list[tuple[float | None, float] | None]]]:
    """The map, and of each cell before and after."""
    shown = method_section({"method": "reconstruct", "layers": layers}).blocks[0]
    assert isinstance(shown, Heat)
    cells = [[None if one is None else (one.before, one.value) for one in row] for _, _, row in shown.rows]
    return shown, cells


@pytest.mark.parametrize("when", ["before", "after"])
def test_the_map_of_a_merge_shows_the_residuals_of_its_record(when: str) -> None:
    page, record = page_of(made("reconstruct")), record_of(made("reconstruct"))
    table = page.tables["Residual before and after solving, per layer and map"]
    shown = [cell_numbers(cell)[when == "after"] for row in table[1:] for cell in row[1:] if cell != "–"]
    assert sorted(shown) == pytest.approx(sorted(r[f"residual_{when}"] for r in record["layers"]), rel=0.006)
    assert [row[0] for row in table[1:]] == ["layer 0", "layer 1", "outside"]
    title = "Residual of every regression in the order in which the maps run, relative to the target"
    place = {"before": 4, "after": 5}[when]
    listed = [float(row[place]) for row in page.tables[title][1:]]
    assert listed == pytest.approx([r[f"residual_{when}"] for r in record["layers"]], rel=0.006)


def test_a_map_has_one_row_per_layer_and_one_column_per_kind_of_map() -> None:
    layers = [
        one
        for n in range(2)
        for one in (
            solved(f"h.{n}.attn.q.weight", f"h.{n}.attn.k.weight", before=0.5 + n, after=0.25),
            solved(f"h.{n}.attn.out.dense.weight", before=0.4, after=0.2),
            solved(f"h.{n}.out.dense.weight", before=0.3, after=0.1),
        )
    ]
    shown, cells = heat_map([*layers, solved("head.weight", before=0.1, after=0.05)])
    assert list(shown.columns) == ["q, k", "attn.out.dense", "out.dense", "head"]
    assert [row[:2] for row in shown.rows] == [("layer 0", 0), ("layer 1", 1), ("outside", -1)]
    assert cells[0] == [(0.5, 0.25), (0.4, 0.2), (0.3, 0.1), None] and cells[1][0] == (1.5, 0.25)
    assert cells[2] == [None, None, None, (0.1, 0.05)]
    head = shown.rows[2][2][3]
    assert head and head.tint == -0.5 and head.change == "−50\u202f%" and len(shown.ends) == 3, "a scale of changes"


def test_experts_are_shown_in_the_mean_and_two_stacks_apart() -> None:
    experts = [solved("enc.0.experts.up.weight", before=b, after=0.5 * b, expert=n) for n, b in enumerate((0.2, 0.4))]
    shown, cells = heat_map([*experts, solved("dec.0.up.weight", before=0.8, after=0.2)])
    assert [label for label, _, _ in shown.rows] == ["enc 0", "dec 0"]
    assert cells[0][0] == pytest.approx((0.3, 0.15)) and cells[0][1] is None


def test_refined_blocks_and_the_polish_are_told() -> None:
    refined = [
        {"block": f"h.{n}", "error_before": 0.4, "error_after": after, "batches": 2}
        for n, after in enumerate((0.3, 0.2))
    ]
    polished = {"steps": 5, "loss_before": 0.02, "loss_after": 0.01}
    figure, facts = method_section({"method": "reconstruct", "refined": refined, "polished": polished}).blocks
    assert isinstance(figure, Figure) and isinstance(facts, FactList)
    assert [[cell.value for cell in row.cells] for row in figure.numbers.rows] == [["h.0", 0.4, 0.3], ["h.1", 0.4, 0.2]]
    assert "5 steps" in facts.items["polished"] and "0.0200 → 0.0100" in facts.items["polished"]
