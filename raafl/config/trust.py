"""Check a config from another person: it may contain only names from `registry` and plain values.

What is checked is the parsed tree, every value against the signature of what it is for. What cannot be a value of the
declared type is refused, so that nothing is left which a later parser could read as a class path, a file or a config of its
own. `from_server` is for a config that came over the wire: it may say nothing of this machine either (files, folders, hub
names). `of_folder` is for the config of a run folder.
"""

from __future__ import annotations

import importlib
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Final, NoReturn

from raafl import data, parts
from raafl.algorithms import ALGORITHMS
from raafl.config.check import MADE, Check, with_class_path
from raafl.config.experiment import ABOUT, marked
from raafl.config.own_runs import is_own
from raafl.config.problems import ACCELERATORS
from raafl.core.options import CAPTURES
from raafl.errors import BadInput, RunFailed, briefly, nearest
from raafl.plain_yaml import LARGEST, dump_yaml, inside, load_untrusted_yaml
from raafl.rules import recorded_revision
from raafl.sanitize import sanitize_text

_MOST = {f"Experiment.{name}": one.most for name, one in ABOUT.items() if one.most} | {"Device.count": 1_000_000}
"""Largest value that a server's config may give, by field; larger ones would only use up a client's resources."""
_MAX_TEXT = 200_000
SENDS: Final = ("output", "push_to_hub")
"""Fields that send a run's results elsewhere; only a config of this user's own may set them."""
REACHES: Final = {
    "Privacy.seed_file": "write",
    "ca2fl.memory_folder": "write",
    "ram_fed.memory_folder": "write",
    "Experiment.monitor": "open",
}
"""What the server would do to a file or port that a parameter names, by parameter; nobody else's config may have these."""
_NUMBER: Final = re.compile(r"[+-]?(\d+\.?\d*|\.\d+)(e[+-]?\d+)?|[+-]?\.?inf|\.?nan", re.I | re.A)
_WORD: Final = re.compile(r"\w[\w .+-]{0,99}", re.A)
_DOTTED: Final = re.compile(r"[\w-]{1,60}(\.[\w-]{1,60}){0,20}", re.A)
_PACKAGE: Final = re.compile(r"package:[A-Za-z_]\w*(/\w[\w.-]*)*", re.A)
_FIELD: Final = re.compile(r"[a-z][a-z0-9_]{0,60}", re.A)

Text = Callable[[str], bool]
"""Function that returns whether a server may give this text for a parameter."""

_TEXTS: Final[Mapping[str, Text]] = {
    **{
        f"{name}.tokenizer": lambda text: text in ("words", "bytes") or _is(_PACKAGE, text)
        for name in ("AGNews", "FPB", "FineTuning", "SST2")
    },
    "FineTuning.path": "made:sums".__eq__,
    **{
        f"{name}.name_or_path": lambda text: text == "made:llama" or _is(_PACKAGE, text)
        for name in ("HFCausalLM", "HFImageClassifier", "HFSeq2SeqLM", "HFSequenceClassifier")
    },
    "ByColumn.column": lambda text: _is(_WORD, text),
    "Device.name": lambda text: _is(_WORD, text),
    "Experiment.memory": ("measure", "none").__contains__,
    "FabricOptions.accelerator": ACCELERATORS.__contains__,
    "FabricOptions.capture": CAPTURES.__contains__,
    "FabricOptions.precision": lambda text: _is(_WORD, text),
    "LoRA.target_modules": lambda text: _is(_DOTTED, text),
    "split_fed.cut": lambda text: _is(_DOTTED, text),
}
"""Texts that a server may give, by parameter; a parameter that is missing here takes no text."""

_ARCHITECTURE_TEXTS: Final = (
    "activation",
    "activation_function",
    "hidden_act",
    "hidden_activation",
    "layer_type",
    "layer_types",
    "model_type",
    "position_embedding_type",
    "rope_type",
)
"""Fields of a transformers config that may be texts; others name files, repositories or kernels on the hub."""

