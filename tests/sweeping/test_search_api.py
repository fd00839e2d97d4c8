"""`isomerge.search` against models that transformers runs, and standard errors against numpy."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoModelForImageClassification, AutoTokenizer
from typer.testing import CliRunner

import isomerge
from isomerge.cli.app import app
from isomerge.errors import RequestError
from isomerge.evaluation.example_scores import ExampleScores
from isomerge.merging.recipe import load_recipe
from isomerge.sweeping.measuring import Bench, SweepMeasure
from isomerge.sweeping.natural import natural_axes
from isomerge.sweeping.optimisers import Dimension
from isomerge.sweeping.ranges import read_axes
from isomerge.sweeping.space import Space
from models import llama, vit
from samples import DIGITS, SENTENCES, write_digits


@pytest.fixture(scope="module")
def images(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Three image models, one that answers the same to everything and one that shouts; and digits."""
    folder = tmp_path_factory.mktemp("search")
    for seed, name in enumerate("abc"):
        vit(folder / name, DIGITS, seed=seed)
    for name, factor in (("flat", 0.0), ("loud", 9.0)):
        vit(folder / name, DIGITS, seed=0)
        state = load_file(folder / name / "model.safetensors")
        for tensor in ("classifier.weight", "classifier.bias"):
            state[tensor] = state[tensor] * factor
        save_file(state, folder / name / "model.safetensors", metadata={"format": "pt"})
    write_digits(folder / "digits", 24)
    write_digits(folder / "others", 36)
    return folder


def recipe_in(folder: Path) -> dict[str, Any]:
    models = [{"model": str(folder / name)} for name in "bc"]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(folder / "a"), "models": models}
    return recipe | {"parameters": {"weight": 1.4}}  # worse than anything that a search finds


def quick(folder: Path, **more: Any) -> isomerge.Sweep:
    given = {"data": folder / "digits", "test": folder / "others", "algorithm": "cma", "evaluations": 8, **more}
    return isomerge.search(given.pop("recipe", recipe_in(folder)), given.pop("over", None), **given)


def measured(result: isomerge.Sweep) -> list[Any]:
    return [(point.parameters, point.loss, point.metric) for point in result.points]


def losses(model: Path, count: int) -> np.ndarray:
    """The cross-entropy of every digit, without isomerge."""
    from sklearn.datasets import load_digits

    data = load_digits(n_class=3)
    pixels = torch.tensor(np.stack([(image * 15).astype(np.uint8) for image in data.images[:count]])).float()
    loaded = AutoModelForImageClassification.from_pretrained(model, dtype=torch.float32).eval()
    with torch.no_grad():
        logits = loaded((pixels[:, None] / 255 - 0.5) / 0.5).logits.double()
    return F.cross_entropy(logits, torch.tensor(data.target[:count]), reduction="none").numpy()


# --- what is found ----------------------------------------------------------------------------------------------------
def test_numbers_and_their_standard_errors_are_those_of_numpy(images: Path, tmp_path: Path) -> None:
    found = quick(images, evaluations=6)
    isomerge.merge_recipe([found.recipe]).save(tmp_path / "best")
    isomerge.merge_recipe(recipe_in(images)).save(tmp_path / "start")
    best, start = losses(tmp_path / "best", 24), losses(tmp_path / "start", 24)
    assert (found.best.loss, found.best.error) == pytest.approx((best.mean(), best.std(ddof=1) / 24**0.5), rel=1e-5)
    gains = start - best
    assert found.best.gain == pytest.approx(gains.mean(), rel=1e-4)
    assert found.best.gain_error == pytest.approx(gains.std(ddof=1) / 24**0.5, rel=1e-4)
    assert found.test is not None and found.controls is not None and found.test.controls is not None
    assert [one.name for one in found.controls] == [str(images / name) for name in "bca"]
    assert [one.role for one in found.controls] == ["model", "model", "base"]
    tested = losses(tmp_path / "best", 36)
    assert found.test.best["loss"] == pytest.approx(tested.mean(), rel=1e-5)
    for one in found.test.controls:
        gains = losses(Path(one.name), 36) - tested
        assert (one.gain, one.gain_error) == pytest.approx((gains.mean(), gains.std(ddof=1) / 6), rel=1e-4)
    assert found.says is not None and str(images) in found.says


