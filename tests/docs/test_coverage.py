"""The page of architectures covered says what its JSON says, and the JSON what the stock classes say."""

from __future__ import annotations

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import pytest
import transformers

from models import mostly_slow

ROOT = Path(__file__).parents[2]
KEPT = json.loads((ROOT / "docs/coverage.json").read_text(encoding="utf-8"))
AGAIN = ("biogpt", "bloom", "cohere", "gpt_bigcode")


@pytest.fixture(scope="module")
def coverage() -> Any:
    specification = importlib.util.spec_from_file_location("coverage_page", ROOT / "docs/coverage.py")
    assert specification and specification.loader
    module = importlib.util.module_from_spec(specification)
    specification.loader.exec_module(module)
    return module


def test_the_page_says_what_was_measured(coverage: Any) -> None:
    page = coverage.page(KEPT["types"], KEPT["transformers"], KEPT["waiting"])
    assert (ROOT / "docs/coverage.md").read_text(encoding="utf-8") == page, "run: python docs/coverage.py --page"


def test_every_model_type_is_measured_or_named_as_waiting(coverage: Any) -> None:
    if transformers.__version__ != KEPT["transformers"]:
        pytest.skip("the page is of another transformers")
    assert sorted([*KEPT["types"], *KEPT["waiting"]]) == sorted(coverage.model_types())


def test_the_readme_has_the_counts(coverage: Any) -> None:
    number = coverage.counts(KEPT["types"], KEPT["waiting"])
    text = re.sub(r"\s+", " ", (ROOT / "README.md").read_text(encoding="utf-8"))
    opening = f"Of the {number['types']} model types of transformers {KEPT['transformers']}, {number['measured']} are"
    attention, stream = number["heads and feed-forwards"], number["residual stream"]
    sentence = f"{opening} measured so far: {attention} align attention and feed-forwards, {stream} the residual stream"
    assert sentence in text


@pytest.mark.parametrize("kind", mostly_slow(AGAIN, "biogpt", "bloom"))
def test_a_type_measured_again_gives_its_row(coverage: Any, kind: str) -> None:
    if transformers.__version__ != KEPT["transformers"]:
        pytest.skip("the page is of another transformers")
    assert kind in KEPT["types"]
    row = coverage.examined(kind, coverage.model_types()[kind])
    assert row["spaces"] == KEPT["types"][kind]["spaces"]


def test_what_is_not_proven_is_not_counted(coverage: Any) -> None:
    whole = dict.fromkeys(coverage.SPACES, "permutation")
    rows = {
        "all": {"by": "hand", "spaces": whole},
        "no attention": {"by": "inferred", "spaces": {**whole, **dict.fromkeys(coverage.SPACES[1:4])}},
        "stream stays": {"by": "inferred", "spaces": {**whole, "residual stream": "identity"}},
        "units stay": {"by": "inferred", "spaces": {**whole, "feed-forward": "identity"}},
        "broken": {"failed": "why"},
    }
    number = coverage.counts(rows, ["later"])
    assert (number["types"], number["measured"], number["run"]) == (6, 5, 4)
    assert (number["heads and feed-forwards"], number["residual stream"]) == (2, 3)
