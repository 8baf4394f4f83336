"""Explain errors in a user's config, one line each, with field, value, remedy, and line of the file."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import os
import pkgutil
import sys
import types
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields, is_dataclass
from functools import lru_cache, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, NoReturn, Union, get_args, get_origin, get_type_hints

import yaml

from raafl.algorithms import ALGORITHMS, DESCRIBED
from raafl.config.argv import name_of, values
from raafl.config.check import MADE, Check, kind_of, with_class_path
from raafl.config.experiment import ABOUT, SECTIONS
from raafl.devices import Device
from raafl.errors import cause, nearest, user_frame

if TYPE_CHECKING:
    from jsonargparse import ArgumentParser

_WORDS: Mapping[Any, str] = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: "text",
    type(None): "null",
    Path: "a path",
    list: "a list",
    tuple: "a list",
    Sequence: "a list",
    dict: "a table",
}
_LISTED: Mapping[Any, str] = {
    int: "whole numbers, such as [200]",
    float: "numbers",
    str: "texts",
    Device: "tables of fields, such as [{name: slow, flops_per_s: 1.0e9}]",
}
_EXAMPLES = {
    "model": ("LightningModule", "model_zoo.MLP"),
    "data": ("LightningDataModule", "raafl.data.Digits"),
    "algorithm": ("Algorithm", "raafl.fed_raa"),
    "partition": ("Partition", "raafl.data.Iid"),
    "select": ("Select", "raafl.parts.RateSelect"),
}
_SPEC = ("class_path", "init_args", "dict_kwargs")


class Wrong(ValueError):
    """One error in a config; ``field`` is the dotted name of the field at fault."""

    def __init__(self, text: str, field: str) -> None:
        super().__init__(text)
        self.field = field


def explain(refused: str, parser: ArgumentParser, argv: Sequence[str], hidden: str | None = None) -> str:
    """Explain why jsonargparse refused a command line; return one line for each error."""
    lines = ErrorCollector(parser).lines(argv, hidden)
    return "\n".join(lines) or " ".join(refused.split())


def place_of_field(field: str | None, argv: Sequence[str]) -> str:
    """Describe the line of a config file that sets a field: `` (FIELD is in FILE, line N)``; "" if no file does."""
    if field is None or any(name_of(item).startswith(f"--{field}") for item in argv):
        return ""
    for file in reversed(values(argv, "--config")):
        number = yaml_line(file, field)
        if number is not None:
            return f" ({field} is in {relative(file)}, line {number})"
    return ""


def yaml_line(file: str, field: str) -> int | None:
    """Return the line number of a dotted field in a YAML file, or of the section around it; None if the file has neither."""
    found = None
    with suppress(OSError, UnicodeDecodeError, yaml.YAMLError):
        node: Any = yaml.compose(Path(file).read_text(encoding="utf-8"), Loader=yaml.SafeLoader)
        for name in field.split("."):
            pairs = _pairs(node)
            pairs = pairs if name in pairs else _pairs(pairs.get("init_args", (None, None))[1])
            if name not in pairs:
                break
            key, node = pairs[name]
            found = key.start_mark.line + 1
    return found


def _pairs(node: object) -> dict[str, tuple[Any, Any]]:
    """Map each key of a YAML mapping, or of all mappings in a YAML list, to its pair of key node and value node."""
    if isinstance(node, yaml.SequenceNode):
        return {name: pair for entry in node.value for name, pair in _pairs(entry).items()}
    return {key.value: (key, value) for key, value in node.value} if isinstance(node, yaml.MappingNode) else {}


def place_in(file: str, *fields: str) -> str:
    """Return " (FILE, line N)" for the first of the fields that the file has; "" if it has none."""
    line = next(filter(None, (yaml_line(file, field) for field in fields)), None)
    return "" if line is None else f" ({relative(file)}, line {line})"


def relative(path: str) -> str:
    """Return a path without the current folder at its beginning."""
    return path.removeprefix(str(Path.cwd()) + os.sep)


class ErrorCollector(Check):
    """Checker that collects all errors in a command line and its config files; later values override earlier ones."""

    def __init__(self, parser: ArgumentParser) -> None:
        super().__init__()
        self.problems: list[str] = []
        self._parser = parser
        self._made: dict[str, tuple[str, dict[str, Any]]] = {"partition": (_EXAMPLES["partition"][1], {})}
        self._given: set[str] = set()

    def lines(self, argv: Sequence[str], hidden: str | None = None) -> list[str]:
        """Check all files and options of a command line; return a line for each error."""
        for file in values(argv, "--config"):
            tree = with_class_path(yaml.safe_load(Path(file).read_text(encoding="utf-8")))
            self.source(tree, partial(place_in, file) if file != hidden else lambda field: "")
        for tree in self.options([item for item in argv if name_of(item) != "--config"]):
            self.source(tree, lambda field: "")
        self.missing()
        return list(dict.fromkeys(self.problems))

    def source(self, tree: Mapping[str, Any], place: Callable[[str], str]) -> None:
        """Check the fields that one file or option sets; ``place(field)`` describes the line that sets a field, for messages."""
        for name, value in tree.items():
            try:
                self._section(name, value)
            except Wrong as wrong:
                self.problems.append(f"{wrong}{place(wrong.field)}")

    def _section(self, name: str, value: object) -> None:
        if value is None and name in MADE:  # null for one of these sections means that it is left out
            return None
        self._given.add(name)
        if name == "json":
            return self.value(value, bool, name, name)
        if name not in self.hints:
            raise Wrong(unknown(f"unknown field {name}", f"{name}", [*ABOUT, "config", "json"]), f"{name}")
        if name in MADE:
            return self.check_object(name, value, name)
        if name != "logger":  # the logger field is checked by code of its own
            self.value(value, self.hints[name], name, name)

    def missing(self) -> None:
        """Record an error for each field without a value or default, and errors that involve several files or options."""
        needed = [name for name in ABOUT if name in MADE and name != "partition" and name not in self._given]
        if len(needed) > 1:
            options = ", ".join(f"--{name} VALUE" for name in needed)
            self.problems.append(f"{', '.join(needed)} are missing: give --config FILE with them, or {options}")
            return
        for kind, (path, given) in self._made.items():
            with suppress(Exception):
                parameters = inspect.signature(_imported(path)).parameters.values()
                needed += [
                    f"{kind}.{one.name}"
                    for one in parameters
                    if one.default is one.empty and one.kind is one.POSITIONAL_OR_KEYWORD and one.name not in given
                ]
            if not self.problems:  # the model and the data are built together only if each of them is valid alone
                try:
                    self.arguments(given, self._target(kind, path, kind), kind, path)
                except Wrong as wrong:
                    self.problems.append(str(wrong))
        self.problems += [f"{name} is missing: give it in the config, or as --{name} VALUE" for name in needed]

    def options(self, argv: Sequence[str]) -> list[dict[str, Any]]:
        """Parse options, each to a nested mapping with one value; record an error for unknown options and missing values."""
        known = {name: action for action in self._parser._actions for name in action.option_strings}
        found: list[dict[str, Any]] = []
        items = list(argv)
        while items:
            item = items.pop(0)
            option, sign, text = item.partition("=")
            name = option.removeprefix("--")
            root = name.partition(".")[0]
            if not item.startswith("-"):
                self.problems.append(f"unexpected '{item}': an option starts with --, as in --clients 4")
            elif option not in known and (root not in MADE or "." not in name):
                shown = f"--{option.lstrip('-')}"
                self.problems.append(
                    unknown(f"unknown option {shown}", shown, [n for n in known if n.startswith("--")])
                )
                if not sign and items and not items[0].startswith("--"):
                    items.pop(0)
            elif option in known and known[option].nargs == 0:
                self.problems += [f"{option} takes no value: leave '{text}' out"] if sign else []
            elif not sign and (not items or items[0].startswith("--")):
                self.problems.append(f"{option} needs a value, as in {option} VALUE")
            elif root in ABOUT and not name.endswith("+"):
                found.append(_nested(name, text if sign else items.pop(0)))
            elif not sign:
                items.pop(0)
        return found

    def check_object(self, kind: str, value: Any, where: str) -> None:
        """Check a value that names a class or function, and its arguments; see `Check.check_object`."""
        spec = value if isinstance(value, dict) else {"class_path": value}
        before, given = self._made.get(where, (None, {}))
        path = spec.get("class_path", before)
        for name in map(str, spec.keys() - _SPEC):
            if (hint := nearest(name, _SPEC[:2])).startswith("did you mean"):
                raise Wrong(f"unknown field {where}.{name}: {hint}", f"{where}.{name}")
        if path is None:
            return
        target = self._target(kind, path, where)
        arguments = spec.get("init_args") or {}
        if not isinstance(arguments, dict):
            raise Wrong(f"{where}.init_args is {arguments!r:.60}: give a mapping of arguments", where)
        arguments = {**arguments, **{str(n): v for n, v in spec.items() if n not in _SPEC}}
        self.arguments(arguments, target, where, path)
        if where in MADE:
            kept = given if path == before else {n: v for n, v in given.items() if n in self.takes(target)}
            self._made[where] = (path, _merged(kept, arguments))

    def _target(self, kind: str, path: object, where: str) -> object:
        """Import the class or function of a class_path; raise `Wrong` unless its result has the section's type, such as a model."""
        base, example = _EXAMPLES[kind]
        home = example.rpartition(".")[0]
        if not isinstance(path, str) or "." not in path:
            hint = nearest(path, _public(home), home=f"{home}.") if isinstance(path, str) and _public(home) else ""
            remedy = f"; {hint}" if hint else f", such as {example}"
            raise Wrong(f"{where} is '{path}': give a class path{remedy}", where)
        try:
            target = _imported(path)
        except ModuleNotFoundError as error:
            raise Wrong(f"{where} cannot be imported, {_no_module(str(error.name))}", where) from None
        except Exception as error:
            home = path.rpartition(".")[0]
            missing = isinstance(error, AttributeError | ValueError) and (home in sys.modules or not user_frame(error))
            if not missing:
                raise Wrong(f"{where} is {path}, which cannot be imported: {cause(error)}", where) from None
            hint = nearest(path.rpartition(".")[2], _public(home), home=f"{home}.")
            raise Wrong(f"{where} is {path}, which does not exist: {hint}", where) from None
        made = target
        if not inspect.isclass(target):
            with suppress(Exception):
                made = get_type_hints(target).get("return")
        # jsonargparse takes a function only if its return annotation is declared
        if made in (target, None) and not inspect.isclass(target):
            if not callable(target):
                raise Wrong(f"{where} is {path}, which is no class or function: give one, such as {example}", where)
            remedy = f"annotate it, as in `def {path.rpartition('.')[2]}(...) -> {base}:`"
            raise Wrong(f"{where} is {path}, which does not say what it makes: {remedy}", where)
        if inspect.isclass(made) and base not in [one.__name__ for one in made.__mro__]:
            raise Wrong(f"{where} is {path}, which makes no {base}: give one that does, such as {example}", where)
        return target

    def takes(self, factory: object) -> Mapping[str, Any]:
        """Return the declared type of each argument, including arguments that are passed on as ``**kwargs``."""
        parser = parser_of(factory)
        found = {action.dest.split(".")[1]: Any for action in parser._actions if action.dest.startswith("of.")}
        hints: dict[str, Any] = {}
        # annotations may use names that a user's module imports only for type checkers, and so cannot be resolved
        with suppress(Exception):
            hints = get_type_hints(factory.__init__ if inspect.isclass(factory) else factory)
        typed = {a.dest[3:]: t for a in parser._actions if (t := getattr(a, "_typehint", None)) is not None}
        return {name: hints.get(name, typed.get(name, Any)) for name in found}

    def _tried(self, value: object, hint: object, where: str, parameter: str) -> bool:
        """Check whether a value fits one member of a union type; a bare class path fits a class."""
        spec = {"class_path": value} if kind_of(hint) and isinstance(value, str) and "." in value else value
        return super()._tried(spec, hint, where, parameter)

    def scalar(self, value: object, hint: object, parameter: str) -> bool:
        """Check whether jsonargparse accepts a value for a type; see `Check.scalar`."""
        from jsonargparse import ArgumentParser

        parser = ArgumentParser(exit_on_error=False)
        try:
            parser.add_argument("--value", type=hint)
            parser.parse_object({"value": value})
        except Exception:
            return False
        return True

    def free(self, value: object, parameter: str) -> bool:
        """Accept any value for a parameter without a declared type."""
        return True

    def key(self, key: object) -> bool:
        """Accept any text as a key of a mapping."""
        return isinstance(key, str)

    def arguments(self, given: object, factory: object, where: str, owner: str) -> None:
        """Check arguments; create a nested object, so that its constructor checks the values; see `Check.arguments`."""
        super().arguments(given, factory, where, owner)
        if where in MADE or where in SECTIONS:
            return  # jsonargparse constructs these last, and its messages are passed on
        parser = parser_of(factory)
        try:
            namespace = parser.parse_object({"of": given})
        except Exception:  # missing required arguments are reported elsewhere
            return
        try:
            parser.instantiate(namespace)
        except ValueError as error:
            raise Wrong(str(error), where) from None

    def refuse(self, where: str, value: object, hint: object) -> NoReturn:
        """Raise an error with the value and a description of the expected type; see `Check.refuse`."""
        if where in SECTIONS and not isinstance(value, dict):
            raise Wrong(f"{where} is {value!r:.60}: give its fields, as in --{where}.FIELD VALUE (see --help)", where)
        shown = f"'{value}'" if isinstance(value, str) else f"{value}"
        shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
        raise Wrong(f"{where} is {shown}: give {' or '.join(dict.fromkeys(describe_type(hint)))}", where)

    def refuse_name(self, where: str, name: object, value: object, takes: Sequence[str], owner: str) -> NoReturn:
        """Raise an error with the unknown argument and the nearest valid name; see `Check.refuse_name`."""
        field = f"{where}.{name}"
        if where in SECTIONS:
            raise Wrong(unknown(f"unknown field {field}", field, [f"{where}.{one}" for one in takes]), field)
        raise Wrong(f"unknown field {field}: {nearest(str(name), takes)}", field)