def test_the_error_of_a_mean_over_tokens_counts_texts() -> None:
    """Tokens of one text are not independent: the ratio estimator of numpy, text by text."""
    random = np.random.default_rng(0)
    counts = random.integers(3, 9, 20)
    first, second = ([torch.tensor(random.random(n)) for n in counts] for _ in range(2))
    made = [ExampleScores.of([(torch.cat(rows), None)], [torch.tensor(counts)]) for rows in (first, second)]
    gap = np.array([float(b.sum() - a.sum()) for a, b in zip(first, second, strict=True)])
    mean = gap.sum() / counts.sum()
    spread = np.sqrt(20 / 19 * ((gap - mean * counts) ** 2).sum()) / counts.sum()
    assert made[0].gain_over(made[1], "loss") == pytest.approx((mean, spread), rel=1e-5)
    assert made[0].gain_over(made[1], "metric") is None
    other = ExampleScores(made[1].losses, made[1].counts + 1, None)
    assert made[0].gain_over(other, "loss") is None  # cut into other tokens: not to be compared


def test_texts_have_errors_by_text(tmp_path: Path) -> None:
    for seed, name in enumerate("ab"):
        llama(tmp_path / name, seed=seed)
    (tmp_path / "book.txt").write_text("\n".join(SENTENCES))
    recipe = {"merge_method": "linear", "models": [{"model": str(tmp_path / name)} for name in "ab"]}
    data = {"path": tmp_path / "book.txt", "kind": "lines"}
    (tmp_path / "other.txt").write_text("\n".join(SENTENCES[:5]))
    test = {**data, "path": tmp_path / "other.txt"}
    found = isomerge.search(recipe, {"t": "0:0.5"}, data=data, algorithm="random", evaluations=3, test=test)
    model, tokenizer = (kind.from_pretrained(tmp_path / "a") for kind in (AutoModelForCausalLM, AutoTokenizer))
    sums, counts = [], []
    for text in SENTENCES:
        ids = tokenizer(text, return_tensors="pt").input_ids
        with torch.no_grad():
            each = F.cross_entropy(model(ids).logits[0, :-1].double(), ids[0, 1:], reduction="none")
        sums.append(float(each.sum()))
        counts.append(len(each))
    mean = sum(sums) / sum(counts)
    rest = np.array(sums) - mean * np.array(counts)
    error = np.sqrt(12 / 11 * (rest**2).sum()) / sum(counts)
    assert found.controls is not None
    assert (found.controls[0].loss, found.controls[0].error) == pytest.approx((mean, error), rel=1e-4)


def test_the_result_is_the_same_for_every_number_of_workers(images: Path) -> None:
    one, three, alone = (quick(images, workers=workers, evaluations=9) for workers in (1, 3, None))
    assert measured(one) == measured(three) == measured(alone)
    assert one.best.to_dict() | {"seconds": 0} == three.best.to_dict() | {"seconds": 0}
    assert one.test is not None and three.test is not None and one.test.to_dict() == three.test.to_dict()
    assert measured(quick(images, seed=1)) != measured(one)


@pytest.mark.slow
def test_a_gaussian_process_proposes_the_same_for_every_number_of_workers(images: Path) -> None:
    one, two = (quick(images, workers=workers, algorithm="bayesian", evaluations=11) for workers in (1, 2))
    assert measured(one) == measured(two)


def test_methods_are_chosen_with_the_options_that_each_has(images: Path) -> None:
    over = ["method=ties,task_arithmetic,linear", "density=0.1:1", "lambda=0.1:1:log", "models.0.weight=0:1:gradient2"]
    found = quick(images, over=over, algorithm="random", evaluations=12)
    for point in found.points:
        values = point.parameters
        assert ("lambda" in values) == (values["merge_method"] != "linear")
        assert isinstance(values["models.0.weight"], list) and len(values["models.0.weight"]) == 2
        assert point.recipe.merge_method == values["merge_method"]
    assert len({str(point.parameters["merge_method"]) for point in found.points}) == 3


def test_points_without_a_common_axis_are_drawn_as_a_trace(images: Path, tmp_path: Path) -> None:
    over = ["method=ties,linear", "density=0.1:1"]
    found = quick(images, over=over, algorithm="random", evaluations=5, plot=tmp_path / "search.svg")
    assert "best so far" in (tmp_path / "search.svg").read_text() and found.plot == str(tmp_path / "search.svg")
    assert {"density" in point.parameters for point in found.points} == {True, False}


