"""What `raafl serve` and `raafl join` take beside the config, and what is wrong with it."""

from __future__ import annotations

import socket
from pathlib import Path

import pytest
import yaml

from raafl.commands.cli import main
from raafl.commands.serve import listener
from raafl.config.argv import names_section
from raafl.config.experiment import marked
from raafl.config.parse import parse
from raafl.config.remote_options import split
from raafl.config.shared import for_clients, sections
from raafl.config.trust import from_server
from raafl.devices.files import load_devices
from raafl.errors import BadInput
from raafl.runtime.identity import Identity, agree
from raafl.runtime.server.session_protocol import Terms
from tests.helpers.certificates import TOKEN

QUICKSTART = Path(__file__).parents[2] / "configs" / "quickstart.yaml"


def test_own_options_are_taken_out_wherever_they_stand():
    own, rest = split("serve", ["--config", "c.yaml", "--address=0.0.0.0:99", "--seed", "3", "--min_clients", "2"])
    assert (own.address, own.min_clients, own.certs, own.tls_cert) == ("0.0.0.0:99", 2, "certs", None)
    assert rest == ["--config", "c.yaml", "--seed", "3"]
    own, rest = split("join", ["--data.root", "/d", "--client", "3", "--certs", "c", "--address", "h:1"])
    assert (own.client, own.certs, own.share_of_data, rest) == (3, "c", False, ["--data.root", "/d"])
    assert split("serve", [])[0].address == "127.0.0.1:0"  # loopback unless told otherwise


def test_a_dry_run_shows_what_the_server_asks_and_takes_no_config_of_ones_own():
    own, rest = split("join", ["--client=3", "--address", "h:1", "--policy", "site.yaml", "--dry-run"])
    assert (own.policy, own.dry_run, rest) == ("site.yaml", True, [])
    with pytest.raises(
        BadInput, match="--dry-run shows the server's config, but --config names another: leave --config out"
    ):
        split("join", ["--client=3", "--address", "h:1", "--dry-run", "--config", "c.yaml"])


@pytest.mark.parametrize(
    ("command", "argv", "named"),
    [
        ("join", ["--client", "1"], "`raafl join` needs --address HOST:PORT"),
        ("join", ["--address", "h:1"], "`raafl join` needs --client ID"),
        ("join", ["--address", "h:1", "--client", "0"], "client is '0': give a whole number from 1"),
        ("join", ["--address", "h:1", "--client", "two"], "client is 'two': give a whole number from 1"),
        ("serve", ["--min_clients", "-1"], "min_clients is '-1': give a whole number from 1"),
        ("join", ["--share_of_data", "yes"], "share_of_data is 'yes': give true or false"),
        ("serve", ["--address"], "--address: expected one argument"),
    ],
)
def test_bad_options_are_named(command, argv, named):
    with pytest.raises(BadInput, match=named):
        split(command, argv)


def test_own_data_is_what_a_data_option_asks_for():
    assert names_section(["--data", "x.Y"], "--data") and names_section(["--data.root=/d"], "--data")
    assert not names_section(["--devices", "d.yaml", "--database", "1"], "--data")


@pytest.mark.parametrize(
    ("argv", "named"),
    [
        (["serve", "--address", "here"], "address is 'here': give HOST:PORT"),
        (["serve", "--address", "127.0.0.1:99999"], "whose port is '99999'"),
        (["serve", "--address", "fd:77"], "address is 'fd:77'"),
        (["serve", "--min_clients", "9"], "min_clients is 9: give 1 to 4, the run's number of clients"),
        (["join", "--address", "127.0.0.1:1", "--client", "5"], "client is 5: this run has clients 1 to 4"),
    ],
)
def test_bad_input_ends_with_one_line_and_exit_code_2(monkeypatch, capsys, argv, named):
    monkeypatch.setenv("RAAFL_LOCAL_TOKEN", TOKEN.token.hex())
    assert main([*argv, "--config", str(QUICKSTART), "--progress=quiet"]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line.startswith("raafl: ") and named in line


def test_without_certificates_nothing_starts_and_the_remedy_is_named(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("RAAFL_LOCAL_TOKEN", raising=False)
    for argv, remedy in (
        (["serve"], "tls_ca is 'certs/ca.crt', which does not exist: make one with `raafl certs`"),
        (
            ["join", "--address", "127.0.0.1:1", "--client", "1"],
            "'certs' has no site's certificate with its key: run `raafl certs",
        ),
    ):
        assert main([*argv, "--config", str(QUICKSTART)]) == 2
        assert remedy in capsys.readouterr().err


def test_a_token_is_good_on_this_machine_alone(monkeypatch, capsys):
    monkeypatch.setenv("RAAFL_LOCAL_TOKEN", TOKEN.token.hex())
    assert main(["serve", "--address", "0.0.0.0:0", "--config", str(QUICKSTART)]) == 2
    assert "which other machines can reach, but an access token is only for this machine" in capsys.readouterr().err
    monkeypatch.setenv("RAAFL_LOCAL_TOKEN", "short")
    assert main(["serve", "--config", str(QUICKSTART)]) == 2
    assert "RAAFL_LOCAL_TOKEN is set, but not by `raafl fit --local`: unset it" in capsys.readouterr().err


def test_an_inherited_socket_must_listen():
    with socket.socket() as quiet, pytest.raises(BadInput, match="the socket does not listen: give HOST:PORT, or fd:N"):
        quiet.bind(("127.0.0.1", 0))
        listener(f"fd:{quiet.detach()}")
    with socket.create_server(("127.0.0.1", 0)) as open_door:
        port = open_door.getsockname()[1]
        found = listener(f"fd:{open_door.detach()}")
        assert found.getsockname()[1] == port
        found.close()


def test_clients_are_told_what_they_use_and_what_a_device_file_holds(tmp_path):
    file = tmp_path / "devices.yaml"
    file.write_text("- {name: phone, flops_per_s: 3.0e8, availability: [[0, 5], [7, 9]], count: 3}\n- {name: a100}\n")
    told = yaml.safe_load(
        for_clients(yaml.safe_dump({**yaml.safe_load(QUICKSTART.read_text()), "devices": str(file), "output": "x"}))
    )
    assert set(told) == {"model", "data", "algorithm", "partition", "clients", "seed", "train", "devices"}
    taken = parse("join", [], config_yaml=from_server(yaml.safe_dump(told))).experiment
    assert taken.devices == load_devices(file) and taken.devices[0].availability == ((0.0, 5.0), (7.0, 9.0))
    assert for_clients("") == ""


def test_only_sections_that_matter_to_a_client_are_compared():
    text = QUICKSTART.read_text()
    config = yaml.safe_load(text)
    mine = Identity("m", config=Terms(text, sections(text)).sections)

    def different(config: dict[str, object] | None, own_data: bool = False) -> str | None:
        theirs = None if config is None else sections(yaml.safe_dump(config), own_data=own_data)
        found = agree(mine, Identity("m", config=theirs))
        return found and found.field

    assert different({**config, "max_updates": 7, "devices": None, "name": "x"}) is None
    for name in marked("must_match"):
        assert different({**config, name: "something else"}) == f"config.{name}"
    assert different({**config, "data": "mine"}, own_data=True) is None
    assert different(None) == "config"
    assert agree(Identity("m", config=Terms().sections), Identity("m")) is None  # ranks of torchrun read one file
