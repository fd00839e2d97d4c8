"""Models on a web server: bytes served, answers that are cut, slow, wrong or hostile."""

from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

import isomerge
import models
from commands import said, verb
from isomerge.checkpoint import open_checkpoint
from isomerge.checkpoint import remote_store as store
from isomerge.errors import CheckpointError, IsomergeError, NotFoundError, RequestError

WEIGHTS = "model.safetensors"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two large tensors with small ones between them: 400 kB, of which the header is less than one."""
    torch.manual_seed(0)
    state = {"a.big": torch.randn(200, 300), "b.small": torch.randn(7), "c.small": torch.randn(3, 5).bfloat16()}
    made = tmp_path / "model"
    made.mkdir()
    save_file({**state, "d.big": torch.randn(160, 256)}, made / WEIGHTS, metadata={"format": "pt"})
    (made / "config.json").write_text('{"model_type": "toy"}')
    (made / "tokenizer.json").write_text('{"kept": true}')
    (made / "README.md").write_text("# a card")
    return made


def header_bytes(path: Path) -> int:
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


def test_every_way_of_reading_gives_the_bytes_of_the_file(web, folder, monkeypatch):
    monkeypatch.setattr(store, "PART", 60_000)  # a tensor comes in many parts, some of them at once
    here, there = open_checkpoint(folder), open_checkpoint(web(folder).url)
    assert dict(there.tensors) == dict(here.tensors) and there.config == here.config
    for name in here.tensors:
        assert models.same_bytes(there.read(name), here.read(name))
        assert models.same_bytes(there.read_rows(name, 1, 3), here.read_rows(name, 1, 3))
        assert models.same_bytes(there.read_span(name, 2, 6), here.read_span(name, 2, 6))
        assert models.same_bytes(there.read_spans(name, [(1, 3), (0, 2)]), here.read_spans(name, [(1, 3), (0, 2)]))
    assert [path.name for path in there.side_files()] == ["README.md", "tokenizer.json"]
    again = pickle.loads(pickle.dumps(there))
    assert models.same_bytes(again.read("a.big"), here.read("a.big"))


def test_plan_reads_headers_and_configs_and_nothing_else(web, folder):
    server = web(folder)
    said("plan", server.url, "--method", "passthrough")
    beside = sum((folder / name).stat().st_size for name in ("config.json", "README.md", "tokenizer.json"))
    probes = sum(1 for _, span, _ in server.asked if span == "bytes=0-0")
    assert max(last for _, _, last in server.asked) <= max(header_bytes(folder / WEIGHTS), beside)
    served = sum(count for _, _, count in server.asked)
    assert served <= 2 * (header_bytes(folder / WEIGHTS) + beside) + probes < 5_000 < (folder / WEIGHTS).stat().st_size


def test_small_neighbours_come_in_one_request(web, folder):
    server = web(folder)
    model = open_checkpoint(server.url)
    before = len(server.asked)
    model.read("b.small"), model.read("c.small"), model.read("b.small")
    assert len(server.asked) == before + 1


def test_a_merge_of_urls_has_the_bytes_of_a_merge_of_folders(web, folder, tmp_path):
    other = models.variant(folder, {"a.big": torch.zeros(200, 300)}, "other")
    server = web(folder.parent)
    shutil.copytree(other, folder.parent / "other")
    remote = isomerge.merge([f"{server.url}/model", f"{server.url}/other"]).save(tmp_path / "remote")
    local = isomerge.merge([folder, other]).save(tmp_path / "local")
    assert remote.sha256 == local.sha256
    for name in (WEIGHTS, "config.json", "tokenizer.json"):  # what names the models, a card or a lock, is another
        assert (tmp_path / "remote" / name).read_bytes() == (tmp_path / "local" / name).read_bytes()
    lock = json.loads((tmp_path / "remote" / "isomerge.lock.json").read_text())
    size = (folder / WEIGHTS).stat().st_size
    assert lock["inputs"][0]["source"] == f"{server.url}/model"
    assert lock["inputs"][0]["stored"][WEIGHTS][0] == size and lock["inputs"][0]["stored"][WEIGHTS][1]
    assert said("reproduce", tmp_path / "remote")["verdict"] == "identical"


@pytest.mark.parametrize("faults", [["cut"], ["reset", 503], [500, "slow"], [429, "cut"]])
def test_a_passing_failure_is_asked_again(web, folder, faults):
    server = web(folder)
    model = open_checkpoint(server.url)
    server.faults[WEIGHTS] = list(faults)
    assert models.same_bytes(model.read("a.big"), open_checkpoint(folder).read("a.big"))


@pytest.mark.parametrize(
    ("fault", "cause"),
    [
        ("always cut", "the connection broke off"),
        (404, "404"),
        (403, "403.*may not be read"),
        (500, "the server answers 500"),
        ("always whole", "the server answers 200 to a range request"),
    ],
)
def test_a_lasting_failure_names_tensor_file_and_cause(web, folder, fault, cause):
    server = web(folder)
    model = open_checkpoint(server.url)
    server.faults[WEIGHTS] = [fault] * 9
    with pytest.raises(CheckpointError, match=f"(?s)'a.big' from {server.url}/{WEIGHTS}: .*({cause})"):
        model.read("a.big")


def test_a_server_without_ranges_is_refused_before_a_byte_of_weights_is_read(web, folder):
    server = web(folder)
    server.faults[WEIGHTS] = ["always whole"]
    with pytest.raises(CheckpointError, match=r"does not answer range requests.*download the model"):
        open_checkpoint(server.url)


def test_bytes_beyond_those_asked_for_are_not_read(web, folder):
    server = web(folder)
    model = open_checkpoint(server.url)
    server.faults[WEIGHTS] = ["always flood"]
    assert models.same_bytes(model.read("a.big"), open_checkpoint(folder).read("a.big"))


@pytest.mark.parametrize("tagged", [True, False])
def test_a_file_that_changes_is_an_error_at_the_next_read(web, folder, tagged):
    server = web(folder)
    if not tagged:
        server.tags = {WEIGHTS: ""}  # then its size is all there is to see
    model = open_checkpoint(server.url)
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes() + b"" if tagged else b"x" * 500_000)
    with pytest.raises(CheckpointError, match="changed since it was opened"):
        model.read("d.big")


def test_a_config_that_changes_during_a_merge_stops_it(web, folder, tmp_path):
    server = web(folder)
    merged = isomerge.merge([server.url], method="passthrough")
    (folder / "config.json").write_text('{"model_type": "other"}')
    with pytest.raises(CheckpointError, match=rf"'{server.url}/config.json' changed while it was being read"):
        merged.save(tmp_path / "out")
    assert not (tmp_path / "out").exists()


def test_redirects_lead_to_web_servers_only(web, folder, tmp_path):
    server, other = web(tmp_path), web(folder)
    server.redirects = {f"m/{name}": f"{other.url}/{name}" for name in (WEIGHTS, "config.json")}
    assert models.same_bytes(open_checkpoint(f"{server.url}/m").read("a.big"), open_checkpoint(folder).read("a.big"))
    server.redirects = {f"m/{WEIGHTS}": (folder / WEIGHTS).as_uri()}
    with pytest.raises(CheckpointError, match="file"):
        open_checkpoint(f"{server.url}/m")


def test_a_signature_in_a_redirect_is_in_no_message(web, folder, tmp_path):
    server, other = web(tmp_path), web(folder)
    server.redirects = {f"m/{WEIGHTS}": f"{other.url}/gone?X-Amz-Signature=geheim"}
    with pytest.raises(NotFoundError) as caught:
        open_checkpoint(f"{server.url}/m")
    server.redirects = {f"m/{WEIGHTS}": "http://127.0.0.1:9/gone?X-Amz-Signature=geheim"}
    with pytest.raises(CheckpointError) as cut:
        open_checkpoint(f"{server.url}/m")
    assert "geheim" not in f"{caught.value}{cut.value}" and cut.value.__suppress_context__


@pytest.mark.parametrize(
    "url",
    [
        "https://me:geheim@host.example/model",
        "https://geheim@host.example/model",
        "https://host.example/model.safetensors?X-Amz-Signature=geheim",
        "s3://bucket/model#geheim",
        "s3:/me:geheim@bucket/model",
    ],
)
@pytest.mark.parametrize("command", ["check {} {}", "merge {} {} -o out", "eval {} --data x", "merge a b -o {}"])
def test_an_address_with_a_secret_is_refused_without_repeating_it(url, command, tmp_path):
    done = verb(*command.format(url, url).split(), "--debug", folder=tmp_path)
    assert done.exit_code == 2, done.output
    assert "geheim" not in done.output and not list(tmp_path.iterdir())


def test_a_recipe_with_a_secret_address_is_refused_without_repeating_it(tmp_path):
    (tmp_path / "r.yml").write_text("models: [{model: 'https://me:geheim@h.example/m'}]\nmerge_method: linear\n")
    done = verb("merge", "r.yml", "-o", "out", folder=tmp_path)
    assert done.exit_code == 2 and "geheim" not in done.output, done.output


@pytest.mark.parametrize(
    "url", ["file:///etc/passwd", "ftp://h/x", "simplecache::s3://b/x", "https://h/../x", "s3://b/x y"]
)
def test_other_addresses_are_refused(url):
    with pytest.raises(IsomergeError, match="opening checkpoint"):
        open_checkpoint(url)


def test_a_revision_is_only_for_the_hub(web, folder):
    with pytest.raises(RequestError, match="only the hub has revisions"):
        open_checkpoint(web(folder).url, revision="v1")


def test_an_index_behind_a_url_cannot_leave_the_folder(web, folder):
    (folder / WEIGHTS).rename(folder / "model-00001-of-00001.safetensors")
    index = folder / f"{WEIGHTS}.index.json"
    index.write_text(json.dumps({"weight_map": {"a.big": "../model-00001-of-00001.safetensors"}}))
    with pytest.raises(CheckpointError, match="points outside the folder"):
        open_checkpoint(web(folder).url)


def test_a_header_that_claims_more_than_the_file_has_is_refused(web, folder):
    (folder / WEIGHTS).write_bytes((folder / WEIGHTS).read_bytes()[:-1000])
    with pytest.raises(CheckpointError, match="it is truncated"):
        open_checkpoint(web(folder).url)


def test_a_weight_file_can_be_named_by_its_own_address(web, folder):
    model = open_checkpoint(f"{web(folder).url}/{WEIGHTS}")
    assert models.same_bytes(model.read("a.big"), open_checkpoint(folder).read("a.big"))


def test_a_missing_package_is_named(monkeypatch):
    def absent(name: str) -> None:
        raise ImportError(f"No module named '{name}'", name=name)

    monkeypatch.setattr("isomerge.packages.is_installed", lambda package: False)
    monkeypatch.setattr(store.importlib, "import_module", absent)
    with pytest.raises(CheckpointError, match=r"'s3fs' is not installed.*isomerge\[remote\]"):
        open_checkpoint("s3://bucket/model")
