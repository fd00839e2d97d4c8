"""`isomerge.convert`: what it writes, held against the gguf package's reader, llama.cpp's layout and transformers."""

from __future__ import annotations

import json
import os
from itertools import pairwise
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
import transformers
from gguf import GGMLQuantizationType as Q
from safetensors.torch import load_file, save_file
from tokenizers import pre_tokenizers

import isomerge
from gguf_files import KINDS, VOCABULARY, gguf_tensors, stock, write_gguf
from isomerge.checkpoint import open_checkpoint
from isomerge.errors import CheckpointError, IsomergeError, RequestError
from tokenizers_of_bytes import byte_level, pieces, with_tokenizer

TEXT = "the merge of two models, and 1234 more words: it's fine — naïve, 日本"


def saved(kind: str, folder: Path, **changes) -> Path:
    stock(kind, **changes).save_pretrained(folder)
    return folder


def read(path: Path) -> dict[str, np.ndarray]:
    return {t.name: gguf.dequantize(t.data, t.tensor_type) for t in gguf.GGUFReader(path).tensors}


@pytest.mark.parametrize("kind", KINDS)
def test_the_tensors_are_those_that_llama_cpp_expects(kind: str, tmp_path: Path) -> None:
    done = isomerge.convert(saved(kind, tmp_path / "a"), tmp_path / "a.gguf", type="f32")
    found, truth = read(tmp_path / "a.gguf"), gguf_tensors(kind, tmp_path / "a")
    assert found.keys() == truth.keys() and done.tensors == len(truth)
    for name, values in truth.items():
        assert np.array_equal(found[name].reshape(values.shape), values), name


@pytest.mark.parametrize("kind", KINDS)
def test_the_metadata_are_those_of_the_converter(kind: str, tmp_path: Path) -> None:
    write_gguf(kind, tmp_path / "theirs.gguf")
    isomerge.convert(tmp_path / "theirs", tmp_path / "ours.gguf")
    theirs, ours = (gguf.GGUFReader(tmp_path / name).fields for name in ("theirs.gguf", "ours.gguf"))
    for key, entry in theirs.items():
        if not key.startswith("GGUF.") and entry.types != [gguf.GGUFValueType.STRING]:
            assert key in ours and ours[key].contents() == entry.contents(), key
    assert ours["general.architecture"].contents() == KINDS[kind][2]


@pytest.mark.parametrize("kind", KINDS)
def test_what_is_written_is_read_as_the_same_model(kind: str, tmp_path: Path) -> None:
    isomerge.convert(saved(kind, tmp_path / "a"), tmp_path / "a.gguf", type="f32")
    before, after = open_checkpoint(tmp_path / "a"), open_checkpoint(tmp_path / "a.gguf")
    for name in before.tensors:
        values = before.read(name)
        shifted = kind.startswith("gemma") and name.endswith("norm.weight")
        assert torch.equal(after.read(name), (values + 1) - 1 if shifted else values), name


TYPES = {"f16": Q.F16, "bf16": Q.BF16, "q8_0": Q.Q8_0, "q5_1": Q.Q5_1, "q5_0": Q.Q5_0, "q4_1": Q.Q4_1, "q4_0": Q.Q4_0}


@pytest.mark.parametrize("kind", TYPES)
def test_every_type_is_what_the_package_quantises_to(kind: str, tmp_path: Path) -> None:
    done = isomerge.convert(saved("llama", tmp_path / "a"), tmp_path / "a.gguf", type=kind)
    truth = gguf_tensors("llama", tmp_path / "a")
    for tensor in gguf.GGUFReader(tmp_path / "a.gguf").tensors:
        values = np.ascontiguousarray(truth[tensor.name])
        used = TYPES[kind] if values.ndim > 1 else Q.F32
        assert tensor.tensor_type == used
        assert np.array_equal(np.asarray(tensor.data).view(np.uint8), gguf.quantize(values, used).view(np.uint8))
    assert done.bytes == (tmp_path / "a.gguf").stat().st_size


def test_rows_that_no_block_divides_are_f16_and_told(tmp_path: Path) -> None:
    done = isomerge.convert(
        saved("qwen2", tmp_path / "a", intermediate_size=72), tmp_path / "a.gguf", type="q8_0"
    )  # fmt: skip
    assert any("2 tensors whose rows no block of 32 divides are F16" in note for note in done.notes)
    kinds = {t.name: t.tensor_type for t in gguf.GGUFReader(tmp_path / "a.gguf").tensors}
    assert kinds["blk.0.ffn_down.weight"] == Q.F16 and kinds["blk.0.ffn_up.weight"] == Q.Q8_0


# --- rotary scaling ---------------------------------------------------------------------------------------------------
SCALINGS = {
    "llama3": {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
               "original_max_position_embeddings": 8192},
    "linear": {"factor": 4.0},
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 32},
}  # fmt: skip


@pytest.mark.parametrize("kind", SCALINGS)
def test_scaled_rotary_positions_come_back(kind: str, tmp_path: Path) -> None:
    rope = {"rope_type": kind, "rope_theta": 500000.0, **SCALINGS[kind]}
    isomerge.convert(saved("llama", tmp_path / "a", rope_parameters=rope), tmp_path / "a.gguf")
    assert open_checkpoint(tmp_path / "a.gguf").config["rope_parameters"] == rope


