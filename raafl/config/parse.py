"""Parse an experiment from YAML files and the command line with jsonargparse; each error becomes one clear line."""

from __future__ import annotations

import os
import re
import sys
import threading
import traceback
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from copy import deepcopy
from dataclasses import MISSING, asdict, dataclass, fields
from functools import cache, partial
from itertools import pairwise
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from raafl.config.argv import expand_algorithm, expand_trainer, name_of, names_section, values
from raafl.config.check import MADE, OF_TRAINER, beside_trainer, with_class_path
from raafl.config.experiment import ABOUT, SECTIONS, Experiment, field_types
from raafl.config.options import Group
from raafl.errors import USER_ERRORS, BadInput, cause, nearest, user_frame
from raafl.lean_import import PACKAGES
from raafl.plain_yaml import dump_yaml, load_yaml, read_yaml
from raafl.sanitize import is_url

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser, Namespace

_EPILOG = """\
Options win over the file. CLASS is the path of a class, such as model_zoo.MLP or my_module.MyModel; NAME is one that
`raafl algorithms` lists. The arguments of the parts are options too: --model.lr 0.1 --algorithm.alpha 0.5
--partition.alpha 1. Another --algorithm than the file's keeps the arguments that both take and drops the others.
What a part takes is said by --model.help CLASS, --data.help CLASS, --partition.help CLASS, --devices.help and
`raafl algorithms NAME`. --resume RUN takes the config of that run; where that names classes that are not raafl's own, add
--trust_config if you trust who made the folder: they choose what code runs."""
TRUST = "--trust_config"
# jsonargparse works in the config's folder, by os.chdir, and with functions and settings that are set here
_PARSING = threading.RLock()
NEEDS_CONFIG = "{0} needs a config: give --config FILE (raafl {0} --help lists every field)"
_LOCAL = """
--local N starts a server and N clients on this machine, without torchrun (--clients is then N); a rank that dies is
started again, --max_restarts times in all (100)."""

GROUPS: dict[Group, str] = {
    "who": "who trains what",
    "end": "when it ends (the first that comes)",
    "shown": "what is measured, kept and shown",
    "computed": "how it is computed",
    "other": "",
}
"""The headings of `--help`."""


@dataclass(frozen=True, slots=True)
class Parsed:
    """Result of parsing a command line: the experiment, and its config as text."""

    experiment: Experiment
    config_yaml: str
    as_json: bool


@cache  # building the parser takes a quarter of the time of reading a config
def make_parser(command: str, packages: tuple[str, ...] = ("lightning",), *, plain: bool = False) -> ArgumentParser:
    """Create the parser of a command: `--config FILE`, and an option for every field of `Experiment`."""
    import jsonargparse

    parts = {} if plain else _part_types()
    jsonargparse.set_parsing_settings(
        subclasses_enabled=[parts[name] for name in ("Algorithm", "Partition") if name in parts],
        instantiate_subclass_spec_in_any=False,  # without a declared type, a value stays plain data
        # the list is empty, since raafl checks imports itself: no config may name os.system, subprocess, pickle and the
        # like
        import_path_denylist=[],
    )
    parser = _parser_class()(
        prog=f"raafl {command}",
        parser_mode=_parser_mode(),
        usage=f"raafl {command} --config FILE [--FIELD VALUE ...] [--json]",
        epilog=_EPILOG + _own_options(command),
        formatter_class=_formatter(),
        exit_on_error=False,
        allow_abbrev=False,
    )
    parser.add_argument("--config", action="config", metavar="FILE", help="a YAML file with any of the fields below")
    parser.add_argument("--json", action="store_true", help="print the summary, and nothing else, on standard output")
    hints = field_types(**parts)
    for package in packages[1:]:
        hints["model"] |= Callable[[], sys.modules[package].LightningModule]
        hints["data"] |= Callable[[], sys.modules[package].LightningDataModule]
    # loggers stay plain data here, since only the server creates them, later
    hints["logger"] = str | dict[str, Any] | list[str | dict[str, Any]] | None
    groups = {group: parser.add_argument_group(title) if title else parser for group, title in GROUPS.items()}
    for field in sorted(fields(Experiment), key=lambda field: [*GROUPS].index(ABOUT[field.name].group)):
        about = ABOUT[field.name]
        options: dict[str, Any] = {"help": about.help}
        options["type"] = _as_it_is if plain and field.name in MADE else hints[field.name]
        if about.metavar is not None:
            options["metavar"] = about.metavar
        if field.name == "clients":  # None becomes the number of devices, see `_count_clients`
            options["type"] = int | None
        elif field.name == "partition":
            options["default"] = None if plain else {"class_path": "raafl.data.Iid"}
        elif field.default is not MISSING:
            options["default"] = field.default
        elif field.name not in SECTIONS:  # the fields of a section have their own defaults
            options["required"] = not plain
        groups[about.group].add_argument(f"--{field.name}", **options)
    return parser