_NEVER: Final = (
    "class_path",
    "auto_map",
    "cache_dir",
    "code_revision",
    "gguf_file",
    "proxies",
    "quantization_config",
    "return_unused_kwargs",
    "revision",
    "subfolder",
    "token",
)
"""Fields that a server's architecture may not have: `from_pretrained` would take them as its own arguments."""

_WITH_KERNELS: Final = ("mra", "rwkv", "yoso")
"""Model types of transformers whose code fetches a compute kernel when it is imported."""

_LOGGERS_TAKE: Final = ("name", "project", "offline", "prefix", "experiment_name", "group", "job_type", "notes", "tags")
"""Arguments of a logger that name neither an account nor a folder."""


class UntrustedValue(ValueError):
    """Raised for a value in an untrusted config that is neither a registered name nor plain data of the field's type."""


class UnknownName(UntrustedValue):
    """Raised for a field or argument that raafl does not have, which no trust in the config's author makes valid."""


def from_server(text: str) -> str:
    """Check a config received from a server; return the sections that a client needs, as YAML.

    Raises:
        RunFailed: the config contains more than names and plain values; the user may give such a config to the client
            directly.
    """
    try:
        tree = _tree(text)
        check = _Check(on_this_machine=False)
        for name in marked("sent_to_clients"):
            if name in tree:
                check.section(name, tree[name])
    except UntrustedValue as problem:
        raise RunFailed(
            f"the server's config is refused: {problem}: obtain the config yourself and give it as --config FILE"
        ) from None
    return dump_yaml({name: tree[name] for name in marked("sent_to_clients") if name in tree})


def of_folder(folder: Path, *, trusted: bool, without: Collection[str] = ()) -> str:
    """Read the config of a run folder, check it unless it is trusted, and return it as YAML.

    Raises:
        BadInput: the file is not a config, or it names classes that are not part of raafl and ``trusted`` is False.
    """
    file = folder / "config.yaml"
    try:
        tree = _tree(file.read_text(encoding="utf-8"))
        tree = {name: value for name, value in tree.items() if name not in without} | {"rules": recorded_revision(tree)}
        if not trusted:
            _check_names(tree)
    except UntrustedValue as problem:
        raise BadInput(
            f"the config of '{folder}' is refused: {problem}: its author could choose which code runs here; if you "
            "trust the author of that folder, add --trust_config (in Python trust_config=True)"
        ) from None
    except (FileNotFoundError, NotADirectoryError):
        raise BadInput(f"'{folder}' is not a run folder: it has no {file.name}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise BadInput(
            f"{file} cannot be read ({error}): give a run folder whose config.yaml is readable text"
        ) from None
    return dump_yaml(tree)


def of_text(text: str, what: str, *, trusted: bool) -> str:
    """Check a config that somebody else submits to this machine, unless it is trusted, and return it as YAML.

    `what`: whose config it is, for messages.

    Raises:
        BadInput: the text is not a config, it says where results go or which folder is resumed, or ``trusted`` is False
            and it names classes that are not part of raafl, files that the server would write, or a port that it would open.
    """
    try:
        tree = with_class_path(_tree(text))
        places = {name: tree.pop(name) for name in (*SENDS, "resume") if name in tree}
        for name, value in places.items():
            if value is not None:  # a config of --print_config has all fields, these as null
                raise BadInput(
                    f"the config of {what} is refused: {name} is {briefly(value)}: leave it out, since the server decides "
                    "where the run's folder is and where its model goes"
                )
        if not trusted:
            _check_names(tree, may_write=False)
    except UnknownName as problem:
        raise BadInput(f"the config of {what} is refused: {problem}") from None
    except UntrustedValue as problem:
        raise BadInput(
            f"the config of {what} is refused: {problem}: its author could choose which code runs at the server, or which "
            "files it writes; let the server's owner put the config into its folder, or start the server with --trust_config"
        ) from None
    return dump_yaml(tree)


