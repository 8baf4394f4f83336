"""What a check of a run's books finds: each file of a run's folder altered, and what is no alteration."""

from __future__ import annotations

import json
import shutil

import pytest

from raafl.runfolder.append_file import START, AppendFile, link, read_table, write_table
from raafl.runfolder.books import check_books, signature_warning, unlink
from raafl.runfolder.journal import RunFolder
from raafl.runfolder.seals import Signer
from raafl.runtime.lifecycle.resume import reopened


@pytest.fixture(scope="module")
def signer(tmp_path_factory):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))
        return Signer.own()


def timer(number):
    return {"time_s": float(number), "event": "timer", "id": number}


def write(path, signer, *, end=True):
    """A run of two checkpoints, as `Run` writes it: a column comes late, rows follow the last checkpoint."""
    with RunFolder(path, "seed: 1\n") as run:
        run.signer = signer
        run.event(timer(1))
        run.seal(run.sealed(), 0, ["config.yaml"])
        (path / "checkpoints").mkdir()
        for version in (1, 2):
            run.event(timer(1 + version))
            run.metrics({"version": version, "time_s": 1.0, "wall_s": 1.0, "loss": 0.5} | {f"new{version}": 1})
            run.client({"client": version, "task": 0, "outcome": "merged"})
            books = run.sealed()
            name = f"checkpoints/version-00000{version}.ckpt"
            (path / name).write_bytes(b"values" * version)
            run.client({"client": 3, "task": version, "outcome": "lost:x", "peak_bytes": 1})
            run.seal(books, version, [name])
        run.event(timer(4))
        if end:
            (path / "model").mkdir()
            (path / "model" / "weights").write_bytes(b"w")
            run.finish({"versions": 2}, 0, [])
            run.seal(run.sealed(), 2, [], final=True)
    return path


@pytest.fixture
def run(tmp_path, signer):
    return write(tmp_path / "run", signer)


def test_books_as_they_were_written_are_signed_to_the_last_row(run, signer):
    books = check_books(run, keys=[signer.public])
    assert (books.findings, books.notes, books.state) == ([], [], "signed")
    assert (books.num_rows, books.num_signed, books.num_seals, books.final) == (4, 4, 4, True)
    assert books.line().startswith("books: signed by ") and books.line().endswith("4 of 4 journal rows")


UNSEALED = "after the last seal, in which an alteration is not found"


def test_a_run_that_goes_on_or_was_killed_is_signed_to_its_last_checkpoint(tmp_path, signer):
    path = write(tmp_path / "run", signer, end=False)
    books = check_books(path)
    assert (books.findings, books.num_rows, books.num_signed, books.final) == ([], 4, 3, False)
    one_row = [f"{name}: unsealed: 1 row {UNSEALED}" for name in ("events.jsonl", "clients.csv")]
    assert books.unsealed == one_row and books.line().endswith("; ".join(["journal rows", *one_row]))
    assert signature_warning(path) is None and signature_warning(path, unsealed=True) == books.line()


def test_a_run_that_goes_on_after_its_end_writes_its_model_and_its_best_version_anew(tmp_path, signer):
    """A server that is killed before the second end has replaced what the first end has sealed, and nobody altered it."""
    path = write(tmp_path / "run", signer, end=False)
    again = ("model/weights", "checkpoints/best.ckpt")
    with reopened(path) as run:
        (path / "model").mkdir()
        for name in again:
            (path / name).write_bytes(b"{}")
        run.signer = signer
        run.seal(run.sealed(), 2, [], final=True)
    (path / "model" / "weights").write_bytes(b"altered")
    assert check_books(path).findings == ["model/weights was altered"]
    with reopened(path) as run:
        run.signer = signer
        run.seal(run.sealed(), 2, ["config.yaml"])
    for name in again:
        (path / name).write_bytes(b"anew")
    assert check_books(path).findings == []
    (path / "checkpoints" / "version-000002.ckpt").write_bytes(b"altered")
    assert check_books(path).findings == ["checkpoints/version-000002.ckpt was altered"]