def _own_options(command: str) -> str:
    """Return help text about the options of a command that are not fields of the config."""
    if command not in ("serve", "join"):
        return _LOCAL if command == "fit" else ""
    from raafl.config.remote_options import JOIN, SERVE

    return SERVE if command == "serve" else JOIN


@cache
def _parser_mode() -> str:
    """Register a YAML loader that accepts short names of methods (`fed_avg`) as class paths, and a writer of YAML.

    Returns the name that both have for jsonargparse.
    """
    import jsonargparse
    import yaml

    load = jsonargparse.get_loader("yaml")

    def load_config(text: str, path: str = "") -> Any:
        # text without a path is the value of an option, and no config file
        return with_class_path(load(text)) if path else load(text)

    jsonargparse.set_loader("raafl", load_config, exceptions=(yaml.YAMLError,))
    jsonargparse.set_dumper("raafl", partial(dump_yaml, default_flow_style=False, allow_unicode=True))
    return "raafl"


@cache
def _parser_class() -> type[ArgumentParser]:
    """Return a parser that writes a config from which parsing makes the same values.

    Where a parameter takes any value, jsonargparse reads each text within a list or mapping as YAML once more when it
    writes: "no" became false, so that a replay and the clients had other values than the run.
    """
    import jsonargparse

    class Parser(jsonargparse.ArgumentParser):
        """Parser of jsonargparse that does not read texts again while it writes."""

        def dump(self, *args: Any, **options: Any) -> str:
            """Write a namespace as YAML."""
            with _replaced("parse_value_or_config", lambda value, **_: (value, None)):
                return str(super().dump(*args, **options))

    return Parser


def _as_it_is(value: object) -> object:
    """Return the value unchanged: as an option's type, unlike `Any`, this keeps jsonargparse from importing class paths."""
    return value


def _part_types() -> dict[str, Any]:
    """Import the types of the fields that name a class, and return them by name."""
    from raafl.lean_import import import_lightning

    import_lightning()
    from lightning import LightningDataModule, LightningModule

    from raafl.core.algorithm import Algorithm
    from raafl.data.partition import Partition

    found = (LightningModule, LightningDataModule, Algorithm, Partition)
    return {one.__name__: one for one in found}


def _formatter() -> type[Any]:
    """Return jsonargparse's help formatter, changed to omit types and class paths that help texts already contain."""
    import argparse

    import jsonargparse

    class Formatter(jsonargparse.DefaultHelpFormatter, argparse.RawDescriptionHelpFormatter):
        def _get_help_string(self, action: argparse.Action) -> str:
            text = (action.help or "").rstrip(".")
            if "Print the configuration" in text:
                return "print the whole config and stop"
            if isinstance(action, argparse._HelpAction):
                return "print this and stop"
            hidden = action.default is None or action.default is False or action.default == argparse.SUPPRESS
            shown = not hidden and isinstance(action.default, bool | int | float | str)
            return f"{text} (default: %(default)s)" if shown else text

        def add_argument(self, action: argparse.Action) -> None:
            names = action.option_strings
            if not any(n.endswith(".help") for n in names) and "configuration file" not in (action.help or ""):
                super().add_argument(action)

        def _format_action_invocation(self, action: argparse.Action) -> str:
            if "--print_config" in action.option_strings:
                return "--print_config"
            return re.sub(r", --[\w.]+\+.*", "", super()._format_action_invocation(action))

    return Formatter


