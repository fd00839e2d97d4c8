"""Mixtures of experts built from dense models: whose tensors they have, what they compute, where they send texts."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import isomerge
from isomerge.errors import RequestError
from merging.experts.counting import family, ids, recipe, text_file
from merging.test_resume import interrupted, same
from models import model, read_config, tensors
from precision import float64_throughout

MIXTURES = {
    "llama": transformers.MixtralForCausalLM,
    "mistral": transformers.MixtralForCausalLM,
    "qwen2": transformers.Qwen2MoeForCausalLM,
    "qwen3": transformers.Qwen3MoeForCausalLM,
}


def stock(folder: Path, dtype: torch.dtype = torch.float64) -> Any:
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, experts_implementation="eager").eval()


@torch.no_grad()
def scores(folder: Path, words: Tensor) -> Tensor:
    with float64_throughout():
        found: Tensor = stock(folder)(input_ids=words).logits
    return found


def far(first: Tensor, second: Tensor) -> float:
    return float((first - second).abs().max() / second.abs().max())


def lines(*files: Path) -> list[dict[str, Any]]:
    return [{"path": str(file), "kind": "lines"} for file in files]


# --- what it is made of -----------------------------------------------------------------------------------------------
@pytest.mark.parametrize("name", MIXTURES)
def test_experts_are_the_models_and_all_else_is_the_bases(tmp_path: Path, name: str) -> None:
    models = family(name)
    merged = isomerge.moe(recipe(models, chosen=2))
    merged.verify(merged.save(tmp_path / "out"))
    loaded = stock(tmp_path / "out", torch.float32)
    assert type(loaded) is MIXTURES[name]
    dense = {member: tensors(folder) for member, folder in models.items()}
    state = loaded.state_dict()
    for key, tensor in dense["base"].items():
        if ".mlp." not in key:
            assert torch.equal(state[key], tensor), key
    for layer in range(2):
        gate_up, down = (state[f"model.layers.{layer}.mlp.experts.{part}"] for part in ("gate_up_proj", "down_proj"))
        for expert in (0, 1):
            gate, up, own_down = (
                dense[str(expert)][f"model.layers.{layer}.mlp.{part}_proj.weight"] for part in ("gate", "up", "down")
            )
            assert torch.equal(gate_up[expert], torch.cat([gate, up])) and torch.equal(down[expert], own_down)
    assert isomerge.reproduce(tmp_path / "out").verdict == "identical"


@pytest.mark.parametrize("name", MIXTURES)
@pytest.mark.parametrize("chosen", [1, 2, 3])
def test_copies_of_a_model_compute_what_it_computes(tmp_path: Path, name: str, chosen: int) -> None:
    dense = family(name)["0"]
    isomerge.moe(dense, copies=3, experts_per_token=chosen, gate_mode="random").save(tmp_path / "out")
    words = torch.randint(0, 27, (4, 12), generator=torch.Generator().manual_seed(1))
    assert far(scores(tmp_path / "out", words), scores(dense, words)) < 1e-12


def test_a_router_that_does_not_sum_to_one_is_noticed_by_this(tmp_path: Path) -> None:
    dense = model("qwen3", 3)
    isomerge.moe(dense, copies=3, experts_per_token=2).save(tmp_path / "out")
    words = torch.randint(0, 29, (4, 12), generator=torch.Generator().manual_seed(1))
    config = tmp_path / "out" / "config.json"
    config.write_text(config.read_text().replace('"norm_topk_prob": true', '"norm_topk_prob": false'))
    assert far(scores(tmp_path / "out", words), scores(dense, words)) > 1e-3


def test_scale_and_noise_change_what_they_say(tmp_path: Path) -> None:
    models = family()
    asked = recipe(models, "random")
    asked["experts"] = [{"source_model": str(models["0"]), "residual_scale": 0.25},
                        {"source_model": str(models["1"]), "noise_scale": 0.1}]  # fmt: skip
    isomerge.moe(asked).save(tmp_path / "out")
    found, own = tensors(tmp_path / "out"), [tensors(models[name]) for name in ("0", "1")]
    place, dense = "model.layers.1.block_sparse_moe.experts.{}.{}.weight", "model.layers.1.mlp.{}_proj.weight"
    assert torch.allclose(found[place.format(0, "w2")], 0.25 * own[0][dense.format("down")])
    assert torch.equal(found[place.format(0, "w1")], own[0][dense.format("gate")])
    noise = found[place.format(1, "w1")] - own[1][dense.format("gate")]
    assert noise.std().item() == pytest.approx(0.1, rel=0.15) and abs(noise.mean().item()) < 0.02


def test_the_expert_of_all_tokens_is_added_with_its_gate(tmp_path: Path) -> None:
    """Against the block written out: Σ w_k E_k(x) + σ(g·x) S(x)."""
    models = family("qwen2")
    shared = [{"source_model": str(models["base"]), "positive_prompts": ["a m"], "residual_scale": 0.5}]
    isomerge.moe(recipe(models, chosen=2, shared_experts=shared)).save(tmp_path / "out")
    found = stock(tmp_path / "out")
    block = found.model.layers[1].mlp
    x = torch.randn(5, 16, dtype=torch.float64, generator=torch.Generator().manual_seed(2))

    def expert(member: str) -> Tensor:
        gate, up, down = (
            tensors(models[member])[f"model.layers.1.mlp.{part}_proj.weight"].double()
            for part in ("gate", "up", "down")
        )
        return (torch.nn.functional.silu(x @ gate.T) * (x @ up.T)) @ down.T

    weights = (x @ block.gate.weight.T).softmax(-1)
    open_ = (x @ block.shared_expert_gate.weight.T).sigmoid()
    wanted = weights[:, :1] * expert("0") + weights[:, 1:] * expert("1") + open_ * 0.5 * expert("base")
    with torch.no_grad(), float64_throughout():
        assert far(block(x[None])[0], wanted) < 1e-12


def test_models_without_biases_fit_into_a_class_that_has_them(tmp_path: Path) -> None:
    dense = model("llama", 3, head_dim=6)
    merged = isomerge.moe(dense, copies=2, architecture="qwen")
    merged.save(tmp_path / "out")
    assert type(stock(tmp_path / "out")) is transformers.Qwen2MoeForCausalLM
    words = torch.randint(0, 29, (4, 12), generator=torch.Generator().manual_seed(1))
    assert far(scores(tmp_path / "out", words), scores(dense, words)) < 1e-12


def test_a_tied_table_and_rope_stay_what_they_are(tmp_path: Path) -> None:
    rope = {"rope_theta": 500.0, "rope_type": "linear", "factor": 4.0}
    dense = model("llama", 4, tie_word_embeddings=True, rope_parameters=rope, rms_norm_eps=1e-3)
    isomerge.moe(dense, copies=2).save(tmp_path / "out")
    assert "lm_head.weight" not in tensors(tmp_path / "out") and read_config(tmp_path / "out")["tie_word_embeddings"]
    words = torch.randint(0, 29, (4, 12), generator=torch.Generator().manual_seed(1))
    assert far(scores(tmp_path / "out", words), scores(dense, words)) < 1e-12


def test_a_run_that_was_stopped_goes_on_to_the_same_bytes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    models = family()
    steps: dict[str, Any] = {
        "moe": lambda: isomerge.moe(recipe(models), threads=1),
        "shrunk": lambda: isomerge.moe(tmp_path / "first-moe", keep=1, threads=1),
        "dense": lambda: isomerge.moe(tmp_path / "first-moe", to_dense="average", threads=1),
        "moved": lambda: isomerge.transplant(models["0"], models["1"], threads=1),
    }
    for name, make in steps.items():
        first, second = (tmp_path / f"{which}-{name}" for which in ("first", "second"))
        make().save(first)
        interrupted(monkeypatch, lambda make=make, out=second: make().save(out))  # type: ignore[misc]
        assert not (second / "config.json").exists()
        make().save(second)
        assert same(second, first), name


# --- where it sends texts ---------------------------------------------------------------------------------------------
def shares(merged: isomerge.Merged) -> list[float]:
    """Of each skill's texts, the share of choices that fell on its own expert."""
    rows = merged.report().to_dict()["moe"]["measured"]
    return [row["routing"][skill] for skill, row in enumerate(rows)]


