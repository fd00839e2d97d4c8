"""The library without the command line: state_dicts, modules, and results as inputs."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoModelForImageClassification

import isomerge
from isomerge.calibration import calibrate
from isomerge.errors import CheckpointError, RequestError
from models import model, tensors, variant


def state(seed: int, dtype: torch.dtype = torch.float32) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return {
        "w": torch.randn(6, 4, generator=generator).to(dtype),
        "b": torch.randn(4, generator=generator).to(dtype),
        "steps": torch.tensor(seed),
    }


def test_state_dicts_merge_by_any_method() -> None:
    base, a, b = state(0), state(1), state(2)
    found = isomerge.merge_state_dicts([a, b], method="task_arithmetic", base=base, weight=[0.5, 0.25], **{"lambda": 2})
    for name in ("w", "b"):
        change = 0.5 * (a[name].double() - base[name].double()) + 0.25 * (b[name].double() - base[name].double())
        assert torch.allclose(found[name].double(), base[name].double() + 2 * change, atol=1e-6)
    assert int(found["steps"]) == 0


def test_the_dtype_stays_and_the_inputs_too() -> None:
    a, b = state(1, torch.bfloat16), state(2, torch.bfloat16)
    before = {name: tensor.clone() for name, tensor in a.items()}
    found = isomerge.merge_state_dicts([a, b])
    assert found["w"].dtype == torch.bfloat16
    assert torch.equal(found["w"], ((a["w"].float() + b["w"].float()) / 2).bfloat16())
    assert all(torch.equal(a[name], tensor) for name, tensor in before.items())


def test_wrong_state_dicts_are_refused() -> None:
    with pytest.raises(RequestError, match=r"do not hold the same tensors \('b'\)"):
        isomerge.merge_state_dicts([state(0), {k: v for k, v in state(1).items() if k != "b"}])
    with pytest.raises(RequestError, match="w has the shapes"):
        isomerge.merge_state_dicts([state(0), {**state(1), "w": torch.zeros(2, 2)}])
    with pytest.raises(RequestError, match="needs a base"):
        isomerge.merge_state_dicts([state(0), state(1)], method="ties")
    with pytest.raises(RequestError, match="Did you mean 'ties'"):
        isomerge.merge_state_dicts([state(0)], method="tise")
    broken = torch.zeros(6, 4)
    broken[2, 1] = float("nan")
    with pytest.raises(CheckpointError, match=r"tensor 'w' of model 2.*1 of its 24 values are NaN"):
        isomerge.merge_state_dicts([state(0), {**state(1), "w": broken}])


@pytest.mark.slow
def test_merging_state_dicts_needs_neither_transformers_nor_scipy() -> None:
    code = (
        "import isomerge, sys, torch\n"
        "isomerge.merge_state_dicts([{'w': torch.zeros(2)}, {'w': torch.ones(2)}])\n"
        "heavy = {'transformers', 'scipy', 'pydantic', 'huggingface_hub', 'yaml'} & set(sys.modules)\n"
        "assert not heavy, heavy"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_merge_is_put_into_a_module_in_place() -> None:
    paths = [model("vit", 0), model("vit", 1)]
    module = AutoModelForImageClassification.from_pretrained(paths[0])
    head = module.classifier.weight
    assert isomerge.merge(paths).load_into(module) is module
    assert module.classifier.weight is head
    a, b = (AutoModelForImageClassification.from_pretrained(path).state_dict() for path in paths)
    for name, tensor in module.state_dict().items():
        assert torch.allclose(tensor, (a[name] + b[name]) / 2, atol=1e-7), name


def test_modules_and_state_dicts_are_models_too(tmp_path: Path) -> None:
    paths = [model("vit", 0), model("vit", 1)]
    module = AutoModelForImageClassification.from_pretrained(paths[1])
    mixed = isomerge.merge([paths[0], module]).state_dict()
    plain = isomerge.merge(paths).state_dict()
    assert all(torch.equal(mixed[name], tensor) for name, tensor in plain.items())
    written = isomerge.merge([paths[0], module]).save(tmp_path / "out")
    assert written.sha256 == isomerge.merge(paths).save(tmp_path / "plain").sha256


def test_documents_feed_each_other_unrounded(tmp_path: Path) -> None:
    """Rounding the model in between to bfloat16 would be seen: the result is that of one formula, rounded once."""
    paths = [model("bert", seed, torch.bfloat16) for seed in range(3)]
    recipe = f"""
name: between
merge_method: linear
models:
- model: {paths[0]}
- model: {paths[1]}
---
merge_method: linear
models:
- model: between
  parameters: {{weight: 2}}