def parse(command: str, argv: Sequence[str], *, config_yaml: str | None = None) -> Parsed:
    """Parse a command line into an experiment.

    Args:
        command: name of the command, whose options are parsed.
        argv: arguments of the command. A run that is resumed without `--config` uses the config in its folder.
        config_yaml: text of a config that was checked by `raafl.config.trust`; options override it.

    Raises:
        BadInput: an option or value is wrong. Or a run is to be resumed without `--trust_config`, its config names
            classes that are not part of raafl, and this user has not run it here.
        SystemExit: `--help` or `--print_config` was given.
    """
    trusted = TRUST in argv
    argv = expand_trainer(expand_algorithm(expand_short([item for item in argv if item != TRUST])))
    if config_yaml is None and (folder := _resumed(argv)) is not None:
        from raafl.config.trust import SENDS, is_trusted, of_folder

        trusted = is_trusted(folder, asked=trusted)
        # an untrusted config must not choose a hub to which this user's model is uploaded
        config_yaml = of_folder(folder, trusted=trusted, without=() if trusted else SENDS)
    argv = _with_recorded_rules(argv)
    if not argv and config_yaml is None:
        raise BadInput(NEEDS_CONFIG.format(command))
    _find_project_modules()
    hidden = None
    with _PARSING, ExitStack() as stack:
        stack.enter_context(_replaced("deepcopy", _without_lists))
        if config_yaml is not None:
            if not trusted and not _names_own(argv):
                from raafl.config.trust import imports_only, paths

                stack.enter_context(imports_only(paths()))
            file = Path(stack.enter_context(TemporaryDirectory(prefix="raafl-"))) / "config.yaml"
            file.write_text(config_yaml, encoding="utf-8")
            hidden = str(file)
            argv = ["--config", hidden, *argv]
        known = _packages()
        try:
            namespace, text, made = _read(make_parser(command, known), config_first(argv), hidden)
        except BadInput:
            if _packages() == known:
                raise
            # a class in the config imported the other Lightning package, so parse again with a parser for both packages
            namespace, text, made = _read(make_parser(command, _packages()), config_first(argv), hidden)
        made_fields = {field.name: made[field.name] for field in fields(Experiment)}
        _check_made(namespace, made_fields)
        others = [name for name in ("model", "data") if not _is_of_trainer(getattr(namespace, name, None))]
        if len(others) == 1:
            raise beside_trainer(others[0])
        if not others:
            import yaml

            from raafl.local.from_trainer import said_by_trainer

            tree = yaml.safe_load(text)
            said = said_by_trainer(tree, _set_options(config_first(argv)))
            made_fields |= said
            text = dump_yaml(tree | {**said, "fabric": asdict(said["fabric"])})
    return Parsed(Experiment(**made_fields), text, bool(namespace.json))


def _check_made(namespace: Namespace, made: Mapping[str, Any]) -> None:
    """Raise `BadInput` if a function of the config returned another object than its annotation says, such as None."""
    from raafl.core.algorithm import Algorithm
    from raafl.data.partition import Partition

    for name, base in (("algorithm", Algorithm), ("partition", Partition)):
        if not isinstance(made[name], base):
            path, returned = getattr(namespace[name], "class_path", None), made[name]
            what = "None" if returned is None else f"an object of type {type(returned).__name__}"
            raise BadInput(f"{name} is {path}, which returned {what}: let it return an instance of {base.__name__}")


