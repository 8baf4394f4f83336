"""Generate a shell completion script with shtab (`raafl --print_completion SHELL`)."""

from __future__ import annotations

import argparse
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

from raafl.config import remote_options
from raafl.config.argv import LOG_FORMATS, values
from raafl.errors import BadInput

SHELLS = ("bash", "zsh", "tcsh")
_CONFIG_COMMANDS = ("fit", "simulate", "serve", "join", "plan", "axes")
_REMOTE_COMMANDS = ("serve", "join")
_OWN_PARSERS = (
    "replay",
    "audit",
    "watch",
    "report",
    "compare",
    "sweep",
    "reproduce",
    "plan",
    "calibrate",
    "axes",
    "certs",
    "runs",
)
_FLAGS = ("--json", "--trust_config", "--help", "--print_config")
_FILES = frozenset(
    {
        "--config",
        "--devices",
        "--tls_ca",
        "--tls_cert",
        "--tls_key",
        "--tls_crl",
        "--sites",
        "--measure",
        "--client_data",
        "--policy",
    }
)
_FOLDERS = ("--output", "--resume", "--certs")


def completion(argv: Sequence[str], commands: Iterable[str], usage: str) -> str:
    """Return a script that makes a shell complete raafl's commands and options when the user presses Tab."""
    texts = dict(re.findall(r"^  (\w+) +(\S.*?):?$", usage, re.M))
    shell = (values(argv, "--print_completion") or [""])[0]
    return script(shell, {name: texts.get(name, "") for name in commands})


def script(shell: str, commands: Mapping[str, str]) -> str:
    """Return a script that makes a shell complete raafl's commands and options when the user presses Tab.

    Raises:
        BadInput: ``shell`` is not one of these three.
    """
    if shell not in SHELLS:
        raise BadInput(
            f"print_completion is '{shell}', not a supported shell: give {', '.join(SHELLS[:-1])} or {SHELLS[-1]}"
        )
    import shtab

    text: str = shtab.complete(_parser(commands, shtab), shell=shell)
    return text


def _parser(commands: Mapping[str, str], shtab: Any) -> argparse.ArgumentParser:
    """Build a parser of all commands with the names of their options, from which shtab generates completions."""
    from raafl.algorithms import ALGORITHMS

    parser = argparse.ArgumentParser(prog="raafl")
    parser.add_argument("--version", action="store_true", help="print the version")
    parser.add_argument("--print_completion", choices=SHELLS, help="print a completion script")
    parser.add_argument("--log", choices=LOG_FORMATS, help="form of the log on standard error")
    added = parser.add_subparsers()
    for command, text in commands.items():
        one = added.add_parser(command, help=text, description=text, add_help=False, parents=_own_parser(command))
        for action in one._actions:
            if action.type is Path or not _FILES.isdisjoint(action.option_strings):
                vars(action)["complete"] = shtab.DIRECTORY if action.metavar in ("RUN", "DIR") else shtab.FILE
        options: dict[str, tuple[str, list[str]]] = {}
        if command in _CONFIG_COMMANDS:
            options = {name: (text, known) for name, text, known in _fields(command)} | {"--trust_config": ("", [])}
        if command == "fit":
            options |= dict.fromkeys(("--local", "--max_restarts"), ("", []))
        for name, (text, known) in options.items():
            if not any(name in action.option_strings for action in one._actions):
                _add(one, name, text, known, shtab)
        if command == "algorithms":
            one.add_argument("--json", action="store_true")
            one.add_argument("names", nargs="*", choices=[*ALGORITHMS, "auto"])
        if not any("--help" in action.option_strings for action in one._actions):
            one.add_argument("-h", "--help", action="help")
    return parser


def _own_parser(command: str) -> list[argparse.ArgumentParser]:
    """Return a list with the parser of a command's own options, which are no fields of a config; empty if it has none."""
    if command in _REMOTE_COMMANDS:
        return [remote_options.parser(command)]
    if command == "submit":
        return [importlib.import_module("raafl.commands.runs").parser("submit")]
    if command not in _OWN_PARSERS:
        return []
    found: argparse.ArgumentParser = importlib.import_module(f"raafl.commands.{command}").parser()
    return [found]


def _add(parser: argparse.ArgumentParser, name: str, text: str, known: list[str], shtab: Any) -> None:
    if name in ("--help", "-h"):
        return
    text = text.replace("%", "%%")
    if name in _FLAGS:
        parser.add_argument(name, action="store_true", help=text)
        return
    action = parser.add_argument(name, help=text, choices=known or None)
    if name in _FILES:
        vars(action)["complete"] = shtab.FILE
    elif name in _FOLDERS:
        vars(action)["complete"] = shtab.DIRECTORY


def _fields(command: str) -> Iterator[tuple[str, str, list[str]]]:
    """Yield each config option of a command with its help text and, if they are few, its allowed values."""
    from raafl.algorithms import ALGORITHMS
    from raafl.commands.listing import documented_arguments
    from raafl.config.parse import make_parser

    for action in make_parser(command)._actions:
        for name in action.option_strings:
            if not name.startswith("--") or name.endswith((".help", "+")):
                continue
            known = [*ALGORITHMS, "auto"] if name == "--algorithm" else _values(getattr(action, "_typehint", None))
            text = action.help if isinstance(action.help, str) and action.help != argparse.SUPPRESS else ""
            yield name, text, known
    seen = set()
    for factory in ALGORITHMS.values():
        texts = {name: text.partition("\n")[0] for name, text in documented_arguments(factory)}
        for argument in inspect.signature(factory).parameters:
            if argument not in seen:
                seen.add(argument)
                yield f"--algorithm.{argument}", texts.get(argument, ""), []


def _values(hint: object) -> list[str]:
    """List the values that a type hint allows, if it is a Literal or bool, with null if it also allows None; else nothing."""
    if hint is bool:
        return ["true", "false"]
    if get_origin(hint) is Literal:
        return [str(value) for value in get_args(hint)]
    parts = get_args(hint)
    if parts and type(None) in parts:
        found = [_values(part) for part in parts if part is not type(None)]
        return [*found[0], "null"] if len(found) == 1 and found[0] else []
    return []
