"""`raafl certs` from the command line."""

from __future__ import annotations

import json

import pytest

from raafl.certs import authority
from raafl.commands.cli import main


def test_from_an_empty_folder_to_a_revoked_site(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in (
        "init --federation heart", "server localhost 127.0.0.1", "request north --folder site", "sign site/north.csr",
        "renew north --days 5", "renew server",
    ):  # fmt: skip
        assert main(["certs", *line.split()]) == 0, line
    words = capsys.readouterr().out
    told = [line for line in words.splitlines() if line.count(":") == 15]
    assert len(told) == 2 and told[0] == told[1], "the fingerprint that the site reads out is the one that is signed"
    assert "authority of federation 'heart'" in words and "send it back with certs/ca.crt" in words
    assert main(["certs", "list"]) == 0
    assert "expires soon: raafl certs renew north" in capsys.readouterr().out
    assert main(["certs", "revoke", "north"]) == 0 and main(["certs", "list", "--json"]) == 0
    said, rows = capsys.readouterr().out.splitlines()
    assert said == "revoked 'north': 2 valid certificates"
    assert sorted((row["name"], row["state"]) for row in json.loads(rows)) == [
        ("north", "revoked"), ("north", "revoked"), ("server", "valid"), ("server", "valid"),
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sing x", "did you mean 'sign'?"), ("sign none.csr", "no certificate authority"),
        ("request a/b", "site is 'a/b'"), ("init --federation", "expected one argument"),
        ("server h --days x", "days is 'x': give a whole number"), ("request", "required: SITE"),
    ],
)  # fmt: skip
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, line, why):
    monkeypatch.chdir(tmp_path)
    assert main(["certs", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and why in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_usage_says_how_long_a_certificate_is_good():
    from raafl.commands.certs import USAGE, parser

    assert f"--days {authority.DAYS}" in USAGE and parser("sign").parse_args(["x"]).days == str(authority.DAYS)
