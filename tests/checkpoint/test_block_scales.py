"""FP8 and MXFP4 folders are read as what transformers dequantises them to, and numpy by the definition."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from transformers.integrations.finegrained_fp8 import Fp8Dequantize
from transformers.integrations.mxfp4 import convert_moe_packed_tensors

import isomerge
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError

FP8 = torch.float8_e4m3fn
BLOCKS = {"quant_method": "fp8", "weight_block_size": [32, 16], "activation_scheme": "dynamic", "fmt": "e4m3"}
SIZES = {"vocab_size": 40, "hidden_size": 48, "intermediate_size": 80, "num_hidden_layers": 2,
         "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "tie_word_embeddings": False}  # fmt: skip


def is_quantised(name: str) -> bool:
    return name.endswith("_proj.weight")


def write_fp8(folder: Path, *, quantization: dict, grid: str = "blocks", seed: int = 0, scale_dtype=torch.float32):
    """A stock model whose projections are FP8 with random scales, as DeepSeek-V3's files have them."""
    config = transformers.Qwen3Config(**SIZES)
    torch.manual_seed(seed)
    transformers.Qwen3ForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    state, made = load_file(folder / "model.safetensors"), {}
    for name, tensor in state.items():
        if not is_quantised(name):
            made[name] = tensor
            continue
        rows, columns = tensor.shape
        shape = {"blocks": (-(-rows // 32), -(-columns // 16)), "tensor": (), "rows": (rows, 1)}[grid]
        scale = (torch.rand(shape) + 0.5) / 100
        if scale_dtype == torch.uint8:
            scale = torch.randint(118, 124, shape)
        made[name] = (tensor.float() * 100).to(FP8)
        made[name + ("_scale_inv" if grid == "blocks" else "_scale")] = scale.to(scale_dtype)
    if grid == "tensor":
        made["model.layers.0.mlp.up_proj.input_scale"] = torch.tensor(0.5)
    save_file(made, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": quantization}))
    return made


def by_definition(weight: torch.Tensor, scale: torch.Tensor, block: tuple[int, int]) -> np.ndarray:
    """W[i, j] · s[i // b, j // c], an element at a time."""
    values, scales = weight.float().numpy(), scale.float().numpy()
    out = np.empty(values.shape, dtype=np.float32)
    for i in range(values.shape[0]):
        for j in range(values.shape[1]):
            out[i, j] = values[i, j] * scales[i // block[0], j // block[1]]
    return out


@pytest.mark.parametrize("scale_dtype", [torch.float32, torch.bfloat16], ids=str)
def test_block_scales_are_multiplied_as_the_definition_says(tmp_path: Path, scale_dtype: torch.dtype) -> None:
    stored = write_fp8(tmp_path, quantization=BLOCKS, scale_dtype=scale_dtype)
    checkpoint = open_checkpoint(tmp_path)
    assert "quantization_config" not in checkpoint.config
    names = [name for name in stored if is_quantised(name)]
    assert len(names) == 14
    for name in names:
        truth = torch.from_numpy(by_definition(stored[name], stored[name + "_scale_inv"], (32, 16)))
        assert torch.equal(checkpoint.read_rows(name, 0, len(truth)), truth), name
        middle = slice(29, min(45, len(truth)))
        assert torch.equal(checkpoint.read_rows(name, middle.start, middle.stop), truth[middle])
        assert torch.equal(checkpoint.read(name), truth.to(torch.bfloat16))
        assert torch.equal(checkpoint.read_span(name, 100, 999), truth.reshape(-1)[100:999].to(torch.bfloat16))
    assert set(checkpoint.tensors) == {name for name in stored if not name.endswith("_scale_inv")}


def test_whole_blocks_are_what_transformers_dequantises(tmp_path: Path) -> None:
    stored = write_fp8(tmp_path, quantization=BLOCKS)
    checkpoint = open_checkpoint(tmp_path)
    name = "model.layers.0.self_attn.k_proj.weight"  # 32 × 48, whole blocks, which transformers needs
    theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[name + "_scale_inv"], torch.bfloat16)
    assert torch.equal(checkpoint.read(name), theirs)


@pytest.mark.parametrize(
    ("grid", "method"), [("tensor", "fp8"), ("rows", "compressed-tensors"), ("rows", "fbgemm_fp8")]
)
def test_scales_of_tensors_and_rows(tmp_path: Path, grid: str, method: str) -> None:
    stored = write_fp8(tmp_path, quantization={"quant_method": method}, grid=grid)
    checkpoint = open_checkpoint(tmp_path)
    for name in (name for name in stored if is_quantised(name)):
        truth = stored[name].float() * stored[name + "_scale"].float()
        assert torch.equal(checkpoint.read_rows(name, 3, 9), truth[3:9])
    assert not [name for name in checkpoint.tensors if name.endswith("scale")]


def test_exponents_are_powers_of_two(tmp_path: Path) -> None:
    stored = write_fp8(tmp_path, quantization=BLOCKS, scale_dtype=torch.uint8)
    name = "model.layers.0.self_attn.k_proj.weight"
    theirs = Fp8Dequantize(None)._dequantize_one(stored[name], stored[name + "_scale_inv"], torch.float32)
    assert torch.equal(open_checkpoint(tmp_path).read_rows(name, 0, 32), theirs)


def test_two_fp8_models_merge_to_a_model_of_bfloat16(tmp_path: Path) -> None:
    states = [write_fp8(tmp_path / str(seed), quantization=BLOCKS, seed=seed) for seed in (0, 1)]
    merged = isomerge.merge([tmp_path / "0", tmp_path / "1"])
    assert sum("FP8" in note and "quantization_config" in note for note in merged.notes) == 2
    written = merged.save(tmp_path / "out")
    result = load_file(tmp_path / "out" / "model.safetensors")
    name = "model.layers.1.mlp.down_proj.weight"
    parts = [torch.from_numpy(by_definition(s[name], s[name + "_scale_inv"], (32, 16))) for s in states]
    assert torch.equal(result[name], ((parts[0] + parts[1]) / 2).to(torch.bfloat16))
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.dtype == torch.bfloat16 and not hasattr(loaded.config, "quantization_config")
    assert isomerge.verify(tmp_path / "out").verdict != "bad"
    assert isomerge.reproduce(written).verdict == "identical"


# --- MXFP4 ------------------------------------------------------------------------------------------------------------
def write_mxfp4(folder: Path, seed: int = 0) -> dict[str, torch.Tensor]:
    config = transformers.GptOssConfig(
        vocab_size=40, hidden_size=64, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2,
        num_key_value_heads=1, head_dim=32, num_local_experts=3, num_experts_per_tok=2,
    )  # fmt: skip
    torch.manual_seed(seed)
    transformers.GptOssForCausalLM(config).to(torch.bfloat16).save_pretrained(folder)
    state = load_file(folder / "model.safetensors")
    for name in [name for name in state if name.endswith(("experts.gate_up_proj", "experts.down_proj"))]:
        experts, inputs, outputs = state.pop(name).shape
        state[name + "_blocks"] = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), dtype=torch.uint8)
        state[name + "_scales"] = torch.randint(110, 128, (experts, outputs, inputs // 32), dtype=torch.uint8)
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    written = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**written, "quantization_config": {"quant_method": "mxfp4"}}))
    return state


def test_microscaled_experts_are_what_transformers_makes_of_them(tmp_path: Path) -> None:
    stored = write_mxfp4(tmp_path)
    checkpoint = open_checkpoint(tmp_path)
    for name in ("gate_up_proj", "down_proj"):
        name = f"model.layers.0.mlp.experts.{name}"
        theirs = convert_moe_packed_tensors(stored[name + "_blocks"], stored[name + "_scales"], dtype=torch.bfloat16)
        assert torch.equal(checkpoint.read(name), theirs)
        assert torch.equal(checkpoint.read_rows(name, 1, 3), theirs[1:3])
        # A byte by the definition: the low half is the first value.
        packed, scale = int(stored[name + "_blocks"][1, 5, 0, 7]), int(stored[name + "_scales"][1, 5, 0])
        sign, exponent, mantissa = packed >> 3 & 1, packed >> 1 & 3, packed & 1
        value = (1 + mantissa / 2) * 2 ** (exponent - 1) if exponent else mantissa / 2
        assert float(theirs[1, 14, 5]) == (-1) ** sign * value * 2.0 ** (scale - 127)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16).state_dict()
    for name in checkpoint.tensors:
        assert torch.equal(checkpoint.read(name), theirs[name]), name