class PlainErrors(ErrorCollector):
    """Messages about plain fields alone, for a check before torch is imported (`raafl.config.parse`)."""

    def __init__(self, parser: ArgumentParser, *, whole: bool) -> None:
        super().__init__(parser)
        self._made, self._whole = {}, whole

    def check_object(self, kind: str, value: object, where: str) -> None:
        """Accept any class or function, since importing it would take seconds."""

    def missing(self) -> None:
        """Record an error for each of model, data and algorithm that the config lacks."""
        if self._whole:
            super().missing()


@lru_cache(maxsize=64)  # one message asks for the same few parsers up to ten times, 10 ms each
def parser_of(factory: Any) -> ArgumentParser:
    """Return a parser with one field, ``of``, whose values are objects that ``factory`` (a class or function) creates."""
    from jsonargparse import ArgumentParser

    parser = ArgumentParser(exit_on_error=False)
    add = parser.add_class_arguments if inspect.isclass(factory) else parser.add_function_arguments
    add(factory, "of", fail_untyped=False)
    return parser


def _merged(old: Mapping[str, Any], new: Mapping[str, Any]) -> dict[str, Any]:
    """Merge two configs recursively; where ``old`` names a class by a string, a mapping in ``new`` gives its arguments."""
    old = {
        n: {"class_path": x, "init_args": {}} if isinstance(x, str) and isinstance(new.get(n), dict) else x
        for n, x in old.items()
    }
    both = {n: _merged(old[n], new[n]) for n in new if isinstance(old.get(n), dict) and isinstance(new[n], dict)}
    return {**old, **new, **both}


