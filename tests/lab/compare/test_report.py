"""Files of a comparison's result."""

from __future__ import annotations

import json

import pytest

from raafl.lab.compare import report

RESULT = {"name": "mine", "rows": [], "metric": "accuracy", "reference": "A"}


def test_the_numbers_are_saved_before_anything_is_drawn(tmp_path, monkeypatch):
    def broken(*_):
        raise OSError("no fonts")

    monkeypatch.setattr(report, "groups_of", broken)
    with pytest.raises(OSError, match="no fonts"):
        report.write(RESULT, tmp_path)
    assert json.loads((tmp_path / "result.json").read_text()) == RESULT
    assert sorted(path.name for path in tmp_path.iterdir()) == ["result.json", "table.csv", "table.tex"]
