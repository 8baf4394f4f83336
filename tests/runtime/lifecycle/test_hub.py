"""Uploads to a stand-in of the Hub on this machine; a hub that fails, or is not there, ends no run."""

from __future__ import annotations

import base64
import http.server
import json
import threading

import pytest

from raafl.errors import BadInput
from raafl.runtime.lifecycle.hub import push_model
from tests.helpers.small_runs import experiment, finish

constants = pytest.importorskip("huggingface_hub.constants")


class Hub(http.server.BaseHTTPRequestHandler):
    """Answers what an upload of small files asks, and notes it."""

    def do_POST(self):
        body = self.rfile.read(int(self.headers["Content-Length"] or 0))
        self.server.asked.append((self.path, body))
        here = f"http://127.0.0.1:{self.server.server_address[1]}/me/digits"
        lines = [json.loads(line) for line in body.splitlines() if line.startswith(b"{")]
        answers = {
            "/api/repos/create": {"url": here},
            "/api/validate-yaml": {"errors": [], "warnings": []},
            "/api/models/me/digits/preupload/main": {
                "files": [
                    {"path": file["path"], "uploadMode": "regular", "shouldIgnore": False, "oid": None}
                    for line in lines
                    for file in line.get("files", [])
                ],
            },
            "/api/models/me/digits/commit/main": {
                "commitUrl": f"{here}/commit/1",
                "commitOid": "1" * 40,
                "hookOutput": "",
                "success": True,
            },
        }
        self.reply(answers.get(self.path.partition("?")[0]))

    def do_GET(self):
        self.reply(None)

    def reply(self, found):
        self.send_response(403 if self.server.refuses or found is None else 200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(found or {"error": "not yours"}).encode())

    def log_message(self, *_):
        pass


@pytest.fixture
def hub(monkeypatch):
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Hub) as server:
        server.asked, server.refuses = [], False
        server.daemon_threads = True
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("HF_ENDPOINT", f"http://127.0.0.1:{server.server_address[1]}")
        monkeypatch.setenv("HF_TOKEN", "hf_for_tests_only")
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        yield server
        server.shutdown()
        thread.join()


def test_a_finished_model_goes_to_a_private_repository_with_its_card(hub, tmp_path, caplog):
    caplog.set_level("INFO", logger="raafl.run")
    run = finish(experiment(tmp_path / "run", push_to_hub="me/digits", max_updates=1))
    url = f"http://127.0.0.1:{hub.server_address[1]}/me/digits/commit/1"
    assert run.summary["hub"] == {"repo": "me/digits", "url": url, "error": None}
    assert caplog.messages.count("uploading the final model to me/digits") == 1  # an upload may take long
    asked = dict(hub.asked)
    made = json.loads(asked["/api/repos/create"])
    assert made["name"] == "digits" and made.get("private", made.get("visibility") == "private")
    lines = [json.loads(line) for line in asked["/api/models/me/digits/commit/main"].splitlines()]
    files = {line["value"]["path"]: line["value"]["content"] for line in lines if line["key"] == "file"}
    assert sorted(files) == ["README.md", "model.safetensors"]
    assert base64.b64decode(files["README.md"]) == (run.folder / "model" / "README.md").read_bytes()


@pytest.mark.parametrize("reason", ["failed: no clients", "interrupted"])
def test_a_run_that_did_not_reach_its_end_sends_nothing(reason, tmp_path, hub):
    assert push_model("me/digits", tmp_path, reason, pytest.fail) is None
    assert hub.asked == []


def test_a_hub_that_refuses_is_warned_of_and_in_the_summary(hub, tmp_path):
    hub.refuses, said = True, []
    (tmp_path / "model").mkdir()
    found = push_model("me/digits", tmp_path, "max_updates", said.append)
    assert found["url"] is None and "403" in found["error"]
    assert said == [
        f"the final model cannot be uploaded to me/digits ({found['error']}): it is in {tmp_path / 'model'}"
    ]


def test_a_name_that_is_no_repository_is_bad_input(tmp_path):
    with pytest.raises(BadInput, match="push_to_hub is 'digits': give OWNER/NAME"):
        experiment(tmp_path / "run", push_to_hub="digits").check()