def test_a_mixture_of_two_fine_tunes_routes_by_task_and_a_random_gate_does_not(tmp_path: Path) -> None:
    models = family()
    held_out = lines(*(text_file(tmp_path, skill, 60, seed=99) for skill in (0, 1)))
    found = {gate: shares(isomerge.moe(recipe(models, gate), data=held_out)) for gate in ("hidden", "cheap_embed")}
    assert min(found["hidden"]) > 0.8 and min(found["cheap_embed"]) > 0.65
    random = [shares(isomerge.moe(recipe(models, "random"), data=held_out, seed=seed)) for seed in range(6)]
    assert 0.35 < sum(map(sum, random)) / 12 < 0.65  # on average no better than a coin
    merged = isomerge.moe(recipe(models, "hidden"), data=held_out)
    for skill, row in enumerate(merged.report().to_dict()["moe"]["measured"]):
        loss = row["loss"]
        assert loss[str(models[str(skill)])] < loss["mixture"] < loss[str(models["base"])]


def test_routers_fitted_to_data_send_new_texts_to_their_own_expert(tmp_path: Path) -> None:
    models = family()
    known = lines(*(text_file(tmp_path, skill, 40, seed=7) for skill in (0, 1)))
    isomerge.moe(recipe(models, "data"), data=known).save(tmp_path / "out")
    mixture = stock(tmp_path / "out", torch.float32)
    for skill in (0, 1):
        sent: list[Tensor] = []
        hooks = [
            layer.mlp.gate.register_forward_hook(lambda *call, to=sent: to.append(call[-1][2]))
            for layer in mixture.model.layers
        ]
        with torch.no_grad():
            mixture(input_ids=ids(skill, 50, 99))
        for hook in hooks:
            hook.remove()
        assert len(sent) == 2 and all(float((one == skill).double().mean()) > 0.95 for one in sent)


