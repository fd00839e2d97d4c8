"""What holds for every text, with Hypothesis: readers of JSON and YAML agree with the plain libraries, or refuse."""

from __future__ import annotations

import json
import math
import re
from typing import Any

import yaml
from hypothesis import given, settings
from hypothesis import strategies as st

from isomerge.adapters.adapter import not_exact
from isomerge.checkpoint.config import config_problems
from isomerge.errors import IsomergeError
from isomerge.json_files import JsonError, parse_json
from isomerge.merging.recipe.load import load_recipe
from isomerge.name_patterns import NamePattern
from isomerge.reporting.curve_sections import connection_sections
from isomerge.reporting.measurements import is_line, is_measurement, is_plane
from isomerge.yaml_files import load

FEW = settings(max_examples=25, deadline=None, derandomize=True, database=None)
LEAVES = (
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=8)
)
TREES = st.recursive(
    LEAVES, lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4)
)


@FEW
@given(TREES)
def test_json_is_read_as_python_reads_it(tree: Any) -> None:
    assert parse_json(json.dumps(tree)) == tree
    assert parse_json(json.dumps(tree, ensure_ascii=False).encode()) == tree


@FEW
@given(st.text() | st.binary())
def test_any_text_is_json_or_an_error(text: str | bytes) -> None:
    try:
        value = parse_json(text)
    except JsonError:
        return
    again = json.dumps(value, ensure_ascii=False).encode()  # what was let through can be written again
    assert parse_json(again) == value


@FEW
@given(TREES)
def test_yaml_is_read_as_pyyaml_reads_it(tree: Any) -> None:
    text = yaml.safe_dump(tree)
    try:
        assert load(text) == yaml.safe_load(text)
    except yaml.YAMLError as error:
        assert "\0" in json.dumps(tree, ensure_ascii=False) or "\\u0000" in json.dumps(tree), error


def near(keys: list[str]) -> st.SearchStrategy[dict[str, Any]]:
    """Objects with the keys that a reader looks for."""
    return st.dictionaries(st.sampled_from(keys) | st.text(max_size=5), TREES, max_size=6)


@FEW
@given(
    near(["merge_method", "models", "base_model", "parameters", "slices", "tokenizer", "align", "name", "data", "seed"])
)
def test_any_mapping_is_a_recipe_or_an_error(recipe: dict[str, Any]) -> None:
    try:
        read = load_recipe({"merge_method": "linear", **recipe})
    except IsomergeError:
        return
    assert read[0].to_yaml()


@FEW
@given(near(["r", "lora_alpha", "rank_pattern", "alpha_pattern", "bias", "target_modules", "init_lora_weights"]))
def test_any_object_is_an_adapter_or_has_problems(config: dict[str, Any]) -> None:
    problems = not_exact({"peft_type": "LORA", **config})
    assert problems or (type(config["r"]) is int and config["r"] > 0)


@FEW
@given(near(["model_type", "architectures", "num_hidden_layers", "id2label", "text_config", "num_labels"]))
def test_any_object_is_a_config_or_has_problems(config: dict[str, Any]) -> None:
    problems = config_problems(config, 10)
    kind = config.get("model_type")
    assert problems or kind is None or isinstance(kind, str)


@FEW
@given(near(["points", "models", "aligned", "ensemble", "x", "y", "loss", "notes"]))
def test_what_counts_as_a_curve_can_be_drawn(record: dict[str, Any]) -> None:
    points = [{"t": t, "loss": 1.0, "metric": None} for t in (0.0, 0.5, 1.0)]
    record = {"points": points, **record}
    if is_measurement(record) and (is_line(record) or is_plane(record)):
        assert connection_sections([record])


@FEW
@given(st.from_regex(r"[a-z.*+?|()]{0,8}", fullmatch=True), st.text(alphabet="abc.", max_size=10))
def test_patterns_match_as_re_does(pattern: str, name: str) -> None:
    try:
        mine = NamePattern(pattern).fullmatch(name)
    except ValueError:
        return
    assert mine == (re.fullmatch(pattern, name) is not None)


@FEW
@given(st.floats())
def test_only_finite_numbers_pass(number: float) -> None:
    try:
        assert math.isfinite(parse_json(json.dumps(number)))
    except JsonError:
        assert not math.isfinite(number)
