"""Convert the keyword arguments of `Federation` to fields of `Experiment`, and write these to config.yaml."""

from __future__ import annotations

import dataclasses
import re
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, TypedDict, get_type_hints

import numpy as np
import yaml
from torch import Tensor

from raafl.algorithms import ALGORITHMS, AUTO
from raafl.api.modules import ModuleSpec, check_types, qualified_name
from raafl.api.python_objects import digest
from raafl.config.experiment import SECTIONS, Experiment, field_types, marked
from raafl.config.messages import unknown
from raafl.config.options import Engine, Samples, SubmodelOptions, Timeouts
from raafl.core.algorithm import Algorithm, Training
from raafl.core.options import Compress, FabricOptions, Guard, Privacy, Rounds, SecureAggregation
from raafl.data.partition import Partition
from raafl.devices.catalog import FIGURES
from raafl.devices.files import no_file, num_devices
from raafl.devices.profiles import Device
from raafl.errors import BadInput, briefly, one_of
from raafl.exact_key import digest_of
from raafl.plain_yaml import dumper_class, read_yaml
from raafl.rules import recorded_revision

_FLAT = {
    f.name: group for group in ("train", "fabric") for f in dataclasses.fields(SECTIONS[group]) if f.name != "device"
}
_HOW = ("loss", "optimizer", "metrics", "batch_size", "collate_fn")
_HERE = "raafl.api.python_objects"


class Settings(TypedDict, total=False):
    """Keyword arguments of `Federation`: the fields of `Experiment`, `Training` and `FabricOptions`."""

    partition: Any
    name: str
    seed: int
    memory: float | str
    train: Training | Mapping[str, Any]
    num_epochs: int | None
    num_steps: int | None
    batch_size: int | None
    lr_schedule: Literal["constant", "linear", "cosine", "step"]
    lr_versions: int | None
    lr_time_s: float | None
    lr_warmup: float
    lr_final: float
    submodels: SubmodelOptions | Mapping[str, Any]
    fabric: FabricOptions | Mapping[str, Any]
    accelerator: str
    precision: str
    gradient_clip_val: float | None
    accumulate_grad_batches: int
    capture: str | bool
    data_on_device: float
    deterministic: bool
    tf32: bool | None
    shard: bool
    guard: Guard | Mapping[str, Any]
    rounds: Rounds | Mapping[str, Any]
    privacy: Privacy | Mapping[str, Any]
    secure_aggregation: SecureAggregation | Mapping[str, Any]
    compress: Compress | Mapping[str, Any]
    max_updates: int | None
    max_time: float | str | None
    target: str | list[str] | None
    eval_every: int | str | None
    checkpoint_every: int | None
    checkpoint_s: float | str | None
    keep_checkpoints: int
    keep_best: str | None
    samples: Samples | Mapping[str, Any]
    safetensors: bool
    push_to_hub: str | None
    emulate: bool
    overlap: bool
    server_device: str
    transport: str
    workers: int
    engine: Engine | Mapping[str, Any]
    batch_clients: int | Literal["auto", "fast"]
    threads: int
    output: str | Path | None
    progress: str
    logger: Any
    monitor: str | None
    monitor_clients: int
    monitor_stall_s: float | str
    rules: int
    waits: Timeouts | Mapping[str, Any]
    strict: bool


