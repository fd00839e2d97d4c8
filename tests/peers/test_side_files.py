"""What stands beside the weights, and models that come with an adapter."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from models import FAMILIES, tensors
from peers.recipes import recipe, weighted
from peers.side_by_side import assert_same_tensors, isomerge, write_recipe
from peers.stage import write_adapter

pytestmark = pytest.mark.peers
OWN_TEMPLATE = "{% for message in messages %}{{ message.content }}{{ eos_token }}{% endfor %}"
CHAT = [{"role": "user", "content": "w1 w2"}, {"role": "assistant", "content": "w3"}]


@pytest.mark.parametrize("template", ["chatml", "mistral", OWN_TEMPLATE])
def test_a_chat_template_renders_as_with_mergekit(both: Any, family: Any, template: str) -> None:
    out = both(recipe("linear", weighted(0.7, 0.3), base="a", chat_template=template), family("llama"))
    ours, theirs = (rendered(folder) for folder in out)
    assert ours == theirs and "w1 w2" in ours


@pytest.mark.parametrize("template", ["alpaca", "llama3", "exaone"])
def test_a_chat_template_renders_as_with_mergekit_but_for_its_indentation(
    both: Any, family: Any, template: str
) -> None:
    """Line breaks and indentation of mergekit's template files reach the prompt, where no model was trained on them."""
    out = both(recipe("linear", weighted(0.7, 0.3), base="a", chat_template=template), family("llama"))
    ours, theirs = (rendered(folder) for folder in out)
    assert ours != theirs and "".join(ours.split()) == "".join(theirs.split())


def rendered(folder: Path) -> str:
    return str(transformers.AutoTokenizer.from_pretrained(folder).apply_chat_template(CHAT, tokenize=False))


@pytest.mark.parametrize("kind", FAMILIES)
def test_the_output_loads_in_the_stock_class(both: Any, family: Any, kind: str) -> None:
    out = both(recipe("linear", weighted(0.7, 0.3)), family(kind))
    ours, theirs = (getattr(transformers, FAMILIES[kind][0]).from_pretrained(folder).state_dict() for folder in out)
    assert ours.keys() == theirs.keys()
    assert all(torch.allclose(ours[name], theirs[name], rtol=0, atol=1e-6) for name in theirs)


def test_a_deeper_stack_loads_in_the_stock_class(both: Any, family: Any) -> None:
    from peers.examples import SLICES

    ours, _ = both(SLICES["a deeper stack"], family("llama"))
    model, report = transformers.AutoModelForCausalLM.from_pretrained(ours, output_loading_info=True)
    assert model.config.num_hidden_layers == 4
    assert not report["missing_keys"] and not report["unexpected_keys"]


@pytest.mark.parametrize("method", ["linear", "ties"])
def test_a_model_with_an_adapter_is_the_model_with_it_merged(
    mergekit: Any, family: Any, tmp_path: Path, method: str
) -> None:
    models = family("llama")
    write_adapter(tmp_path / "adapter", models / "a")
    parameters = {"weight": 0.7, **({"density": 0.5} if method == "ties" else {})}
    body = recipe(method, {"a+$adapter": parameters, "b": parameters}, base="base" if method == "ties" else None)
    file = write_recipe(body, models, tmp_path / "recipe.yml", adapter=tmp_path / "adapter")
    theirs = mergekit.merge(file, tmp_path / "theirs", "--lora-merge-cache", str(tmp_path / "cache"))
    ours = isomerge(file, tmp_path / "ours")
    assert_same_tensors(ours, theirs)
    query = "model.layers.0.self_attn.q_proj.weight"
    assert not torch.allclose(tensors(ours)[query], tensors(models / "a")[query], atol=1e-3)


def test_the_donor_of_side_files_is_the_base_or_the_first_model(family: Any, tmp_path: Path) -> None:
    for base, expected in ((None, "a"), ("c", "c")):
        models = {"a": {"weight": 1.0}, "c": {"weight": 1.0}}
        folder = tmp_path / str(base)
        file = write_recipe(recipe("linear", models, base=base), family("llama"), folder / "recipe.yml")
        for member in "ac":
            (family("llama") / member / "note.txt").write_text(member)
        assert (isomerge(file, folder / "out") / "note.txt").read_text() == expected
