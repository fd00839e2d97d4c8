"""The first sentence of a page, from records: its colour, what was done to whom, what to expect, what was measured."""

from __future__ import annotations

import math
import shlex
from typing import Any

import pytest

from isomerge.checking.mergeability import expected_loss
from isomerge.reporting.kept_measurements import searched_scores
from isomerge.reporting.quality import how_to_measure, quality_cards
from isomerge.reporting.verdict import NEAR, verdict

Parts = dict[str, Any]


def related(
    cosine: float | None, before: float | None = None, after: float | None = None, base: str | None = None
) -> Parts:
    """The `measured` of two models; distances of models of one size follow from their cosine."""
    if cosine is not None and after is None:
        after = math.sqrt(2 * (1 - cosine))
    pairs = [{"models": ["first", "second"], "cosine": {"before": None, "after": cosine}}]
    whole = {"distance": {"before": [before], "after": [after]}, "cosine": {"before": None, "after": cosine}}
    return {"measured": {"all": whole, "pairs": pairs, "base": base, "reference": "first"}}


def merged(
    *parts: Parts, method: str = "linear", names: tuple[str, ...] = ("runs/first", "second"), **more: Any
) -> Parts:
    inputs = [{"reference": name, "role": "model"} for name in names]
    record: Parts = {"kind": "merge", "method": method, "inputs": inputs, "strangers": {}, **more}
    for part in parts:
        record |= part
    return record


def aligned(verdict: str = "aligned: 9 of 9 spaces moved", level: str | None = "full") -> Parts:
    models = [{"model": "second", "verdict": verdict, "spaces": []}]
    return {"alignment": {"anchor": "first", "level": level, "models": models}}


def with_base(strangers: Parts | None = None, distance: float = 0.02) -> Parts:
    inputs = [{"reference": n, "role": r} for n, r in (("base", "base"), ("a", "model"), ("b", "model"))]
    return {"inputs": inputs, "strangers": strangers or {}, **related(None, after=distance, base="base")}


STRANGERS = {"strangers": {"runs/first": {"second": 0.01}}}
SIBLINGS, UNRELATED = related(0.9995), related(0.01)


@pytest.mark.parametrize(
    ("record", "tone", "label", "sentence"),
    [
        (merged(SIBLINGS), "good", "Expect it to work",
         "first and second, siblings (cosine 1.00), were averaged: expect the result to work like its parents."),
        (merged(UNRELATED, STRANGERS), "bad", "Expect noise",
         "first and second, strangers (cosine 0.01), were averaged unaligned: expect noise."),
        (merged(UNRELATED, strangers=None), "bad", "Expect noise",
         "first and second, strangers (cosine 0.01), were averaged unaligned: expect noise."),
        (merged(UNRELATED, STRANGERS, method="ties"), "bad", "Expect noise",
         "first and second, strangers (cosine 0.01), were merged by ties unaligned: expect noise."),
        (merged(UNRELATED, aligned("unmoved: no space may move"), STRANGERS), "bad", "Expect noise",
         "first and second, strangers (cosine 0.01), were averaged unaligned: expect noise."),
        (merged(related(0.9, after=0.44)), "caution", "Measure it",
         "first and second, siblings (cosine 0.90), were averaged: they lie 0.440 apart, so the result may lose "
         "quality: measure how much."),
        (merged(related(0.01, 1.41, 1.1), aligned()), "caution", "Expect lower quality",
         "first and second, strangers (cosine 0.01), were aligned (level full) and averaged: after alignment they "
         "still lie 1.10 apart, so expect the result to lose quality, and measure how much."),
        (merged(related(0.01, 1.41, 0.01), aligned()), "good", "Expect it to work",
         "first and second, strangers (cosine 0.01), were aligned (level full) and averaged: they were one model in "
         "another order, and the result should work like it."),
        (merged(SIBLINGS, aligned("siblings: nothing needs to move")), "good", "Expect it to work",
         "first and second, siblings (cosine 1.00), were averaged: expect the result to work like its parents."),
        (merged(UNRELATED, method="reconstruct", features={"stream": "joint"}), "caution", "Expect lower quality",
         "first and second, strangers (cosine 0.01), were rebuilt from their joint features: expect the result "
         "to lose quality, and measure how much."),
        (merged(UNRELATED, method="reconstruct", strangers=None, layers=[{}]), "caution", "Expect lower quality",
         "first and second, strangers (cosine 0.01), were rebuilt from their features: expect the result to lose "
         "quality, and measure how much."),
        (merged(related(1.0)), "good", "Same weights",
         "first and second, which hold the same weights, were averaged: the result is the same model."),
        (merged(method="passthrough"), "caution", "Not measured",
         "first and second were stacked: how well the result works is not known until it is measured."),
        (merged(names=("first",)), "caution", "Not measured",
         "first was averaged: how well the result works is not known until it is measured."),
        (merged(with_base(), method="ties"), "good", "Expect it to work",
         "a and b, siblings of the base base (distance 0.0200), were merged by ties: expect the result to "
         "work like its parents."),
        (merged(with_base({"base": {"a": 0.01, "b": 0.02}}, 1.41), method="ties"), "bad", "Expect noise",
         "a and b, strangers to the base base (cosine 0.01), were merged by ties unaligned: expect noise."),
        (merged(with_base({"base": {"b": 0.02}}, 1.41), method="ties"), "bad", "Expect noise",
         "a and b, of which b is a stranger to base (cosine 0.02), were merged by ties unaligned: expect noise."),
        (merged(SIBLINGS, names=tuple("abcde")), "good", "Expect it to work",
         "a, b and 3 more models, siblings (cosine 1.00), were averaged: expect the result to work like its parents."),
    ],
)  # fmt: skip
def test_a_merge_that_was_not_measured_says_what_to_expect(record: Parts, tone: str, label: str, sentence: str) -> None:
    found = verdict(record)
    assert found is not None
    assert (found.sentence, found.tone, found.label) == (sentence, tone, label)
    assert (found.command is not None) is (tone == "bad"), "only what should be done again has a command"