def test_measured_routing_is_what_the_routers_choose(tmp_path: Path) -> None:
    models = family()
    file = text_file(tmp_path, 0, 20, seed=5)
    merged = isomerge.moe(recipe(models, "hidden", chosen=1), data=lines(file)[0])
    (row,) = merged.report().to_dict()["moe"]["measured"]
    merged.save(tmp_path / "out")
    mixture, sent = stock(tmp_path / "out", torch.float32), []
    mixture.model.layers[0].mlp.gate.register_forward_hook(lambda *call: sent.append(call[-1][2]))
    with torch.no_grad():
        loss = mixture(input_ids=ids(0, 20, 5), labels=ids(0, 20, 5)).loss.item()
    assert row["layers"][0][0] == pytest.approx(float((sent[0] == 0).double().mean()))
    assert row["loss"]["mixture"] == pytest.approx(loss, rel=1e-5) and row["tokens"] == 20 * 15


# --- what is refused --------------------------------------------------------------------------------------------------
def wrong(change: Any) -> str:
    asked = recipe(family())
    change(asked)
    with pytest.raises(RequestError) as caught:
        isomerge.moe(asked)
    return str(caught.value)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda r: r.update(experts_per_token=3), "'experts_per_token' is 3, and there are 2 experts"),
        (lambda r: r.update(gate_mode="hiden"), "must be one of hidden"),
        (lambda r: r["experts"][0].pop("positive_prompts"), "this expert needs 'positive_prompts'"),
        (lambda r: r["experts"][0].update(positive_prompts=r["experts"][1]["positive_prompts"]), "same prompts"),
        (lambda r: r["experts"][0].update(positive_prompt=["a"]), "Did you mean 'positive_prompts'?"),
        (lambda r: r["experts"][0].update(positive_prompts="a"), "'positive_prompts'"),
        (lambda r: r["experts"][0].update(residual_scale="half"), "this is a number"),
        (lambda r: r["experts"][0].update(source_model=str(model("gpt2"))), "models of one family"),
        (lambda r: r["experts"][0].update(source_model=str(model("llama"))), "other shapes"),
        (lambda r: r.update(merge_method="linear"), "'experts' is for moe"),
        (lambda r: r.update(parameters={"gate_mode": "random"}), "keep one of them"),
        (lambda r: r.update(architecture="qwen3"), "fit into Mixtral or Qwen2-MoE"),
        (lambda r: r.update(gate_mode="data"), "needs data for each model"),
        (lambda r: r.update(align=True), "takes parts of the models as they are"),
        (lambda r: r.update(base_model=str(model("mixtral"))), "models of one family"),
        (lambda r: r.update(models=[{"model": str(family()["0"])}]), "is not one of the 'models'"),
        (lambda r: r.update(shared_experts=[{"source_model": "x"}] * 2), "shared_experts"),
    ],
)  # fmt: skip
def test_a_mistake_is_named(change: Any, words: str) -> None:
    assert words in wrong(change)


def test_what_does_not_go_together_is_refused() -> None:
    dense = model("llama")
    for arguments, words in (
        ({"copies": 2, "keep": 1}, "Choose one of them"),
        ({"copies": 0}, "copies is 0"),
        ({"keep": 2}, "no known mixture of experts"),
        ({"to_dense": "mean"}, "to_dense"),
        ({"keep": 2, "gate_mode": "random"}, "gate_mode has no effect"),
    ):
        with pytest.raises(RequestError, match=words):
            isomerge.moe(dense, **arguments)  # type: ignore[arg-type]
    with pytest.raises(RequestError, match="no class holds models of the family 'gpt2'"):
        isomerge.moe(model("gpt2"), copies=2)
    with pytest.raises(RequestError, match="attention_bias"):
        isomerge.moe(model("llama", attention_bias=True), copies=2)
    with pytest.raises(RequestError, match="experts already; see keep"):
        isomerge.moe(model("mixtral"), copies=2)
    with pytest.raises(RequestError, match="has none"):
        isomerge.moe({**recipe(family("qwen3")), "shared_experts": recipe(family("qwen3"))["experts"][:1]})
