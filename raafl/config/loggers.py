"""Create the Lightning loggers that a config names: W&B, TensorBoard, CSV, MLflow, or a class of the user."""

from __future__ import annotations

import importlib
import importlib.util
import inspect
import netrc
import os
import sys
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from raafl.errors import BadInput, installing, nearest

SHORT_NAMES = {
    "csv": "lightning.pytorch.loggers.CSVLogger",
    "mlflow": "lightning.pytorch.loggers.MLFlowLogger",
    "tensorboard": "lightning.pytorch.loggers.TensorBoardLogger",
    "wandb": "lightning.pytorch.loggers.WandbLogger",
}

_PACKAGES = {
    "MLFlowLogger": ("mlflow",),
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
}
_EXTRAS = {"MLFlowLogger": "mlflow", "WandbLogger": "wandb"}
_LIBRARIES = {"MLFlowLogger": "mlflow", "TensorBoardLogger": "torch.utils.tensorboard", "WandbLogger": "wandb"}
"""Library that a logger imports when it is created or first called."""
_IMPORTING = threading.Lock()
"""Held while a logger's library is imported: of packages that two share, such as pandas, one could see the other's half."""
FOLDER = "loggers"
"""Folder within the run folder for loggers without a folder of their own."""
_WANDB_INIT_S = 20
_ANSWER_S = 5.0


@dataclass(frozen=True)
class LoggerSpec:
    """A logger that a config names: its class and arguments."""

    class_path: str
    init_args: Mapping[str, Any] = field(default_factory=dict)
    instance: Any = None

    @property
    def name(self) -> str:
        """Name of the logger's class."""
        return self.class_path.rpartition(".")[2]


def specs(logger: object) -> list[LoggerSpec]:
    """Parse the config field `logger`: a name, a `class_path` with `init_args`, a logger object, or a list of these.

    Raises:
        BadInput: an entry has another form, or its logger cannot be created; the message lists all problems.
    """
    return entries(logger, _check)


def entries(logger: object, check: Callable[[LoggerSpec], None] = lambda spec: None) -> list[LoggerSpec]:
    """Parse the config field `logger` without importing anything; see `specs`.

    Raises:
        BadInput: an entry has another form or is refused; the message lists all problems.
    """
    given = logger if isinstance(logger, list | tuple) else [] if logger is None else [logger]
    found, problems = [], []
    for entry in given:
        try:
            spec = _spec(entry)
            check(spec)
            found.append(spec)
        except BadInput as error:
            problems.append(str(error))
    if problems:
        raise BadInput("\n".join(problems))
    return found


def _spec(entry: object) -> LoggerSpec:
    if isinstance(entry, str):
        entry = {"class_path": entry}
    if hasattr(entry, "log_metrics"):
        return LoggerSpec(type(entry).__name__, instance=entry)
    if not isinstance(entry, dict) or not isinstance(entry.get("class_path"), str):
        raise BadInput(f"logger is {entry!r:.80}: give {', '.join(SHORT_NAMES)}, or a class_path with init_args")
    unknown = [name for name in entry if name not in ("class_path", "init_args")]
    if unknown:
        raise BadInput(f"unknown field logger.{unknown[0]}: {nearest(unknown[0], ('class_path', 'init_args'))}")
    init_args = entry.get("init_args") or {}
    if not isinstance(init_args, dict):
        raise BadInput(f"logger.init_args is {init_args!r:.80}: give a mapping of the logger's arguments")
    path: str = entry["class_path"]
    if "." not in path and path not in SHORT_NAMES:
        if f"lightning.pytorch.loggers.{path}" not in SHORT_NAMES.values():
            raise BadInput(f"logger is '{path}': {nearest(path, SHORT_NAMES)}")
        path = f"lightning.pytorch.loggers.{path}"
    return LoggerSpec(SHORT_NAMES.get(path, path), init_args)


def _check(spec: LoggerSpec) -> None:
    """Raise `BadInput` if a logger's class is missing or does not accept its arguments; the logger is not created."""
    if spec.instance is not None:
        return
    cls = _find(spec)
    packages = _PACKAGES.get(spec.name, ())
    if packages and not any(importlib.util.find_spec(package) for package in packages):
        remedy = installing(_EXTRAS[spec.name]) if spec.name in _EXTRAS else f"pip install {packages[0]}"
        raise BadInput(f"logger is {spec.class_path}, which needs the package {packages[0]}: {remedy}")
    parameters = inspect.signature(cls).parameters
    if any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values()):
        return
    for name in spec.init_args:
        if name not in parameters:
            raise BadInput(f"unknown field logger.init_args.{name} of {spec.class_path}: {nearest(name, parameters)}")
    for name, parameter in parameters.items():
        if parameter.default is inspect.Parameter.empty and name not in (*spec.init_args, "save_dir"):
            raise BadInput(f"logger.init_args.{name} is missing: {spec.class_path} needs it")


def _find(spec: LoggerSpec) -> type[Any]:
    from raafl.lean_import import import_lightning

    import_lightning()
    from lightning.fabric.loggers.logger import Logger

    module_name, _, name = spec.class_path.rpartition(".")
    try:
        cls = getattr(importlib.import_module(module_name), name)
    except (ImportError, AttributeError, ValueError) as error:
        raise BadInput(
            f"logger is {spec.class_path}, which cannot be imported ({error}): give {', '.join(SHORT_NAMES)}, "
            "or the path of a Lightning logger's class"
        ) from None
    # the package pytorch_lightning has a base class of its own
    twin = sys.modules.get("lightning_fabric.loggers.logger")
    bases = (Logger,) if twin is None else (Logger, twin.Logger)
    if not (isinstance(cls, type) and issubclass(cls, bases)):
        raise BadInput(f"logger is {spec.class_path}, which is not a Lightning logger: give a subclass of Logger")
    return cls