def fields_of(settings: Mapping[str, Any]) -> dict[str, Any]:
    """Convert the keyword arguments of `Federation` to fields of `Experiment`.

    Raises:
        BadInput: a setting is unknown or of another type, or a section of settings is invalid.
    """
    known = marked("keyword")
    given: dict[str, Any] = {}
    flat: dict[str, dict[str, Any]] = {}
    for name, value in ((name, plain_value(name, value)) for name, value in settings.items()):
        if value is None and (name in SECTIONS or name == "partition"):
            continue  # same as leaving it out
        if name in _FLAT:
            flat.setdefault(_FLAT[name], {})[name] = value
        elif name in known:
            given[name] = value
        else:
            raise BadInput(unknown(f"Federation has no '{name}'", name, [*known, *_FLAT]))
    check_types({name: value for name, value in given.items() if name not in SECTIONS}, field_types())
    if "partition" in given and not isinstance(given["partition"], Partition):
        raise BadInput(
            f"partition is {briefly(given['partition'])}: {_as_object(given['partition'], 'raafl.data.Dirichlet(alpha=0.5)')}"
        )
    for group, cls in SECTIONS.items():
        value = given.get(group)
        if isinstance(value, Mapping):
            given[group] = _made(group, cls, value)
        elif value is not None and not isinstance(value, cls):
            raise BadInput(f"{group} is {briefly(value)}: give its fields as a dict")
        elif value is not None:
            found = {f.name: plain_value(f.name, getattr(value, f.name)) for f in dataclasses.fields(cls)}
            check_types(found, get_type_hints(cls), group)
            given[group] = dataclasses.replace(
                value, **{f.name: found[f.name] for f in dataclasses.fields(cls) if f.init}
            )
        if group in flat:
            check_types(flat[group], get_type_hints(cls), group)
            earlier = given.get(group, cls())
            more = {"num_epochs": None} if "num_steps" in flat[group] and group not in given else {}
            given[group] = dataclasses.replace(earlier, **{**more, **flat[group]})
    return given


def options_set(settings: Mapping[str, Any]) -> frozenset[str]:
    """Return the names of the options of `FabricOptions` that keyword arguments set, such as fabric.precision."""
    section = settings.get("fabric")
    flat = [name for name in settings if _FLAT.get(name) == "fabric"]
    return frozenset(f"fabric.{name}" for name in (*flat, *(section if isinstance(section, Mapping) else ())))


def _as_object(value: Any, example: str) -> str:
    """Tell how to create the object that is needed in place of a class, or of a config's class_path and init_args."""
    if isinstance(value, Mapping) and isinstance(value.get("class_path"), str):
        given = value.get("init_args") or {}
        example = f"{value['class_path']}({', '.join(f'{name}={item!r}' for name, item in dict(given).items())})"
    elif isinstance(value, type):
        return f"give an object, {value.__name__}(...)"
    return f"give an object, such as {example}"


def plain_value(name: str, value: Any) -> Any:
    """Convert a path, and Lightning's ``precision=32``, to text, and numpy's numbers to Python's; return others as they are."""
    if isinstance(value, Path) or (name == "precision" and type(value) is int):
        return str(value)
    return value.item() if type(value).__module__ == "numpy" and getattr(value, "ndim", 1) == 0 else value


def _made(group: str, cls: Any, value: Mapping[str, Any]) -> Any:
    names = [f.name for f in dataclasses.fields(cls) if f.init]
    for name in value:
        if name not in names:
            raise BadInput(unknown(f"unknown field {group}.{name}", str(name), names))
    value = {name: plain_value(name, item) for name, item in value.items()}
    check_types(value, get_type_hints(cls), group)
    try:
        return cls(**value)
    except ValueError as error:
        raise BadInput(str(error)) from error


def algorithm_of(algorithm: Any) -> Algorithm:
    """Return an algorithm, which may be given by name; it then has its default settings.

    Raises:
        BadInput: ``algorithm`` is neither an algorithm nor the name of one.
    """
    if isinstance(algorithm, str):
        one_of("algorithm", algorithm, [*ALGORITHMS, AUTO])
        if algorithm != AUTO:
            return ALGORITHMS[algorithm]()
        from raafl.lab.plan.choose import auto

        return auto()
    if not isinstance(algorithm, Algorithm):
        made = (
            f"give what it makes, raafl.{algorithm.__name__}()"
            if callable(algorithm)
            else _as_object(algorithm, "raafl.fed_raa()")
        )
        raise BadInput(f"algorithm is {briefly(algorithm)}: {made}, or its name")
    return algorithm


