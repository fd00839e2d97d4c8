"""Who may ask, for what, and what a page may do."""

from __future__ import annotations

from itertools import product
from pathlib import Path
from typing import Any

import pytest

from isomerge.studio.app import READING, WRITING
from studio.conftest import PORT, TOKEN, Studio

ADDRESSES = ["", "studio.js", *(f"api/{name}" for name in (*READING, *WRITING))]


def test_nothing_is_answered_without_the_token(studio: Studio) -> None:
    for token, address in product(("", "wrong", TOKEN[:-1], f"{TOKEN}x", TOKEN.upper(), "file"), ADDRESSES):
        refusals = (403, 404) if token != "file" else (403, 404, 405)
        for method in ("GET", "POST"):
            answer = studio.client.request(method, f"/{token}/{address}".replace("//", "/"), json={})
            assert answer.status_code in refusals and "models" not in answer.text, (token, address)


@pytest.mark.parametrize(
    "host", ["evil.example", f"evil.example:{PORT}", "127.0.0.1", "127.0.0.1:80", f"127.0.0.1.evil.example:{PORT}", ""]
)
def test_a_name_that_only_leads_here_is_refused(studio: Studio, host: str) -> None:
    answer = studio.client.get(f"/{TOKEN}/", headers={"host": host})
    assert answer.status_code == 403 and "127.0.0.1 and localhost" in answer.text


def test_both_names_of_this_computer_are_answered(studio: Studio) -> None:
    for host in (f"127.0.0.1:{PORT}", f"localhost:{PORT}"):
        assert studio.client.get(f"/{TOKEN}/", headers={"host": host}).status_code == 200


@pytest.mark.parametrize("origin", ["http://evil.example", "null", f"https://127.0.0.1:{PORT}", "http://127.0.0.1:1"])
def test_requests_of_other_pages_are_refused(studio: Studio, origin: str) -> None:
    answer = studio.client.post(f"/{TOKEN}/api/lineage", json={"path": "a"}, headers={"origin": origin})
    assert answer.status_code == 403
    own = {"origin": f"http://127.0.0.1:{PORT}"}
    assert studio.client.post(f"/{TOKEN}/api/lineage", json={"path": "a"}, headers=own).status_code == 200


def test_no_answer_may_be_read_by_another_page(studio: Studio) -> None:
    headers = {"origin": "http://evil.example", "access-control-request-method": "POST"}
    for answer in (
        studio.client.get(f"/{TOKEN}/"),
        studio.client.get(f"/{TOKEN}/api/listing"),
        studio.client.options(f"/{TOKEN}/api/merge", headers=headers),
        studio.client.get("/wrong/"),
    ):
        assert not [name for name in answer.headers if name.startswith("access-control")]
        assert "default-src 'none'" in answer.headers["content-security-policy"]
        assert "unsafe" not in answer.headers["content-security-policy"]
        assert answer.headers["referrer-policy"] == "no-referrer" and "no-store" in answer.headers["cache-control"]


@pytest.mark.parametrize("name", WRITING)
def test_what_acts_is_post_with_json_only(studio: Studio, name: str) -> None:
    for method in ("GET", "PUT", "DELETE", "HEAD"):
        assert studio.client.request(method, f"/{TOKEN}/api/{name}").status_code == 405
    form = studio.client.post(f"/{TOKEN}/api/{name}", content="{}", headers={"content-type": "text/plain"})
    assert form.status_code == 415


@pytest.mark.parametrize("name", READING)
def test_what_reads_is_get_only(studio: Studio, name: str) -> None:
    assert studio.client.post(f"/{TOKEN}/api/{name}", json={}).status_code == 405


@pytest.mark.parametrize("body", ["", "[]", "{", "1", '{"a":' * 100, "\udcff"])
def test_a_request_that_is_no_object_is_refused(studio: Studio, body: str) -> None:
    content = body.encode("utf-8", "surrogateescape")
    headers = {"content-type": "application/json"}
    assert studio.client.post(f"/{TOKEN}/api/recipe", content=content, headers=headers).status_code == 400


def test_a_request_that_is_too_large_is_refused(studio: Studio) -> None:
    assert studio.client.post(f"/{TOKEN}/api/recipe", json={"text": "x" * 3_000_000}).status_code == 413


OUTSIDE = ["..", "../secret.yml", "/etc/passwd", "a/../../secret.yml", "link.yml", "", " ", "a\0", 7, None, ["a"]]


@pytest.mark.parametrize("name", OUTSIDE, ids=repr)
def test_no_name_leads_out_of_the_folder(studio: Studio, tmp_path: Path, name: Any) -> None:
    (studio.folder / "link.yml").symlink_to(tmp_path / "secret.yml")
    before = sorted(tmp_path.iterdir())
    text = "merge_method: linear\nmodels:\n- model: a\n- model: b\n"
    for action, given in {
        "open": {"path": name},
        "points": {"path": name},
        "lineage": {"path": name},
        "check": {"models": ["a", name]},
        "merge": {"text": text, "out": name},
        "again": {"out": name},
        "sweep": {"text": text, "out": "swept", "over": "t=0:1:1", "data": name},
    }.items():
        if not (name == "link.yml" and action == "again"):
            assert "secret" not in studio.refused(action, **given).replace(f"'{name}'", "")
    assert sorted(tmp_path.iterdir()) == before and studio.get("runs")["jobs"] == []


def test_a_link_out_of_the_folder_is_not_listed(studio: Studio, tmp_path: Path) -> None:
    (studio.folder / "a").rename(tmp_path / "elsewhere")
    (studio.folder / "linked").symlink_to(tmp_path / "elsewhere")
    (studio.folder / "round").symlink_to(studio.folder)
    assert [one["path"] for one in studio.get("listing")["models"]] == ["b", "deep/c"]


def test_a_file_of_the_folder_is_shown_without_rights_and_without_the_token(studio: Studio) -> None:
    """Anybody may have written a report that lies beside a downloaded model."""
    (studio.folder / "a" / "isomerge.json").write_text('{"kind": "merge", "format": 1, "isomerge": "0.1.0"}')
    (studio.folder / "a" / "report.html").write_text("<script>parent.fetch('api/listing')</script>")
    (link,) = [one["report"] for one in studio.get("listing")["outputs"]]
    assert TOKEN not in link
    answer = studio.client.get(link)
    assert answer.status_code == 200 and "<script>" in answer.text
    policy = answer.headers["content-security-policy"]
    assert "sandbox allow-scripts;" in policy and "default-src 'none'" in policy and "connect-src" not in policy
    assert studio.client.get(link, headers={"host": "evil.example"}).status_code == 403


def test_the_link_of_one_file_opens_no_other(studio: Studio) -> None:
    for name in ("a", "b"):
        (studio.folder / name / "report.html").write_text("<p>")
        (studio.folder / name / "isomerge.json").write_text('{"kind": "merge", "format": 1, "isomerge": "0.1.0"}')
    first, second = (one["report"] for one in studio.get("listing")["outputs"])
    mark = first.split("/")[2]
    for other in (second.split("/", 3)[3], "a/config.json", "../secret.yml", "a/%2e%2e/b/report.html"):
        assert studio.client.get(f"/file/{mark}/{other}").status_code in (403, 404)
