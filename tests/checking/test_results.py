"""What check, report, demo and catalogue hand back: typed, picklable, with the keys of their JSON; errors with data."""

from __future__ import annotations

import copy
import json
import pickle
import typing
from pathlib import Path
from typing import Any

import pytest

import isomerge
from isomerge import errors
from isomerge.checking.api import CheckResult
from isomerge.checking.pair import PairCheck
from isomerge.demonstration.run import DemoResult
from isomerge.listing import CatalogueEntry, CombinationEntry, MethodEntry, SolverEntry
from isomerge.reporting.page import ReportResult
from models import model, noisy

CHECK_KEYS = {
    "summary", "verdict", "reasons", "suggestion", "why", "recipe", "weights", "distance", "sign_conflict",
    "alignment_helps", "cosine", "norm_ratio", "low_rank", "alignment", "layers", "spaces", "mergeability", "pairs",
    "from_base", "models", "base", "architecture", "tokenizer", "seconds",
}  # fmt: skip


def assert_travels(result: Any) -> None:
    assert pickle.loads(pickle.dumps(result)) == copy.deepcopy(result) == result
    assert json.loads(json.dumps(result.to_dict())) == result.to_dict()


def test_a_check_travels_and_reads_like_its_json() -> None:
    first = model("vit", 0)
    result = isomerge.check(first, noisy(first, 0.02), model("vit", 1), base=first)
    assert isinstance(result, CheckResult) and all(isinstance(pair, PairCheck) for pair in result.pairs)
    assert set(result) == CHECK_KEYS and result["verdict"] == result.verdict == "strangers"
    assert result["pairs"][0]["verdict"] == result.pairs[0].verdict == "siblings"
    assert_travels(result)


def test_a_report_travels(tmp_path: Path) -> None:
    isomerge.merge([model("vit", 0), model("vit", 1)]).save(tmp_path / "out")
    result = isomerge.report(tmp_path / "out")
    assert isinstance(result, ReportResult) and result.kind == "merge" and result.page == result["page"]
    assert set(result) == {"folder", "kind", "page", "summary", "sections", "notes"}
    assert_travels(result)


def test_a_catalogue_travels() -> None:
    kinds: dict[str, type] = {
        "methods": MethodEntry, "solvers": SolverEntry, "architectures": CatalogueEntry,
        "combinations": CombinationEntry,
    }  # fmt: skip
    for kind, entry in kinds.items():
        rows = isomerge.catalogue(kind)
        assert rows and all(type(row) is entry for row in rows)
        assert_travels(rows[0])


def test_distance_and_cosine_of_one_pair_do_not_contradict_each_other() -> None:
    """Of strangers of one size: no cosine, and √2 apart; `align` measures the same distance before it moves."""
    first, second = model("vit", 0), model("vit", 1)
    result = isomerge.check(first, second)
    assert result.distance is not None and result.cosine is not None and result.norm_ratio is not None
    assert abs(result.cosine) < 0.2 and result.distance > 1
    before = isomerge.align(second, anchor=first).report()["distance"]["before"]
    assert before == pytest.approx(result.distance, rel=1e-6)


@pytest.mark.parametrize("result", [CheckResult, PairCheck, ReportResult, DemoResult, MethodEntry, CatalogueEntry])
def test_every_field_has_a_type(result: type) -> None:
    assert typing.get_type_hints(result)


@pytest.mark.parametrize(
    ("call", "argument"),
    [
        (lambda: isomerge.check("a", "b", data=3), "data"),
        (lambda: isomerge.report(3), "folder"),
        (lambda: isomerge.report("out", out=3), "out"),
        (lambda: isomerge.report("out", measured="curve.json"), "measured"),
        (lambda: isomerge.demo(3), "out"),
        (lambda: isomerge.demo("out", seeds="2"), "seeds"),
        (lambda: isomerge.catalogue(["methods"]), "kind"),
    ],
)
def test_an_argument_of_the_wrong_type_is_named(call: Any, argument: str) -> None:
    with pytest.raises(errors.RequestError, match=f"^{argument} must be") as caught:
        call()
    assert caught.value.keys == (argument,)


@pytest.mark.parametrize(
    "kind",
    ["IsomergeError", "RequestError", "CheckpointError", "NotFoundError", "SpecificationError", "AlignmentError"],
)
def test_an_error_travels_with_what_it_knows(kind: str) -> None:
    error = getattr(errors, kind)("Reading.", keys=("weight",), cause="missing", module="ot")
    again = pickle.loads(pickle.dumps(error))
    assert type(again) is type(error) and str(again) == "Reading." and vars(again) == vars(error)
    assert (again.keys, again.cause, again.module) == (("weight",), "missing", "ot")


def test_a_result_can_be_spread_like_a_mapping() -> None:
    entry = isomerge.catalogue("methods")[0]
    assert dict(entry) == {**entry} == entry.to_dict() and len(entry) == len(entry.items())
