"""`raafl certs` from the command line."""

from __future__ import annotations

import json

import pytest

from raafl.commands.cli import main
from raafl.sites import authority
from raafl.sites.server import read_sites


def test_from_an_empty_folder_to_a_revoked_site(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    for line in (
        "init --federation heart",
        "server localhost 127.0.0.1",
        "request north --folder site",
        "sign site/north.csr",
        "renew north --days 5",
        "renew server",
    ):
        assert main(["certs", *line.split()]) == 0, line
    words = capsys.readouterr().out
    told = [line for line in words.splitlines() if line.count(":") == 15]
    assert len(told) == 2 and told[0] == told[1], "the fingerprint that the site reads out is the one that is signed"
    assert (
        "authority of federation 'heart'" in words and "send it back with certs/ca.crt and certs/revoked.crl" in words
    )
    assert main(["certs", "list"]) == 0
    assert "expires soon: raafl certs renew north" in capsys.readouterr().out
    assert main(["certs", "revoke", "north"]) == 0 and main(["certs", "list", "--json"]) == 0
    said, rows = capsys.readouterr().out.splitlines()
    assert said == "revoked 'north': 2 valid certificates"
    assert sorted((row["name"], row["state"]) for row in json.loads(rows)) == [
        ("north", "revoked"),
        ("north", "revoked"),
        ("server", "valid"),
        ("server", "valid"),
    ]


@pytest.fixture
def requests(tmp_path, monkeypatch, capsys):
    """An authority, and the requests of sites named north, south, on and 007."""
    monkeypatch.chdir(tmp_path)
    for line in ("init", *(f"request {site} --folder sites" for site in ("north", "south", "on", "007"))):
        assert main(["certs", *line.split()]) == 0
    capsys.readouterr()
    return tmp_path / "certs"


def test_signed_sites_are_on_the_servers_list(requests):
    for site, clients in (("north", "1,2"), ("south", "3"), ("on", "4"), ("007", "5"), ("north", "2,1")):
        assert main(["certs", "sign", f"sites/{site}.csr", "--clients", clients]) == 0
    found = {site: sorted(rules.clients) for site, rules in read_sites(requests / "sites.yaml").items()}
    assert found == {"north": [1, 2], "south": [3], "on": [4], "007": [5]}


@pytest.mark.parametrize(
    ("before", "why"),
    [
        (
            "south: {clients: [3, 1]}",
            "clients is [1], but 'certs/sites.yaml' lists [1] for 'south': give ids of no other",
        ),
        ("north: {clients: [1, 2]}", "lists site 'north' with [1, 2]: change that entry, or leave --clients out"),
        ('"north":\n  clients: 2', "lists site 'north' with [2]: change that entry"),
        ("{south: {clients: [3]}}", "cannot take a line at its end: add `north: {clients: [1]}` yourself"),
        ("south: {clients: [0]}", "certs/sites.yaml: south.clients is [0]: give the ids"),
        ("south: [", "sites is 'certs/sites.yaml': line 1, column 9: expected"),
    ],
)
def test_nothing_is_signed_where_the_server_would_refuse_the_list(requests, capsys, before, why):
    path = requests / "sites.yaml"
    path.write_text(before)
    assert main(["certs", "sign", "sites/north.csr", "--clients", "1"]) == 2
    assert why in capsys.readouterr().err
    assert path.read_text() == before and not (requests / "north.crt").exists()
    assert main(["certs", "sign", "sites/north.csr"]) == 0, "without --clients no list is in the way"


def test_a_site_that_is_on_no_list_is_told_the_next_command(requests, capsys):
    assert main(["certs", "sign", "sites/north.csr", "--clients", "1,4"]) == 0
    assert "no client yet" not in capsys.readouterr().out
    assert main(["certs", "sign", "sites/south.csr"]) == 0
    said = capsys.readouterr().out.splitlines()[-1]
    assert said.startswith(
        "site 'south' can be no client yet, since certs/sites.yaml does not list it: raafl certs sign "
    )
    assert main(said.partition(": raafl ")[2].split()) == 0, "the command does it"
    assert read_sites(requests / "sites.yaml")["south"].clients == {5}
    for line, note in (("sign sites/south.csr", None), ("sign sites/on.csr", "sites/on.csr --clients 6")):
        assert main(["certs", *line.split()]) == 0
        said = capsys.readouterr().out
        assert note is None or note in said
        assert ("no client yet" in said) == (note is not None)


def test_who_revokes_the_server_is_told_what_to_do(requests, capsys):
    assert main(["certs", "server", "localhost"]) == 0 and main(["certs", "revoke", "server"]) == 0
    said = capsys.readouterr().out
    assert "send certs/revoked.crl to every site" in said and "remove certs/server.key" in said


@pytest.mark.parametrize(
    ("line", "why"),
    [
        ("sing x", "did you mean 'sign'?"),
        ("sign none.csr", "no certificate authority"),
        ("request a/b", "site is 'a/b'"),
        ("init --federation", "expected one argument"),
        ("server h --days x", "days is 'x': give a whole number"),
        ("request", "required: SITE"),
    ],
)
def test_bad_input_is_one_line(tmp_path, monkeypatch, capsys, line, why):
    monkeypatch.chdir(tmp_path)
    assert main(["certs", *line.split()]) == 2
    out, err = capsys.readouterr()
    assert out == "" and why in err and err.count("\n") == 1
    assert list(tmp_path.iterdir()) == []


def test_the_usage_says_how_long_a_certificate_is_good():
    from raafl.commands.certs import USAGE, parser

    assert f"--days {authority.DAYS}" in USAGE and parser("sign").parse_args(["x"]).days == str(authority.DAYS)