# --- the final test ---------------------------------------------------------------------------------------------------
def test_the_test_part_is_measured_once(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[tuple[str, str]] = []
    original = SweepMeasure.at

    def at(self: Any, merged: Any, module: Any, lock: Any) -> Any:
        calls.append((self.data.name, merged.recipe.to_yaml()))
        return original(self, merged, module, lock)

    monkeypatch.setattr(SweepMeasure, "at", at)
    found = quick(images)
    tested = [recipe for name, recipe in calls if "others" in name]
    assert len(tested) == len(set(tested)) == 5  # the best, the unchanged recipe, two models and the base
    assert len(calls) == 5 + 8 + 3 and found.recipe.to_yaml() in tested
    assert [name for name, _ in calls[-5:]] == [calls[-1][0]] * 5  # after everything that was chosen


def test_without_other_data_every_fourth_example_is_held_out(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[bool, list[Any]] = {False: [], True: []}
    original = SweepMeasure.fit

    def fit(self: Any, merged: Any) -> Any:
        measure = original(self, merged)
        seen[self.part.held] += [batch["pixel_values"] for batch in measure._batches()]
        return measure

    monkeypatch.setattr(SweepMeasure, "fit", fit)
    found = quick(images, test=None, evaluations=3)
    assert found.test is not None and (found.examples, found.test.examples) == (18, 6)
    assert any("every 4th example was held out" in note for note in found.notes)
    parts = {held: {image.numpy().tobytes() for batch in of for image in batch} for held, of in seen.items()}
    assert not parts[False] & parts[True] and len(parts[False] | parts[True]) > 20


def test_the_part_called_test_is_kept_for_the_test(images: Path, tmp_path: Path) -> None:
    write_digits(tmp_path / "digits", 30)
    (tmp_path / "digits" / "test").rename(tmp_path / "digits" / "validation")
    write_digits(tmp_path / "digits", 12)
    found = quick(images, data=tmp_path / "digits", test=None, evaluations=3)
    assert found.test is not None and (found.examples, found.test.examples) == (30, 12)


def test_a_parent_that_wins_is_kept_and_no_model_is_written(images: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / name)} for name in ("flat", "loud")]}
    found = quick(images, recipe=recipe, over={"t": "0.6:1"}, evaluations=4, out=tmp_path / "out")
    assert found.keep == str(images / "flat") and found.model is None
    assert found.says is not None and found.says.startswith(
        f"Keep {images / 'flat'}: on the test part its loss is 1.099"
    )
    assert "worse by" in found.says and not (tmp_path / "out" / "model").exists()


def test_a_merge_that_wins_is_written_with_the_search_on_its_page(images: Path, tmp_path: Path) -> None:
    recipe = {"merge_method": "linear", "models": [{"model": str(images / name)} for name in ("b", "flat")]}
    loss = lambda module: float((module.classifier.bias - 0.01).abs().sum().detach())  # noqa: E731
    found = quick(images, recipe=recipe, over={"t": "0.2:0.8"}, data=None, test=None, loss=loss, evaluations=4)
    assert found.test is None and found.says is not None and "the data of the search" in found.says
    found = quick(images, recipe=recipe, over={"t": "0.9:1"}, by="metric", out=tmp_path / "out", evaluations=4)
    if found.keep is None:  # what random models are good at is not to be foreseen
        assert found.model is not None and Path(found.model, "config.json").exists()
    assert (tmp_path / "out" / "search.json").exists() and (tmp_path / "out" / "best.yml").exists()


