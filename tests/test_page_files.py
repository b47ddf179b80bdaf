"""The page's files without a browser: who gets them, with which headers, and that they are what they say."""

from __future__ import annotations

import hashlib
import json
import re
from pathlib import Path

import httpx
import pytest

from fake_engine import FakeEngine
from headrace.api.app import create_app
from headrace.api.config import ServerConfig
from headrace.api.page_files import FOLDER
from headrace.cli import main
from server_driver import LOOP, Api

HTML = {"accept": "text/html,application/xhtml+xml,*/*;q=0.8"}
FILES = sorted(str(path.relative_to(FOLDER)) for path in FOLDER.rglob("*") if path.is_file())


def test_browsers_get_the_page_and_programs_what_they_got():
    api = Api()
    page = api.request("GET", "/", headers=HTML)
    assert page.status_code == 200 and page.headers["content-type"] == "text/html; charset=utf-8"
    assert page.headers["vary"] == "accept"
    for headers in ({}, {"accept": "application/json"}, {"accept": "*/*"}):
        answer = api.request("GET", "/", headers=headers)
        assert answer.status_code == 404 and answer.json()["error"]["code"] == "unknown_path"
    assert api.request("POST", "/", headers=HTML).status_code == 405


@pytest.mark.parametrize("name", ["", *FILES])
def test_every_file_is_served_with_its_type_and_runs_nothing_from_elsewhere(name):
    path = f"/page/{name}" if name else "/"
    answer = Api().request("GET", path, headers=HTML)
    assert answer.status_code == 200, path
    policy = answer.headers["content-security-policy"]
    assert policy.startswith("default-src 'self';") and "unsafe" not in policy and "script-src" not in policy
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.headers["content-type"] != "application/octet-stream", "a type for this ending"
    assert Api().request("GET", path, headers={**HTML, "if-none-match": answer.headers["etag"]}).status_code == 304 or not name


@pytest.mark.parametrize("asked", ["bytes=5-1", "bytes=0-3", "lines=1-2", "bytes=99999999-", ""])
def test_no_file_comes_in_parts(asked):
    for path in ("/", "/page/app.js"):
        whole, answer = (Api().request("GET", path, headers={**HTML, **more}) for more in ({}, {"range": asked}))
        assert (answer.status_code, answer.content, answer.headers["accept-ranges"]) == (200, whole.content, "none")


def test_what_is_not_there():
    api = Api()
    for path in ("/page/nothing.js", "/page/../app.py", "/page/%2e%2e/app.py", "/page/..%2fapp.py", "/page", "/page//etc/passwd", "/page/vendor"):
        assert api.request("GET", path).status_code == 404, path
    assert api.request("POST", "/page/app.js").status_code == 405


def test_without_the_page():
    api = Api(page=False, api_keys=("k",))
    for path in ("/", "/page/app.js"):
        assert api.request("GET", path, headers=HTML).status_code == 401
        assert api.request("GET", path, headers={**HTML, "authorization": "Bearer k"}).status_code == 404


def test_the_page_needs_no_key_and_what_it_asks_for_does():
    api = Api(api_keys=("k",))
    assert api.request("GET", "/", headers=HTML).status_code == 200
    assert api.request("GET", "/page/app.js").status_code == 200
    for path in ("/v1/models", "/page/../v1/models", "/pages", "//v1/models", "/metrics"):
        assert api.request("GET", path, headers=HTML).status_code in (401, 404), path
    assert api.request("GET", "/v1/models").status_code == 401


def test_what_is_vendored_is_what_was_packed():
    vendor = FOLDER / "vendor"
    listed = json.loads((vendor / "vendor.json").read_text())
    for entry in listed:
        assert hashlib.sha256((vendor / entry["file"]).read_bytes()).hexdigest() == entry["sha256"], entry["file"]
        assert (vendor / entry["license_file"]).stat().st_size > 500
    known = {entry["file"] for entry in listed} | {entry["license_file"] for entry in listed} | {"vendor.json"}
    assert {path.name for path in vendor.iterdir()} == known
    code = sum((vendor / entry["file"]).stat().st_size for entry in listed if entry["file"].endswith((".js", ".css")))
    assert code < 180_000


