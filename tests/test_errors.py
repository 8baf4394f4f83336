"""Which file and line of the user's code an error names."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

import raafl
from raafl.errors import user_frame


@pytest.mark.parametrize("folder", ["models", "raafl_models"])
def test_a_folder_that_only_begins_like_raafls_own_is_the_users(tmp_path, monkeypatch, folder):
    root = tmp_path / "raafl"
    monkeypatch.setattr("raafl.errors._NOT_THE_USERS", _moved(root))
    file = tmp_path / folder / "net.py"
    file.parent.mkdir()
    file.write_text("def fail():\n    raise ValueError('no')\n")
    assert user_frame(_raised(file)) == f" ({file}:2)"


def test_raafls_own_frames_are_left_out(tmp_path, monkeypatch):
    file = tmp_path / "raafl" / "net.py"
    monkeypatch.setattr("raafl.errors._NOT_THE_USERS", (*_moved(file.parent), str(Path(__file__))))
    file.parent.mkdir()
    file.write_text("def fail():\n    raise ValueError('no')\n")
    assert user_frame(_raised(file)) == ""


def _moved(root):
    """Return what is not the user's if raafl lay in ``root``."""
    from raafl.errors import _NOT_THE_USERS

    own = str(Path(raafl.__file__).resolve().parent)
    return tuple(start.replace(own, str(root)) for start in _NOT_THE_USERS)


def _raised(file):
    spec = importlib.util.spec_from_file_location("net", file)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    with pytest.raises(ValueError, match="no") as caught:
        module.fail()
    return caught.value
