"""Folders in object stores: in memory, in another folder, and of people who mean ill."""

from __future__ import annotations

import uuid

import fsspec
import pytest

from raafl.errors import BadInput
from raafl.object_store import ObjectStore
from raafl.sanitize import is_url


@pytest.fixture(params=["memory", "file"])
def url(request, tmp_path):
    return f"memory://{uuid.uuid4()}/run" if request.param == "memory" else f"file://{tmp_path}/store/run"


def test_what_is_put_is_listed_and_fetched_whole(url, tmp_path):
    store = ObjectStore(url + "/")
    assert store.url == url and store.names() == []
    (tmp_path / "file").write_bytes(b"x" * 100_000)
    moved = []
    store.put(tmp_path / "file", "checkpoints/version-000001.ckpt", lambda: moved.append(1))
    store.write(b"{}", "summary.json")
    store.write(b"old", "a.txt")
    store.write(b"new", "a.txt")
    assert ObjectStore(url).names() == ["a.txt", "checkpoints/version-000001.ckpt", "summary.json"]
    assert moved or url.startswith("file")  # copied by the operating system, in one go
    assert store.fetch(tmp_path / "here", lambda name: name != "summary.json") == 2
    assert (tmp_path / "here" / "a.txt").read_bytes() == b"new"
    assert (tmp_path / "here" / "checkpoints" / "version-000001.ckpt").read_bytes() == b"x" * 100_000
    store.remove("a.txt")
    store.rename("-before")
    assert store.names() == []
    assert ObjectStore(url + "-before").names() == ["checkpoints/version-000001.ckpt", "summary.json"]


@pytest.mark.parametrize("name", ["../out", "a/../../out", "a\\b"])
def test_a_name_that_leads_out_of_the_folder_is_refused(name, tmp_path, monkeypatch):
    store = ObjectStore(f"memory://{uuid.uuid4()}/run")
    monkeypatch.setattr(ObjectStore, "names", lambda self: [name])
    with pytest.raises(BadInput, match="which is not part of a run folder: remove it"):
        store.fetch(tmp_path / "here")
    assert not (tmp_path / "here").exists()


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("s3://bucket/run", True),
        ("memory://x", True),
        ("runs/a", False),
        ("C:/runs", False),
        ("S3://bucket/run", True),
        ("s3://", True),
        ("://x", True),
        (None, False),
    ],
)
def test_a_text_with_a_scheme_is_meant_as_a_url(text, answer):
    assert is_url(text) is answer


@pytest.mark.parametrize("url", ["memory://", "s3://", "s3:///run", "gs:////run", "file:///", "://bucket/run"])
def test_a_url_that_lacks_a_part_is_no_folder_on_this_machine(url):
    """A variable of the shell may be empty: `s3://$BUCKET/run`."""
    assert is_url(url)
    with pytest.raises(
        BadInput, match=f"output is '{url}', which names no folder of a store: give its scheme, bucket and"
    ):
        ObjectStore(url)


def test_a_scheme_may_be_written_in_capitals(tmp_path):
    name = uuid.uuid4()
    ObjectStore(f"memory://{name}/Run").write(b"", "a")
    store = ObjectStore(f"MEMORY://{name}/Run/")
    assert store.url == f"memory://{name}/Run" and store.names() == ["a"]


def test_a_store_that_nobody_knows_and_one_that_does_not_answer_are_bad_input(monkeypatch):
    with pytest.raises(
        BadInput, match=r"output is 'nowhere://run', which cannot be used \(Protocol not known: nowhere\)"
    ):
        ObjectStore("nowhere://run")
    memory = fsspec.filesystem("memory")
    monkeypatch.setattr(type(memory), "find", lambda *_, **__: (_ for _ in ()).throw(PermissionError("denied")))
    with (
        pytest.raises(BadInput, match=r"which cannot be used \(PermissionError: denied\): check the URL"),
        ObjectStore.answering("memory://run", "resume") as store,
    ):
        store.names()
