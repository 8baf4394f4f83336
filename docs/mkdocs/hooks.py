"""What the site has beside the pages of docs/: a page for each algorithm, the API reference, and links that lead out of docs/."""

from __future__ import annotations

import importlib
import inspect
import re
import sys
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File, Files

ROOT = Path(__file__).resolve().parents[2]
sys.path.insert(0, str(ROOT))
PARTS = {
    "sample": "Which clients work",
    "select": "On which submodel",
    "local": "How they train",
    "trigger": "When updates are merged",
    "merge": "How they are merged",
}
API = {
    "raafl": ["raafl"],
    "Interfaces of parts": ["raafl.core.algorithm", "raafl.core.local"],
    "Parts": [
        "raafl.core.sample",
        *(f"raafl.parts.{n}" for n in ("select", "select.rate_select", "select.windows", "trigger")),
        "raafl.parts.merge.mean",
    ],
    "Records": ["raafl.core.types", "raafl.core.state"],
    "Submodels": ["raafl.submodel"],
    "Data": ["raafl.data"],
    "Devices": ["raafl.devices"],
    "Model zoo": ["model_zoo"],
}


def on_config(config: Any) -> Any:
    """Complete the navigation: the generated pages, and no page that is not there."""
    config.nav = [entry for item in config.nav if (entry := _entry(item)) is not None]
    return config


def _entry(item: Any) -> Any:
    if isinstance(item, str):
        return item if (ROOT / "docs" / item).exists() else None
    ((title, value),) = item.items()
    if value == "api/":
        return {title: [{name: f"api/{_slug(name)}.md"} for name in API]}
    if value == "algorithms/":
        return {title: [{name: f"algorithms/{name}.md"} for name in _algorithms()]}
    if isinstance(value, str):
        return item if _entry(value) else None
    return {title: [entry for each in value if (entry := _entry(each)) is not None]}


def on_files(files: Files, config: Any) -> Files:
    """Add the generated pages."""
    pages = {f"algorithms/{name}.md": algorithm_page(name) for name in _algorithms()}
    documented: set[str] = set()
    pages |= {f"api/{_slug(title)}.md": api_page(title, modules, documented) for title, modules in API.items()}
    for path, text in pages.items():
        files.append(File.generated(config, path, content=text))
    return files


def on_page_markdown(markdown: str, page: Any, config: Any, files: Files) -> str:
    """Mend what a code host reads otherwise: lists without a blank line before them, links to files outside docs/."""
    text = re.sub(r"(?<!!)\[([^\]]*)\]\(((?!\w+:|#)[^)\s]+)\)", lambda match: _outside(match, page), markdown)
    return spaced(text)


def _outside(match: re.Match[str], page: Any) -> str:
    """Name a file or folder of the repository that is no page of the site; there is nothing here for a link to lead to."""
    path = match[2].partition("#")[0]
    target = (ROOT / "docs" / Path(page.file.src_uri).parent / path).resolve()
    if target.is_relative_to(ROOT / "docs") and not target.is_dir():
        return match[0]
    if not target.exists():
        raise SystemExit(f"{page.file.src_uri}: {match[2]} leads to nothing")
    text, name = match[1], target.relative_to(ROOT).as_posix()
    return text if name in text else f"{text} (`{name}`)"


def spaced(markdown: str) -> str:
    """Put the blank line before each list that follows a paragraph at once."""
    lines: list[str] = []
    fenced = False
    for line in markdown.splitlines():
        if line.lstrip().startswith("```"):
            fenced = not fenced
        is_item = re.match(r"([-*]|\d+\.) ", line)
        before = lines[-1] if lines else ""
        if not fenced and is_item and before.strip() and not re.match(r"\s|([-*]|\d+\.) ", before):
            lines.append("")
        lines.append(line)
    return "\n".join(lines) + "\n"


def _slug(title: str) -> str:
    return re.sub(r"\W+", "-", title.lower()).strip("-")


def _algorithms() -> dict[str, Any]:
    from raafl.algorithms import ALGORITHMS

    return ALGORITHMS


def algorithm_page(name: str) -> str:
    """Return the page of one algorithm: its module's docstring, its five answers, what its factory takes."""
    from raafl.commands.listing import documented_arguments

    factory = _algorithms()[name]
    module = sys.modules[factory.__module__]
    head, _, body = inspect.cleandoc(module.__doc__ or "").partition("\n\n")
    answers = factory().describe()
    lines = [f"# {name}", "", head, "", body, "", "## Its five answers", "", "| | with its defaults |", "| --- | --- |"]
    lines += [f"| {question} (`{part}`) | {_cell(answers[part])} |" for part, question in PARTS.items()]
    lines += ["", "## Arguments", "", "| argument | default | |", "| --- | --- | --- |"]
    parameters = inspect.signature(factory).parameters
    lines += [
        f"| `{arg}` | `{_default(parameters[arg].default)}` | {_cell(text)} |"
        for arg, text in documented_arguments(factory)
    ]
    lines += [
        "",
        "## Run it",
        "",
        "```bash",
        f"raafl simulate --config configs/quickstart.yaml --algorithm {name}",
        "```",
    ]
    configs = [path.name for path in sorted((ROOT / "configs").glob("*.yaml")) if f"raafl.{name}\n" in path.read_text()]
    if configs:
        lines += ["", "Configs made for it: " + ", ".join(f"`configs/{config}`" for config in configs) + "."]
    file = Path(module.__file__ or "").relative_to(ROOT)
    lines += ["", f"The equations are in `{file}`; [methods](../methods/index.md) have the prose."]
    return "\n".join(lines) + "\n"


def _default(value: Any) -> str:
    return {"None": "null", "True": "true", "False": "false"}.get(str(value), str(value))


def _cell(text: str) -> str:
    return " ".join(text.split()).replace("|", "\\|")


def api_page(title: str, module_names: list[str], documented: set[str]) -> str:
    """Return the reference of what modules offer; what is ``documented`` on an earlier page is named only, and grows."""
    lines = [f"# {title}", ""]
    for module_name in module_names:
        module = importlib.import_module(module_name)
        lines += [f"## `{module_name}`", "", (inspect.getdoc(module) or "").splitlines()[0], ""]
        for name in _public(module):
            found = getattr(module, name)
            home = getattr(found, "__module__", "")
            if module_name == "raafl" and name in _algorithms():
                lines += [f"- [`raafl.{name}`](../algorithms/{name}.md)"]
            elif home.startswith(("raafl.", "model_zoo.")) and (inspect.isclass(found) or inspect.isfunction(found)):
                path = f"{home}.{found.__qualname__}"
                lines += ["", f"- [`{name}`][{path}]" if path in documented else f"::: {path}", ""]
                documented.add(path)
    return "\n".join(lines) + "\n"


def _public(module: Any) -> list[str]:
    names = getattr(module, "__all__", None) or getattr(module, "_HOMES", None)
    if names is not None and not module.__name__.startswith("raafl.core"):
        return sorted(
            (name for name in names if not name.startswith("_")), key=lambda name: (name in _algorithms(), name)
        )
    own = vars(module)
    return [n for n, v in own.items() if not n.startswith("_") and getattr(v, "__module__", "") == module.__name__]