def test_two_mxfp4_models_merge(tmp_path: Path) -> None:
    for seed in (0, 1):
        write_mxfp4(tmp_path / str(seed), seed)
    isomerge.merge([tmp_path / "0", tmp_path / "1"]).save(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out", dtype="auto")
    assert loaded.model.layers[0].mlp.experts.gate_up_proj.dtype == torch.bfloat16
    assert isomerge.verify(tmp_path / "out").verdict != "bad"


UP = "model.layers.0.mlp.up_proj.weight_scale_inv"


# --- bad input --------------------------------------------------------------------------------------------------------
@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda s: s.pop(UP), f"there is no '{UP}'"),
        (lambda s: s.update({UP: torch.ones(2, 2)}), "does not divide"),
    ],
)  # fmt: skip
def test_scales_that_do_not_fit_are_named(tmp_path: Path, change, said: str) -> None:
    stored = write_fp8(tmp_path, quantization=BLOCKS)
    change(stored)
    save_file(stored, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(CheckpointError, match=said):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize("size", [[0, 16], "x", [128], [1.5, 2]])
def test_nonsense_for_a_block_size_is_named(tmp_path: Path, size: object) -> None:
    write_fp8(tmp_path, quantization={**BLOCKS, "weight_block_size": size})
    with pytest.raises(CheckpointError, match="weight_block_size is"):
        open_checkpoint(tmp_path)


@pytest.mark.parametrize(
    ("method", "said"),
    [("bitsandbytes", r"model\.dequantize\(\), and save it with save_pretrained"), ("gptq", "quantised from"),
     ("awq", "quantised from"), ("hqq", "dequantise this one")],
)  # fmt: skip
def test_other_quantisations_are_refused_with_the_way_out(tmp_path: Path, method: str, said: str) -> None:
    for seed in (0, 1):
        write_fp8(tmp_path / str(seed), quantization={"quant_method": method}, seed=seed)
    with pytest.raises(CheckpointError, match=said) as caught:
        isomerge.merge([tmp_path / "0", tmp_path / "1"])
    assert f"quantization_config ({method})" in str(caught.value)