def test_long_factors_come_back(tmp_path: Path) -> None:
    rope = {"rope_type": "longrope", "rope_theta": 10000.0, "long_factor": [1.5 + i for i in range(32)],
            "short_factor": [1.25 + i for i in range(32)], "original_max_position_embeddings": 64}  # fmt: skip
    isomerge.convert(
        saved("phi3", tmp_path / "a", rope_parameters=rope, original_max_position_embeddings=64), tmp_path / "a.gguf"
    )
    found = open_checkpoint(tmp_path / "a.gguf").config["rope_parameters"]
    assert found == {key: value for key, value in rope.items() if key != "partial_rotary_factor"}  # the class adds a 1
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    expected = (1 + np.log(128 / 64) / np.log(64)) ** 0.5
    assert fields["phi3.rope.scaling.attn_factor"].contents() == pytest.approx(expected)


# --- tokenizers -------------------------------------------------------------------------------------------------------
ROWS = 320
SPECIAL = {"vocab_size": ROWS, "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0}


def test_merges_of_bytes_are_written_and_read_back(tmp_path: Path) -> None:
    tokenizer = byte_level()
    saved("qwen2", tmp_path / "a", **SPECIAL)
    own = with_tokenizer(tmp_path / "a", tokenizer)
    isomerge.convert(tmp_path / "a", tmp_path / "a.gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "gpt2" and fields["tokenizer.ggml.pre"].contents() == "gpt-2"
    tokens = fields["tokenizer.ggml.tokens"].contents()
    assert len(tokens) == ROWS and [tokens[i] for i in (3, 40)] == own.convert_ids_to_tokens([3, 40])
    assert fields["tokenizer.ggml.merges"].contents() == ["t h", "th e", "e r", "m er"]
    assert "m.content" in fields["tokenizer.chat_template"].contents()
    theirs = transformers.AutoTokenizer.from_pretrained(tmp_path, gguf_file="a.gguf")
    assert theirs(TEXT).input_ids == own(TEXT).input_ids
    folder = open_checkpoint(tmp_path / "a.gguf").folder
    assert transformers.AutoTokenizer.from_pretrained(folder)(TEXT).input_ids == own(TEXT).input_ids


def test_pieces_are_written_with_scores_in_the_order_of_their_merges(tmp_path: Path) -> None:
    saved("llama", tmp_path / "a", **SPECIAL)
    own = with_tokenizer(tmp_path / "a", pieces())
    isomerge.convert(tmp_path / "a", tmp_path / "a.gguf")
    fields = gguf.GGUFReader(tmp_path / "a.gguf").fields
    assert fields["tokenizer.ggml.model"].contents() == "llama"
    assert fields["tokenizer.ggml.add_bos_token"].contents() and fields["tokenizer.ggml.add_space_prefix"].contents()
    kinds, tokens = fields["tokenizer.ggml.token_type"].contents(), fields["tokenizer.ggml.tokens"].contents()
    assert kinds[:5] == [3, 3, 3, 2, 6] and tokens[4] == "<0x00>"
    assert merged_by_score(tokens, fields["tokenizer.ggml.scores"].contents(), "▁the▁mermaid") == [
        own.convert_tokens_to_ids(token) for token in ("▁the", "▁mer", "m", "a", "i", "d")
    ]


def merged_by_score(tokens: list[str], scores: list[float], text: str) -> list[int]:
    """llama.cpp's `llm_tokenizer_spm`: merge the pair of neighbours whose piece has the highest score."""
    known = {token: i for i, token in enumerate(tokens)}
    parts = list(text)
    while True:
        pairs = [(scores[known[a + b]], -i) for i, (a, b) in enumerate(pairwise(parts)) if a + b in known]
        if not pairs:
            return [known[part] for part in parts]
        at = -max(pairs)[1]
        parts[at : at + 2] = [parts[at] + parts[at + 1]]


def test_a_tokenizer_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    saved("qwen2", tmp_path / "a", **SPECIAL)
    tokenizer = byte_level()
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    with_tokenizer(tmp_path / "a", tokenizer)
    notes = isomerge.convert(tmp_path / "a", tmp_path / "a.gguf").notes
    assert any("no tokenizer" in note and "cuts text" in note for note in notes)
    notes = isomerge.convert(saved("qwen2", tmp_path / "b"), tmp_path / "b.gguf").notes
    assert any("there is no tokenizer.json" in note for note in notes)


# --- folders ----------------------------------------------------------------------------------------------------------
def test_a_file_becomes_a_folder_and_a_file_again(tmp_path: Path) -> None:
    write_gguf("qwen2", tmp_path / "m.gguf", qtype=Q.Q8_0)
    done = isomerge.convert(tmp_path / "m.gguf", tmp_path / "folder", dtype="float32")
    assert (done.format, done.type) == ("safetensors", "float32") and any("Q8_0" in note for note in done.notes)
    truth = transformers.AutoModelForCausalLM.from_pretrained(tmp_path, gguf_file="m.gguf", dtype=torch.float32)
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "folder", dtype="auto")
    state = loaded.state_dict()
    assert all(torch.equal(state[name], values) for name, values in truth.state_dict().items())
    isomerge.convert(tmp_path / "m.gguf", tmp_path / "again.gguf", type="q8_0")
    first, again = (gguf.GGUFReader(tmp_path / name) for name in ("m.gguf", "again.gguf"))
    stored = {t.name: np.asarray(t.data) for t in again.tensors}
    assert all(np.array_equal(stored[t.name], np.asarray(t.data)) for t in first.tensors)  # codes and scales


def test_a_folder_that_mlx_wrote_is_read_and_merges(tmp_path: Path) -> None:
    """MLX stores the names of the model class, in bfloat16, with its own word in the header."""
    for seed in (0, 1):
        folder = saved("qwen2", tmp_path / str(seed), seed=seed)
        state = {name: t.to(torch.bfloat16) for name, t in load_file(folder / "model.safetensors").items()}
        save_file(state, folder / "model.safetensors", metadata={"format": "mlx"})
    isomerge.merge([tmp_path / "0", tmp_path / "1"]).save(tmp_path / "out")
    states = [load_file(tmp_path / name / "model.safetensors") for name in ("0", "1", "out")]
    name = "model.layers.0.mlp.up_proj.weight"
    assert torch.equal(states[2][name], ((states[0][name].float() + states[1][name].float()) / 2).to(torch.bfloat16))
    assert isomerge.verify(tmp_path / "0").verdict == "good"
    assert [path.name for path in (tmp_path / "out").glob("model*.safetensors")] == ["model.safetensors"]


def test_packed_weights_of_mlx_are_refused_with_the_way_out(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    module = "model.layers.0.mlp.up_proj."
    state |= {module + "weight": torch.zeros(256, 32, dtype=torch.uint32), module + "scales": torch.ones(256, 4),
              module + "biases": torch.ones(256, 4)}  # fmt: skip
    save_file(state, folder / "model.safetensors", metadata={"format": "mlx"})
    with pytest.raises(CheckpointError, match="mlx_lm.convert does it"):
        isomerge.convert(folder, tmp_path / "out")


# --- bad requests -----------------------------------------------------------------------------------------------------
def test_a_file_is_replaced_only_when_asked(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path / "a")
    (tmp_path / "a.gguf").write_bytes(b"mine")
    with pytest.raises(RequestError, match="nothing is overwritten unasked"):
        isomerge.convert(folder, tmp_path / "a.gguf")
    assert (tmp_path / "a.gguf").read_bytes() == b"mine"
    isomerge.convert(folder, tmp_path / "a.gguf", force=True)
    assert gguf.GGUFReader(tmp_path / "a.gguf").tensors
    assert sorted(path.name for path in tmp_path.iterdir()) == ["a", "a.gguf"]


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"type": "q4_k"}, "type cannot be 'q4_k'|q4_k"),
        ({"dtype": "float32"}, "dtype is not for a GGUF file. Use type"),
        ({"type": 3}, "type must be"),
    ],
)
def test_wrong_arguments_are_named(arguments: dict, said: str, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match=said):
        isomerge.convert(saved("qwen2", tmp_path / "a"), tmp_path / "a.gguf", **arguments)
    with pytest.raises(RequestError, match="type is not for a folder"):
        isomerge.convert(tmp_path / "a", tmp_path / "folder", type="f16")


