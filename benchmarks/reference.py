"""Write what docs/ has from the code: configuration.md, sections.md, parts.md and the settings of docs/methods/*.md.

python -m benchmarks.reference [--check]

A table of settings stands between `<!-- settings: FACTORY ... -->` and `<!-- end of settings -->`. Its column with the paper's
symbols is written by hand and kept.
"""

from __future__ import annotations

import dataclasses
import importlib
import inspect
import pkgutil
import re
import sys
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

DOCS = Path(__file__).resolve().parents[1] / "docs"
_CONFIGURATION = """# Configuration

With this page you can look up every field of a config;
[sections](sections.md) has those of `train`, `guard` and the like.
Each field is an option of the command line too: `--train.num_steps 5` is `train: {num_steps: 5}`.
`raafl simulate --help` prints the same, `--print_config` prints a whole config.
The page is written by `python -m benchmarks.reference`.

```yaml
model: {class_path: model_zoo.MLP, init_args: {in_features: 64, hidden: [32], num_classes: 10}}
data: {class_path: raafl.data.Digits}
algorithm: {class_path: raafl.fed_avg}
clients: 4
train: {num_steps: 5, num_epochs: null}
max_updates: 8
```

`model`, `data`, `algorithm` and `partition` name a class or a factory with its arguments:
raafl's own or yours, by its path.
The last column says who must have the same value.
*Shared* fields are compared when a client joins, *told* fields are sent to a client without a config,
*resume* fields may change when a run is resumed.
"""
_SECTIONS = """# Sections of a config

With this page you can look up the fields within `train`, `submodels`, `fabric`, `guard`, `rounds`, `privacy`,
`secure_aggregation`, `compress` and `waits`; the other fields are under [configuration](configuration.md).
The page is written by `python -m benchmarks.reference`.

```yaml
train: {num_steps: 5, num_epochs: null}
guard: {clip_norm: 1.0, combine: median}
compress: {down: bf16, up: int8}
waits: {task_s: 60}
```

*Shared*, *told* and *resume* mean what they mean [there](configuration.md).
"""
_MARKED = re.compile(r"(<!-- settings: ([\w ]+) -->\n)(.*?)(<!-- end of settings -->)", re.S)
_PARTS = """# Parts

With this page you can find an answer to each of the [five questions](concepts.md#five-answers)
that a method of your own can take as it is.
`raafl algorithms NAME` shows which parts a method has;
[adding one](add-an-algorithm.md) shows how they are put together.
The page is written by `python -m benchmarks.reference`.
"""
_QUESTIONS = {
    "Sample": ("sample: which clients work?", ("raafl.core.sample",)),
    "Select": ("select: on which submodel, and how much?", ("raafl.parts.select",)),
    "Local": ("local: what does the client do with it?", ("raafl.core.local", "raafl.parts.local")),
    "Trigger": ("trigger: when are updates folded in?", ("raafl.parts.trigger",)),
    "Merge": ("merge: how are they folded in?", ("raafl.parts.merge", "raafl.parts.protect")),
}


def configuration() -> str:
    """Return the reference of the fields of a config outside its sections."""
    from raafl.config.experiment import ABOUT, SECTIONS, Experiment
    from raafl.config.options import GROUPS

    fields = {field.name: field for field in dataclasses.fields(Experiment)}
    text = [_CONFIGURATION]
    for group, heading in GROUPS.items():
        rows = [
            f"| `{name}` | {_default(fields[name])} | {_cell(about.help)} | {_who(about)} |"
            for name, about in ABOUT.items()
            if about.group == group and name not in SECTIONS
        ]
        text += [f"## {(heading or 'other fields').capitalize()}", "", "| field | default | what it is | |"]
        text += ["| --- | --- | --- | --- |", *rows, ""]
    return "\n".join(text).rstrip() + "\n"


def sections() -> str:
    """Return the reference of the fields in the sections of a config."""
    from raafl.config.experiment import ABOUT, SECTIONS

    text = [_SECTIONS]
    for name, record in SECTIONS.items():
        described = _attributes(record)
        rows = [
            f"| `{name}.{one.name}` | {_default(one)} | {_cell(described.get(one.name, ''))} |"
            for one in dataclasses.fields(record)
        ]
        who = _who(ABOUT[name])
        text += [f"## {name}", "", _sentence(ABOUT[name].help) + (f" ({who})" if who else ""), ""]
        text += ["| field | default | what it is |", "| --- | --- | --- |", *rows, ""]
    return "\n".join(text).rstrip() + "\n"


def parts() -> str:
    """Return the catalogue of parts by question."""
    from raafl.algorithms import ALGORITHMS

    made = {name: factory() for name, factory in ALGORITHMS.items()}
    text = [_PARTS]
    for question, (heading, packages) in _QUESTIONS.items():
        text += [f"## {heading[0].upper() + heading[1:]}", "", "| part | what it does | fields | methods |"]
        text += ["| --- | --- | --- | --- |"]
        for cls in sorted(_classes(question, packages), key=lambda cls: (cls.__module__, cls.__name__)):
            names = [name for name, algorithm in made.items() if type(getattr(algorithm, question.lower())) is cls]
            fields = [one.name for one in dataclasses.fields(cls) if one.init] if dataclasses.is_dataclass(cls) else []
            first = _cell((inspect.getdoc(cls) or "").split("\n\n")[0])
            shown = ", ".join(f"`{field}`" for field in fields)
            text.append(f"| `{cls.__module__}.{cls.__name__}` | {first} | {shown} | {', '.join(names)} |")
        text.append("")
    return "\n".join(text).rstrip() + "\n"