def _is_of_trainer(section: Any) -> bool:
    """Check whether a config's section stands for what a Trainer has."""
    return str(getattr(section, "class_path", "")).startswith(OF_TRAINER)


@contextmanager
def _replaced(name: str, function: Callable[..., Any]) -> Iterator[None]:
    """Replace a function that jsonargparse's `_typehints`, which is private, calls."""
    from jsonargparse import _typehints

    typehints: Any = _typehints
    before = getattr(typehints, name)
    setattr(typehints, name, function)
    try:
        yield
    finally:
        setattr(typehints, name, before)


def _without_lists(value: Any) -> Any:
    """Copy a value, but not the lists that a call of `adapt_typehints` for an entry of a list has had before and was given.

    It only reads these. jsonargparse copies them for each entry, which takes minutes for a thousand devices.
    """
    if not isinstance(value, dict) or "orig_val" not in value:
        return deepcopy(value)
    whole = {name: value[name] for name in ("orig_val", "prev_val") if isinstance(value.get(name), list)}
    return {**deepcopy({name: one for name, one in value.items() if name not in whole}), **whole}


def _set_options(argv: Sequence[str]) -> set[str]:
    """Return the names of the fields that options or config files set, also to their defaults, such as fabric.precision."""
    found = {name_of(item).removeprefix("--") for item in argv}
    for path in values(argv, "--config"):
        tree = read_yaml(Path(path), f"config {path}")
        found |= {*tree, *(f"fabric.{name}" for name in tree.get("fabric") or ())}
    for text in values(argv, "--fabric"):  # the section as a whole: a mapping, or the file that has it
        section = read_yaml(Path(text), f"fabric {text}") if os.path.isfile(text) else load_yaml(text)
        found |= {f"fabric.{name}" for name in section}
    return found


def _packages() -> tuple[str, ...]:
    return tuple(package for package in PACKAGES if package == "lightning" or package in sys.modules)


def _read(parser: ArgumentParser, argv: list[str], hidden: str | None) -> tuple[Namespace, str, Namespace]:
    """Parse ``argv``; return the namespace, its YAML text, and the namespace with its objects instantiated."""
    from argparse import ArgumentError

    try:
        namespace = parser.parse_args(argv)
        # the config has a single value in place of a section, as in `train: 5`
        if single := [name for name in SECTIONS if not hasattr(namespace[name], "as_dict")]:
            raise ValueError(f"{single[0]} is a single value: give its fields (see --help)")
        _count_clients(namespace)
        # the text keeps nulls, and needs no validation, since the values were validated above
        text = str(parser.dump(namespace, skip_unset=False, skip_validation=True))
    except (ArgumentError, ValueError, TypeError) as error:
        raise BadInput(_explained(f"the config is refused: {error}", parser, argv, hidden)) from error
    except USER_ERRORS as error:
        if not user_frame(error):
            raise
        raise BadInput(_explained(f"the config is refused: {cause(error)}", parser, argv, hidden)) from error
    try:
        return namespace, text, parser.instantiate(namespace)
    except BadInput:
        raise
    except USER_ERRORS as error:
        if user_frame(error):
            raise BadInput(_explained(_failed(error, namespace), parser, argv, hidden)) from error
        if not isinstance(error, ArgumentError | ValueError | TypeError):
            raise
        # a constructor has raised this error, which jsonargparse may have wrapped in a message of its own
        raise BadInput(_explained(str(error), parser, argv, hidden)) from error


def _explained(text: str, parser: ArgumentParser, argv: Sequence[str], hidden: str | None) -> str:
    """Rewrite an error message of jsonargparse or raafl so that it names field and remedy."""
    from raafl.config.messages import explain

    found, names = explain(text, parser, argv, hidden), {*map(name_of, argv)}
    of_trainer = [name for name in names if name.replace("--model.arguments.", "--data.arguments.") in names - {name}]
    if of_trainer and re.search(r"unknown field (model|data)\.arguments|arguments: --arguments\.", found):
        name = f"trainer.{min(of_trainer).removeprefix('--model.arguments.')}"
        return f"{name} is given, but no trainer: add --trainer MODULE.FUNCTION, or trainer to the config"
    return found