def test_what_gguf_cannot_say_is_refused(tmp_path: Path) -> None:
    folder = saved("llama", tmp_path / "a", hidden_act="gelu")
    with pytest.raises(CheckpointError, match=r"hidden_act is gelu.*Write safetensors"):
        isomerge.convert(folder, tmp_path / "a.gguf")
    with pytest.raises(CheckpointError, match="query_pre_attn_scalar is 100"):
        isomerge.convert(saved("gemma2", tmp_path / "b", query_pre_attn_scalar=100), tmp_path / "b.gguf")
    assert not list(tmp_path.glob("*.gguf")) and not list(tmp_path.glob(".*"))


def test_a_model_of_another_kind_is_refused(tmp_path: Path) -> None:
    from models import model

    with pytest.raises(CheckpointError, match=r"of type 'bert'.*llama, mistral"):
        isomerge.convert(model("bert"), tmp_path / "a.gguf")


def test_weights_that_are_not_finite_leave_nothing(tmp_path: Path) -> None:
    folder = saved("qwen2", tmp_path / "a")
    state = load_file(folder / "model.safetensors")
    state["model.layers.1.mlp.up_proj.weight"][3, 3] = float("nan")
    save_file(state, folder / "model.safetensors", metadata={"format": "pt"})
    for out in ("a.gguf", "folder"):
        with pytest.raises(IsomergeError, match="up_proj"):
            isomerge.convert(folder, tmp_path / out)
    assert os.listdir(tmp_path) == ["a"]
    assert json.loads((folder / "config.json").read_text())["vocab_size"] == VOCABULARY
