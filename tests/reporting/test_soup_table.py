"""The table of a greedy soup: which model has which score, and which are in it; and that of learned coefficients."""

from __future__ import annotations

from isomerge.reporting.blocks import FactList, TableBlock
from isomerge.reporting.method_sections import method_section


def test_every_model_has_its_name_its_score_and_whether_it_was_chosen() -> None:
    scores = [{"model": name, "score": score} for name, score in (("org/a", 0.25), ("b", 0.0), ("c", 0.75))]
    record = {"method": "greedy_soup", "metric": "accuracy", "scores": scores, "chosen": ["c", "org/a"]}
    (table,) = method_section(record).blocks
    assert isinstance(table, TableBlock)
    assert [[cell.value for cell in row.cells] for row in table.rows] == [
        ["org/a", 0.25, "yes"], ["b", 0.0, "no"], ["c", 0.75, "yes"],
    ]  # fmt: skip


def test_learned_coefficients_have_a_column_for_each_model() -> None:
    rows = [{"group": "layers.0", "models": {"a": 0.25, "b": 0.5}}, {"group": "head", "models": {"a": -0.5, "b": 1.0}}]
    objective = {"kind": "entropy", "steps": 7, "before": 2.0, "after": 1.5}
    facts, table = method_section({"method": "adamerging", "coefficients": rows, "objective": objective}).blocks
    assert facts == FactList({"entropy": "2.00 → 1.50 in 7 steps"})
    assert isinstance(table, TableBlock) and table.columns == ("tensors", "a", "b")
    assert [[cell.value for cell in row.cells] for row in table.rows] == [["layers.0", 0.25, 0.5], ["head", -0.5, 1.0]]
