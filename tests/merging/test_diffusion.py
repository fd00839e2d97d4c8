"""Pipelines, components and single files of diffusion models merge, and diffusers loads the result."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import diffusers
import pytest
import torch
from diffusers.loaders.lora_conversion_utils import (
    _convert_non_diffusers_lora_to_diffusers,
    _maybe_map_sgm_blocks_to_diffusers,
)
from safetensors.torch import load_file, save_file

import isomerge
from diffusion_models import components, flux, save_xl, unet
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, dict, dict]:
    home = tmp_path_factory.mktemp("pair")
    states = [components(save_xl(home / name, seed)) for seed, name in enumerate(("a", "b"))]
    return home / "a", home / "b", states[0], states[1]


def loaded(folder: Path) -> dict[str, dict[str, torch.Tensor]]:
    return components(diffusers.StableDiffusionXLPipeline.from_pretrained(folder))


# --- pipelines --------------------------------------------------------------------------------------------------------
def test_every_component_is_the_mean_and_the_rest_is_copied(pair, tmp_path: Path) -> None:
    a, b, first, second = pair
    written = isomerge.merge([a, b]).save(tmp_path / "out")
    result = loaded(tmp_path / "out")
    assert set(result) == {"unet", "vae", "text_encoder", "text_encoder_2"}
    for component, state in result.items():
        for name, tensor in state.items():
            mean = (first[component][name].double() + second[component][name].double()) / 2
            assert torch.allclose(tensor.double(), mean, atol=1e-7), (component, name)
    for name in ("model_index.json", "scheduler/scheduler_config.json", "tokenizer/tokenizer.json", "unet/config.json"):
        assert (tmp_path / "out" / name).read_bytes() == (a / name).read_bytes()
    assert written.files[-1].name == "model_index.json"  # without it nothing loads
    assert isomerge.verify(tmp_path / "out").verdict == "good"
    assert isomerge.reproduce(written).verdict == "identical"


METHODS = {
    "slerp": {"t": 0.3}, "task_arithmetic": {"weight": 0.5}, "ties": {"density": 0.5}, "dare_linear": {"density": 0.5},
    "breadcrumbs": {}, "nuslerp": {"weight": [0.3, 0.7]}, "multislerp": {}, "karcher": {}, "sce": {},
    "arcee_fusion": {},    "della": {"density": 0.5, "epsilon": 0.1},
}  # fmt: skip


@pytest.mark.parametrize("method", METHODS)
def test_data_free_methods_merge_a_pipeline(method: str, pair, tmp_path: Path) -> None:
    a, b, first, _ = pair
    bases = ("task_arithmetic", "ties", "dare_linear", "breadcrumbs", "sce", "della", "arcee_fusion")
    given = {"models": [b], "base": a} if method in bases else {"models": [a, b]}
    isomerge.merge(**given, method=method, **METHODS[method]).save(tmp_path / "out")
    result = loaded(tmp_path / "out")
    moved = [
        name
        for component, state in result.items()
        for name, tensor in state.items()
        if not torch.equal(tensor, first[component][name])
    ]
    assert moved and all(t.isfinite().all() for state in result.values() for t in state.values())


def test_parts_of_a_name_weigh_blocks(pair, tmp_path: Path) -> None:
    a, b, first, second = pair
    recipe = f"""
merge_method: linear
models:
  - model: {a}
    parameters: {{weight: 1.0}}
  - model: {b}
    parameters:
      weight:
        - {{filter: unet/down_blocks.0., value: 0.0}}
        - {{filter: unet/mid_block., value: 3.0}}
        - {{filter: vae/, value: 0.0}}
        - {{value: 1.0}}