def test_what_a_killed_run_left_unsealed_is_sealed_once_it_was_resumed(tmp_path, signer):
    path = write(tmp_path / "run", signer, end=False)
    for name in ("events.jsonl", "metrics.csv", "clients.csv", "seals.jsonl"):
        with (path / name).open("ab") as file:
            file.write(b'{"x')  # the row that was being written
    books = check_books(path)
    assert books.findings == [] and books.unsealed == [
        f"{name}: unsealed: {what} {UNSEALED}"
        for name, what in (
            ("events.jsonl", "1 row and 3 bytes"),
            ("metrics.csv", "3 bytes"),
            ("clients.csv", "1 row and 3 bytes"),
            ("seals.jsonl", "3 bytes"),
        )
    ]
    with reopened(path) as run:
        run.signer = signer
        run.seal(run.sealed(), 2, ["config.yaml"], altered=books.findings)
        run.event({"time_s": 2.0, "event": "resumed", "kept": 4})
        assert check_books(path).unsealed == [f"events.jsonl: unsealed: 1 row {UNSEALED}"]
        run.finish({"versions": 2}, 0, [])
        run.seal(run.sealed(), 2, [], final=True)
    books = check_books(path)
    assert (books.findings, books.unsealed, books.num_signed, books.final) == ([], [], 5, True)


def test_rows_that_wait_for_space_are_not_added_after_the_seal_of_the_end(tmp_path, monkeypatch):
    with RunFolder(tmp_path / "run", "seed: 1\n") as run:
        run.event(timer(1))
        with monkeypatch.context() as full:
            full.setattr(AppendFile, "_write", lambda *_: (_ for _ in ()).throw(OSError("full")))
            run.event(timer(2))
            run.finish(summary := {}, 0, [])
            sealed = run.sealed()
        run.seal(sealed, 0, [], final=True)
    assert summary["unwritten"] == {"events.jsonl": 1} and check_books(tmp_path / "run").findings == []


def test_without_a_key_books_are_unsigned_and_still_checked(tmp_path):
    path = write(tmp_path / "run", None)
    assert check_books(path).line() == "books: unsigned"
    flip(path / "clients.csv", -3)
    assert check_books(path).state == "altered"


def test_a_folder_of_an_earlier_version_says_unsigned_no_chain(tmp_path, signer):
    path = write(tmp_path / "run", signer)
    (path / "seals.jsonl").unlink()
    (path / "events.jsonl").write_text(json.dumps(timer(1)) + "\n")
    (finding,) = check_books(path).findings
    assert finding.startswith("seals.jsonl: the run has ended, and nothing of it is sealed"), (
        "as one whose seals are gone"
    )
    (path / "summary.json").unlink()
    books = check_books(path)
    assert books.state == "unsigned" and books.findings == [] and books.line().startswith("books: unsigned, no chain")


@pytest.mark.parametrize("gone", ["removed", "emptied", "of which no line is a seal"])
@pytest.mark.parametrize("ended", [True, False])
def test_a_run_without_any_seal_is_found(tmp_path, signer, gone, ended):
    """Each run has one from its first row on; who removes all could else write the journal anew, and compute its hashes."""
    path = write(tmp_path / "run", signer, end=ended)
    seals = path / "seals.jsonl"
    seals.unlink() if gone == "removed" else seals.write_text("" if gone == "emptied" else "{}\n")
    books = check_books(path, whole_files=False)
    assert f"the run has {'ended' if ended else 'begun'}, and nothing of it is sealed" in books.findings[-1]
    assert books.state == "altered" and signature_warning(path).startswith("books: altered: seals.jsonl: ")


def test_a_run_that_has_just_begun_has_no_seal_yet(tmp_path):
    with RunFolder(tmp_path / "run", "seed: 1\n") as run:
        assert check_books(tmp_path / "run").findings == []
        run.event(timer(1))
        books = check_books(tmp_path / "run")
        assert (books.findings, books.notes) == ([], ["no seals"])


def flip(path, place=-10):
    data = bytearray(path.read_bytes())
    data[place] ^= 1
    path.write_bytes(data)


def test_the_chain_finds_a_flipped_bit_and_names_the_row(run):
    flip(run / "events.jsonl", 12)
    books = check_books(run)
    assert books.findings[0] == "events.jsonl: row 1 was altered, or is not the one that followed row 0"
    assert books.line().startswith("books: altered: events.jsonl: row 1")


