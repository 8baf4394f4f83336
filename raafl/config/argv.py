"""Read command-line options (`--option VALUE` or `--option=VALUE`) without the parser of configs, which needs torch."""

from __future__ import annotations

import errno
import os
import re
import socket
from argparse import ArgumentError, ArgumentParser, Namespace
from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import NoReturn

from raafl.errors import BadInput, nearest, one_of, parse_address

LOG_FORMATS = ("text", "json")


def options_of(parser: ArgumentParser, argv: Sequence[str]) -> Namespace:
    """Parse the arguments of a command; ``parser`` must have ``exit_on_error=False``.

    Raises:
        BadInput: an option is wrong or unknown.
    """
    options, unknown = own_options(parser, argv)
    if unknown:
        raise BadInput(f"unknown option '{unknown[0]}': {parser.prog} --help lists the options")
    return options


def own_options(parser: ArgumentParser, argv: Sequence[str]) -> tuple[Namespace, list[str]]:
    """Parse the options that ``parser`` knows; return them, and all other arguments.

    Raises:
        BadInput: an option is wrong, or a required one is missing.
    """

    def refuse(message: str) -> NoReturn:
        raise BadInput(f"{message}: {parser.prog} --help lists the options")

    vars(parser)["error"] = refuse  # argparse's own `error` prints and ends the process
    try:
        return parser.parse_known_args(list(argv))
    except ArgumentError as error:
        refuse(f"{error.argument_name}: {error.message}")


def name_of(item: str) -> str:
    """Return the name of the option in an argument such as `--option` or `--option=VALUE`."""
    return item.partition("=")[0]


def values(argv: Sequence[str], option: str) -> list[str]:
    """Return all values that the arguments give for an option; an option at the end, without a value, gives ""."""
    return [
        item.partition("=")[2] if "=" in item else following
        for item, following in zip(argv, [*argv, ""][1:], strict=True)
        if name_of(item) == option
    ]


def whole_number(option: str, text: str, least: int = 1) -> int:
    """Parse the value of an option as a whole number; raise `BadInput` unless it is at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise BadInput(f"{option} is '{text}': give a whole number from {least}")
    return int(text)


def names_section(argv: Sequence[str], section: str) -> bool:
    """Check whether the arguments set a section of the config, or a field in it, such as `--data` or `--data.batch_size`."""
    return any(name_of(item).split(".")[0] == section for item in argv)


def without(argv: Sequence[str], *options: str) -> list[str]:
    """Return the arguments without the given options and their values."""
    kept: list[str] = []
    items = iter(argv)
    for item in items:
        if name_of(item) not in options:
            kept.append(item)
        elif "=" not in item:
            next(items, None)
    return kept


def _value(item: str, items: Iterator[str], needs: str) -> str:
    """Return an option's value, which stands behind its ``=`` or is the next of ``items``; raise `BadInput` if there is none."""
    option, sign, value = item.partition("=")
    value = value if sign else next(items, "")
    if not value or value.startswith("--"):
        raise BadInput(f"{option} needs {needs}")
    return value


def expand_algorithm(argv: Sequence[str]) -> list[str]:
    """Replace the name in `--algorithm NAME` by the import path of the algorithm's factory; return the new arguments.

    Raises:
        BadInput: no algorithm has that name.
    """
    from raafl.algorithms import ALGORITHMS

    expanded: list[str] = []
    items = iter(argv)
    for item in items:
        option = name_of(item)
        if option == "--algorithm.help":
            raise BadInput(
                "--algorithm.help does not exist: run `raafl algorithms NAME` for the arguments of an algorithm"
            )
        if option == "--algorithm":
            name = _value(item, items, f"a name: {', '.join(sorted(ALGORITHMS))}")
            if "." not in name and not name.startswith("{"):
                one_of("algorithm", name, [*ALGORITHMS, "auto"])
                name = f"raafl.{name}"
            item = f"{option}={name}"
        expanded.append(item)
    return expanded