def test_every_import_is_a_file_and_nothing_is_asked_from_elsewhere():
    for name in FILES:
        path = FOLDER / name
        if path.suffix not in (".js", ".css", ".html", ".svg") or path.parent.name == "vendor":
            continue
        text = path.read_text()
        for target in re.findall(r"""(?:from|import)\s+["'](\.[^"']+)["']""", text):
            assert (path.parent / target).is_file(), f"{name} imports {target}"
        for target in re.findall(r"""(?:src|href)="(page/[^"]+)\"""", text):
            assert (FOLDER.parent / target).is_file(), f"{name} names {target}"
        outside = set(re.findall(r"https?://[^\s\"'`)]+", text)) - {"http://www.w3.org/2000/svg"}
        assert not outside, f"{name}: {outside}"
        assert len(text.splitlines()) < 350, name


def test_what_scenes_and_panels_name_of_the_tour_is_there():
    titles = re.findall(r"^#+ (.+)$", (Path(__file__).parents[1] / "docs" / "tour.md").read_text(), re.MULTILINE)
    anchors = {re.sub(r"[^\w\s-]", "", title.lower()).strip().replace(" ", "-") for title in titles}
    named = set(re.findall(r'tour: "([^"]+)"', (FOLDER / "scenes.js").read_text()))
    assert len(named) >= 4 and named <= anchors, named - anchors


def test_the_files_are_in_the_wheel():
    """scikit-build-core takes all files of its packages but those that git or pyproject leaves out."""
    ignored = (Path(__file__).parents[1] / ".gitignore").read_text().split()
    assert not [name for name in FILES if any(part.strip("/") in name.split("/") for part in ignored)]


def test_what_the_server_tells_its_scenes():
    api = Api(api_keys=("k",))
    assert api.request("GET", "/glass/server").status_code == 401
    found = api.request("GET", "/glass/server", headers={"authorization": "Bearer k"}).json()
    assert found["max_model_len"] == 4096 and found["max_num_seqs"] == 8 and found["kill_core"] is False
    assert found["counters"]["preemptions"] == 0 and found["num_blocks"] is None
    api.engine.state.loaded = False
    assert api.request("GET", "/glass/server", headers={"authorization": "Bearer k"}).status_code == 503
    assert Api(page=False).request("GET", "/glass/server").status_code == 404


def killing(answer: bool, **options):
    """An application that may kill, what it killed, and how it is asked to."""
    killed: list[int] = []
    app = create_app(FakeEngine(), ServerConfig(**options), kill_core=lambda core: killed.append(core) or answer)  # type: ignore

    def ask(client: str = "127.0.0.1", base: str = "http://127.0.0.1:8000", **headers: str) -> httpx.Response:
        async def call() -> httpx.Response:
            transport = httpx.ASGITransport(app, client=(client, 5))
            async with httpx.AsyncClient(transport=transport, base_url=base) as http:
                return await http.post("/glass/kill-core", headers=headers)

        return LOOP.run(call())

    return killed, ask


def test_a_core_is_killed_only_by_this_servers_page_on_this_machine():
    killed, ask = killing(True)
    for refused in (
        ask(client="10.0.0.7"), ask(origin="http://evil.example"), ask(origin="http://127.0.0.1:9000"), ask(origin="null"),
        ask(base="http://evil.example:8000"), ask(base="http://evil.example", origin="http://evil.example"), ask(client="::2"),
        ask(host="["), ask(host="[::1"), ask(origin="http://["),
    ):  # fmt: skip
        assert refused.status_code == 403 and refused.json()["error"]["code"] == "kill_core_not_allowed"
    assert killed == []
    assert ask(origin="http://127.0.0.1:8000").json() == {"killed": 0}
    assert ask(base="http://localhost:8000", origin="http://localhost:8000").status_code == 200
    assert ask(client="::1", base="http://[::1]:8000", origin="http://[::1]:8000").status_code == 200
    assert killed == [0, 0, 0]
    assert killing(False)[1]().status_code == 503  # it is being started anew
    assert killing(True, api_keys=("k",))[1]().status_code == 401
    assert Api().request("POST", "/glass/kill-core").status_code == 403


@pytest.mark.parametrize("options", [["--host", "0.0.0.0"], ["--api-processes", "2"]])
def test_whoever_may_reach_the_server_may_not_kill_its_cores(options, model, capsys):
    code = main(["serve", str(model), "--port", "0", "--device", "cpu", "--allow-kill-core", *options])
    assert code == 1 and "allow-kill-core" in capsys.readouterr().err