- model: {paths[2]}
"""
    found = isomerge.merge_recipe(recipe).state_dict()
    a, b, c = (tensors(path) for path in paths)
    exact = rounded_twice = total = 0
    for name, tensor in found.items():
        once = ((a[name].double() + b[name].double() + c[name].double()) / 3).bfloat16()
        between = ((a[name].double() + b[name].double()) / 2).bfloat16()
        twice = ((2 * between.double() + c[name].double()) / 3).bfloat16()
        exact, total = exact + int((tensor == once).sum()), total + tensor.numel()
        rounded_twice += int((twice == once).sum())
    # Float32 sums differ from float64 ones in the rare case that lies between two bfloat16 numbers.
    assert exact / total > 0.99 > rounded_twice / total


def test_a_module_with_tied_tables_is_refused_for_weights_that_need_two() -> None:
    folders = [model("gpt2", seed, tie_word_embeddings=True) for seed in (0, 1)]
    merged = isomerge.merge(folders, align=True)
    assert merged.config_changes["tie_word_embeddings"] is False
    module = AutoModelForCausalLM.from_pretrained(folders[0])
    before = module.state_dict()["transformer.wte.weight"].clone()
    with pytest.raises(RequestError, match="need a configuration with tie_word_embeddings=False"):
        merged.load_into(module)
    assert torch.equal(module.state_dict()["transformer.wte.weight"], before)


def test_a_module_with_tied_tables_is_refused_for_two_that_differ() -> None:
    untied = isomerge.merge([model("gpt2", seed) for seed in (0, 1)])
    module = AutoModelForCausalLM.from_pretrained(model("gpt2", 0, tie_word_embeddings=True))
    before = module.state_dict()["transformer.wte.weight"].clone()
    with pytest.raises(RequestError, match="are one tensor there and differ here"):
        untied.load_into(module)
    assert torch.equal(module.state_dict()["transformer.wte.weight"], before)


def test_a_module_that_stores_nothing_is_refused() -> None:
    module = AutoModelForImageClassification.from_pretrained(model("vit", 0)).to("meta")
    with pytest.raises(RequestError, match="meta device"):
        isomerge.merge([model("vit", 0), model("vit", 1)]).load_into(module)


def test_what_is_wrong_with_a_recipe_can_be_sent_to_another_process() -> None:
    with pytest.raises(RequestError) as caught:
        isomerge.merge([model("vit", 0), model("vit", 1)], wieght=1)
    again = pickle.loads(pickle.dumps(caught.value))
    assert type(again) is type(caught.value) and str(again) == str(caught.value) and "weight" in str(again)
    assert again.problems == caught.value.problems


def test_models_are_any_collection_but_not_one_path() -> None:
    paths = [model("vit", 0), model("vit", 1)]
    listed, given = (isomerge.merge(models).state_dict() for models in (paths, (path for path in paths)))
    assert all(torch.equal(given[name], tensor) for name, tensor in listed.items())
    for one in (paths[0], str(paths[0])):
        with pytest.raises(RequestError, match=r"models must be a list of models, as in merge\(\[a, b\]\)"):
            isomerge.merge(one)
    with pytest.raises(RequestError, match=r"as in align_family\(\[a, b\]\)"):
        isomerge.align_family(str(paths[0]), anchor=paths[1])
    with pytest.raises(RequestError, match="mean the same"):
        isomerge.merge(paths, weights=[1, 0], weight=[0, 1])


def test_parameters_are_tensors_too() -> None:
    states = [{"w": torch.nn.Parameter(torch.full((3,), float(k)))} for k in (0, 1)]
    found = isomerge.merge_state_dicts(states)["w"]
    assert torch.equal(found, torch.full((3,), 0.5)) and not found.requires_grad


def test_a_list_of_batches_is_one_data_set() -> None:
    paths = [model("vit", 0), model("vit", 1)]
    generator = torch.Generator().manual_seed(0)
    batches = [{"pixel_values": torch.randn(3, 3, 8, 8, generator=generator)} for _ in range(2)]
    listed, opened = (
        isomerge.merge(paths, method="regmean", data=data).state_dict()
        for data in (batches, isomerge.open_data(lambda: iter(batches)))
    )
    assert all(torch.equal(listed[name], tensor) for name, tensor in opened.items())
    grams = [calibrate(paths[0], data).stored for data in (batches, lambda: iter(batches))]
    assert all(torch.equal(grams[0].read(name), grams[1].read(name)) for name in grams[0].tensors)
    with pytest.raises(RequestError, match="neither a path nor batches"):
        calibrate(paths[0], None)
    with pytest.raises(RequestError, match="at least one is needed"):
        isomerge.open_data(batches).passes(isomerge.open_checkpoint(paths[0]), limit=-1)


def test_an_adapter_beside_the_weights_is_named() -> None:
    paths = [model("vit", 0), variant(model("vit", 1), {}, "beside")]
    (paths[1] / "adapter_config.json").write_text("{}")
    (note,) = [note for note in isomerge.merge(paths).report()["notes"] if "adapter" in note]
    assert note.startswith(f"{paths[1]} has an adapter beside its weights") and "which is not merged" in note


def test_what_wraps_a_module_is_taken_off() -> None:
    paths = [model("vit", 0), model("vit", 1)]
    compiled, parallel = (AutoModelForImageClassification.from_pretrained(path) for path in paths)
    wrapped = [torch.compile(compiled), torch.nn.DataParallel(parallel)]
    found, plain = isomerge.merge(wrapped).state_dict(), isomerge.merge(paths).state_dict()
    assert found.keys() == plain.keys() and all(torch.equal(found[name], plain[name]) for name in plain)
    isomerge.merge(paths).load_into(wrapped[0])
    assert torch.equal(compiled.classifier.weight, plain["classifier.weight"])


def test_results_are_shown_in_a_line() -> None:
    first, second = model("vit", 0), model("vit", 1)
    count = len(tensors(first))
    assert repr(isomerge.merge([first, second])) == f"Merged({first}, {second}, method linear, {count} tensors)"
    shown = repr(isomerge.align(second, anchor=first))
    assert shown.startswith(f"Alignment({second} next to {first}, level full, ") and shown.endswith("spaces moved)")
