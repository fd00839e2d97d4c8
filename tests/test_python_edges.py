"""Functions take models however they are at hand, show progress if asked, and results show themselves in a notebook."""

from __future__ import annotations

import html.parser
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

import isomerge
from isomerge.errors import CheckpointError, RequestError
from isomerge.progress_bars import Bar, in_notebook
from isomerge.results import Result
from models import (
    image_pair,
    read_config,
    same_bytes,
    save_model,
    tensors,
    word_tokenizer,
)
from samples import digits
from test_public_api import RESULTS

A, B = image_pair()
CONFIG = read_config(Path(A))


def module() -> Any:
    return transformers.ViTForImageClassification.from_pretrained(A, local_files_only=True)


def arrays() -> dict[str, np.ndarray]:
    return {name: tensor.numpy() for name, tensor in tensors(Path(A)).items()}


MODELS: dict[str, Callable[[], Any]] = {
    "path": lambda: A,
    "Path": lambda: Path(A),
    "file": lambda: Path(A) / "model.safetensors",
    "Checkpoint": lambda: isomerge.open_checkpoint(A),
    "module": module,
    "state_dict": lambda: isomerge.open_checkpoint(tensors(Path(A)), config=CONFIG),
    "numpy": lambda: isomerge.open_checkpoint(arrays(), config=CONFIG),
    "Merged": lambda: isomerge.merge([A, B], weights=[1, 0]),
    "Alignment": lambda: isomerge.align(A, B),
}
"""Ways to pass the first model. The alignment computes the same with other weights."""
RUN: dict[str, Callable[[Any], Any]] = {
    "evaluate": lambda m: isomerge.evaluate(m, digits(), limit=9).loss,
    "ensemble": lambda m: isomerge.ensemble([m, B], digits(), limit=9).models[0]["loss"],
    "barrier": lambda m: isomerge.barrier(m, B, data=digits(), limit=9, points=3).parents[0]["loss"],
    "sweep": lambda m: isomerge.sweep([m, B], {"t": [0]}, method="slerp", base=m, data=digits(), limit=9).best.loss,
}  # fmt: skip
WEIGHTS: dict[str, Callable[[Any], Any]] = {
    "check": lambda m: isomerge.check([m, A]).verdict == "identical",
    "merge": lambda m: all(
        torch.equal(tensors(Path(A))[n], t) for n, t in isomerge.merge([m, B], weights=[1, 0]).state_dict().items()
    ),
    "align": lambda m: isomerge.align(m, A).verdict.startswith("siblings"),
    "selftest": lambda m: isomerge.selftest(m).unchanged,
    "calibrate": lambda m: bool(isomerge.calibrate(m, digits(), what={"gram"}, limit=4).info["maps"]),
}


@pytest.mark.parametrize(
    ("name", "way"), [*(("evaluate", way) for way in MODELS if way != "file"), *((name, "Merged") for name in RUN)]
)
def test_a_model_is_run_however_it_is_passed(name: str, way: str) -> None:
    assert RUN[name](MODELS[way]()) == pytest.approx(truth(), rel=1e-4)


@pytest.mark.parametrize("way", ["numpy", "Merged"])
@pytest.mark.parametrize("name", WEIGHTS)
def test_its_weights_are_read_however_it_is_passed(name: str, way: str) -> None:
    assert WEIGHTS[name](MODELS[way]())


def truth() -> float:
    """Without isomerge: the loss on the first nine digits of the data that the tests have."""
    record = isomerge.open_data(digits(), limit=9)
    batches = list(record.batches(isomerge.open_checkpoint(A), batch_size=9, limit=9, labels=True, task="image"))
    batch = {name: value for name, value in batches[0].items() if name in ("pixel_values", "labels")}
    with torch.no_grad():
        return float(module().eval()(**batch).loss)


# --- what a state_dict and a dtype may be -----------------------------------------------------------------------------
def test_arrays_are_merged_as_tensors_are() -> None:
    ours, theirs = arrays(), {name: tensor.numpy() for name, tensor in tensors(Path(B)).items()}
    assert all(isinstance(value, np.ndarray) for value in ours.values())
    merged = isomerge.merge([ours, theirs]).state_dict()
    plain = isomerge.merge_state_dicts([ours, theirs])
    for name, array in ours.items():
        assert np.allclose(merged[name].numpy(), (array + theirs[name]) / 2, atol=1e-7), name
        assert torch.equal(plain[name], merged[name])


def test_weights_are_numbers_in_whatever_holds_them() -> None:
    truth = isomerge.merge([A, B], weights=[0.25, 0.75]).state_dict()
    for weights in (torch.tensor([0.25, 0.75]), np.array([0.25, 0.75]), (0.25, 0.75)):
        found = isomerge.merge([A, B], weights=weights).state_dict()
        assert all(torch.equal(found[name], tensor) for name, tensor in truth.items())