def devices_of(devices: object) -> object:
    """Check the user's devices and convert them: a file becomes its path, a name or a dict of fields becomes a `Device`.

    Raises:
        BadInput: ``devices`` is neither a file nor a list, or a device is invalid.
    """
    if devices is None or isinstance(devices, str):
        return devices
    if isinstance(devices, Path):
        return str(devices)
    if isinstance(devices, int):
        raise BadInput(no_file(str(devices)))
    if not isinstance(devices, (list, tuple)):
        raise BadInput(f"devices is {briefly(devices)}: give a list of devices, or a YAML, JSON or CSV file of them")
    found = []
    for device in devices:
        if isinstance(device, str):
            device = {"name": device}
        found.append(_made("devices", Device, device) if isinstance(device, Mapping) else device)
    return found


def count_of(devices: Any) -> int | None:
    """Return the number of devices; None if it is unknown."""
    if devices is None:
        return None
    try:
        return num_devices(devices)
    except (ValueError, OSError) as error:
        raise BadInput(str(error)) from error


def same_settings(theirs: Mapping[str, Any], ours: Mapping[str, Any]) -> None:
    """Raise `BadInput` if settings differ from those of the run to be resumed."""
    other = [name for name in ours if name not in marked("may_change") and theirs.get(name) != ours[name]]
    if other:
        seeded = " (of the model the values that it began with, too: torch.manual_seed before it is made)"
        raise BadInput(
            f"resume: {', '.join(other)} not as in the run's config.yaml: give the same as in that run"
            + (seeded if "model" in other else "")
        )


def config_of(experiment: Experiment, module: ModuleSpec, data: object) -> dict[str, Any]:
    """Return the complete config of a run for config.yaml; Python objects in it are described in words."""
    found: dict[str, Any] = {f.name: _plain(getattr(experiment, f.name)) for f in dataclasses.fields(Experiment)}
    algorithm = experiment.algorithm
    if algorithm.name in ALGORITHMS and ALGORITHMS[algorithm.name]() == algorithm:
        found["algorithm"] = {"class_path": f"raafl.{algorithm.name}"}
    else:
        parts = algorithm.describe()
        shown = {"given": parts.pop("name"), "parts": parts, "shown": repr(algorithm) + _arrays_in(algorithm)}
        found["algorithm"] = {"class_path": f"{_HERE}.algorithm", "init_args": shown}
    found["partition"] = _partition(experiment.partition)
    found["model"] = {"class_path": f"{_HERE}.Module", "init_args": _module(module)}
    given = qualified_name(type(data)) if not isinstance(data, str) else data
    settings = {name: _plain(value) for name, value in getattr(data, "hparams", {}).items()}
    found["data"] = {
        "class_path": f"{_HERE}.Data",
        "init_args": {"given": given, "settings": settings, "shown": _shown(data)},
    }
    return found


def _module(spec: ModuleSpec) -> dict[str, Any]:
    given = spec.given
    settings = {name: _plain(value) for name, value in getattr(given, "hparams", {}).items()} if spec.is_module else {}
    return {
        "given": given if isinstance(given, str) else qualified_name(type(given) if spec.is_module else given),
        "settings": {**settings, **spec.settings()},
        "weights": digest(spec.unwrap(given)) if spec.is_module else None,
        "shown": _shown(given) if spec.is_module else "",
    }


def _partition(partition: object) -> dict[str, Any]:
    cls = type(partition)
    home = sys.modules.get(cls.__module__)
    importable = cls.__module__ != "__main__" and getattr(home, cls.__qualname__, None) is cls
    if importable and dataclasses.is_dataclass(partition):
        args = {f.name: _plain(getattr(partition, f.name)) for f in dataclasses.fields(partition) if f.init}
        return {"class_path": qualified_name(cls), "init_args": args}
    return {
        "class_path": f"{_HERE}.partition",
        "init_args": {"given": qualified_name(cls), "shown": _shown(partition)},
    }