def is_trusted(folder: Path, *, asked: bool) -> bool:
    """Check whether a run folder's config may name any class: yes if the user ``asked`` for that, or has run this config here."""
    if asked:
        return True
    try:
        return is_own((folder / "config.yaml").read_text(encoding="utf-8"))
    except (OSError, UnicodeDecodeError):
        return False


def _check_names(tree: Mapping[str, Any], *, may_write: bool = True) -> None:
    """Raise `UntrustedValue` if the config names a class or function that is not raafl's, or a file that it may not write."""
    check = _Check(on_this_machine=True, may_write=may_write)
    for name, value in tree.items():
        check.section(name, value)


@contextmanager
def imports_only(paths: Sequence[str]) -> Iterator[None]:
    """Return a context in which jsonargparse can import only these paths: a protection in addition to checking the config."""
    import jsonargparse
    from jsonargparse import _common  # private, because the public setter cannot widen the allow list again

    before = dict(_common.parsing_settings)
    try:
        jsonargparse.set_parsing_settings(import_path_denylist=["*"], import_path_allowlist=list(paths))
        yield
    finally:
        _common.parsing_settings.update(before)


def _tree(text: str) -> dict[str, Any]:
    try:
        return load_untrusted_yaml(text)
    except ValueError as error:
        raise UntrustedValue(str(error)) from None