def test_strangers_come_with_the_command_that_aligns_them() -> None:
    found = verdict(merged(UNRELATED, STRANGERS, names=("my runs/first", "second")), name="out")
    assert found is not None and found.command is not None
    assert shlex.split(found.command) == [
        "isomerge",
        "merge",
        "my runs/first",
        "second",
        "--align",
        "-o",
        "out-aligned",
    ]


def test_the_base_is_not_among_the_models_to_align() -> None:
    found = verdict(merged(with_base({"base": {"a": 0.01, "b": 0.02}})), name="out")
    assert found is not None and found.command == "isomerge merge a b --align -o out-aligned"


def test_a_model_that_a_search_has_tested_needs_no_further_measurement() -> None:
    test = {"data": {"name": "test.txt"}, "examples": 9, "best": {"loss": 2.0, "metric": 7.4}}
    search = {"task": "causal-lm", "metric_name": "perplexity", "higher_is_better": False, "test": test}
    record = merged(UNRELATED, STRANGERS, search=search)
    test["controls"] = [{"name": "runs/first", "loss": 2.1, "metric": 8.2}, {"name": "second", "loss": 3, "metric": 20}]
    found = verdict(record, searched_scores(record, "model"), "model")
    assert found is not None and (found.tone, found.label) == ("good", "Keeps its parents' quality")
    assert found.sentence.endswith("the result has perplexity 7.4 on test.txt, its best parent 8.2.")
    assert searched_scores({**record, "search": {**search, "test": None}}, "model") == []


def score(model: str, metric: float | None, **more: Any) -> Parts:
    facts = {"task": "image", "metric_name": "accuracy", "higher_is_better": True, "data": {"name": "digits"}}
    return {"model": model, "metric": metric, "loss": 1.0, **facts, **more}


def perplexity(model: str, metric: float) -> Parts:
    return score(model, metric, metric_name="perplexity", higher_is_better=False)


def curve(barrier: float | None, *, metrics: tuple[float, ...] = (), level: str | None = None, **more: Any) -> Parts:
    points = [{"t": n / 2, "loss": None, "metric": metric} for n, metric in enumerate(metrics or (None,) * 3)]
    line = {"models": ["first", "second"], "points": points, "barrier": barrier, "metric_name": "accuracy", **more}
    return (
        line
        if level is None
        else {**line, "barrier": 2.0, "aligned": {"level": level, "points": points, "barrier": barrier}}
    )