def with_settings(page: Path) -> str:
    """Return a page with its tables of settings as the signatures and docstrings of the factories are."""
    return _MARKED.sub(
        lambda found: f"{found[1]}\n{_settings(found[2].split(), found[3])}\n\n{found[4]}", page.read_text()
    )


def _settings(names: list[str], old: str) -> str:
    """Return one table of the settings of factories.

    Args:
        names: the factories; with more than one, a column says which of them have a setting.
        old: the table as the page has it, from which the symbols are taken.
    """
    from docstring_parser import parse_from_object

    from raafl.algorithms import ALGORITHMS

    several = len(names) > 1
    symbols: dict[tuple[str, str], str] = {}  # by setting and factory, so that they outlive a change of the texts
    for line in old.splitlines():
        if len(cells := _cells(line)) > 3:
            having = names if len(cells) == 4 or cells[1] == "all" else re.findall(r"\w+", cells[1])
            symbols |= {(cells[0], name): cells[-3] for name in having}
    rows: dict[tuple[str, str, str], list[str]] = {}
    for name in names:
        texts = {one.arg_name: _cell(one.description or "") for one in parse_from_object(ALGORITHMS[name]).params}
        for one in inspect.signature(ALGORITHMS[name]).parameters.values():
            rows.setdefault((f"`{one.name}`", _value(one.default), _plain(texts[one.name])), []).append(name)
    lines = (
        ["| setting | in | paper | default | what it is |"]
        if several
        else ["| setting | paper | default | what it is |"]
    )
    lines += ["| " + " | ".join(["---"] * (5 if several else 4)) + " |"]
    for (setting, default, text), having in rows.items():
        who = ["all" if having == names else ", ".join(f"`{name}`" for name in having)] if several else []
        symbol = ", ".join(dict.fromkeys(filter(None, (symbols.get((setting, name)) for name in having))))
        lines.append("| " + " | ".join([setting, *who, symbol, default, text]) + " |")
    return "\n".join(lines)


def _cells(line: str) -> tuple[str, ...]:
    """Return the cells of a line of a table."""
    return tuple(cell.strip() for cell in re.split(r"(?<!\\)\|", line.strip())[1:-1])


def _classes(question: str, packages: tuple[str, ...]) -> Iterator[type]:
    """Yield the public parts that answer a question, those that are abstract left out."""
    from raafl.core import algorithm, local, sample

    base: Any = getattr({"Sample": sample, "Local": local}.get(question, algorithm), question)
    for package in packages:
        module = importlib.import_module(package)
        homes = [module]
        for info in pkgutil.iter_modules(getattr(module, "__path__", [])):
            homes.append(importlib.import_module(f"{package}.{info.name}"))
        for home, (name, cls) in ((one, item) for one in homes for item in vars(one).items()):
            is_part = isinstance(cls, type) and issubclass(cls, base) and cls.__module__ == home.__name__
            if is_part and not name.startswith("_") and not inspect.isabstract(cls):
                yield cls


def _attributes(record: type) -> dict[str, str]:
    from docstring_parser import parse_from_object

    found = parse_from_object(record)
    return {one.arg_name: _plain(one.description or "") for one in found.params}


def _plain(text: str) -> str:
    """Return a text of a docstring with values as YAML has them."""
    plain = {"``": "`", "None": "null", "True": "true", "False": "false"}
    return re.sub("|".join(plain), lambda found: plain[found[0]], text)


def _value(value: Any) -> str:
    """Return a default as YAML has it."""
    shown = {None: "null", True: "true", False: "false"}.get(value, value) if isinstance(value, bool | None) else value
    return f"`{shown}`"


def _default(field: Any) -> str:
    if field.default is not dataclasses.MISSING:
        return _value(field.default)
    if field.default_factory is not dataclasses.MISSING:
        return f"`{type(field.default_factory()).__name__}`"
    return "must be given"


def _who(about: Any) -> str:
    words = (("shared", about.must_match), ("told", about.sent_to_clients), ("resume", about.may_change))
    return ", ".join(word for word, holds in words if holds)


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def _sentence(text: str) -> str:
    return f"{text[:1].upper()}{' '.join(text[1:].split())}."


PAGES: dict[str, Callable[[], str]] = {
    "configuration.md": configuration,
    "sections.md": sections,
    "parts.md": parts,
    **{f"methods/{page.name}": partial(with_settings, page) for page in sorted((DOCS / "methods").glob("*.md"))},
}


def main(argv: list[str]) -> int:
    """Write the pages; with ``--check`` only say which are not as the code is, and return 1."""
    stale = [name for name, page in PAGES.items() if not (DOCS / name).is_file() or (DOCS / name).read_text() != page()]
    for name in stale:
        if argv != ["--check"]:
            (DOCS / name).write_text(PAGES[name](), encoding="utf-8")
        print(("stale: " if argv == ["--check"] else "written: ") + f"docs/{name}")
    return 1 if stale and argv == ["--check"] else 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