def _nested(name: str, text: str) -> dict[str, Any]:
    """Convert a dotted option to nested dicts; its value stays text unless it is a YAML list or mapping."""
    value: Any = text
    with suppress(yaml.YAMLError):
        loaded = yaml.safe_load(text)
        value = loaded if isinstance(loaded, list | dict) else text
    for part in reversed(name.split(".")):
        value = {part: value}
    tree: dict[str, Any] = value
    return tree


def describe_type(hint: object) -> list[str]:
    """Describe in words what a type accepts, one phrase for each kind, null last."""
    origin, inner = get_origin(hint), get_args(hint)
    if origin in (Union, types.UnionType):
        found = [word for one in inner for word in describe_type(one)]
        return sorted(found, key=lambda word: word == "null")
    if origin is Literal:
        return ["one of " + ", ".join(str(one) for one in inner)]
    if (kind := kind_of(hint)) is not None:
        return [f"a class_path with init_args, such as {_EXAMPLES[kind][1]}"]
    if hint is Device:
        return ["a table of fields, such as {name: slow, flops_per_s: 1.0e9}"]
    if origin in (list, Sequence) and inner[0] in _LISTED:
        return [f"a list of {_LISTED[inner[0]]}"]
    if is_dataclass(hint):
        return [f"a mapping with some of the fields {', '.join(one.name for one in fields(hint))}"]
    return [_WORDS.get(origin or hint) or f"a value of type {getattr(hint, '__name__', hint)}"]