@pytest.mark.parametrize(
    ("name", "finding"),
    [
        ("metrics.csv", "metrics.csv: a line of its first 2 was altered"),
        ("clients.csv", "clients.csv: a line of its first 4 was altered"),
        ("config.yaml", "config.yaml was altered"),
        ("summary.json", "summary.json was altered"),
        ("model/weights", "model/weights was altered"),
        ("checkpoints/version-000001.ckpt", "checkpoints/version-000001.ckpt was altered"),
    ],
)
def test_a_flipped_bit_of_any_file_is_found_and_named(run, name, finding):
    flip(run / name, -3 if name != "model/weights" else 0)
    assert check_books(run).findings == [finding]


ADDED = "too many, added after the end of the run"


@pytest.mark.parametrize(
    ("change", "finding"),
    [
        (lambda run: (run / "model" / "weights").unlink(), "model/weights was removed"),
        (lambda run: (run / "model" / "more").touch(), "model/more is not sealed: it was added after the end"),
        (lambda run: (run / "clients.csv").unlink(), "clients.csv was removed"),
        (lambda run: (run / "events.jsonl").unlink(), "events.jsonl was removed"),
        (lambda run: cut(run / "clients.csv", 1), "clients.csv: 1 of its last 4 sealed lines are missing"),
        (lambda run: cut(run / "events.jsonl", 1), "events.jsonl: rows 4 to 4, which seal 4 covers, are missing"),
        (lambda run: cut(run / "seals.jsonl", 1), "seals.jsonl: the run has ended, and its end is not sealed"),
        (lambda run: rename_column(run / "metrics.csv"), "metrics.csv: its header was altered"),
        (lambda run: (run / "config.yaml").unlink(), "config.yaml was removed"),
        (lambda run: append(run / "events.jsonl", forged_row(run)), f"events.jsonl: 1 row {ADDED}"),
        (lambda run: append(run / "events.jsonl", bytes(5000)), f"events.jsonl: 5000 bytes {ADDED}"),
        (lambda run: append(run / "seals.jsonl", bytes(5000)), f"seals.jsonl: 5000 bytes {ADDED}"),
        (lambda run: append(run / "seals.jsonl", b"x\r"), f"seals.jsonl: 2 bytes {ADDED}"),
        (lambda run: append(run / "metrics.csv", b"3,3,3,0.1,1,1\n"), f"metrics.csv: 1 row {ADDED}"),
        (lambda run: append(run / "clients.csv", b"1,0\n2,0\n7"), f"clients.csv: 2 rows and 1 byte {ADDED}"),
        (lambda run: append(run / "clients.csv", b"\n"), f"clients.csv: 1 row {ADDED}"),
        (lambda run: flip(run / "metrics.csv", -1), "metrics.csv: 1 of its last 2 sealed lines are missing"),
        (lambda run: flip(run / "clients.csv", -1), "clients.csv: 1 of its last 4 sealed lines are missing"),
        (lambda run: flip(run / "events.jsonl", -1), "events.jsonl: rows 4 to 4, which seal 4 covers, are missing"),
        (lambda run: flip(run / "seals.jsonl", -1), "seals.jsonl: the run has ended, and its end is not sealed"),
        (lambda run: widen_line(run / "metrics.csv", b","), "metrics.csv: line 1 was altered"),
        (lambda run: widen_line(run / "metrics.csv", b"\r,"), "metrics.csv: line 1 was altered"),
        (lambda run: add_column(run / "metrics.csv"), "metrics.csv: its header was altered"),
    ],
)
def test_what_is_removed_or_added_is_found(run, change, finding):
    change(run)
    assert any(line.startswith(finding) for line in check_books(run).findings)


def append(path, data):
    with path.open("ab") as file:
        file.write(data)


def forged_row(run):
    """A row that fits the chain, as anybody can compute it."""
    return link(check_books(run).head, json.dumps(timer(9)).encode() + b"\n")[0]


def widen_line(path, ending):
    """Add to the first row what its digest leaves out; readers then skip the row."""
    lines = path.read_bytes().splitlines(keepends=True)
    path.write_bytes(b"".join([lines[0], lines[1][:-1] + ending + b"\n", *lines[2:]]))


def add_column(path):
    header, *rows = read_table(path)
    write_table(path, [[*header, "more"], *([*row, ""] for row in rows)])


def cut(path, num):
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-num]))


