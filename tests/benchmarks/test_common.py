from __future__ import annotations

import json

import pytest

from benchmarks import common


def rows():
    return [{"name": "a", "seconds": 0.123456, "count": 3}, {"name": "long", "extra": None}]


def test_columns_line_up_and_numbers_are_short():
    assert common.table(rows()).splitlines() == [
        "name  seconds  count  extra",
        "   a   0.1235      3       ",
        "long                       ",
    ]


def test_json_is_all_that_is_printed_and_is_saved_too(tmp_path, capsys):
    out = tmp_path / "x.json"
    common.main("x", rows, ["--json", "--out", str(out)])
    printed = capsys.readouterr().out
    result = json.loads(printed)
    assert result == json.loads(out.read_text())
    assert result["rows"] == rows()
    assert result["hardware"]["cores"] >= 1 and result["hardware"]["ram_bytes"] > 2**28
    assert result["versions"]["torch"] and result["date"].startswith("20")


def test_text_names_the_hardware(capsys):
    common.main("x", rows, [])
    first, second, *_ = capsys.readouterr().out.splitlines()
    assert first.startswith("x: ") and "cores" in first and "torch" in second


def test_an_unknown_option_ends_with_code_2():
    with pytest.raises(SystemExit) as end:
        common.main("x", rows, ["--jsn"])
    assert end.value.code == 2