def test_arrays_that_torch_cannot_share_are_copied() -> None:
    fixed = np.arange(4, dtype=np.float32)
    fixed.setflags(write=False)
    odd = {"fixed": fixed, "backwards": np.arange(4.0)[::-1], "big": np.arange(4, dtype=">f4"), "one": np.float64(2)}
    opened = isomerge.open_checkpoint(odd)
    assert {name: opened.read(name).tolist() for name in opened.tensors} == {
        "fixed": [0, 1, 2, 3], "backwards": [3, 2, 1, 0], "big": [0, 1, 2, 3], "one": 2.0,
    }  # fmt: skip


@pytest.mark.parametrize("wrong", [np.array(["a"]), np.array([1 + 1j], dtype=object), [1.0, 2.0]])
def test_what_is_no_array_of_numbers_is_named(wrong: Any) -> None:
    with pytest.raises(CheckpointError, match="'w' is not a tensor, nor an array of numbers"):
        isomerge.open_checkpoint({"w": wrong})


def test_dtypes_are_taken_as_torch_has_them(tmp_path: Path) -> None:
    assert {info.dtype for info in isomerge.merge([A, B], dtype=torch.bfloat16).plan.values()} == {torch.bfloat16}
    aligned = isomerge.align(B, A)
    aligned.save(tmp_path / "torch", out_dtype=torch.float16)
    aligned.save(tmp_path / "text", out_dtype="float16")
    first, second = tensors(tmp_path / "torch"), tensors(tmp_path / "text")
    assert all(tensor.dtype == torch.float16 and same_bytes(second[name], tensor) for name, tensor in first.items())
    with pytest.raises(RequestError, match="dtype"):
        isomerge.merge([A, B], dtype=torch.int64)


def test_a_result_has_the_tokenizer_that_it_would_be_saved_with(tmp_path: Path) -> None:
    words = ["<unk>", "<s>", "</s>", "sun", "moon", "tree"]
    for seed, some in enumerate((words[:5], words)):
        save_model(tmp_path / "ab"[seed], word_tokenizer(some), seed=seed)
    (tmp_path / "x.txt").write_text("sun moon tree " * 20)
    merged = isomerge.merge([tmp_path / "a", tmp_path / "b"], tokenizer="union")
    found = isomerge.evaluate(merged, tmp_path / "x.txt").loss
    assert found == pytest.approx(isomerge.evaluate(merged.save(tmp_path / "out"), tmp_path / "x.txt").loss, rel=1e-6)


def test_what_was_written_is_a_path(tmp_path: Path) -> None:
    written = isomerge.merge([A, B]).save(tmp_path / "out")
    assert isomerge.verify(written).verdict == "good" and isomerge.reproduce(written).verdict == "identical"
    assert isomerge.check(written, A).models[0] == str(tmp_path / "out")


def test_a_merge_of_merges_claims_no_licence_and_no_files_for_them(tmp_path: Path) -> None:
    a = tmp_path / "a"
    a.mkdir()
    for file in Path(A).iterdir():
        (a / file.name).write_bytes(file.read_bytes())
    (a / "README.md").write_text("---\nlicense: mit\n---\n")
    isomerge.merge([isomerge.merge([a, B]), a]).save(tmp_path / "out")
    assert "license:" not in (tmp_path / "out" / "README.md").read_text()
    assert not (tmp_path / "out" / "mergekit_config.yml").exists()


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (lambda: isomerge.evaluate([A, B], digits()), "Pass one model here, and not a list"),
        (lambda: isomerge.sweep([], {"t": "0:1:0.5"}, data=digits()), "recipe must be a recipe or a list of models"),
        (lambda: isomerge.sweep([A, B], {"t": [0]}, method="slrp", base=A, data=digits()), "Did you mean 'slerp'"),
        (
            lambda: isomerge.sweep({"merge_method": "linear"}, {"t": [0]}, method="slerp", data=digits()),
            "it says its method",
        ),
        (lambda: isomerge.sweep([A, B], {"t": [0]}, models={"x": A}, data=digits()), "Leave models out"),
        (lambda: isomerge.check([A]), "at least two models"),
    ],
)
def test_other_things_are_refused_with_the_next_step(call: Callable[[], Any], says: str) -> None:
    with pytest.raises(RequestError, match=says):
        call()


def test_a_sweep_of_a_recipe_takes_models_for_its_names() -> None:
    recipe = {"merge_method": "slerp", "base_model": "one", "models": [{"model": "two"}]}
    swept = isomerge.sweep(recipe, {"t": [0, 1]}, models={"one": A, "two": module()}, data=digits(), limit=9)
    assert [point.loss for point in swept.points] == pytest.approx([truth(), truth()], rel=1e-4)