# --- going on ---------------------------------------------------------------------------------------------------------
def test_a_search_that_was_killed_goes_on(images: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The journal is as after kill -9: the last line is torn."""
    whole = quick(images)
    calls: list[Any] = []
    original = Bench._put

    def place(self: Any, merged: Any) -> Any:
        calls.append(merged)
        if len(calls) == 6:
            raise KeyboardInterrupt
        return original(self, merged)

    monkeypatch.setattr(Bench, "_put", place)
    with pytest.raises(KeyboardInterrupt):
        quick(images, out=tmp_path / "out")
    with (tmp_path / "out" / "points.jsonl").open("a") as file:
        file.write('{"key": "torn')
    again = quick(images, out=tmp_path / "out")
    assert measured(again) == measured(whole) and again.kept == 5
    assert len(calls) == 6 + 3 + 3 + 5  # three merges, three controls, and the test
    assert again.best.to_dict() | {"seconds": 0, "kept": 0} == whole.best.to_dict() | {"seconds": 0, "kept": 0}
    more = quick(images, out=tmp_path / "out", evaluations=10)
    assert measured(more)[:7] == measured(whole) and more.kept == 8 and len(more.points) == 9


# --- what is varied ---------------------------------------------------------------------------------------------------
BASE = {"base_model": "a", "models": [{"model": "b"}, {"model": "c"}]}


@pytest.mark.parametrize(
    ("recipe", "names"),
    [
        ({"merge_method": "linear", "models": [{"model": "a"}, {"model": "b"}]}, ["t"]),
        ({"merge_method": "task_arithmetic", **BASE}, ["models[0].weight", "models[1].weight"]),
        (
            {"merge_method": "ties", **BASE, "parameters": {"density": 0.3}},
            ["models[0].weight", "models[1].weight", "lambda", "parameters.density"],
        ),
        (
            {"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}], "parameters": {"t": [0.1, 0.7]}},
            ["parameters.t[0]", "parameters.t[1]"],
        ),
        ({"merge_method": "slerp", "base_model": "a", "models": [{"model": "b"}], "parameters": {"t": 0.5}},
         ["parameters.t"]),
    ],
)  # fmt: skip
def test_what_varies_if_nothing_is_named(recipe: dict[str, Any], names: list[str]) -> None:
    assert [axis.name for axis in natural_axes(load_recipe(recipe)[0])] == names


def test_a_range_is_widened_to_the_number_of_the_recipe() -> None:
    recipe = {"merge_method": "task_arithmetic", "base_model": "a"}
    recipe["models"] = [{"model": "b", "parameters": {"weight": w}} for w in (2.5,)]  # type: ignore[assignment]
    (axis,) = natural_axes(load_recipe(recipe)[0])
    assert axis.bounds == (0.0, 2.5)


@pytest.mark.parametrize(("method", "low"), [("linear", 0.01), ("ties", 0.01), ("task_arithmetic", 0.0)])
def test_weights_that_are_divided_by_their_sum_are_never_all_zero(method: str, low: float) -> None:
    three = [{"model": name} for name in "bcd"]
    recipe = {"merge_method": method, "models": three} | ({} if method == "linear" else {"base_model": "a"})
    space = Space.of(load_recipe(recipe)[0], natural_axes(load_recipe(recipe)[0]))  # merges the corners' recipes
    lowest = [number for name, number in space.values([0.0] * len(space.dimensions)).items() if "weight" in name]
    assert lowest == [low] * 3


def test_values_lie_between_their_bounds_and_whole_numbers_are_whole() -> None:
    recipe = load_recipe({"merge_method": "dare_linear", **BASE, "parameters": {"density": 0.5}})[0]
    space = Space.of(recipe, read_axes(["seed=0:9", "density=0.01:1:log", "lambda=0:1:gradient3"], search=True))
    assert space.dimensions == [Dimension(10)] + [Dimension()] * 4
    low, middle, high = (space.values((place,) * 5) for place in (0.0, 0.5, 1.0))
    assert low == {"seed": 0, "density": 0.01, "lambda": [0.0, 0.0, 0.0]}
    assert middle == {"seed": 5, "density": 0.1, "lambda": [0.5, 0.5, 0.5]}
    assert high == {"seed": 9, "density": 1.0, "lambda": [1.0, 1.0, 1.0]}


# --- refusals ---------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("search recipe.yml", "--data PATH"),
        ("search recipe.yml --data digits --algorithm bayes", "Did you mean 'bayesian'?"),
        ("search recipe.yml --data digits --evaluations 2", "at least 3 are needed"),
        ("search recipe.yml --data digits --workers 0", "--workers"),
        ("search recipe.yml --data digits --over densty=0:1", "no such option"),
        ("search recipe.yml --data digits --over weight=0:1:gradient1", "2 to 100 numbers"),
        ("search recipe.yml --data digits --over lambda=0:1:log", "above 0 only"),
        ("search recipe.yml --data digits --over method=slerp,ties", "slerp merges exactly 1 model"),
        ("search recipe.yml --data digits --test digits", "the same data"),
        ("search recipe.yml --data digits --test-split test", "--test PATH"),
        ("search recipe.yml --data nowhere", "nowhere"),
        ("search recipe.yml weight=0:1 --data digits", "write --over weight=0:1"),
        ("search a --data digits", "at least two models"),
    ],
)
def test_mistakes_are_told_in_a_paragraph(images: Path, monkeypatch: pytest.MonkeyPatch, line: str, words: str) -> None:
    monkeypatch.chdir(images)
    (images / "recipe.yml").write_text(
        "merge_method: task_arithmetic\nbase_model: a\nmodels: [{model: b}, {model: c}]\n"
    )
    done = CliRunner().invoke(app, line.split())
    assert done.exit_code == 2 and words in done.stderr, done.stderr
    assert done.stderr.startswith("isomerge: ") and len(done.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(("algorithm", "package"), [("cma", "cma"), ("bayesian", "optuna")])
def test_a_missing_package_is_named(
    images: Path, monkeypatch: pytest.MonkeyPatch, algorithm: str, package: str
) -> None:
    monkeypatch.setitem(__import__("sys").modules, package, None)
    monkeypatch.setattr("isomerge.packages.is_installed", lambda name: name != package)
    monkeypatch.setattr(Bench, "_put", lambda *_: pytest.fail("a point was measured"))
    with pytest.raises(RequestError, match=rf"'{package}' is not installed.*isomerge\[search\]"):
        quick(images, algorithm=algorithm)


def test_the_command_line_prints_the_verdict_and_documented_json(images: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(images)
    models = "b c --method task_arithmetic --base a --weights 1.4,1.4"
    line = f"search {models} --data digits --algorithm random --evaluations 4"
    record = json.loads(CliRunner().invoke(app, [*line.split(), "--json"]).stdout)
    page = (Path(__file__).parents[2] / "docs" / "search.md").read_text()
    for key in {*record, *record["best"], *record["test"], *record["controls"][0]}:
        assert f"`{key}`" in page, key
    assert record["mode"] == "search" and record["start"]["parameters"] == {} and len(record["points"]) == 3
    shown = CliRunner().invoke(app, line.split())
    assert record["says"] in " ".join(shown.stdout.split()) and "test: digits" in shown.stdout
    assert "4 evaluations at most" in shown.stderr


# --- LoRAHub: the sum of the weights' sizes beside the loss -----------------------------------------------------------
def test_points_are_ranked_by_the_loss_and_the_size_of_the_weights(images: Path) -> None:
    over = {f"models[{number}].weight": "-1.5:1.5" for number in range(2)}
    plain, small = (quick(images, over=over, l1=l1, evaluations=12, algorithm="random") for l1 in (0.0, 10.0))
    points = [small.start, *small.points]
    assert measured(plain) == measured(small)  # random points do not depend on the scores
    sizes = [sum(abs(p.recipe.models[k].parameters["weight"]) if p.parameters else 1.4 for k in (0, 1)) for p in points]
    ranked = [point.loss + 10.0 * size for point, size in zip(points, sizes, strict=True)]
    assert small.best.parameters == points[int(np.argmin(ranked))].parameters
    assert plain.best.parameters == min([plain.start, *plain.points], key=lambda point: point.loss).parameters
    assert small.best.parameters != plain.best.parameters
    assert any("10 Σ |weight|" in note for note in small.notes)


def test_adapters_are_searched_as_models_that_a_base_makes(tmp_path: Path) -> None:
    """The recipe of LoRAHub: a base, and the base with each adapter."""
    from peft import LoraConfig

    from adapters.peft_adapters import save_adapter

    base = vit(tmp_path / "base", DIGITS, seed=0).folder
    assert base is not None
    write_digits(tmp_path / "digits", 24)
    named = []
    for seed in (1, 2, 3):
        config = LoraConfig(r=2, target_modules=["q_proj", "fc1"])
        named.append(f"{base}+{save_adapter(base, tmp_path / f'adapter-{seed}', config, seed=seed)}")
    models = [{"model": one, "parameters": {"weight": 0.0}} for one in named]
    recipe = {"merge_method": "task_arithmetic", "base_model": str(base), "models": models}
    over = {f"models[{number}].weight": "-1.5:1.5" for number in range(3)}
    found = isomerge.search(recipe, over, data=tmp_path / "digits", algorithm="cma", evaluations=10, l1=0.05)
    assert len(found.best.parameters) in (0, 3)
    best = found.best.loss + 0.05 * sum(abs(value) for value in found.best.parameters.values())
    assert all(best <= p.loss + 0.05 * sum(map(abs, p.parameters.values())) + 1e-12 for p in found.points)


@pytest.mark.parametrize(("options", "message"), [({"l1": -1.0}, "l1 is -1"), ({"l1": 1.0, "by": "metric"}, "rank by")])
def test_an_l1_that_makes_no_sense_is_refused(images: Path, options: dict[str, Any], message: str) -> None:
    with pytest.raises(RequestError, match=message):
        quick(images, **options)