def expand_trainer(argv: Sequence[str]) -> list[str]:
    """Replace `--trainer PATH` and `--trainer.ARGUMENT VALUE` by options of the model and the data that come from a Trainer.

    Raises:
        BadInput: an option has no value.
    """
    expanded: list[str] = []
    items = iter(argv)
    for item in items:
        option = name_of(item)
        section, _, name = option.partition(".")
        if section != "--trainer":
            expanded.append(item)
            continue
        value = _value(item, items, f"a value, such as {option} {'1e-3' if name else 'my_script.make_trainer'}")
        name = name.removeprefix("init_args.").removeprefix("class_path")
        for part, cls in (("--model", "Model"), ("--data", "Data")):
            made = [f"{part}=raafl.local.from_trainer.{cls}", f"{part}.trainer={value}"]
            expanded += [f"{part}.arguments.{name}={value}"] if name else made
    return expanded


def add_replay_options(parser: ArgumentParser) -> None:
    """Add the options that are common to all commands that replay runs."""
    parser.add_argument("--workers", type=int, default=1, help="processes that train")
    parser.add_argument(
        "--client_data",
        action="append",
        default=[],
        metavar="ID=FILE",
        help="YAML file with the data section of a client that trained on data of its own; once for each",
    )
    parser.add_argument(
        "--trust_config", action="store_true", help="import what the run's config names, though it is not raafl's own"
    )


_HERE = Path(__file__).parents[1]
_FOLDERS = (_HERE / "configs", _HERE.parent / "configs")  # shipped configs in a wheel, in a checkout


def folder() -> Path:
    """Return the folder of the configs that are part of raafl."""
    return next((path for path in _FOLDERS if (path / "quickstart.yaml").is_file()), _FOLDERS[0])


def shipped() -> dict[str, Path]:
    """Return the paths of the configs that are part of raafl, by name."""
    return {file.stem: file for file in sorted(folder().glob("*.yaml"))}


def with_paths(argv: Sequence[str]) -> list[str]:
    """Replace the name after each `--config` (NAME or configs/NAME.yaml) by the path of raafl's own config of that name.

    A file in the current folder takes precedence.

    Raises:
        BadInput: there is neither a file nor a config of raafl with that name.
    """
    found: list[str] = []
    for item, before in zip(argv, ["", *argv], strict=False):
        option, sign, value = item.partition("=")
        if before == "--config":
            found.append(_path(item))
        elif option == "--config" and sign:
            found.append(f"{name_of(item)}={_path(value)}")
        else:
            found.append(item)
    return found


def _path(value: str) -> str:
    named = re.fullmatch(r"(?:configs/)?([\w-]+?)(\.yaml)?", value)
    if named is None or value.startswith("-") or Path(value).exists():
        return value
    known = shipped()
    if named[1] in known:
        return str(known[named[1]])
    if named[2] or "/" in value:
        return value
    raise BadInput(
        f"config is '{value}', which is neither a file nor a config that comes with raafl: {nearest(value, known)}"
    )


def check_writable(option: str, path: Path) -> None:
    """Raise `BadInput` unless a file can be written at ``path``, before the work begins whose result it will hold."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, os.strerror(errno.EISDIR))
        with NamedTemporaryFile(dir=path.parent, prefix=f".{path.name}."):
            pass
    except OSError as error:
        raise not_written(option, path, error) from None


def not_written(option: str, path: Path, error: OSError) -> BadInput:
    """Return the error for a file that an option names, and that cannot be written."""
    return BadInput(f"{option} is '{path}', which cannot be written ({error.strerror or error}): name another file")


def resolves(text: str) -> None:
    """Raise `BadInput` unless ``text`` is HOST:PORT and this machine can resolve the host name."""
    host, port = parse_address(text)
    try:
        socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        why = getattr(error, "strerror", None) or error
        raise BadInput(
            f"address is '{text}', whose host is not found ({why}): correct its name, or give an IP address"
        ) from None
