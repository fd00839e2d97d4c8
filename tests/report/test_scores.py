"""The table of a greedy soup: which model has which score, and which are in it."""

from __future__ import annotations

from isomerge.report.blocks import Table
from isomerge.report.method_view import method_section


def test_every_model_has_its_name_its_score_and_whether_it_was_chosen() -> None:
    """The inputs of a record begin with the base, its scores follow the recipe."""
    record = {
        "method": "greedy_soup", "metric": "accuracy", "scores": [0.25, 0.0, 0.75], "chosen": ["c", "org/a"],
        "inputs": [{"reference": name, "role": "model"} for name in ("b", "org/a@main", "c")],
        "recipe": "merge_method: greedy_soup\nbase_model: b\nmodels:\n- model: org/a@main\n- model: b\n- model: c\n",
    }  # fmt: skip
    (table,) = method_section(record).blocks
    assert isinstance(table, Table)
    assert [[cell.value for cell in row.cells] for row in table.rows] == [
        ["org/a@main", 0.25, "yes"], ["b", 0.0, "no"], ["c", 0.75, "yes"],
    ]  # fmt: skip