def _imported(path: str) -> Any:
    """Import the object at a dotted path; raises an error unless jsonargparse's allow list has the path."""
    from jsonargparse import _util

    return _util.import_object(path)


def _no_module(name: str) -> str:
    top = name.partition(".")[0]
    known = [module.name for module in pkgutil.iter_modules([str(Path.cwd())])]
    hint = nearest(top, [*known, "raafl", "model_zoo"])
    if "did you mean" not in hint or importlib.util.find_spec(top):
        hint = "run the command in the folder that holds it, or install the package"
    return f"there is no module '{name}': {hint}"


def _public(module_name: str) -> list[str]:
    """List a module's public names: its ``__all__``, or else its own classes, functions and lazily loaded names."""
    module = sys.modules.get(module_name)
    if module is None:
        return []
    if hasattr(module, "__all__"):
        return list(module.__all__)
    found = [name for name in dir(module) if not name.startswith("_")]
    own = {name: vars(module).get(name) for name in found}
    return [n for n, v in own.items() if v is None or getattr(v, "__module__", "").startswith(module_name)]


_GROUPS = ("", "train", "trainer", "fabric")
_END = "a run ends by max_updates (merged updates), max_time (seconds) or target, such as accuracy=0.9"
_TASK = "num_epochs or num_steps of `train` say how long a task is"
_ALL = "the global model is measured on all of the test set: hand over a smaller one"
_TRIAL = "before each run a step and a measurement are tried in any case"
_FOLDER = "output is the run's folder, runs/NAME-TIME unless given"
_SHOWN = "progress is how a run is shown: auto, live, plain, verbose or quiet"
_FRAMES = "each client trains on one device with plain Fabric; fabric.accelerator and fabric.precision say how"