PARENTS = [score("first", 0.9), score("second", 0.8)]


@pytest.mark.parametrize(
    ("record", "measured", "tone", "label", "words"),
    [
        (merged(UNRELATED, STRANGERS), [score("out", 0.9), *PARENTS], "good", "Keeps its parents' quality",
         "the result has accuracy 0.9 on digits, its best parent 0.9"),
        (merged(SIBLINGS), [score("/runs/out", 0.8), *PARENTS], "caution", "Loses some quality", "has accuracy 0.8 on"),
        (merged(SIBLINGS), [score("out", 0.5), *PARENTS], "bad", "Loses much quality", "has accuracy 0.5 on"),
        (merged(SIBLINGS), [perplexity("out", 10.0), perplexity("first", 9.9)], "good", "Keeps its parents' quality",
         "the result has perplexity 10 on digits, its best parent 9.9"),
        (merged(SIBLINGS), [perplexity("out", 20.0), perplexity("first", 10.0)], "bad",
         "Loses much quality", "has perplexity 20 on"),
        (merged(SIBLINGS), [score("out", None, loss=1.02), score("first", None)], "good", "Keeps its parents' quality",
         "the result has loss 1.02 on digits, its best parent 1"),
        (merged(SIBLINGS), [score("out", None, loss=None), score("first", None)], "bad", "Loses much quality",
         "the loss of the result on digits is no number"),
        (merged(SIBLINGS), [score("out", 0.9)], "caution", "Compare with its parents",
         "the result has accuracy 0.9 on digits, and its parents were not measured there"),
        (merged(SIBLINGS), [score("out", 0.9), score("first", 0.9, data={"name": "others"})], "caution",
         "Compare with its parents", "not measured there"),
        (merged(SIBLINGS), [score("out", 0.9), *PARENTS, perplexity("out", 20.0), perplexity("first", 10.0)], "bad",
         "Loses much quality", "perplexity"),
        (merged(UNRELATED, STRANGERS), [curve(1.5)], "bad", "A high barrier",
         "between the parents the loss rises by at most 1.5 above its ends"),
        (merged(UNRELATED, aligned()), [curve(0.1, level="full")], "caution", "A low barrier", "at most 0.1 above"),
        (merged(SIBLINGS), [curve(0.01)], "good", "No barrier", "at most 0.01 above"),
        (merged(SIBLINGS), [curve(None, metrics=(0.9, 0.3, 0.9))], "bad", "A high barrier",
         "between the parents the accuracy falls to 0.3, from 0.9 at the ends"),
        (merged(SIBLINGS), [curve(None)], "bad", "A high barrier", "the loss is not everywhere a number"),
    ],
)  # fmt: skip
def test_what_was_measured_decides(record: Parts, measured: list[Parts], tone: str, label: str, words: str) -> None:
    found = verdict(record, measured, "out")
    assert found is not None and words in found.sentence, found
    assert (found.tone, found.label) == (tone, label)


@pytest.mark.parametrize(
    ("record", "measured"),
    [
        (merged(SIBLINGS, method="ties"), [curve(1.5)]),  # not on the line
        (merged(SIBLINGS), [curve(1.5, models=["first", "third"])]),  # other models
        (merged(SIBLINGS, aligned("siblings: none")), [curve(1.5, level="permutation")]),  # aligned in another way
        (merged(SIBLINGS), [score("other", 0.1), *PARENTS]),
        (merged(SIBLINGS, names=("first", "second", "third")), [curve(1.5)]),
    ],
)
def test_measurements_of_other_merges_decide_nothing(record: Parts, measured: list[Parts]) -> None:
    assert verdict(record, measured, "out") == verdict(record, [], "out")


