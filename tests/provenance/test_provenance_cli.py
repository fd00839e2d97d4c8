"""From merge to verify and reproduce on the command line, with the real engine."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from typer.testing import CliRunner

from isomerge.checkpoint.lock import read_lock
from isomerge.cli.app import app


@pytest.fixture
def run(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    return lambda line: CliRunner().invoke(app, line.split())


@pytest.fixture(params=["llama-tied", "bert"])
def merged(request, save, run):
    save(request.param, "a", seed=1), save(request.param, "b", seed=2)
    done = run("merge a b --method linear -o out --shard-size 8KB --json")
    assert done.exit_code == 0, done.output[-500:]
    return json.loads(done.stdout)


def test_a_merge_verifies_and_reproduces(merged, run, tmp_path):
    done = run("verify out --json")
    record = json.loads(done.stdout)
    assert done.exit_code == 0, record["problems"]
    assert {check["name"]: check["passed"] for check in record["checks"]}["lock"] is True
    before = sorted(path.name for path in tmp_path.iterdir())
    done = run("reproduce out --json")
    again = json.loads(done.stdout)
    assert done.exit_code == 0 and again["verdict"] == "identical" and again["differences"] == []
    assert again["sha256"] == merged["sha256"] == read_lock(tmp_path / "out").sha256
    assert sorted(path.name for path in tmp_path.iterdir()) == before


def test_the_lock_holds_the_hashes_of_the_inputs(merged, tmp_path, tools):
    lock = read_lock(tmp_path / "out")
    assert [entry.source for entry in lock.inputs] == ["a", "b"]
    for entry in lock.inputs:
        true = tools.true_hashes(tmp_path / entry.source)
        assert {name: tensor.hash for name, tensor in entry.tensors.items()} == true
    assert {name: tensor.hash for name, tensor in lock.tensors.items()} == tools.true_hashes(tmp_path / "out")


def test_a_lock_of_sha256_hashes_still_verifies_and_reproduces(merged, run, tmp_path, tools):
    tools.make_older(tmp_path / "out")
    assert run("verify out").exit_code == 0
    again = json.loads(run("reproduce out --json").stdout)
    assert again["verdict"] == "identical" and again["sha256"] == again["expected_sha256"] != merged["sha256"]
    tools.edit_weights(tmp_path / "b", lambda state: state[min(state)].add_(1))
    assert json.loads(run("reproduce out --json").stdout)["verdict"] == "inputs changed"
    shard = min((tmp_path / "out").glob("*.safetensors"))
    shard.write_bytes(shard.read_bytes()[:-1] + bytes([shard.read_bytes()[-1] ^ 4]))
    assert "changed tensors" in run("verify out").stdout


def test_a_kept_copy_is_the_same_model(merged, run, tmp_path):
    done = run("reproduce out -o again")
    assert done.exit_code == 0 and "identical" in done.stdout
    for path in (tmp_path / "out").iterdir():
        if path.name not in ("README.md", "isomerge.lock.json", "isomerge.json", "report.html"):
            assert (tmp_path / "again" / path.name).read_bytes() == path.read_bytes(), path.name
    assert (tmp_path / "again" / "isomerge.lock.json").read_text() == (
        tmp_path / "out" / "isomerge.lock.json"
    ).read_text()


def test_a_tampered_output_ends_with_1_and_names_the_tensor(merged, run, tmp_path):
    shard = sorted((tmp_path / "out").glob("*.safetensors"))[0]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 4
    shard.write_bytes(data)
    done = run("verify out")
    victim = [name for name, tensor in read_lock(tmp_path / "out").tensors.items() if tensor.file == shard.name]
    assert done.exit_code == 1 and "changed tensors" in done.stdout and any(name in done.stdout for name in victim)
    assert run("verify out --quick --quiet").exit_code == 0


def test_a_changed_input_ends_with_1_and_is_named(merged, run, tmp_path, tools):
    tools.edit_weights(tmp_path / "b", lambda state: state[min(state)].add_(1))
    done = run("reproduce out --json")
    record = json.loads(done.stdout)
    assert done.exit_code == 1 and record["verdict"] == "inputs changed"
    assert record["inputs"][0]["reference"] == "b" and "changed tensors" in record["inputs"][0]["changed"][0]


@pytest.mark.parametrize(
    ("line", "code", "said"),
    [
        ("verify nowhere", 2, "no such folder"),
        ("reproduce nowhere", 2, "no such folder"),
        ("reproduce a", 1, "isomerge.lock.json"),
        ("verify --help", 0, "Example: isomerge verify"),
        ("reproduce --help", 0, "Example: isomerge reproduce"),
    ],
)
def test_wrong_requests_are_one_paragraph(line, code, said, run, save):
    save("vit", "a")
    done = run(line)
    assert done.exit_code == code and said in done.output


def test_the_new_copy_is_never_written_over_an_input_or_the_output(merged, run):
    for place in ("out", "a"):
        done = run(f"reproduce out -o {place} --force --json")
        assert done.exit_code == 2 and "never modified" in json.loads(done.stdout)["error"]


def test_the_hash_of_a_model_is_what_the_document_computes(merged, run, tmp_path, capsys):
    document = (Path(__file__).resolve().parents[2] / "docs" / "trust.md").read_text()
    code = re.search(r"```python\n(.*?)```", document, re.DOTALL)[1]
    shutil.copytree(tmp_path / "out", tmp_path / "merged")
    exec(code, {})
    assert capsys.readouterr().out.strip() == merged["sha256"]


def test_threads_and_shards_do_not_change_the_hash(save, run):
    save("gpt2", "a", seed=1), save("gpt2", "b", seed=2), save("gpt2", "base", seed=0)
    line = "merge a b --base base --method dare_ties --density 0.5 --seed 7 --json"
    found = [
        json.loads(run(f"{line} {more}").stdout)["sha256"]
        for more in ("-o one --threads 1", "-o two --threads 3 --shard-size 3KB", "-o three --seed 8")
    ]
    assert found[0] == found[1] != found[2]
    assert json.loads(run("reproduce two --threads 2 --json").stdout)["verdict"] == "identical"


def test_an_adapter_is_an_input_of_its_own(save, run, tmp_path):
    save("llama", "a", seed=1), save("llama", "b", seed=2)
    adapter = tmp_path / "adapter"
    adapter.mkdir()
    torch.manual_seed(0)
    name = "base_model.model.model.layers.0.self_attn.q_proj.lora_"
    factors = {f"{name}A.weight": torch.randn(2, 16), f"{name}B.weight": torch.randn(16, 2)}
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {"peft_type": "LORA", "r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "task_type": "CAUSAL_LM"}
    (adapter / "adapter_config.json").write_text(json.dumps(config))
    assert run("merge a+adapter b -o out").exit_code == 0
    kinds = {entry.source: entry.kind for entry in read_lock(tmp_path / "out").inputs}
    assert kinds == {"a": "model", "adapter": "adapter", "b": "model"}
    assert run("reproduce out").exit_code == 0
    factors[f"{name}B.weight"][0, 0] += 1
    save_file(factors, adapter / "adapter_model.safetensors", metadata={"format": "pt"})
    record = json.loads(run("reproduce out --json").stdout)
    assert record["inputs"] == [{"reference": "adapter", "changed": [f"changed tensors: '{name}B.weight'"]}]


def test_a_hub_model_is_taken_at_the_commit_that_was_merged(save, run, tmp_path, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    repository = tmp_path / "cache" / "models--org--name"
    commits = ["1" * 40, "2" * 40]
    for seed, commit in enumerate(commits):
        shutil.copytree(save("llama", f"commit{seed}", seed=seed), repository / "snapshots" / commit)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text(commits[0])
    save("llama", "b", seed=5)
    assert run("merge org/name b -o out").exit_code == 0
    assert read_lock(tmp_path / "out").inputs[-1].revision == commits[0]
    (repository / "refs" / "main").write_text(commits[1])
    again = run("reproduce out --json")
    assert json.loads(again.stdout)["verdict"] == "identical"
    card = (tmp_path / "out" / "README.md").read_text()
    assert "base_model:\n- org/name\n" in card and commits[0] in card


def test_a_merge_of_a_merge_has_a_lock_of_its_own(merged, run, tmp_path):
    assert run("merge out a -o second").exit_code == 0
    assert run("verify second").exit_code == 0
    assert [entry.source for entry in read_lock(tmp_path / "second").inputs] == ["a", "out"]
    assert run("merge out a -o third --no-lock --no-report").exit_code == 0
    assert not (tmp_path / "third" / "isomerge.lock.json").exists(), "the lock of an input speaks of another model"