def _count_clients(namespace: Namespace) -> None:
    """Set the number of clients if it is missing: the number of devices or, without devices, the default."""
    if namespace.clients is not None:
        return
    namespace.clients = next(field.default for field in fields(Experiment) if field.name == "clients")
    if namespace.devices is None:
        return
    from raafl.devices.files import num_devices

    try:
        namespace.clients = num_devices(namespace.devices) or namespace.clients
    except (OSError, ValueError):
        return  # `Experiment.check` reports this error


def _failed(error: BaseException, namespace: Namespace) -> str:
    """Describe an error; if the user's code for a section of the config has raised it, name that section."""
    files = {frame.filename for frame in traceback.extract_tb(error.__traceback__)}
    for name in MADE:
        path = str(getattr(namespace[name], "class_path", None))
        if getattr(sys.modules.get(path.rpartition(".")[0]), "__file__", None) in files:
            return f"{name} is {path}, which cannot be made: {cause(error)}"
    return f"the config is refused: {cause(error)}"


def load_run(folder: Path, *overrides: str, trusted: bool, for_replay: bool = False) -> Experiment:
    """Load the experiment of a run folder, whose config may come from another person.

    Raises:
        BadInput: the config is invalid; or it names classes that are not part of raafl, ``trusted`` is False, and this
            user has not run it here.
    """
    from raafl.config.trust import is_trusted, of_folder

    trusted = is_trusted(folder, asked=trusted)
    unused = {name for name, one in ABOUT.items() if not one.used_by_replay} if for_replay else ()
    text = of_folder(folder, trusted=trusted, without=unused)
    return parse("simulate", [*overrides, *([TRUST] if trusted else [])], config_yaml=text).experiment


def _names_own(argv: Sequence[str]) -> bool:
    """Check whether options name a class outside raafl, or a config file, which may contain one."""
    from raafl.config.trust import paths

    known = set(paths())
    sections = ("--model", "--data", "--partition", "--algorithm")
    said = [
        item + " " + after
        for item, after in pairwise([*argv, ""])
        if any(names_section([item], one) for one in sections)
    ]
    named = {path for text in said for path in re.findall(r"[A-Za-z_]\w*(?:\.[A-Za-z_]\w*)+", text)}
    return bool(values(argv, "--config") or named - known)


def load_experiment(path: str | os.PathLike[str], *overrides: str) -> Experiment:
    """Load the experiment of a YAML file.

    Args:
        path: path of the file.
        overrides: options, as on the command line, that override the file.

    Raises:
        BadInput: the file or an option is invalid.
    """
    return parse("simulate", ["--config", str(path), *overrides]).experiment


def _find_project_modules() -> None:
    """Add the current folder to the import path, as `python -m` does, so that class paths can name modules in it."""
    here = str(Path.cwd())
    if here not in sys.path and "" not in sys.path:
        sys.path.insert(0, here)


def expand_short(argv: Sequence[str]) -> list[str]:
    """Write short forms out: `--strict` without a value as `--strict=true`, `--engine ray` as `--engine.name ray`.

    Raises:
        BadInput: an argument of a logger is an option of its own, which jsonargparse would take for a field of the logger.
    """
    for option in map(name_of, argv):
        if option.startswith("--logger.") and option not in ("--logger.class_path", "--logger.init_args"):
            given = f"'{{class_path: wandb, init_args: {{{option.rpartition('.')[2]}: VALUE}}}}'"
            raise BadInput(f"unknown option {option}: give a logger and its arguments as one value, --logger {given}")
    words = [
        "--engine.name" if item == "--engine" and after.isalpha() else item for item, after in pairwise([*argv, ""])
    ]
    argv = [
        f"--engine.name={value}" if name == "--engine" and value.isalpha() else item
        for item, (name, _, value) in ((item, item.partition("=")) for item in words)
    ]
    alone = [item == "--strict" and after.startswith("--") for item, after in pairwise([*argv, "--"])]
    return [f"{item}=true" if bare else item for item, bare in zip(argv, alone, strict=True)]


