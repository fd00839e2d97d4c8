"""The table of a greedy soup: which model has which score, and which are in it."""

from __future__ import annotations

from isomerge.reporting.blocks import TableBlock
from isomerge.reporting.method_sections import method_section


def test_every_model_has_its_name_its_score_and_whether_it_was_chosen() -> None:
    scores = [{"model": name, "score": score} for name, score in (("org/a", 0.25), ("b", 0.0), ("c", 0.75))]
    record = {"method": "greedy_soup", "metric": "accuracy", "scores": scores, "chosen": ["c", "org/a"]}
    (table,) = method_section(record).blocks
    assert isinstance(table, TableBlock)
    assert [[cell.value for cell in row.cells] for row in table.rows] == [
        ["org/a", 0.25, "yes"], ["b", 0.0, "no"], ["c", 0.75, "yes"],
    ]  # fmt: skip
