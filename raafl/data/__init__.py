# mypy: implicit-reexport
# ruff: noqa: F401
"""Provide data for many clients: data modules, partitions among clients, and fast batches of each client's part.

Importing this package costs nothing: a name is imported on first use, and only the data modules need Lightning.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from raafl.data.federated import ClientData, FederatedData
    from raafl.data.fine_tuning import FineTuning
    from raafl.data.partition import ByColumn, ClassesPerClient, Dirichlet, Iid, Partition, QuantitySkew
    from raafl.data.sources import CIFAR10, CIFAR100, MNIST, Digits, GaussianClusters, HuggingFace, TensorImages
    from raafl.data.text import FPB, SST2, AGNews, HuggingFaceText, Shakespeare, TextFolder
    from raafl.data.tokens import TensorTokens, TensorWindows

_HOME = {
    "AGNews": "text",
    "ByColumn": "partition",
    "CIFAR10": "sources",
    "CIFAR100": "sources",
    "ClassesPerClient": "partition",
    "ClientData": "federated",
    "Digits": "sources",
    "Dirichlet": "partition",
    "FPB": "text",
    "FederatedData": "federated",
    "FineTuning": "fine_tuning",
    "GaussianClusters": "sources",
    "HuggingFace": "sources",
    "HuggingFaceText": "text",
    "Iid": "partition",
    "MNIST": "sources",
    "Partition": "partition",
    "QuantitySkew": "partition",
    "SST2": "text",
    "Shakespeare": "text",
    "TensorImages": "sources",
    "TensorTokens": "tokens",
    "TensorWindows": "tokens",
    "TextFolder": "text",
}

__all__ = list(_HOME)


def __getattr__(name: str) -> object:
    """Import the module of a public name at the first access to that name."""
    if name not in _HOME:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f"{__name__}.{_HOME[name]}"), name)


def __dir__() -> list[str]:
    """List the public names, whether they have been imported or not."""
    return __all__