def _resumed(argv: Sequence[str]) -> Path | None:
    """Return the run folder of `--resume RUN`; None without this option, or if `--config` is given, too.

    Raises:
        BadInput: it is no run folder, or `--output` names another one.
    """
    named, output = values(argv, "--resume"), values(argv, "--output")
    if named and output:
        check_output(output[-1], named[-1])
    if not named or values(argv, "--config"):
        return None
    folder = Path(named[-1])
    if not (folder / "config.yaml").is_file():
        raise BadInput(f"resume is '{folder}', which is not a run folder: name one with a config.yaml")
    return folder


def check_output(output: str | None, resume: str) -> None:
    """Raise `BadInput` if a run would be resumed with another folder as ``output`` than its own, ``resume``."""
    if output is not None and not is_url(output) and Path(output).resolve() != Path(resume).resolve():
        raise BadInput(
            f"output is '{output}', but a run that is resumed goes on in its own folder, '{resume}': leave output out, or "
            "copy that folder first, and resume the copy"
        )


def _with_recorded_rules(argv: list[str]) -> list[str]:
    """Add the resumed run's rules version to the options if these name another config, which may lack that version."""
    resumed = values(argv, "--resume")[-1:]
    if not resumed or not values(argv, "--config") or values(argv, "--rules"):
        return argv
    if not (Path(resumed[0]) / "config.yaml").is_file():
        return argv
    import yaml

    from raafl.config.trust import of_folder

    recorded = yaml.safe_load(of_folder(Path(resumed[0]), trusted=True))
    return [*argv, "--rules", str(recorded["rules"])]


def config_first(argv: Sequence[str]) -> list[str]:
    """Move each `--config FILE` to the front, so that options override files in any order; return the new arguments.

    Raises:
        BadInput: a file is missing, is a folder, or does not contain a mapping.
    """
    files, rest = [], []
    items = iter(argv)
    for item in items:
        if item == "--config":
            file = next(items, None)
            if file is None:
                raise BadInput("--config needs a file, for example --config configs/quickstart.yaml")
            files.append(file)
        elif item.startswith("--config="):
            files.append(item.partition("=")[2])
        else:
            rest.append(item)
    for file in files:
        _check_config(file)
    return [*(f"--config={file}" for file in files), *rest]


def _check_config(file: str) -> None:
    """Raise `BadInput` unless ``file`` is a YAML file with a mapping of fields."""
    path = Path(file)
    if path.is_dir():
        raise BadInput(f"config is '{file}', which is a folder: {_other_configs(path / 'x')}")
    if not path.is_file():
        raise BadInput(f"config is '{file}', which does not exist: {_other_configs(path)}")
    try:
        content = read_yaml(path, f"config {file}")
    except OSError as error:
        raise BadInput(f"config {file} cannot be read ({error.strerror}): name a YAML file") from None
    if not isinstance(content, dict):
        held = "nothing" if content is None else f"{content!r:.40}"
        raise BadInput(f"config {file} holds {held}: write fields, with lines such as `clients: 4`")


def _other_configs(path: Path) -> str:
    from raafl.config.messages import relative

    folders = [path.parent, Path("configs")]
    known = {relative(str(file)) for folder in folders for file in folder.glob("[!.]*.y*ml") if folder.is_dir()}
    return nearest(relative(str(path)), known) if known else "give the path of a YAML file"


# Check the plain values of a command line (numbers, texts, names of fields) before torch is imported.
#
# Model, data, algorithm and partition are left to the full parsing in `raafl.config.parse`, whose parser and messages it uses.
