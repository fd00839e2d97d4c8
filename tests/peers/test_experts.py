"""Mixtures of experts: what mergekit-moe builds of the same recipe, where it does not draw random numbers.

mergekit 0.1.5 writes experts stacked, and one tensor for each is written here, as transformers does; so both are loaded
into the stock class, and its parameters are compared.
"""

from __future__ import annotations

import string
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor
from typer.testing import CliRunner

from isomerge.cli.app import app
from models import FAMILY_VOCABULARY, MEMBERS, read_config, tensors, word_tokenizer
from peers.side_by_side import AGREE, apart, write_recipe

pytestmark = pytest.mark.peers

LETTERS = ["<unk>", "<s>", "</s>", *string.ascii_letters][:FAMILY_VOCABULARY]
CLOSE = 1e-5
"""mergekit adds states in float32, of which negative prompts take much away. It runs the base in bfloat16 unless it
is made to use float32: then rows differ by up to 1.2e-2 of the largest number."""
PROMPTS = """
  - source_model: $a
    positive_prompts: ["a b c d", "e f g h"]
    negative_prompts: ["u v w x"]
  - source_model: $b
    positive_prompts: ["i j k l"]
    residual_scale: 0.5
  - source_model: $c
    positive_prompts: ["m n o p"]
"""
RECIPE = "base_model: $base\ndtype: float32\nexperts_per_token: 2\nexperts:" + PROMPTS
SHARED = """shared_experts:
  - source_model: $base
    positive_prompts: ["A B C D"]
    residual_scale: 0.1
"""
CASES = {
    "Mixtral of Llama": ("deep llama", "MixtralForCausalLM", RECIPE),
    "Mixtral of Mistral": ("deep mistral", "MixtralForCausalLM", RECIPE),
    "Mixtral of tied models": ("llama", "MixtralForCausalLM", RECIPE),
    "Qwen3-MoE": ("deep qwen3", "Qwen3MoeForCausalLM", RECIPE),
    "Qwen2-MoE": ("deep qwen2", "Qwen2MoeForCausalLM", RECIPE + SHARED),
    "Qwen2-MoE of Llama": ("deep llama", "Qwen2MoeForCausalLM", RECIPE + SHARED),
}
GATES = ("cheap_embed", "hidden", "hidden_avg", "hidden_last")


@pytest.fixture(scope="module")
def readers(family: Any) -> Any:
    """The families with a tokenizer that reads letters: prompts of unknown tokens would all be the same."""

    def written(name: str) -> Path:
        folder: Path = family(name)
        for model in MEMBERS:
            word_tokenizer(LETTERS).save_pretrained(folder / model)
        return folder

    return written


def state(folder: Path) -> dict[str, Tensor]:
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    return dict(model.state_dict())


def built(mergekit: Any, readers: Any, name: str, gate: str, tmp_path: Path) -> tuple[Path, Path]:
    models, _, text = CASES[name]
    file = write_recipe(f"gate_mode: {gate}\n{text}", readers(models), tmp_path / "recipe.yml")
    mergekit.run("mergekit-moe", [str(file), str(tmp_path / "theirs"), "--device", "cpu"], float32=True)
    done = CliRunner().invoke(app, ["mergekit-moe", str(file), str(tmp_path / "ours"), "--quiet", "--device", "cpu"])
    assert done.exit_code == 0, done.output
    return tmp_path / "ours", tmp_path / "theirs"


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("gate", GATES)
def test_the_mixture_is_what_mergekit_builds(mergekit: Any, readers: Any, tmp_path: Path, name: str, gate: str) -> None:
    ours, theirs = built(mergekit, readers, name, gate, tmp_path)
    assert read_config(ours)["architectures"] == read_config(theirs)["architectures"] == [CASES[name][1]]
    mine, other = state(ours), state(theirs)
    assert mine.keys() == other.keys()
    routers = [key for key in other if key.endswith((".gate.weight", ".shared_expert_gate.weight"))]
    assert routers and max(apart(mine[key], other[key]) for key in other.keys() - set(routers)) <= AGREE
    assert max(apart(mine[key], other[key]) for key in routers) <= CLOSE


@pytest.mark.parametrize("name", CASES)
def test_both_say_the_same_of_the_class(mergekit: Any, readers: Any, tmp_path: Path, name: str) -> None:
    ours, theirs = built(mergekit, readers, name, "cheap_embed", tmp_path)
    mine, other = (transformers.AutoConfig.from_pretrained(folder).to_dict() for folder in (ours, theirs))
    same = set(other) & set(mine) - {"dtype", "_name_or_path", "transformers_version", "sliding_window"}
    differ = {key: (mine[key], other[key]) for key in same if mine[key] != other[key]}
    assert differ == {} or set(differ) <= {"head_dim", "layer_types", "max_window_layers"}


def test_a_router_of_random_numbers_is_of_the_same_size(mergekit: Any, readers: Any, tmp_path: Path) -> None:
    for gate, size in (("random", 1.0), ("uniform_random", 32**-0.5 / 3**0.5)):
        ours, theirs = built(mergekit, readers, "Mixtral of Llama", gate, tmp_path / gate)
        mine, other = state(ours), state(theirs)
        for found in (mine, other):
            rows = torch.cat([found[key].flatten() for key in found if key.endswith("mlp.gate.weight")])
            assert rows.std().item() == pytest.approx(size, rel=0.15)


def test_the_folder_has_the_models_tokenizer(mergekit: Any, readers: Any, tmp_path: Path) -> None:
    ours, theirs = built(mergekit, readers, "Mixtral of Llama", "random", tmp_path)
    vocabularies = [transformers.AutoTokenizer.from_pretrained(folder).get_vocab() for folder in (ours, theirs)]
    assert vocabularies[0] == vocabularies[1]
    assert any("block_sparse_moe.experts.0.w1" in key for key in tensors(ours))
