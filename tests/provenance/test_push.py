"""push: what arrives on a stand-in of the hub is what lies in the folder; every refusal is one clear paragraph."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

import pytest
import yaml
from peft import LoraConfig

import isomerge
from adapters.peft_adapters import save_adapter
from isomerge.errors import CheckpointError, RequestError
from isomerge.merging.adapters import merge_adapters
from models import save_base
from provenance.stand_in_hub import hub_of_this_computer

pytestmark = pytest.mark.filterwarnings("ignore:Use 'content")  # huggingface_hub's own way of sending bytes


def push(folder, to, **options):
    """The address of the one model."""
    return isomerge.push(folder, to, **options).models[0].address


@pytest.fixture
def hub(tmp_path):
    with hub_of_this_computer(tmp_path) as hub:
        yield hub


def content(folder: Path) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in sorted(folder.rglob("*")) if p.is_file()}


@pytest.fixture
def folder(save):
    folder = save("llama", sharded=True)
    (folder / "README.md").write_text("---\ntags:\n- merge\n---\n# merged\n")
    return folder


def test_everything_in_the_folder_arrives_and_the_folder_stays_as_it_was(hub, folder):
    before = content(folder)
    url = push(folder, "me/merged", token="hf_good")
    assert url == f"{hub.url}/me/merged"
    assert hub.files["main"] == before == content(folder)
    assert hub.created["name"] == "merged" and hub.created["organization"] == "me"
    assert hub.created.get("visibility") == "private" or hub.created.get("private") is True
    weights = {hashlib.sha256(data).hexdigest() for name, data in before.items() if name.endswith(".safetensors")}
    assert set(hub.objects) == weights, "weights travel as large files"


def test_the_token_of_the_environment_is_used(hub, folder, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "hf_good")
    push(folder, "me/merged", private=False)
    assert hub.created.get("visibility") != "private" and not hub.created.get("private")
    assert "config.json" in hub.files["main"]


def test_a_second_push_replaces_weights_that_were_cut_in_another_way(hub, folder, save):
    push(folder, "me/merged", token="hf_good")
    hub.files["main"]["notes.txt"] = b"somebody else's"
    one = save("llama", "one", seed=5)
    push(one, "me/merged", token="hf_good")
    weights = [name for name in hub.files["main"] if "safetensors" in name]
    assert weights == ["model.safetensors"] and hub.files["main"]["notes.txt"] == b"somebody else's"
    assert hub.files["main"]["model.safetensors"] == (one / "model.safetensors").read_bytes()


def test_a_branch_is_made_and_main_stays(hub, folder):
    push(folder, "me/merged", token="hf_good", revision="v2")
    assert hub.files["main"] == {} and hub.files["v2"] == content(folder)


def test_no_bars_where_nobody_watches(hub, folder, capfd):
    from huggingface_hub.utils import are_progress_bars_disabled

    before = are_progress_bars_disabled()
    push(folder, "me/merged", token="hf_good")
    assert "safetensors" not in capfd.readouterr().err
    assert are_progress_bars_disabled() == before


def test_hidden_files_stay_at_home(hub, folder):
    (folder / ".cache" / "huggingface").mkdir(parents=True)
    (folder / ".cache" / "huggingface" / "x").write_text("local")
    push(folder, "me/merged", token="hf_good")
    assert not [name for name in hub.files["main"] if name.startswith(".")]


def test_offline_refuses_before_any_request(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(RequestError, match="HF_HUB_OFFLINE is set"):
        push(folder, "me/merged", token="hf_good")
    assert hub.requests == []


def test_no_token_says_how_to_get_one(hub, folder):
    with pytest.raises(RequestError, match=r"no token to push with.*hf auth login.*HF_TOKEN"):
        push(folder, "me/merged")
    assert hub.requests == []


def test_a_wrong_token_is_told(hub, folder):
    before = content(folder)
    with pytest.raises(CheckpointError, match=r"does not know this token \(401\).*is unchanged") as failure:
        push(folder, "me/merged", token="hf_bad")
    assert "hf_bad" not in str(failure.value)
    assert content(folder) == before and hub.files["main"] == {}


@pytest.mark.parametrize("where", ["/api/repos/create", "/preupload/", "/info/lfs/", "/commit/"])
def test_a_forbidden_name_is_told_wherever_the_hub_says_so(hub, folder, where):
    hub.refuse = {where: 403, "/api/models/me/merged/revision": 403}
    if where == "/api/repos/create":
        hub.refuse["/api/models/me/merged"] = 403
    before = content(folder)
    with pytest.raises(CheckpointError, match=r"may not write to 'me' \(403\)"):
        push(folder, "me/merged", token="hf_good")
    assert content(folder) == before and hub.files["main"] == {}


def test_a_name_that_is_no_model_repository_is_told(hub, folder):
    hub.created = {}  # it exists, so it is not made; but there is no model of that name
    with pytest.raises(CheckpointError, match=r"no model repository of that name.*dataset or a Space"):
        push(folder, "me/data", token="hf_good")


def test_a_hub_that_does_not_answer_is_told(hub, folder, monkeypatch):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(CheckpointError, match=r"127\.0\.0\.1:9.*Check the network.*is unchanged"):
        push(folder, "me/merged", token="hf_good")


def test_unfinished_and_damaged_models_are_refused_before_any_request(hub, folder, tmp_path):
    sorted(folder.glob("model-*.safetensors"))[0].unlink()
    with pytest.raises(CheckpointError, match="not in the folder"):
        push(folder, "me/merged", token="hf_good")
    with pytest.raises(RequestError, match="no such folder"):
        push(tmp_path / "nowhere", "me/merged", token="hf_good")
    with pytest.raises(RequestError, match="org/name"):
        push(folder, "me/merged/model", token="hf_good")
    assert hub.requests == []


def test_a_pull_request_proposes_and_leaves_the_branch_as_it_is(hub, folder):
    hub.files["main"]["config.json"] = b"{}"
    address = push(folder, "me/merged", token="hf_good", pull_request=True, message="Better at prose")
    assert address == f"{hub.url}/me/merged/discussions/1" and hub.message == "Better at prose"
    assert hub.files["main"] == {"config.json": b"{}"}
    assert hub.files["refs/pr/1"] == content(folder)


def test_several_models_go_into_repositories_of_their_own_and_a_collection(hub, save):
    folders = [save("llama", "first"), save("llama", "second", seed=5)]
    for _ in range(2):  # the second time, everything is there
        done = isomerge.push(folders, "me", token="hf_good", collection="A sweep of t")
        assert [one.repository for one in done.models] == ["me/first", "me/second"]
        assert done.collection is not None and done.collection.endswith("/collections/me/a-sweep-of-t-0123")
        assert [item["id"] for item in hub.collections["A sweep of t"]] == ["me/first", "me/second"]
    for folder in folders:
        assert hub.repositories[f"me/{folder.name}"]["main"] == content(folder)
    assert len(done.notes) == 2 and "has no model card" in done.notes[0]
    assert [one.card for one in done.models] == ["none", "none"]


def metadata(page):
    return yaml.safe_load(page.decode().split("---")[1])


def test_a_merge_without_a_card_gets_one_with_its_recipe_and_lineage(hub, save, tmp_path):
    inputs = [save("llama", "first"), save("llama", "second", seed=5)]
    out = isomerge.merge(inputs, method="linear", weights=[0.25, 0.75]).save(tmp_path / "merged").out
    written = (out / "README.md").read_bytes()
    (out / "README.md").unlink()
    before = content(out)
    done = isomerge.push(out, "me/merged", token="hf_good")
    assert done.models[0].card == "written" and content(out) == before
    page = hub.files["main"]["README.md"]
    assert metadata(page) == metadata(written) and metadata(page)["tags"] == ["merge", "isomerge"]
    for part in ("## Recipe", "weight: 0.25", "first", "second", "linear", "isomerge reproduce merged"):
        assert part in page.decode() and part in written.decode()
    hub.files["main"]["README.md"] = b"somebody's own"
    isomerge.push(out, "me/merged", token="hf_good")
    assert hub.files["main"]["README.md"] == b"somebody's own"


def test_the_card_of_an_adapter_says_that_it_belongs_to_its_base(hub, tmp_path):
    base = save_base("llama", tmp_path / "base", tie_word_embeddings=False)
    config = LoraConfig(r=2, target_modules=["q_proj"])
    adapters = [save_adapter(base, tmp_path / f"a{i}", config, seed=i) for i in range(2)]
    out = merge_adapters(adapters, out=tmp_path / "both").out
    settings = json.loads((out / "adapter_config.json").read_text())
    (out / "adapter_config.json").write_text(json.dumps({**settings, "base_model_name_or_path": "org/base"}))
    isomerge.push(out, "me/merged", token="hf_good", pull_request=True)
    found = metadata(hub.files["refs/pr/1"]["README.md"])
    assert found["base_model"] == "org/base" and found["base_model_relation"] == "adapter"
    assert found["library_name"] == "peft" and "adapter_model.safetensors" in hub.files["refs/pr/1"]
    assert hub.files["main"] == {}


BOTH_BRANCHES = {"revision": "v2", "pull_request": True}


@pytest.mark.parametrize(
    ("folders", "to", "options", "match", "keys"),
    [
        (["first", "second"], "me/merged", {}, "cannot all be 'me/merged'", ("to",)),
        (["first", "first"], "me", {}, "two folders have the same name", ("models",)),
        (["first"], "me/merged", BOTH_BRANCHES, "a branch of its own", ("revision", "pull_request")),
        (["first"], "me/", {}, "no name of a repository", ("to",)),
        ([], "me/merged", {}, "models is empty", ("models",)),
        (["nowhere"], "me/merged", {}, "no such folder", ("models",)),
    ],
)  # fmt: skip
def test_requests_that_cannot_be_carried_out(hub, save, tmp_path, folders, to, options, match, keys):
    for name in {"first", "second"} & set(folders):
        save("llama", name)
    with pytest.raises(RequestError, match=match) as refused:
        isomerge.push([tmp_path / name for name in folders], to, token="hf_good", **options)
    assert refused.value.keys == keys and hub.requests == []


def test_one_damaged_model_of_several_is_refused_before_any_is_sent(hub, save):
    folders = [save("llama", "first"), save("llama", "second")]
    (folders[1] / "model.safetensors").write_bytes(b"cut")
    with pytest.raises(CheckpointError):
        isomerge.push(folders, "me", token="hf_good")
    assert hub.requests == []