# --- progress ---------------------------------------------------------------------------------------------------------
class Kernel:
    kernel = object()


@pytest.fixture
def bars(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What a bar was told, and when it was stopped."""
    seen: list[str] = []
    call, stop = Bar.__call__, Bar.stop
    monkeypatch.setattr(
        Bar, "__call__", lambda bar, done, total, what: (seen.append(what), call(bar, done, total, what))
    )
    monkeypatch.setattr(Bar, "stop", lambda bar: (seen.append("stopped"), stop(bar)))
    return seen


def a_terminal(monkeypatch: pytest.MonkeyPatch, *, is_one: bool) -> None:
    monkeypatch.setattr(sys.stderr, "isatty", lambda: is_one, raising=False)


def a_notebook(monkeypatch: pytest.MonkeyPatch) -> None:
    ipython = types.ModuleType("IPython")
    ipython.get_ipython = Kernel  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "IPython", ipython)
    assert in_notebook()


def test_true_shows_a_bar_on_a_terminal_until_the_work_is_done(
    bars: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    a_terminal(monkeypatch, is_one=True)
    isomerge.evaluate(A, digits(), limit=9, progress=True)
    assert "evaluating" in bars and bars[-1] == "stopped"


def test_no_bar_is_shown_where_a_program_reads(bars: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a_terminal(monkeypatch, is_one=False)
    isomerge.evaluate(A, digits(), limit=9, progress=True)
    assert bars == []


def test_a_notebook_has_a_bar_unless_it_is_refused(bars: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a_notebook(monkeypatch)
    isomerge.evaluate(A, digits(), limit=9, progress=False)
    assert bars == []
    isomerge.evaluate(A, digits(), limit=9)
    assert "evaluating" in bars and bars[-1] == "stopped"


def test_saving_takes_its_bar_away_also_when_it_fails(
    bars: list[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    a_notebook(monkeypatch)
    merged = isomerge.merge([A, B])
    merged.save(tmp_path / "out")
    assert "writing out" in bars and bars[-1] == "stopped"
    bars.clear()
    with pytest.raises(RequestError):
        merged.save(tmp_path / "out")
    assert bars == ["stopped"]


def test_a_function_is_called_and_no_bar_shown(bars: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a_notebook(monkeypatch)
    told: list[str] = []
    isomerge.evaluate(A, digits(), limit=9, progress=lambda done, total, what: told.append(what))
    assert "evaluating" in told and bars == []


def test_a_function_inside_another_shows_no_bar_of_its_own(bars: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    a_notebook(monkeypatch)
    isomerge.selftest(A)  # has no progress, and aligns
    isomerge.check(A, B, progress=False)
    assert "solving" not in bars or bars[-1] == "stopped"
    assert not isomerge.verify(A, progress=False).problems


# --- notebooks --------------------------------------------------------------------------------------------------------
class Parsed(html.parser.HTMLParser):
    """Whether every tag is closed in its order."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.open: list[str] = []
        self.seen: set[str] = set()
        self.text = ""
        self.feed(text)
        assert not self.open

    def handle_starttag(self, tag: str, attrs: Any) -> None:
        self.open.append(tag)
        self.seen.add(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.text += data


SHOWN = [name for name in RESULTS if name not in ("demo", "open_checkpoint", "open_data", "catalogue", "calibrate",
                                                  "merge_state_dicts", "plane", "universe", "make_ensemble",
                                                  "load_ensemble")]  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("name", SHOWN)
def test_a_result_shows_itself_in_a_notebook(name: str, tmp_path: Path) -> None:
    shown = Parsed(RESULTS[name](A, B, tmp_path)._repr_html_())
    assert shown.seen <= {"table", "tr", "td", "th", "div", "caption"} and len(shown.text) > 20


def test_a_notebook_has_the_numbers_of_the_terminal_and_nothing_from_a_file_as_markup() -> None:
    found = isomerge.evaluate(A, digits(), limit=9)
    found.notes.append("<script>alert(1)</script>\x1b[2J")
    text = found._repr_html_()
    assert f"{found.loss:.4f}" in Parsed(text).text
    assert "<script" not in text and "&lt;script&gt;" in text and "\x1b" not in text


def test_every_table_of_a_notebook_is_there() -> None:
    from isomerge.reporting.notebook import TABLES, _table

    names = {kind.__name__ for kind in _all(Result)}
    assert set(TABLES) <= names and all(callable(_table(kind)) for kind in TABLES)


def _all(kind: type) -> set[type]:
    import isomerge.demonstration.run
    import isomerge.sweeping.api  # noqa: F401

    return {kind}.union(*(_all(one) for one in kind.__subclasses__()))
