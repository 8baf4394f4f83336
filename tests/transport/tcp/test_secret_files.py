"""Files with secrets: for their owner alone, never overwritten, and each good for one run."""

from __future__ import annotations

import os
import shutil
import stat

import pytest

from raafl.commands.cli import main
from raafl.errors import BadInput
from raafl.transport.tcp.handshake import Secret, load_secret
from raafl.transport.tcp.secret_files import bind, check_run


@pytest.fixture(autouse=True)
def open_umask(monkeypatch, tmp_path):
    monkeypatch.delenv("RAAFL_SECRET", raising=False)
    monkeypatch.delenv("RAAFL_SECRET_FILE", raising=False)
    monkeypatch.chdir(tmp_path)
    before = os.umask(0)
    yield
    os.umask(before)


def mode(path):
    return stat.S_IMODE(os.stat(path).st_mode)


def test_the_command_makes_files_that_only_their_owner_can_use():
    assert main(["key", "--output", "raafl.secret"]) == 0
    assert main(["key", "--client", "3", "--secret_file", "raafl.secret", "--output", "client-3.key"]) == 0
    assert mode("raafl.secret") == mode("client-3.key") == 0o600
    secret = load_secret("raafl.secret")
    assert load_secret("client-3.key") == Secret(secret.for_client(3).key, 3)
    assert main(["key", "--output", "other.secret"]) == 0
    assert load_secret("other.secret").for_client(3) != secret.for_client(3)


def test_no_file_is_overwritten_or_followed(capsys, tmp_path):
    (tmp_path / "there").write_text("precious")
    (tmp_path / "link").symlink_to(tmp_path / "elsewhere")
    for name in ("there", "link"):
        assert main(["key", "--output", name]) == 2
        assert "which is there already: a secret is never overwritten" in capsys.readouterr().err
    assert (tmp_path / "there").read_text() == "precious" and not (tmp_path / "elsewhere").exists()
    assert main(["key", "--output", "no/such/folder"]) == 2
    assert "cannot be made: No such file" in capsys.readouterr().err
    assert main(["key", "--secret_file", "there"]) == 2
    assert "key needs --client ID" in capsys.readouterr().err


def test_a_secret_is_good_for_one_run_and_for_its_resumption(tmp_path):
    main(["key", "--output", "raafl.secret"])
    secret = load_secret("raafl.secret")
    check_run(secret, None)
    bind(secret, tmp_path / "first")
    assert mode("raafl.secret.run") == 0o600
    bind(secret, tmp_path / "first")  # resumed
    check_run(secret, tmp_path / "x" / ".." / "first")
    for folder in (None, tmp_path / "second"):
        with pytest.raises(BadInput, match=r"is the secret of the run in '.*first'.*raafl key --output FILE"):
            check_run(secret, folder)
    with pytest.raises(BadInput, match="is the secret of the run in"):
        bind(secret, tmp_path / "second")


def test_a_secret_that_somebody_made_otherwise_is_bound_to_nothing(tmp_path):
    (tmp_path / "own").write_text("a secret of one's own")
    (tmp_path / "own").chmod(0o600)
    for secret in (load_secret("own"), Secret(b"raafl-run-of no file at all")):
        bind(secret, tmp_path / "first")
        bind(secret, tmp_path / "second")
    assert sorted(os.listdir()) == ["own"]


def test_a_copy_of_a_secret_or_a_variable_serves_no_second_run(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state"))
    main(["key", "--output", "raafl.secret"])
    bind(load_secret("raafl.secret"), tmp_path / "first")
    shutil.copy("raafl.secret", "copy.secret")
    monkeypatch.setenv("RAAFL_SECRET", (tmp_path / "raafl.secret").read_text())
    for secret, name in ((load_secret("copy.secret"), "copy.secret"), (load_secret(), "RAAFL_SECRET")):
        check_run(secret, tmp_path / "first")  # resumed
        with pytest.raises(BadInput, match=f"secret_file is '{name}', which is the secret of the run in"):
            bind(secret, tmp_path / "second")
    assert not (tmp_path / "copy.secret.run").exists()
    (note,) = (tmp_path / "state" / "raafl" / "secrets").iterdir()
    assert (tmp_path / "raafl.secret").read_text().strip() not in note.read_text() and len(note.name) == 32
