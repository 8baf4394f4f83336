"""Import lightning without everything that torchmetrics would pull in.

lightning needs two classes of torchmetrics (`Metric` and `MetricCollection`), but the package's `__init__` imports
every metric, and with them torchvision, transformers and scipy where they are installed: about four seconds
of start-up for each client rank. Here the package is entered by its two modules, and its `__init__` runs later,
unchanged and in full, when somebody imports torchmetrics for its own sake. Its plots, which import matplotlib, wait for that, too.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import importlib.abc
import importlib.machinery
import importlib.util
import logging
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from types import ModuleType

PACKAGES = ("lightning", "pytorch_lightning")
"""Packages that have Lightning's classes, of one API; raafl imports the first, its users either."""

_HOME = {"Metric": "torchmetrics.metric", "MetricCollection": "torchmetrics.collections"}


@contextmanager
def quick_imports() -> Iterator[None]:
    """Turn off garbage collection during imports; objects made inside the context are never collected.

    Imports create half a million objects that are never freed. Scanning them takes more than a quarter of the time for
    importing torch and lightning, 0.8 s in each process.
    """
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        atexit.register(gc.unfreeze)  # some extension modules warn about objects that still exist at exit
        if was_enabled:
            gc.enable()


def import_lightning() -> ModuleType:
    """Import `lightning` without most of torchmetrics, to save time; call this before anything else imports lightning.

    Only `Metric` and `MetricCollection` of torchmetrics are loaded. An ordinary import is done instead if lightning or
    torchmetrics is already imported, if torchmetrics is not installed, or if this version of lightning needs more of
    torchmetrics. Later imports of torchmetrics load all of it. Not safe while another thread imports these packages.
    """
    if "lightning" not in sys.modules and "torchmetrics" not in sys.modules:
        before = set(sys.modules)
        try:
            _import_beside_lean_torchmetrics()
        except ImportError:
            partial = {
                name for name in set(sys.modules) - before if name.partition(".")[0] in ("lightning", "torchmetrics")
            }
            for name in partial:
                del sys.modules[name]
    return importlib.import_module("lightning")


def lightning_classes(name: str) -> tuple[type, ...]:
    """Return a class of `lightning` by name, and the same class of `pytorch_lightning` if that package was imported."""
    return tuple(getattr(sys.modules[package], name) for package in PACKAGES if hasattr(sys.modules.get(package), name))


def _import_beside_lean_torchmetrics() -> None:
    spec = importlib.machinery.PathFinder.find_spec("torchmetrics")
    if spec is None:
        return
    package = importlib.util.module_from_spec(spec)
    vars(package)["__getattr__"] = _lean_attribute
    vars(package)["_logger"] = logging.getLogger("torchmetrics")
    sys.modules["torchmetrics"] = package
    try:
        with _without_plots(package):
            # this imports `metric`; to import `metric` first would be circular
            importlib.import_module("torchmetrics.utilities")
        importlib.import_module("lightning")
    finally:
        sys.modules.pop("torchmetrics", None)
        del vars(package)["__getattr__"]
    sys.meta_path.insert(0, _Resume(package))


@contextmanager
def _without_plots(package: ModuleType) -> Iterator[None]:
    """Have `torchmetrics.utilities` find no matplotlib while it is imported within the ``with`` block."""
    # the module of flags is loaded by its file: an import of its name would first import the package that reads them
    path = f"{next(iter(package.__path__))}/utilities/imports.py"
    spec = importlib.util.spec_from_file_location("torchmetrics.utilities.imports", path)
    assert spec is not None and spec.loader is not None  # since the path ends with .py
    flags = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = flags
    try:
        spec.loader.exec_module(flags)
        found, flags._MATPLOTLIB_AVAILABLE = flags._MATPLOTLIB_AVAILABLE, False  # type: ignore[attr-defined]
    except (OSError, AttributeError) as error:
        raise ImportError("another version of torchmetrics") from error
    try:
        yield
        vars(sys.modules["torchmetrics.utilities"])["imports"] = flags
    finally:
        flags._MATPLOTLIB_AVAILABLE = found  # type: ignore[attr-defined]


def _lean_attribute(name: str) -> object:
    """Import a class of torchmetrics from the submodule that defines it; only used while Lightning is imported."""
    if name not in _HOME:
        raise AttributeError(f"module 'torchmetrics' has no attribute {name!r} before its __init__ has run")
    return getattr(importlib.import_module(_HOME[name]), name)


class _Resume(importlib.abc.MetaPathFinder):
    """Import finder that, at a later `import torchmetrics`, runs its `__init__` in the package object that exists already."""

    def __init__(self, package: ModuleType) -> None:
        self.package = package

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != "torchmetrics":
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path, target)
        if spec is not None and spec.loader is not None:
            vars(spec.loader)["create_module"] = self._take
        return spec

    def _take(self, spec: importlib.machinery.ModuleSpec) -> ModuleType:
        # only a real import calls this; `find_spec("torchmetrics")` alone leaves the finder in place
        if self in sys.meta_path:
            sys.meta_path.remove(self)
            # in place, since `torchmetrics.metric` has its functions
            importlib.reload(sys.modules["torchmetrics.utilities.plot"])
        return self.package