def maker(
    spec: LoggerSpec,
    folder: Path,
    warn: Callable[[str], None],
    note: Callable[[str], None],
    before: Mapping[str, Any] | None = None,
    version: int = 0,
) -> Callable[[], Any]:
    """Return a function that creates a logger; it should be called on its own thread, since it may import and connect.

    `before`: arguments by which the logger continues an earlier run; None = a new run.
    """

    def make() -> object:
        ranks: Any = importlib.import_module("lightning.pytorch.utilities.rank_zero")
        # this process logs for the run, whatever rank a cluster's environment variables give it
        ranks.rank_zero_only.rank = 0
        with _IMPORTING, suppress(ImportError):
            if spec.name in _LIBRARIES:
                importlib.import_module(_LIBRARIES[spec.name])
        if spec.instance is not None:
            return _opened(spec.instance, before or {}, warn, note)
        cls = _find(spec)
        args = {**_defaults(spec, cls, folder), **(before or {}), **spec.init_args}
        if spec.name == "TensorBoardLogger" and before:
            args = {"purge_step": version + 1, **args}
        if args.get("save_dir") == str(folder / FOLDER):
            (folder / FOLDER).mkdir(parents=True, exist_ok=True)
        if spec.name == "WandbLogger":
            # log_model would upload Lightning's checkpoints, of which raafl writes none: see raafl.loggers
            args.pop("log_model", None)
        if spec.name == "MLFlowLogger":  # MLflow refuses a store of plain files unless this is set
            os.environ.setdefault("MLFLOW_ALLOW_FILE_STORE", "true")
        return _opened(cls(**args), {}, warn, note)

    return make


def _opened(logger: Any, before: Mapping[str, Any], warn: Callable[[str], None], note: Callable[[str], None]) -> object:
    """Return the logger ready for use; a W&B logger starts or resumes its run, offline if it has no key or server."""
    init = getattr(logger, "_wandb_init", None)
    if not isinstance(init, dict) or getattr(logger, "_experiment", None) is not None:
        return logger
    import wandb

    if init.get("id") is None and before:
        init["id"] = before.get("id")
    if init.get("anonymous") is None:  # Lightning passes it always, and W&B warns of it
        init.pop("anonymous", None)
    init.setdefault("settings", wandb.Settings(init_timeout=_WANDB_INIT_S, console="off"))
    chosen = getattr(logger, "_offline", False) or init.get("mode") or os.environ.get("WANDB_MODE")
    later = f"to send it later: wandb sync {init.get('dir') or '.'}/wandb/offline-run-*"
    url = os.environ.get("WANDB_BASE_URL", "https://api.wandb.ai")
    if not chosen and not _has_wandb_key(url):
        note(f"wandb: there is no API key, so it logs offline; {later}, after wandb login")
        init["mode"] = chosen = "offline"
    elif not chosen and not _answers(url):  # wandb would retry for minutes, then print to stdout
        warn(f"logger WandbLogger: {url} does not answer, so it logs offline; {later}")
        init["mode"] = chosen = "offline"
    try:
        _ = logger.experiment
    except Exception as error:
        if chosen in ("offline", "dryrun", "disabled", True):
            raise
        warn(f"logger WandbLogger cannot log online ({in_words(error)[:200]}), so it logs offline; {later}")
        init["mode"] = "offline"
        _ = logger.experiment
    return logger


def _defaults(spec: LoggerSpec, cls: type[Any], folder: Path) -> dict[str, Any]:
    """Return arguments for a logger that the config omits, such as the run's folder and name."""
    takes = inspect.signature(cls).parameters
    args: dict[str, Any] = {"save_dir": str(folder / FOLDER)} if "save_dir" in takes else {}
    if spec.name in ("CSVLogger", "TensorBoardLogger"):
        args["name"] = spec.name.removesuffix("Logger").lower()
    elif spec.name == "WandbLogger":
        args |= {"name": folder.name, "project": os.environ.get("WANDB_PROJECT", "raafl")}
    elif spec.name == "MLFlowLogger":
        args |= {"run_name": folder.name, "experiment_name": "raafl"}
        # other loggers' folders are none of MLflow's; a store of an earlier version stays beside them
        if not (folder / FOLDER / ".trash").is_dir():
            args["save_dir"] = str(folder / FOLDER / "mlflow")
    return args


def _answers(url: str) -> bool:
    """Check whether a web server answers at ``url`` within seconds."""
    try:
        with urllib.request.urlopen(url, timeout=_ANSWER_S):
            return True
    except urllib.error.HTTPError:
        return True
    except (OSError, ValueError):
        return False


def _has_wandb_key(url: str) -> bool:
    if os.environ.get("WANDB_API_KEY"):
        return True
    with suppress(OSError, netrc.NetrcParseError):
        return netrc.netrc(os.environ.get("NETRC")).authenticators(urlsplit(url).hostname or "") is not None
    return False


def in_words(error: BaseException) -> str:
    """Format an error as one short line."""
    return " ".join(f"{type(error).__name__}: {error}".split())[:500]
