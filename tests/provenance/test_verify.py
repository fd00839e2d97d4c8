"""verify: a whole model is good; every way of spoiling one is found and named."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.header import read_header
from isomerge.errors import RequestError
from isomerge.evaluation.verify import verify

KINDS = ("llama", "llama-tied", "gpt2", "bert", "vit")


def answers(record):
    return {check["name"]: check["passed"] for check in record["checks"]}


def detail(record, name):
    return next(check["detail"] for check in record["checks"] if check["name"] == name)


def failed(record):
    assert record["verdict"] == ("bad" if record["problems"] else "good")
    return [name for name, passed in answers(record).items() if passed is False]


@pytest.mark.parametrize("sharded", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_what_transformers_saved_is_good(kind, sharded, save, tools):
    folder = save(kind, sharded=sharded)
    tools.lock(folder)
    record = verify(folder, threads=2)
    assert failed(record) == [] and record["verdict"] == "good"
    tokens = None if kind == "vit" else True
    expected = dict.fromkeys(("complete", "opens", "index", "format", "structure", "ties", "finite", "lock"), True) | {
        "special tokens": tokens,
        "tokenizer": tokens,
    }
    assert answers(record) == expected
    assert record["seconds"] > 0


def test_an_adapter_beside_the_model_is_bad_since_transformers_would_apply_it(save):
    folder = save("llama")
    (folder / "adapter_config.json").write_text("{}")
    (folder / "adapter_model.safetensors").write_bytes((folder / "model.safetensors").read_bytes())
    record = verify(folder)
    assert failed(record) == ["structure"] and "adapter_config.json" in detail(record, "structure")
    assert "folder of their own" in detail(record, "structure")
    (folder / "adapter_config.json").unlink()
    assert verify(folder)["verdict"] == "good", "weights alone are never applied"


def test_without_a_lock_there_is_nothing_to_compare(save):
    record = verify(save("bert"))
    assert record["verdict"] == "good" and answers(record)["lock"] is None


@pytest.mark.parametrize("kind", KINDS)
def test_one_flipped_bit_is_found_and_its_tensor_named(kind, save, tools):
    folder = save(kind)
    tools.lock(folder)
    path = folder / "model.safetensors"
    entries = read_header(path)
    victim = sorted(entries)[len(entries) // 2]
    data = bytearray(path.read_bytes())
    data[entries[victim].start] ^= 1
    path.write_bytes(data)
    record = verify(folder)
    assert failed(record) == ["lock"]
    assert detail(record, "lock") == f"changed tensors: '{victim}'"


def test_the_same_bytes_in_another_shape_or_dtype_are_another_tensor(save, tools):
    folder = save("bert")
    (folder / "config.json").write_text("{}")
    tools.lock(folder)
    name, other = "bert.pooler.dense.weight", "cls.predictions.bias"
    tools.edit_weights(folder, lambda state: state.update({name: torch.ones(16, 4)}))
    tools.lock(folder)
    tools.edit_weights(
        folder, lambda state: state.update({name: state[name].reshape(4, 16), other: state[other].view(torch.int32)})
    )
    assert detail(verify(folder), "lock") == f"changed tensors: '{name}', '{other}'"


def test_no_flipped_byte_anywhere_in_a_weight_file_goes_unseen(save, tools):
    folder = save("vit")
    tools.lock(folder)
    path = folder / "model.safetensors"
    data = path.read_bytes()
    header = 8 + int.from_bytes(data[:8], "little")
    places = torch.randint(0, header, (60,), generator=torch.Generator().manual_seed(0)).tolist()
    for place in [0, 7, 8, header - 1, header, len(data) - 1, *places]:
        path.write_bytes(data[:place] + bytes([data[place] ^ 1]) + data[place + 1 :])
        assert verify(folder, threads=1)["verdict"] == "bad", data[max(0, place - 20) : place + 20]
    path.write_bytes(data)
    assert verify(folder, threads=1)["verdict"] == "good"


def test_a_missing_shard_is_named(save, tools):
    folder = save("llama", sharded=True)
    tools.lock(folder)
    shard = sorted(folder.glob("model-*.safetensors"))[1]
    shard.unlink()
    record = verify(folder)
    assert failed(record) == ["opens"] and shard.name in detail(record, "opens")
    assert answers(record)["lock"] is None


def test_a_truncated_file_is_named(save):
    folder = save("vit")
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:-10])
    record = verify(folder)
    assert failed(record) == ["opens"] and "truncated" in detail(record, "opens")


@pytest.mark.parametrize(
    ("kind", "changes", "said"),
    [
        ("llama", {"num_hidden_layers": 3}, "no tensor for 'model.layers.2"),
        ("llama", {"num_hidden_layers": 1}, "counts fewer layers than are stored, no place for 'model.layers.1."),
        ("llama", {"intermediate_size": 20}, "(16, 24) where config.json promises (16, 20)"),
        ("llama", {"tie_word_embeddings": True}, None),
        ("gpt2", {"n_positions": 8}, "(16, 16) where config.json promises (8, 16)"),
        ("bert", {"num_hidden_layers": 1}, "counts fewer layers"),
        ("vit", {"num_hidden_layers": 1}, "counts fewer layers"),
        ("vit", {"num_hidden_layers": 3}, "no tensor for"),
        ("llama", {"num_attention_heads": 3}, "LlamaForCausalLM"),
    ],
)
def test_an_edited_config_is_found_with_and_without_a_lock(kind, changes, said, save, tools):
    folder = save(kind)
    tools.lock(folder)
    tools.edit_config(folder, **changes)
    record = verify(folder)
    assert "lock" in failed(record) and detail(record, "lock") == "changed files: 'config.json'"
    (folder / "isomerge.lock.json").unlink()
    record = verify(folder)
    assert failed(record) == [("structure" if said else "ties")]
    assert (said or "'lm_head.weight' and 'model.embed_tokens.weight' differ") in record["problems"][0]


def test_a_class_that_transformers_does_not_have_is_not_held_against_the_model(save, tools):
    folder = save("bert")
    tools.edit_config(folder, architectures=["SomebodysOwnModel"])
    record = verify(folder)
    assert answers(record)["structure"] is None and "SomebodysOwnModel" in detail(record, "structure")
    assert record["verdict"] == "good"


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_a_weight_that_is_not_finite_is_named(value, save, tools):
    folder = save("gpt2")
    tools.edit_weights(folder, lambda state: state["transformer.h.1.mlp.c_fc.weight"][3].fill_(value))
    record = verify(folder)
    assert failed(record) == ["finite"]
    assert detail(record, "finite") == "NaN or infinity in 'transformer.h.1.mlp.c_fc.weight'"


def test_large_finite_weights_are_finite(save, tools):
    folder = save("llama")
    tools.edit_weights(folder, lambda state: state["lm_head.weight"].fill_(3e38))
    assert answers(verify(folder))["finite"] is True


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_one_value_among_many_is_enough_in_every_dtype(dtype, value, tmp_path):
    state = {name: torch.randn(65, 33).to(dtype) for name in ("a", "b")}
    state |= {"empty": torch.zeros(0, 3), "ids": torch.arange(5), "scalar": torch.tensor(1.0)}
    state["b"][64, 17] = value
    save_file(state, tmp_path / "model.safetensors", metadata={"format": "pt"})
    assert detail(verify(tmp_path), "finite") == "NaN or infinity in 'b'"


def test_missing_extra_and_renamed_tensors_are_listed(save, tools):
    folder = save("bert")
    tools.lock(folder)
    tools.edit_weights(
        folder, lambda state: state.update({"extra.weight": state.pop("bert.embeddings.LayerNorm.bias")})
    )
    record = verify(folder)
    assert failed(record) == ["structure", "lock"]
    assert "no tensor for 'bert.embeddings.LayerNorm.bias'" in detail(record, "structure")
    assert detail(record, "lock") == (
        "missing tensors: 'bert.embeddings.LayerNorm.bias'; extra tensors: 'extra.weight'"
    )


def test_a_head_the_class_does_not_use_is_said_and_allowed(save, tools):
    folder = save("bert")
    tools.edit_weights(folder, lambda state: state.update({"cls.seq_relationship.bias": torch.zeros(2)}))
    record = verify(folder)
    assert record["verdict"] == "good" and "no use for 'cls.seq_relationship.bias'" in detail(record, "structure")


@pytest.mark.parametrize(
    ("kind", "head", "table"),
    [
        ("llama-tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
        ("bert", "cls.predictions.decoder.weight", "bert.embeddings.word_embeddings.weight"),
    ],
)
@pytest.mark.parametrize("quick", [False, True])
def test_a_tied_head_may_be_stored_twice_but_not_differ(kind, head, table, quick, save, tools):
    folder = save(kind)
    tools.edit_weights(folder, lambda state: state.update({head: state[table].clone()}))
    assert answers(verify(folder, deep=not quick))["ties"] is True
    tools.edit_weights(folder, lambda state: state[head].mul_(1.5))
    record = verify(folder, deep=not quick)
    assert failed(record) == ["ties"] and f"'{head}' and '{table}' differ" in record["problems"][0]


@pytest.mark.parametrize(
    ("kind", "head", "table"),
    [
        ("llama-tied", "lm_head.weight", "model.embed_tokens.weight"),
        ("gpt2", "lm_head.weight", "transformer.wte.weight"),
    ],
)
def test_torn_ties_are_seen_without_the_class_too(kind, head, table, save, tools):
    folder, donor = save(kind), save(kind, "donor", seed=1)
    for place, factor in ((folder, 1.5), (donor, 1.0)):
        tools.edit_weights(place, lambda state, factor=factor: state.update({head: state[table] * factor}))
    record = verify(folder, deep=False, same_structure_as=open_checkpoint(donor))
    assert failed(record) == ["ties"]
    assert "the same names" in detail(record, "structure")
    assert verify(donor, deep=False, same_structure_as=open_checkpoint(donor))["verdict"] == "good"


def test_a_folder_without_config_is_bad_unless_it_is_an_adapter(save, tmp_path):
    folder = save("vit")
    (folder / "config.json").unlink()
    assert failed(verify(folder)) == ["structure"]
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    save_file({"lora_A.weight": torch.ones(2, 3)}, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    (adapter / "adapter_config.json").write_text("{}")
    record = verify(adapter)
    assert record["verdict"] == "good" and answers(record)["structure"] is None


def test_a_quantised_model_is_not_measured_by_the_plain_class(save, tools):
    folder = save("llama")
    tools.edit_config(folder, quantization_config={"quant_method": "gptq", "bits": 4})
    record = verify(folder)
    assert answers(record)["structure"] is None and "quantised" in detail(record, "structure")


@pytest.mark.parametrize(
    ("file", "key", "value", "said"),
    [
        ("config.json", "eos_token_id", [2, 32], "config.json has eos_token_id 32"),
        ("config.json", "pad_token_id", 99, "config.json has pad_token_id 99"),
        ("generation_config.json", "bos_token_id", 32, "generation_config.json has bos_token_id 32"),
    ],
)
def test_a_special_token_without_a_row_is_named(file, key, value, said, save):
    folder = save("gpt2")
    path = folder / file
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    record = verify(folder)
    assert "special tokens" in failed(record)
    assert detail(record, "special tokens") == f"{said}, and the embedding has 32 rows"


def test_minus_one_means_no_token(save):
    folder = save("gpt2")
    path = folder / "generation_config.json"
    path.write_text(json.dumps({"pad_token_id": -1}))
    assert answers(verify(folder))["special tokens"] is True


def test_a_tokenizer_with_more_tokens_than_rows_is_bad(save):
    from tokenizers import Tokenizer

    folder = save("llama")
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    tokenizer.add_special_tokens(["<|im_start|>", "<|im_end|>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    record = verify(folder)
    assert failed(record) == ["tokenizer"]
    assert "ids up to 33" in record["problems"][0] and "'<|im_start|>', '<|im_end|>'" in record["problems"][0]


@pytest.mark.parametrize(
    ("files", "passed"),
    [
        ({"vocab.json": '{"a": 31}', "merges.txt": ""}, True),
        ({"vocab.json": '{"a": 30}', "added_tokens.json": '{"<x>": 32}'}, False),
        ({"vocab.txt": "a\nb\n" * 16}, True),
        ({"vocab.txt": "a\nb\n" * 17}, False),
        ({"tokenizer.json": '{"model": {"type": "Unigram", "vocab": [["a", 0.0], ["b", -1.0]]}}'}, True),
        ({"tokenizer.json": "{"}, False),
        ({"tokenizer.model": "binary"}, None),
        ({"tokenizer_config.json": "{}"}, False),
        ({}, None),
    ],
)
def test_vocabularies_in_other_formats_are_counted(files, passed, save):
    folder = save("llama")
    (folder / "tokenizer.json").unlink()
    for name, text in files.items():
        (folder / name).write_text(text)
    assert answers(verify(folder, deep=False))["tokenizer"] is passed


def test_what_the_donor_has_wrong_is_told_and_not_held_against_the_merge(save, tools):
    folder, donor = save("gpt2"), save("gpt2", "donor", seed=1)
    for place in (folder, donor):
        tools.edit_config(place, bos_token_id=50256)
    record = verify(folder, deep=False, same_structure_as=open_checkpoint(donor))
    assert record["verdict"] == "good" and detail(record, "special tokens").startswith(
        f"as in {donor}: config.json has"
    )
    assert failed(verify(folder, deep=False)) == ["special tokens"]


def test_a_file_that_does_not_say_its_format_is_bad_as_for_transformers(save):
    folder = save("vit")
    path = folder / "model.safetensors"
    save_file(load_file(path), path)
    record = verify(folder)
    assert failed(record) == ["format"] and "model.safetensors" in record["problems"][0]


@pytest.mark.parametrize(
    ("spoil", "said"),
    [
        (lambda index: index["metadata"].update(total_size=7), "gives total_size 7, the tensors take"),
        (lambda index: index.pop("metadata"), "gives total_size None"),
        (lambda index: index["weight_map"].pop("model.norm.weight"), "forgets 'model.norm.weight'"),
    ],
)
def test_an_index_that_does_not_agree_with_its_files_is_bad(spoil, said, save):
    folder = save("llama", sharded=True)
    path = folder / "model.safetensors.index.json"
    index = json.loads(path.read_text())
    spoil(index)
    path.write_text(json.dumps(index))
    record = verify(folder)
    assert failed(record) == ["index"] and said in record["problems"][0]


def test_a_stray_shard_of_another_model_is_bad(save):
    folder = save("llama")
    save_file({"w": torch.ones(1)}, folder / "model-00001-of-00002.safetensors", metadata={"format": "pt"})
    record = verify(folder)
    assert failed(record) == ["index"] and "model-00001-of-00002.safetensors" in record["problems"][0]


def test_the_leftover_of_an_interrupted_write_is_bad(save):
    folder = save("bert")
    (folder / ".isomerge-partial").mkdir()
    (folder / ".isomerge-partial" / "model.safetensors").write_bytes(b"half")
    assert failed(verify(folder)) == ["complete"]


def test_an_older_model_beside_what_a_forced_run_has_solved_is_good(save):
    folder = save("bert")
    (folder / ".isomerge-partial" / ".solved").mkdir(parents=True)
    (folder / ".isomerge-partial" / ".solved" / "part.safetensors").write_bytes(b"half")
    assert failed(verify(folder)) == []


def test_side_files_count_and_the_card_does_not(save, tools):
    folder = save("gpt2")
    (folder / "README.md").write_text("the card")
    tools.lock(folder)
    (folder / "README.md").write_text("the card, edited by its owner")
    assert verify(folder)["verdict"] == "good"
    (folder / "tokenizer.json").unlink()
    record = verify(folder)
    assert failed(record) == ["lock"] and detail(record, "lock") == "missing files: 'tokenizer.json'"


def test_a_spoiled_lock_is_a_problem_and_not_a_crash(save, tools):
    folder = save("bert")
    tools.lock(folder)
    (folder / "isomerge.lock.json").write_text("{")
    record = verify(folder)
    assert failed(record) == ["lock"] and "cut off" in record["problems"][0]


def test_a_folder_that_is_not_there_is_a_wrong_request(tmp_path):
    with pytest.raises(RequestError, match="no such folder"):
        verify(tmp_path / "nowhere")


@pytest.mark.slow
def test_the_quick_look_after_a_merge_reads_no_weights_and_no_transformers(save):
    folder, donor = save("llama"), save("llama", "donor", seed=1)
    code = f"""
import sys
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint.files import SafetensorsFile
from isomerge.evaluation.verify import verify
def refuse(*args):
    raise AssertionError("a weight was read")
SafetensorsFile._fill = refuse
record = verify({str(folder)!r}, deep=False, same_structure_as=open_checkpoint({str(donor)!r}))
assert record["verdict"] == "good", record
assert not {{"transformers", "huggingface_hub"}} & set(sys.modules)
print("structure:", next(c["detail"] for c in record["checks"] if c["name"] == "structure"))
"""
    source = Path(verify.__code__.co_filename).parents[2]
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env={"PYTHONPATH": str(source), "PATH": ""}
    )
    assert done.returncode == 0, done.stderr[-800:]
    assert done.stdout.strip() == f"structure: the same names, shapes and config as {donor}"