def _plain(value: object) -> object:
    """Convert a value to plain data for YAML; an array or tensor becomes its digest, another object the name of its class."""
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, np.ndarray | Tensor):
        found = digest_of(value.cpu() if isinstance(value, Tensor) else value)
        return qualified_name(value) if found is None else f"{qualified_name(value)} {tuple(value.shape)} {found[:16]}"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain(item) for item in value]
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        named = {f.name: getattr(value, f.name) for f in dataclasses.fields(value) if f.init}
        if isinstance(value, Device):  # the other fields follow from the device's name
            named = {name: item for name, item in named.items() if name in value.given or name not in FIGURES}
        return {name: _plain(item) for name, item in named.items()}
    return str(value) if isinstance(value, Path) else qualified_name(value)


def check_attribute(name: str, value: object) -> None:
    """Raise `BadInput` if an attribute that is set on a `Federation` is a setting, which its runs would not read."""
    if name in marked("keyword") or name in _FLAT:
        raise BadInput(
            f"{name} is set to {briefly(value)}, which has no effect on a federation that exists: "
            f"give it to a new one, raafl.Federation(..., {name}=...)"
        )


def check_how(how: Mapping[str, Any]) -> None:
    """Raise `BadInput` if there is no such argument about a module or its data."""
    for name in how:
        if name not in _HOW:
            raise BadInput(unknown(f"there is no argument '{name}'", name, _HOW))


def brief_repr(value: object) -> str:
    """Return the `repr` of a value on one short line, cut with dots, without memory addresses."""
    text = without_addresses(repr(value))
    return text if len(text) <= 60 else f"{text[:57]}..."


def without_addresses(text: str) -> str:
    """Return a text, the `repr` of an object, without memory addresses."""
    return re.sub(r" at 0x[0-9a-fA-F]+", "", text)


def _shown(thing: object) -> str:
    text = without_addresses(repr(thing))
    return (text if len(text) <= 4000 else f"{text[:4000]} ...") + _arrays_in(thing)


def _arrays_in(thing: object) -> str:
    """Return digests of the arrays in a record, of which its `repr` leaves out digits and entries; "" if it has none."""

    def walk(value: object) -> Iterator[object]:
        if isinstance(value, np.ndarray | Tensor):
            yield _plain(value)
        elif isinstance(value, (Mapping, list, tuple)):
            for item in value.values() if isinstance(value, Mapping) else value:
                yield from walk(item)
        elif dataclasses.is_dataclass(value) and not isinstance(value, type):
            for field in dataclasses.fields(value):
                yield from walk(getattr(value, field.name, None))

    return "".join(f"; {one}" for one in walk(thing))


def to_yaml(config: Mapping[str, Any], notes: list[str]) -> str:
    """Convert a config to YAML, with ``notes`` as comments at the top."""

    class Dumper(dumper_class()):  # type: ignore[misc]
        pass

    def text(dumper: yaml.SafeDumper, value: str) -> yaml.Node:
        return dumper.represent_scalar("tag:yaml.org,2002:str", value, style="|" if "\n" in value else None)

    Dumper.add_representer(str, text)
    comments = [f"# {line}" for note in notes for line in note.splitlines()]
    return "\n".join(
        [*comments, yaml.dump(dict(config), Dumper=Dumper, sort_keys=False, allow_unicode=True, width=100)]
    )


def settings_in(folder: Path) -> Mapping[str, Any]:
    """Read the settings of a run to be resumed, with the revision of its rules; raise `BadInput` if it has no config."""
    path = folder / "config.yaml"
    if not path.is_file():
        raise BadInput(f"resume is '{folder}', which is not a run folder: name one with a config.yaml")
    found = read_yaml(path, f"resume: '{path}'")
    found = found if isinstance(found, dict) else {}
    return {**found, "rules": recorded_revision(found)}