def test_a_failed_check_comes_before_all_else() -> None:
    checks = [
        {"name": n, "passed": p, "detail": f"about {n}"} for n, p in (("opens", True), ("lock", False), ("x", None))
    ]
    for record in (merged(SIBLINGS), {**merged(), "kind": "align"}, {**merged(), "kind": "adapters"}):
        found = verdict({**record, "run": {"checks": checks}}, [score("out", 0.9), *PARENTS], "out")
        assert found is not None and (found.tone, found.label) == ("bad", "File check failed")
        assert found.sentence == "Do not use out: the check 'lock' failed (about lock)."
        again = "isomerge reproduce 'my runs/out' -o 'my runs/out-again'" if record["kind"] == "merge" else None
        found = verdict({**record, "run": {"checks": checks}}, name="out", place="my runs/out")
        assert found is not None and found.command == again
    broken = [{"name": "finite", "passed": False, "detail": "some weight is not"}]
    found = verdict({**merged(SIBLINGS), "run": {"checks": broken}}, [], "out")
    assert found is not None and found.command is None, "the lock file would give the same weights"
    more = [*checks, {"name": "y", "passed": False, "detail": ""}]
    found = verdict({**merged(SIBLINGS), "run": {"checks": more}}, [], "out")
    assert found is not None and found.sentence.endswith("(about lock), and 1 other.")


@pytest.mark.parametrize(
    ("facts", "tone", "words"),
    [
        ({"max_output_difference": 2.7e-7}, "good",
         "outputs differ by 3e-07 of the largest; its distance to first fell from 1.41 to 1.10."),
        ({"max_output_difference_reason": "it has no stock class"}, "caution", "not compared (it has no stock class)"),
        (aligned("siblings: nothing needs to move"), "good", "second already lies next to first, and was written"),
        ({"max_output_difference": 0.5, **aligned("changed: the output computes something else")}, "bad",
         "second was moved next to first, and changed: the output computes something else."),
        (aligned("unmoved: no space may move"), "good", "second has nothing that may move next to first"),
    ],
)  # fmt: skip
def test_an_alignment_says_whether_the_function_is_the_same(facts: Parts, tone: str, words: str) -> None:
    found = verdict({"kind": "align", "distance": {"before": 1.41, "after": 1.1}, **aligned(), **facts})
    assert found is not None and found.tone == tone and words in found.sentence, found


@pytest.mark.parametrize(("missed", "tone"), [(0.01, "good"), (0.45, "caution"), (None, "caution")])
def test_adapters_say_what_the_rank_misses(missed: float | None, tone: str) -> None:
    found = verdict({**merged(names=("a", "b")), "kind": "adapters", "relative_error": missed})
    assert found is not None and found.tone == tone and "a and b were merged into one adapter" in found.sentence
    assert missed is None or f"{100 * missed:.1f} %" in found.sentence


def test_a_demo_has_no_verdict() -> None:
    assert verdict({"kind": "demo"}) is None


def test_siblings_are_called_safe_where_check_calls_them_so() -> None:
    """`check` knows what the means of measured pairs lost; the report's word for near is the same distance."""
    near, farther = expected_loss(NEAR, math.log(10)), expected_loss(0.05, math.log(10))
    assert near is not None and near.safe and farther is not None and not farther.safe


def test_the_numbers_on_top_are_those_that_were_measured() -> None:
    best = {"parameters": {"t": 0.4}, "loss": 0.3, "metric": 0.91}
    sweep = {"models": ["first", "second"], "method": "slerp", "parameters": [{"name": "t"}], "points": [best] * 3,
             "best": best, "by": "metric", "metric_name": "accuracy", "test": {"best": {"metric": 0.9}}}  # fmt: skip
    measured = [score("out", 0.85), *PARENTS, curve(0.5, level="full"), sweep, {**sweep, "models": ["x", "y"]}]
    assert quality_cards(merged(SIBLINGS), measured, "out") == [
        ("accuracy", "0.85", "on digits; best parent 0.9"),
        ("barrier", "2 → 0.5", "rise of the loss between the parents; then aligned at level full"),
        ("best accuracy of a sweep", "0.91", "t = 0.4, of 3 points; 0.9 on other data"),
    ]


def test_the_commands_measure_the_model_and_its_parents() -> None:
    assert how_to_measure(merged(names=("my runs/a", "b")), "out").splitlines() == [
        "isomerge eval out --data DATA --json > out/eval.json",
        "isomerge eval 'my runs/a' --data DATA --json > out/eval-1.json",
        "isomerge eval b --data DATA --json > out/eval-2.json",
        "isomerge report out",
    ]