def rename_column(path):
    header, *rows = read_table(path)
    write_table(path, [[name.replace("loss", "gain") for name in header], *rows])


def test_a_summary_of_an_earlier_end_that_was_removed_is_found(run, signer):
    with reopened(run) as folder:
        folder.signer = signer
        folder.seal(folder.sealed(), 2, ["config.yaml"])
    assert check_books(run).findings == []
    (run / "summary.json").unlink()
    assert check_books(run).findings == ["summary.json was removed"]


def test_a_journal_that_was_removed_is_no_run_without_one(run):
    (run / "events.jsonl").unlink()
    assert str(signature_warning(run)).startswith("books: altered: events.jsonl was removed")
    (run / "seals.jsonl").unlink()
    assert signature_warning(run) is None


def rewrite_chain(run):
    """Change the second row and link all that follow anew, as somebody does who knows how."""
    head, new = START, []
    for number, line in enumerate((run / "events.jsonl").read_bytes().splitlines(keepends=True)):
        row, _ = unlink(line)
        line, head = link(head, row.replace(b'"id":2', b'"id":9') if number == 1 else row)
        new.append(line)
    (run / "events.jsonl").write_bytes(b"".join(new))


def test_a_chain_that_was_rewritten_is_not_the_one_that_was_signed(run):
    rewrite_chain(run)
    findings = check_books(run).findings
    assert findings == [
        f"events.jsonl: its first {rows} rows are not those that seal {number} covers"
        for number, rows in ((2, 2), (3, 3), (4, 4))
    ]


def test_seals_that_were_altered_or_written_by_somebody_else_are_named(run, signer, tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "other"))
    other = Signer.own()
    forged = write(tmp_path / "forged", other)
    assert check_books(forged).findings == []  # nothing but the key is wrong
    (finding, *_) = check_books(forged, keys=[signer.public]).findings
    assert "is signed by" in finding and "which is not the key given to check" in finding
    assert check_books(write(tmp_path / "none", None), keys=[signer.public]).findings == [
        "seals.jsonl: no seal is signed, but a key was given to check"
    ]
    seals = (run / "seals.jsonl").read_text().splitlines(keepends=True)
    (run / "seals.jsonl").write_text("".join([seals[0], seals[1].replace('"version":1', '"version":7'), *seals[2:]]))
    assert check_books(run).findings == [
        "seals.jsonl: seal 3 does not follow the line before it",
        "seals.jsonl: seal 2 (version 7) was altered: its signature does not match its content",
    ]
    (run / "seals.jsonl").write_text("".join([*seals[:3], (forged / "seals.jsonl").read_text().splitlines()[3] + "\n"]))
    assert any("is signed by" in line and "those before it by" in line for line in check_books(run).findings)


HOSTILE = [
    '{"rows":1,"tables":{"../x":{}},"files":{"../../etc/passwd":"x","\\u0000":"y"},"key":{"a":1}}',
    '{"rows":1,"tables":{"clients.csv":{"lines":"x"}},"files":{},"key":[],"version":["\\u001b[2J"],"altered":["\\u001b"]}',
    '{"rows":true,"tables":{},"files":{}}',
    '{"rows":1',
    "[]",
    "[" * 10_000,
    "\x00\xff",
    '{"signature":"x"}',
]


@pytest.mark.parametrize("line", HOSTILE)
def test_seals_that_somebody_made_up_raise_nothing(run, line):
    with (run / "seals.jsonl").open("a") as file:
        file.write(line + "\n")
    found = check_books(run).findings
    assert found and all(text.isprintable() for text in found)


def test_a_resumed_run_is_sealed_as_it_goes_on(run, signer):
    shutil.copy(run / "clients.csv", run / "clients.before")
    header, *rows = read_table(run / "clients.csv")
    write_table(run / "clients.csv", [header, *rows[:1]])  # as a resumption does: rows after the checkpoint come again
    with reopened(run) as folder:
        folder.signer = signer
        folder.event({"time_s": 2.0, "event": "resumed", "kept": 2})
        folder.seal(folder.sealed(), 1, ["config.yaml"], altered=["clients.csv was altered"])
    books = check_books(run, whole_files=False)
    assert books.findings == ["before seal 5, when the run was resumed: clients.csv was altered"]
    assert (books.num_rows, books.num_signed) == (5, 5)