"""
    isomerge.merge_recipe(recipe).save(tmp_path / "out")
    result = loaded(tmp_path / "out")
    shares = {"down_blocks.0.resnets.0.conv1.weight": 0.0, "down_blocks.1.resnets.0.conv1.weight": 0.5,
              "mid_block.resnets.0.conv1.weight": 0.75}  # fmt: skip
    for name, share in shares.items():
        expected = (1 - share) * first["unet"][name] + share * second["unet"][name]
        assert torch.allclose(result["unet"][name], expected, atol=1e-7), name
    name = "decoder.conv_in.weight"
    assert torch.equal(result["vae"][name], first["vae"][name])


def test_files_of_several_parts_are_read_and_written(tmp_path: Path) -> None:
    states = [components(save_xl(tmp_path / str(seed), seed, shard="200KB")) for seed in (0, 1)]
    assert (tmp_path / "0" / "unet" / "diffusion_pytorch_model.safetensors.index.json").is_file()
    isomerge.merge([tmp_path / "0", tmp_path / "1"]).save(tmp_path / "out", shard_size="150KB")
    index = json.loads((tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors.index.json").read_text())
    assert len(set(index["weight_map"].values())) > 1 and "conv_in.weight" in index["weight_map"]
    result = loaded(tmp_path / "out")
    for name, tensor in result["unet"].items():
        assert torch.allclose(tensor, (states[0]["unet"][name] + states[1]["unet"][name]) / 2, atol=1e-7)


def test_nothing_is_aligned_and_the_notes_say_why(pair) -> None:
    notes = isomerge.merge([*pair[:2]], align=True).notes
    assert any("class of diffusers, in which no symmetry is proven" in note for note in notes)
    assert any("NOT ALIGNED" in note for note in notes)


def test_another_dtype_is_that_of_the_files_alone(pair, tmp_path: Path) -> None:
    isomerge.merge([*pair[:2]], dtype="float16").save(tmp_path / "out")
    assert (tmp_path / "out" / "model_index.json").read_bytes() == (pair[0] / "model_index.json").read_bytes()
    state = load_file(tmp_path / "out" / "unet" / "diffusion_pytorch_model.safetensors")
    assert {tensor.dtype for tensor in state.values()} == {torch.float16}


# --- one component ----------------------------------------------------------------------------------------------------
def test_a_flux_transformer_merges_and_runs(tmp_path: Path) -> None:
    models = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(flux())
        models[-1].save_pretrained(tmp_path / str(seed))
    isomerge.merge([tmp_path / "0", tmp_path / "1"], weights=[1, 3]).save(tmp_path / "out")
    merged = diffusers.FluxTransformer2DModel.from_pretrained(tmp_path / "out")
    states = [model.state_dict() for model in models]
    for name, tensor in merged.state_dict().items():
        assert torch.allclose(tensor, 0.25 * states[0][name] + 0.75 * states[1][name], atol=1e-7), name
    out = merged(
        hidden_states=torch.randn(1, 4, 16), encoder_hidden_states=torch.randn(1, 3, 16),
        pooled_projections=torch.randn(1, 16), timestep=torch.tensor([0.5]), guidance=torch.tensor([1.0]),
        img_ids=torch.zeros(4, 3), txt_ids=torch.zeros(3, 3),
    ).sample  # fmt: skip
    assert out.shape == (1, 4, 16) and bool(out.isfinite().all())
    assert isomerge.verify(tmp_path / "out").verdict == "good"


# --- one file ---------------------------------------------------------------------------------------------------------
SINGLE = {
    "model.diffusion_model.input_blocks.1.1.proj_in.weight": (8, 8),
    "model.diffusion_model.middle_block.1.proj_in.weight": (8, 8),
    "model.diffusion_model.output_blocks.11.0.in_layers.2.weight": (8, 4, 3, 3),
    "first_stage_model.encoder.conv_in.weight": (4, 3, 3, 3),
    "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight": (8, 8),
}


def single(path: Path, seed: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    state = {name: torch.randn(shape, generator=generator).half() for name, shape in SINGLE.items()}
    save_file(state, path)
    return state


def test_single_files_merge_with_the_weights_of_their_blocks(tmp_path: Path) -> None:
    states = [single(tmp_path / f"{seed}.safetensors", seed) for seed in (0, 1)]
    recipe = f"""