class _Check(Check):
    """Check of an untrusted config, which raises `UntrustedValue` for all but plain values and raafl's own classes."""

    def __init__(self, *, on_this_machine: bool, may_write: bool = True) -> None:
        """Create a check.

        `on_this_machine`: whether the config comes from this machine, so that it may name files. `may_write`: whether
        these may be files that are written, too.
        """
        super().__init__()
        self._local, self._may_write = on_this_machine, may_write

    def value(self, value: object, hint: object, where: str, parameter: str) -> None:
        """Check a value against a type, and that it names no file or port that the config may not have."""
        if value is not None and not self._may_write and parameter in REACHES:
            _refuse(where, value, f"which names what the server would {REACHES[parameter]}")
        super().value(value, hint, where, parameter)

    def section(self, name: object, value: object) -> None:
        """Check one top-level field of an untrusted config."""
        if name == "json":  # a command-line option, which configs contain, too
            return self.value(value, bool, name, name)
        if name not in self.hints:
            shown = sanitize_text(name, 60)
            raise UnknownName(f"the field '{shown}' does not exist in raafl{_meant(shown, self.hints)}")
        if name in MADE:
            return self.check_object(name, value, name)
        if name == "logger":
            return self.loggers(value, name)
        most = _MOST.get(f"Experiment.{name}")
        if most is not None and type(value) is int and value > most and not self._local:
            raise UntrustedValue(f"{name} is {value}, and a config from a server may ask for at most {most:,}")
        return self.value(value, self.hints[name], name, f"Experiment.{name}")

    def check_object(self, kind: str, value: object, where: str) -> None:
        """Check a section that names a class or function, which the registry must contain, and its arguments."""
        spec = {"class_path": value} if isinstance(value, str) else value
        if not isinstance(spec, dict) or not {"class_path"} <= set(spec) <= {"class_path", "init_args"}:
            _refuse(where, value, "which is no class_path with init_args")
        known = {**registry()[kind], **(stand_ins().get(kind, {}) if self._local else {})}
        path = spec["class_path"]
        if not isinstance(path, str) or path not in known:
            _refuse(where, path, "which is not raafl's own")
        factory = known[path].find()
        self.arguments(spec.get("init_args"), factory, where, known[path].name)

    def refuse(self, where: str, value: object, hint: object) -> NoReturn:
        """Raise `UntrustedValue` for a value whose type is not the declared one."""
        _refuse(where, value, "which is no plain value of the type that belongs there")

    def refuse_name(self, where: str, name: object, value: object, takes: Sequence[str], owner: str) -> NoReturn:
        """Raise `UntrustedValue` for an argument that the class or function does not have."""
        shown = sanitize_text(name, 60)
        raise UnknownName(f"{where}.{shown} is {_shown(value)}, which {owner} does not take{_meant(shown, takes)}")

    def key(self, key: object) -> bool:
        """Check whether a mapping may have ``key``; "class_path" is refused, since parsers create an object for it."""
        return isinstance(key, str) and _is(_WORD, key) and key != "class_path"

    def scalar(self, value: object, hint: object, parameter: str) -> bool:
        """Check whether a value is plain data of its declared type."""
        if hint in (None, type(None)):
            return value is None
        if hint is bool:
            return type(value) is bool
        if hint is int:
            return type(value) is int and (self._local or value <= _MOST.get(parameter, LARGEST))
        if hint is float:
            return type(value) in (int, float) or (isinstance(value, str) and _is(_NUMBER, value))
        if hint in (str, Path) and isinstance(value, str):
            allowed = _TEXTS.get(parameter)
            return _is_plain(value) if self._local else allowed is not None and allowed(value)
        return False

    def free(self, value: object, parameter: str) -> bool:
        """Check whether a value without a declared type is plain data."""
        if parameter.endswith(".architecture"):
            return isinstance(value, dict) and self._architecture(value)
        return self._local and all(_is_plain(one) for one in _leaves(value))

    def _architecture(self, fields: dict[Any, Any]) -> bool:
        return all(
            isinstance(name, str)
            and _is(_FIELD, name)
            and name not in _NEVER
            and "trust" not in name
            and self._of_architecture(name, value)
            for name, value in fields.items()
        )

    def _of_architecture(self, name: str, value: object) -> bool:
        if isinstance(value, dict):
            return self._architecture(value)
        if isinstance(value, list):
            return all(self._of_architecture(name, one) for one in value)
        if not isinstance(value, str):
            return isinstance(value, bool | int | float | None)
        if name.endswith("_implementation"):
            return value in ("eager", "sdpa")  # other values may name a kernel on the Hugging Face Hub, which is code
        if name == "model_type" and value in _WITH_KERNELS:
            return False
        known = self._local or name in _ARCHITECTURE_TEXTS
        return known and _is(_WORD, value) and not value.startswith("timm")

    def loggers(self, value: object, where: str) -> None:
        """Check the loggers of an untrusted config: only short names, and no argument that says where to write."""
        if value is None:
            return
        from raafl.config.loggers import SHORT_NAMES

        for entry in value if isinstance(value, list) else [value]:
            spec = {"class_path": entry} if isinstance(entry, str) else entry
            known = {*SHORT_NAMES, *SHORT_NAMES.values()}
            if not isinstance(spec, dict) or not set(spec) <= {"class_path", "init_args"}:
                _refuse(where, entry, "which is no class_path with init_args")
            if not isinstance(spec.get("class_path"), str) or spec["class_path"] not in known:
                _refuse(where, spec.get("class_path"), "which is not one of " + ", ".join(SHORT_NAMES))
            for name, one in _table(spec.get("init_args"), where).items():
                if name not in _LOGGERS_TAKE:
                    _refuse(f"{where}.{sanitize_text(name, 60)}", one, "which says more than how a run is called")
                if not isinstance(one, bool | int | float | None) and not (isinstance(one, str) and _is(_WORD, one)):
                    _refuse(f"{where}.{name}", one, "which is no plain word or number")


def _table(value: object, where: str) -> Mapping[Any, Any]:
    if not isinstance(value, dict | None):
        _refuse(where, value, "which is no mapping of arguments")
    return value or {}


def _leaves(value: object) -> Iterator[Any]:
    """Yield all scalar values and keys that are nested in ``value``."""
    if isinstance(value, dict | list):
        for item in inside(value):
            yield from _leaves(item)
    else:
        yield value