_INSTEAD = {
    "max_epochs": f"{_END}; {_TASK}",
    "min_epochs": f"{_END}; {_TASK}",
    "max_steps": f"{_END}; {_TASK}",
    "min_steps": f"{_END}; {_TASK}",
    "epochs": f"{_END}; {_TASK}",
    "rounds": f"{_END}",
    "num_rounds": f"{_END}",
    "limit_train_batches": f"{_TASK}: num_steps=10 is a task of ten batches",
    "overfit_batches": f"{_TASK}: num_steps=10 is a task of ten batches",
    "limit_val_batches": _ALL,
    "limit_test_batches": _ALL,
    "limit_predict_batches": "nothing is predicted: take the final model from the run",
    "fast_dev_run": f"{_TRIAL}; max_updates=1 is the shortest run",
    "num_sanity_val_steps": _TRIAL,
    "val_check_interval": "eval_every is the distance between evaluations",
    "check_val_every_n_epoch": "eval_every is the distance between evaluations",
    "strategy": _FRAMES,
    "num_nodes": "`raafl serve` and `raafl join` are for several machines, or torchrun (docs/deploy.md)",
    "num_clients": "clients is their number",
    "plugins": _FRAMES,
    "sync_batchnorm": "submodels.batch_norm is merged or static",
    "use_distributed_sampler": "partition says which client has which samples",
    "gradient_clip_algorithm": "fabric.gradient_clip_val clips by norm",
    "enable_checkpointing": "checkpoint_every, checkpoint_s and keep_checkpoints say when there are checkpoints, and how many",
    "resume": "it is an argument of a run: simulate(module, data, resume=FOLDER), and of fit",
    "ckpt_path": "resume is the folder of a run to go on with",
    "default_root_dir": _FOLDER,
    "enable_progress_bar": _SHOWN,
    "enable_model_summary": "`raafl plan` shows the model and what its submodels cost",
    "log_every_n_steps": "every evaluation and every task is recorded; logger says where else it goes",
    "deterministic": "fabric.deterministic takes deterministic kernels; seed decides all that is drawn",
    "benchmark": "`raafl plan` says what a run takes",
    "inference_mode": "measuring takes no gradients in any case",
    "detect_anomaly": "an update that is not finite is refused in any case",
    "profiler": "times and bytes of every task are in clients.csv; `raafl plan` predicts them",
    "reload_dataloaders_every_n_epochs": "the data set is read once and shared out",
    "barebones": _SHOWN,
    "callbacks": "callbacks are objects of Python: raafl.Federation(..., callbacks=[...]); target ends a run from a config",
    "enable_autolog_hparams": "the whole config goes to every logger",
    "model_registry": "the final model is in the run's folder, and with loggers that take one",
    "batch_size": "train.batch_size is the local batch size, unless the data module's holds",
    "gpus": "fabric.accelerator is cpu, cuda or auto, and fabric.device the index of a GPU",
    "accelerator": "fabric.accelerator is cpu, cuda or auto",
    "optimizer": "the model's configure_optimizers has it; for a plain module give optimizer= to simulate or fit",
    "init_args": "indent it below the part that it is for, beside its class_path: model, data, algorithm or partition",
    "class_path": "indent it below the part that it is for: model, data, algorithm or partition",
    "lr": "the model's configure_optimizers has it; for a plain module give optimizer= to simulate or fit",
    "learning_rate": "the model's configure_optimizers has it; for a plain module give optimizer= to simulate or fit",
}


def unknown(what: str, name: str, known: Iterable[str]) -> str:
    """Return the error message for an unknown name: it suggests raafl's equivalent of a Trainer argument, or the nearest name."""
    group, _, last = name.removeprefix("--").rpartition(".")
    if group in _GROUPS and last in _INSTEAD and name not in known:
        return f"{what}: {_INSTEAD[last]}"
    if not group and (method := _method_with(last)):
        example = f"--algorithm.{last}, or raafl.{method}({last}=...) in Python"
        return f"{what}: it is an argument of methods, such as {method}: {example}"
    return f"{what}: {nearest(name, known)}"


def _method_with(argument: str) -> str | None:
    """Return a method whose factory has the argument, by its source: to import all methods would take seconds."""
    for name in ALGORITHMS:
        file = DESCRIBED.with_name(f"{name}.py")
        file = file if file.exists() else DESCRIBED.parent / name / "__init__.py"
        text = file.read_text(encoding="utf-8")
        body = ast.parse(text).body if argument in text else []
        factories = (node.args for node in body if isinstance(node, ast.FunctionDef) and node.name == name)
        if any(argument == one.arg for args in factories for one in (*args.args, *args.kwonlyargs)):
            return name
    return None