merge_method: linear
models:
  - model: {tmp_path}/0.safetensors
    parameters: {{weight: 1.0}}
  - model: {tmp_path}/1.safetensors
    parameters:
      weight: [{{filter: input_blocks.1., value: 0}}, {{filter: output_blocks.11., value: 3}}, {{value: 1}}]
"""
    isomerge.merge_recipe(recipe).save(tmp_path / "out")
    result = load_file(tmp_path / "out" / "model.safetensors")
    for name, share in zip(SINGLE, (0, 0.5, 0.75, 0.5, 0.5), strict=True):
        expected = (1 - share) * states[0][name].float() + share * states[1][name].float()
        assert torch.equal(result[name], expected.half()), name


# --- LoRA and LyCORIS -------------------------------------------------------------------------------------------------
def kohya(names: list[str], state: dict[str, torch.Tensor], front: str, rank: int = 2, alpha: float = 3.0):
    generator = torch.Generator().manual_seed(7)
    made, truth = {}, {}
    for name in names:
        outputs, inputs, *kernel = state[name + ".weight"].shape
        down, up = (
            torch.randn(rank, inputs, *kernel, generator=generator),
            torch.randn(outputs, rank, generator=generator),
        )
        layer = front + name.replace(".", "_")
        made |= {layer + ".lora_down.weight": down, layer + ".alpha": torch.tensor(alpha),
                 layer + ".lora_up.weight": up.reshape(outputs, rank, *[1] * len(kernel))}  # fmt: skip
        truth[name + ".weight"] = alpha / rank * torch.einsum("or,ri...->oi...", up, down)
    return made, truth


def check(base: dict, merged: dict, truth: dict) -> None:
    for name, tensor in base.items():
        expected = tensor.double() + truth.get(name, torch.zeros(())).double()
        assert torch.allclose(merged[name].double(), expected, atol=1e-5), name


LAYERS = ["down_blocks.1.attentions.0.transformer_blocks.0.attn1.to_q", "mid_block.resnets.1.conv1",
          "up_blocks.0.attentions.2.proj_out", "down_blocks.0.downsamplers.0.conv",
          "add_embedding.linear_1"]  # fmt: skip


def test_layers_in_kohyas_words_are_added(pair, tmp_path: Path) -> None:
    a, _, first, _ = pair
    made, truth = kohya(LAYERS, first["unet"], "lora_unet_")
    more, words = kohya(["text_model.encoder.layers.1.mlp.fc1"], first["text_encoder_2"], "lora_te2_")
    save_file({**made, **more}, tmp_path / "lora.safetensors")
    written = isomerge.merge([f"{a}+{tmp_path}/lora.safetensors"]).save(tmp_path / "out")
    result = loaded(tmp_path / "out")
    check(first["unet"], result["unet"], truth)
    check(first["text_encoder_2"], result["text_encoder_2"], words)
    check(first["vae"], result["vae"], {})
    assert isomerge.reproduce(written).verdict == "identical"


def test_names_of_the_original_code_are_those_that_diffusers_maps(pair, tmp_path: Path) -> None:
    """Its own conversion says which layer of its U-Net each name means."""
    a, _, first, _ = pair
    names = {
        "input_blocks_4_1_proj_in": (16, 16), "middle_block_1_transformer_blocks_1_attn2_to_k": (16, 32),
        "output_blocks_5_1_transformer_blocks_0_ff_net_2": (16, 64),
        "input_blocks_7_1_transformer_blocks_0_attn1_to_v": (16, 16),
        "output_blocks_0_1_proj_out": (16, 16),
    }  # fmt: skip
    made = {}
    for name, (outputs, inputs) in names.items():
        front = f"lora_unet_{name}."
        made |= {front + "lora_down.weight": torch.randn(2, inputs), front + "alpha": torch.tensor(2.0),
                 front + "lora_up.weight": torch.randn(outputs, 2)}  # fmt: skip
    save_file(made, tmp_path / "lora.safetensors")
    mapped = _maybe_map_sgm_blocks_to_diffusers(dict(made), unet().config)
    theirs, _ = _convert_non_diffusers_lora_to_diffusers(mapped)
    truth = {}
    for key in (key for key in theirs if "down.weight" in key):
        other = key.replace("down.weight", "up.weight")
        layer = re.sub(r"\.processor|[._]lora\.down\.weight|^unet\.", "", key)
        truth[f"{layer}.weight"] = theirs[other] @ theirs[key]
    assert len(truth) == len(names) and truth.keys() <= first["unet"].keys()
    isomerge.merge([f"{a}+{tmp_path}/lora.safetensors"]).save(tmp_path / "out")
    check(first["unet"], loaded(tmp_path / "out")["unet"], truth)


def test_a_lora_that_diffusers_saved_is_what_it_fuses(pair, tmp_path: Path) -> None:
    from peft import LoraConfig

    a = pair[0]
    pipeline = diffusers.StableDiffusionXLPipeline.from_pretrained(a)
    pipeline.unet.add_adapter(LoraConfig(r=4, lora_alpha=6, target_modules=["to_q", "to_v", "proj_in"]))
    with torch.no_grad():
        for name, parameter in pipeline.unet.named_parameters():
            if "lora" in name:
                parameter.copy_(torch.randn_like(parameter))
    from peft.utils import get_peft_model_state_dict

    layers = get_peft_model_state_dict(pipeline.unet)
    config = pipeline.unet.peft_config["default"].to_dict()
    diffusers.StableDiffusionXLPipeline.save_lora_weights(
        tmp_path / "lora", unet_lora_layers=layers, unet_lora_adapter_metadata=config
    )
    fused = diffusers.StableDiffusionXLPipeline.from_pretrained(a)
    fused.load_lora_weights(tmp_path / "lora")
    fused.fuse_lora()
    fused.unload_lora_weights()
    isomerge.merge([f"{a}+{tmp_path}/lora"]).save(tmp_path / "out")
    expected, result = components(fused)["unet"], loaded(tmp_path / "out")["unet"]
    assert any(not torch.equal(expected[name], pair[2]["unet"][name]) for name in expected)
    for name, tensor in expected.items():
        assert torch.allclose(result[name], tensor, atol=1e-5), name


def test_products_of_lycoris_are_those_of_its_papers(pair, tmp_path: Path) -> None:
    a, _, first, _ = pair
    half, kron = "mid_block.attentions.0.proj_in", "mid_block.resnets.0.conv2"
    factors = {f"w{i}_{s}": torch.randn((16, 3) if s == "a" else (3, 16)) for i in (1, 2) for s in "ab"}
    w1, w2 = torch.randn(4, 2), torch.randn(4, 8, 3, 3)
    save_file(
        {**{f"lora_unet_{half.replace('.', '_')}.hada_{name}": value for name, value in factors.items()},
         f"lora_unet_{half.replace('.', '_')}.alpha": torch.tensor(1.5),
         f"lycoris_{kron.replace('.', '_')}.lokr_w1": w1, f"lycoris_{kron.replace('.', '_')}.lokr_w2": w2,
         f"lycoris_{kron.replace('.', '_')}.alpha": torch.tensor(8.0)},
        tmp_path / "lyco.safetensors",
    )  # fmt: skip
    hadamard = (factors["w1_a"] @ factors["w1_b"]) * (factors["w2_a"] @ factors["w2_b"]) * (1.5 / 3)
    blocks = torch.stack([torch.cat([w1[i, j] * w2 for j in range(2)], dim=1) for i in range(4)]).flatten(0, 1)
    isomerge.merge([f"{a}+{tmp_path}/lyco.safetensors"]).save(tmp_path / "out")
    check(first["unet"], loaded(tmp_path / "out")["unet"], {half + ".weight": hadamard, kron + ".weight": blocks})


def test_a_lora_goes_onto_a_single_file(tmp_path: Path) -> None:
    state = single(tmp_path / "base.safetensors", 0)
    layer, tensor = "lora_unet_input_blocks_1_1_proj_in", "model.diffusion_model.input_blocks.1.1.proj_in.weight"
    words = "conditioner.embedders.0.transformer.text_model.encoder.layers.0.self_attn.q_proj.weight"
    down, up = torch.randn(2, 8), torch.randn(8, 2)
    save_file({layer + ".lora_down.weight": down, layer + ".lora_up.weight": up,
               "lora_te1_text_model_encoder_layers_0_self_attn_q_proj.lora_down.weight": down.clone(),
               "lora_te1_text_model_encoder_layers_0_self_attn_q_proj.lora_up.weight": up.clone()},
              tmp_path / "lora.safetensors")  # fmt: skip
    isomerge.merge([f"{tmp_path}/base.safetensors+{tmp_path}/lora.safetensors"]).save(tmp_path / "out")
    result = load_file(tmp_path / "out" / "model.safetensors")
    for name in state:
        expected = state[name].float() + (up @ down if name in (tensor, words) else 0)
        assert torch.equal(result[name], expected.half()), name


# --- bad input --------------------------------------------------------------------------------------------------------
def test_layers_of_another_model_are_refused(pair, tmp_path: Path) -> None:
    factors = {"lora_down.weight": torch.ones(2, 8), "lora_up.weight": torch.ones(8, 2)}
    save_file({f"lora_unet_nowhere.{part}": value for part, value in factors.items()}, tmp_path / "lora.safetensors")
    with pytest.raises(RequestError, match=r"1 of its 1 layers are not in the base \('lora_unet_nowhere'\)"):
        isomerge.merge([f"{pair[0]}+{tmp_path}/lora.safetensors"])
    name = "lora_unet_mid_block_attentions_0_proj_in"
    save_file({name + ".lora_down.weight": torch.ones(2, 9), name + ".lora_up.weight": torch.ones(16, 2)},
              tmp_path / "lora.safetensors")  # fmt: skip
    with pytest.raises(IsomergeError, match="9 inputs and 16 outputs"):
        isomerge.merge([f"{pair[0]}+{tmp_path}/lora.safetensors"])
    save_file({name + ".oft_blocks": torch.ones(2, 9)}, tmp_path / "lora.safetensors")
    with pytest.raises(CheckpointError, match="LoRA, LoHa and LoKr are read"):
        isomerge.merge([f"{pair[0]}+{tmp_path}/lora.safetensors"])


def test_a_damaged_pipeline_says_what_is_wrong(tmp_path: Path) -> None:
    save_xl(tmp_path / "a")
    weights = tmp_path / "a" / "vae" / "diffusion_pytorch_model.safetensors"
    whole = weights.read_bytes()
    weights.write_bytes(whole[:-10])
    with pytest.raises(CheckpointError, match=r"vae/diffusion_pytorch_model.safetensors: it is truncated"):
        open_checkpoint(tmp_path / "a")
    weights.write_bytes(whole)
    index = tmp_path / "a" / "model_index.json"
    index.write_text(json.dumps({"../b": ["diffusers", "AutoencoderKL"]}))
    with pytest.raises(CheckpointError, match="is not the name of a folder"):
        open_checkpoint(tmp_path / "a")
    index.write_text("{}")
    with pytest.raises(CheckpointError, match="names no component that holds weights"):
        open_checkpoint(tmp_path / "a")


def test_a_write_that_fails_leaves_nothing(pair, tmp_path: Path) -> None:
    a, b, *_ = pair
    state = load_file(a / "unet" / "diffusion_pytorch_model.safetensors")
    shutil.copytree(b, tmp_path / "b")
    state["conv_in.weight"][0] = float("nan")
    save_file(state, tmp_path / "b" / "unet" / "diffusion_pytorch_model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match="unet/conv_in.weight"):
        isomerge.merge([a, tmp_path / "b"]).save(tmp_path / "out")
    assert not (tmp_path / "out" / "model_index.json").exists()
