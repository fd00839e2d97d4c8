"""push: what arrives on a stand-in of the hub is what lies in the folder; every refusal is one clear paragraph."""

from __future__ import annotations

import base64
import hashlib
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from isomerge.checkpoint.push import push
from isomerge.errors import CheckpointError, RequestError

COMMIT = "0123456789abcdef0123456789abcdef01234567"
pytestmark = pytest.mark.filterwarnings("ignore:Use 'content")  # huggingface_hub's own way of sending bytes


class Hub:
    """As much of the hub's HTTP interface as an upload needs. `files` is what the commits have put there, by branch."""

    def __init__(self) -> None:
        self.files: dict[str, dict[str, bytes]] = {"main": {}}
        self.objects: dict[str, bytes] = {}
        self.created: dict | None = None
        self.requests: list[str] = []
        self.refuse: dict[str, int] = {}
        hub = self

        class Handler(BaseHTTPRequestHandler):
            def log_message(self, *args):
                pass

            def answer(self):
                body = self.rfile.read(int(self.headers.get("Content-Length") or 0))
                path = self.path.split("?")[0]
                hub.requests.append(f"{self.command} {path}")
                status, reply = hub.reply(self.command, path, body, self.headers.get("Authorization"))
                data = json.dumps(reply).encode()
                self.send_response(status)
                self.send_header("Content-Type", "application/json")
                self.send_header("Content-Length", str(len(data)))
                if status == 401:
                    self.send_header("X-Error-Message", "Invalid credentials in Authorization header")
                self.end_headers()
                self.wfile.write(data)

            do_GET = do_POST = do_PUT = do_HEAD = answer

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self.server.server_address[1]}"

    def reply(self, method, path, body, authorization):
        if path.startswith("/storage/") and method == "PUT":
            self.objects[path.rpartition("/")[2]] = body
            return 200, {}
        if authorization != "Bearer hf_good":
            return 401, {"error": "Invalid username or password."}
        for part, status in self.refuse.items():
            if part in path:
                return status, {"error": "no"}
        if path == "/api/repos/create":
            exists, self.created = self.created is not None, json.loads(body)
            return 409 if exists else 200, {"url": f"{self.url}/{self.created['organization']}/{self.created['name']}"}
        if path == "/api/validate-yaml":
            return 200, {"errors": [], "warnings": []}
        if path.endswith("/info/lfs/objects/batch"):
            wanted = json.loads(body)["objects"]
            return 200, {"transfer": "basic", "objects": [
                {**o, "actions": {"upload": {"href": f"{self.url}/storage/{o['oid']}"}}} for o in wanted]}  # fmt: skip
        _, _, _, owner, name, verb, *rest = path.split("/")
        if (owner, name) != ("me", "merged"):
            return 404, {"error": "Repository not found"}
        return self.repository(verb, "/".join(rest), body)

    def repository(self, verb, branch, body):
        if verb == "branch":
            self.files[branch] = dict(self.files["main"])
            return 200, {}
        if verb == "tree":
            present = self.files[branch].items()
            return 200, [{"type": "file", "path": path, "size": len(data), "oid": "0" * 40} for path, data in present]
        if verb == "preupload":
            mode = {True: "lfs", False: "regular"}
            return 200, {"files": [
                {"path": f["path"], "uploadMode": mode[f["path"].endswith(".safetensors")], "shouldIgnore": False}
                for f in json.loads(body)["files"]]}  # fmt: skip
        assert verb == "commit", verb
        for line in map(json.loads, body.splitlines()):
            value = line["value"]
            if line["key"] == "file":
                self.files[branch][value["path"]] = base64.b64decode(value["content"])
            elif line["key"] == "lfsFile":
                self.files[branch][value["path"]] = self.objects[value["oid"]]
            elif line["key"] == "deletedFile":
                del self.files[branch][value["path"]]
        return 200, {"success": True, "commitUrl": f"{self.url}/me/merged/commit/{COMMIT}", "commitOid": COMMIT}


@pytest.fixture
def hub(monkeypatch, tmp_path):
    from huggingface_hub import constants

    for name in ("HF_TOKEN", "HUGGING_FACE_HUB_TOKEN"):
        monkeypatch.delenv(name, raising=False)
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.delenv(name, raising=False)
        monkeypatch.delenv(name.upper(), raising=False)
    hub = Hub()
    monkeypatch.setattr(constants, "ENDPOINT", hub.url)
    monkeypatch.setattr(constants, "HF_HUB_DISABLE_XET", True)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-token"))
    threading.Thread(target=hub.server.serve_forever, args=(0.02,), daemon=True).start()
    yield hub
    hub.server.shutdown()
    hub.server.server_close()


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
        push(folder, "merged", token="hf_good")
    assert hub.requests == []