def _is_plain(value: object) -> bool:
    """Check whether a value is a number, a bool, None, or a short text without "class_path"."""
    if isinstance(value, str):
        return len(value) <= _MAX_TEXT and "class_path" not in value
    return isinstance(value, bool | int | float | None)


def _is(pattern: re.Pattern[str], text: str) -> bool:
    return pattern.fullmatch(text) is not None


def _refuse(where: str, value: object, why: str) -> NoReturn:
    raise UntrustedValue(f"{where} is {_shown(value)}, {why}")


def _meant(name: str, known: Iterable[str]) -> str:
    """Return the end of a message with the known name that is close to ``name``; empty if there is none."""
    hint = nearest(name, known)
    return f": {hint}" if hint.startswith("did you mean") else ""


def _shown(value: object) -> str:
    shown = ascii(value)
    return shown if len(shown) <= 80 else shown[:77] + "..."


# List the names that an untrusted config may use, one for each class or function of raafl. All names that start with
# "raafl." would be unsafe, since raafl's modules have other modules as attributes
# (`raafl.runtime.supervisor.subprocess`).

DATA: Final = (
    "AGNews",
    "CIFAR10",
    "CIFAR100",
    "Digits",
    "FPB",
    "FineTuning",
    "GaussianClusters",
    "HuggingFace",
    "HuggingFaceText",
    "MNIST",
    "SST2",
    "Shakespeare",
    "TextFolder",
)
PARTITIONS: Final = ("ByColumn", "ClassesPerClient", "Dirichlet", "Iid", "QuantitySkew")
_STAND_INS: Final = {"model": "Module", "data": "Data", "algorithm": "algorithm", "partition": "partition"}


@dataclass(frozen=True)
class Entry:
    """Module and name of an object of raafl that an untrusted config may name."""

    home: str
    name: str

    def find(self) -> object:
        """Import the object and return it."""
        return getattr(importlib.import_module(self.home), self.name)


@cache
def registry() -> Mapping[str, Mapping[str, Entry]]:
    """Return the objects that an untrusted config may name for model, data, partition, algorithm and select."""
    methods = {name: f"raafl.algorithms.{name}" for name in ALGORITHMS}
    zoo = importlib.import_module("model_zoo")
    return {
        "model": _entries(zoo._HOMES, "model_zoo", ("model_zoo",)),
        "data": _entries(data._HOME, "raafl.data", ("raafl.data",), DATA),
        "partition": _entries(data._HOME, "raafl.data", ("raafl.data",), PARTITIONS),
        "algorithm": _entries(methods, "", ("raafl", "raafl.algorithms")),
        "select": _entries(parts._HOME, "", ("raafl.parts",)),
    }


@cache
def stand_ins() -> Mapping[str, Mapping[str, Entry]]:
    """Return the placeholders for Python objects in the config of a run that was started from Python."""
    home = "raafl.api.python_objects"
    return {kind: {f"{home}.{name}": Entry(home, name)} for kind, name in _STAND_INS.items()}


def paths() -> list[str]:
    """List all import paths that an untrusted config may name, and the paths of types that jsonargparse needs."""
    named = {path for tables in (registry(), stand_ins()) for table in tables.values() for path in table}
    return sorted(named | {"raafl.devices.Device", "raafl.devices.profiles.Device", "model_zoo.lora.LoRA"})


def _entries(
    homes: Mapping[str, str], package: str, also_in: Iterable[str], names: Iterable[str] | None = None
) -> dict[str, Entry]:
    """Return registry entries by path: for each name, the path in its own module and in the packages that re-export it."""
    found: dict[str, Entry] = {}
    for name in homes if names is None else names:
        home = homes[name] if not package or homes[name].startswith(package) else f"{package}.{homes[name]}"
        found |= {f"{place}.{name}": Entry(home, name) for place in (home, *also_in)}
    return found
