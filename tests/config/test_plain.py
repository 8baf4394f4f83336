"""Wrong names and plain values are found before torch is imported, in the words of the full reading."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from raafl.config.check import MADE
from raafl.config.parse import make_parser, parse
from raafl.config.plain_check import check_plain
from raafl.errors import BadInput
from tests.habits.source import ROOT

QUICKSTART = str(ROOT / "configs" / "quickstart.yaml")
COMMANDS = ("fit", "simulate", "serve", "join", "plan", "axes")


def lines(check, *argv):
    with pytest.raises(BadInput) as error:
        check("simulate", ["--config", QUICKSTART, *argv])
    return str(error.value).splitlines()


@pytest.mark.quick_cases(0, 1, 4, 6, 11, 12)
@pytest.mark.parametrize(
    "argv",
    [
        ["--clients", "many"],
        ["--clientz=3"],
        ["--train.num_epoch", "3"],
        ["--max_epochs", "3"],
        ["--guard.trim", "0.7"],
        ["--privacy.delta", "2"],
        ["--compress.down", "zip"],
        ["--submodels.exits", "[0]"],
        ["--memory", "some"],
        ["--train", "5"],
        ["--devices", "nowhere.yaml"],
        ["--devices", "[{name: slow, latency_s: -1}]"],
        ["--clients"],
        ["stray"],
    ],
)
def test_what_is_said_early_is_what_the_full_reading_says(argv):
    assert lines(check_plain, *argv) == lines(said_in_full, *argv)


def said_in_full(command, argv):
    parse(command, argv).experiment.check()


def test_values_out_of_range_are_all_named_without_the_parts(tmp_path):
    options = [
        "--clients",
        "0",
        "--max_time",
        "2x",
        "--logger",
        "wandbb",
        "--transport",
        "udp",
        "--server_device",
        "gpu",
    ]
    assert [line.split(" is ")[0] for line in lines(check_plain, *options)] == [
        "clients",
        "transport",
        "server_device",
        "max_time",
        "logger",
    ]
    config = tmp_path / "a.yaml"
    config.write_text("model: no.such.Model\nclientss: 3\nguard: {trims: 1}\n")
    with pytest.raises(BadInput) as error:
        check_plain("simulate", ["--config", str(config)])
    assert str(error.value).splitlines() == [
        f"unknown field clientss: did you mean 'clients'? ({config}, line 2)",
        f"unknown field guard.trims: did you mean 'guard.trim'? ({config}, line 3)",
        "data, algorithm are missing: give --config FILE with them, or --data VALUE, --algorithm VALUE",
    ]


def test_a_right_command_line_passes_whatever_it_says_of_the_parts(tmp_path):
    check_plain(
        "simulate", ["--config", QUICKSTART, "--model.lr", "x", "--algorithm=nothing", "--strict", "--trust_config"]
    )
    check_plain("simulate", ["--config", QUICKSTART, "--algorithm", "--seed", "3"])  # no name: for the full reading
    client = tmp_path / "client.yaml"
    client.write_text(f"waits: {{alone_s: 5.0}}\noutput: {tmp_path}\n")  # the server's folder, which is there by now
    check_plain("join", ["--config", str(client)], whole=False)  # when the run ends, the server says
    check_plain("simulate", ["--resume", str(tmp_path), "--max_updates", "5"])
    # without noise that is an error, but the run's config has noise
    check_plain("simulate", ["--resume", str(tmp_path), "--privacy.max_epsilon", "30"])


def types(parser):
    """The type of each option but those of the parts, and the one that jsonargparse adds where shtab is imported."""
    options = {
        name: action for action in parser._actions for name in action.option_strings if "print_shtab" not in name
    }
    left_out = {f"--{name}{end}" for name in MADE for end in ("", ".help")}
    return {name: getattr(a, "_typehint", a.type) for name, a in options.items() if name not in left_out}


@pytest.mark.parametrize("command", COMMANDS)
def test_the_parser_without_torch_is_the_full_one(command):
    plain, full = make_parser(command, plain=True), make_parser(command)
    assert plain.format_help() == full.format_help()
    assert types(plain) == types(full)


EARLY = f"""
import contextlib, io, json, resource, sys, yaml
from raafl.commands.cli import main
base = {QUICKSTART!r}
open("broken.yaml", "w").write("clients: [4")
open("wrong.yaml", "w").write("clientss: 4")
commands = [["--config", "broken.yaml"], ["--config", "wrong.yaml"], ["--config", base, "--clients", "0"]]
with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(io.StringIO()):
    codes = [main([name, *argv]) for argv in commands for name in ("simulate", "serve")]
    codes += [main(["fit", "--local", "2", *argv]) for argv in commands]
    codes.append(main(["join", "--client", "1", "--address", "127.0.0.1:1", "--clientss", "3"]))
    for name in ("simulate", "fit"):
        with contextlib.suppress(SystemExit):
            main([name, "--help"])
used = resource.getrusage(resource.RUSAGE_SELF)
print(json.dumps([set(codes) == {{2}}, "torch" in sys.modules, used.ru_utime + used.ru_stime]))
"""


def test_torch_is_not_imported_for_it(tmp_path):
    done = subprocess.run([sys.executable, "-c", EARLY], cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
    refused, torch, cpu_s = json.loads(done.stdout)
    assert refused and not torch and cpu_s < 1.5
