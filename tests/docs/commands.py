"""Command lines of the documentation: parsed by what would parse them, and run where that is cheap."""

from __future__ import annotations

import glob
import importlib.util
import io
import re
import shutil
import tomllib
from contextlib import redirect_stdout
from itertools import count
from pathlib import Path

import yaml

from raafl.commands.cli import USAGE, main
from raafl.commands.stored_runs import AUTO, with_local_resume
from raafl.config.argv import values, with_paths, without
from raafl.config.parse import parse
from raafl.config.remote_options import split
from raafl.lab.compare.compared import read_sweep
from raafl.lab.compare.comparison import read
from raafl.lab.compare.grid import is_grid, read_grid
from raafl.lab.compare.runs import resolve
from tests.habits.source import ROOT
from tests.helpers import cached_models

# Data or weights that are not at hand.
FAR = re.compile(
    r"raafl\.data\.(MNIST|CIFAR|SST2|AGNews|FPB|Shakespeare|HuggingFace)|package:(?!pydoc_data)|name_or_path(?!: made:|$)"
)
NEVER_RUN = ("fit", "serve", "join", "watch")  # real ranks, or something that goes on
EXTRAS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]
_numbers = count()


def check(words: list[str], *, runs: bool) -> None:
    """Parse a command line, and run it if it is cheap and ``runs``."""
    words = [re.sub(r"\$\{?\w+\}?", "1", word) for word in words]  # a shell's variables are numbers here
    while words and re.match(r"[A-Z_]+=", words[0]):
        words = words[1:]
    if ">" in words:
        with open(words[words.index(">") + 1], "w", encoding="utf-8") as file, redirect_stdout(file):
            return check(words[: words.index(">")], runs=runs)
    words = [found for word in words for found in (sorted(glob.glob(word)) if "*" in word else [word])]
    match words:
        case ["raafl", *rest] | ["python", "-m", "raafl", *rest]:
            check_raafl(rest, runs=runs)
        case ["torchrun", *rest]:
            check_torchrun(rest)
        case ["python", "-m", module, *rest]:
            check_module(module, rest)
        case ["python", file, *_]:
            assert Path(file).is_file() or (ROOT / file).is_file(), f"there is no {file}"
        case ["make", *rest]:
            targets = [word for word in rest if "=" not in word]
            missing = [name for name in targets if not re.search(rf"^{name}:", (ROOT / "Makefile").read_text(), re.M)]
            assert not missing, f"the Makefile has no {missing}"
        case ["pip", "install", *rest]:
            assert not [word for word in rest if re.match(r"raafl\b", word)], (
                "raafl is on no index: pip install '.[EXTRA]'"
            )
            named = [name for word in rest for name in re.findall(r"^\.\[(.*)\]$", word) for name in name.split(",")]
            assert set(named) <= EXTRAS.keys(), f"raafl has no extra {set(named) - EXTRAS.keys()}"
        case _:
            raise AssertionError(f"no rule for the command {words}")


def check_torchrun(argv: list[str]) -> None:
    """Parse torchrun's own options with its own parser, and the rest with raafl's."""
    from torch.distributed.run import get_args_parser

    options = get_args_parser().parse_args(argv)
    if options.module:
        assert options.training_script == "raafl", f"no rule for torchrun -m {options.training_script}"
        check_raafl(options.training_script_args, runs=False)
    else:
        assert Path(options.training_script).is_file() or (ROOT / options.training_script).is_file()


def check_module(module: str, argv: list[str]) -> None:
    """See that a module exists and that its source knows the options."""
    spec = importlib.util.find_spec(module)
    assert spec is not None and spec.origin, f"there is no module {module}"
    source = Path(spec.origin).read_text() + (ROOT / "benchmarks" / "common.py").read_text()
    unknown = [word for word in argv if word.startswith("--") and f'"{word.partition("=")[0]}"' not in source]
    assert not unknown, f"{module} does not know {unknown}"


def check_raafl(argv: list[str], *, runs: bool) -> None:
    """Run a command of raafl with small limits, or parse it."""
    command, rest = argv[0], with_paths(argv[1:])
    assert re.search(rf"^  {command} ", USAGE, re.M) or command.startswith("--"), f"raafl has no command {command}"
    if {"--help", "-h", "--print_config"} & set(rest) or command in ("algorithms", "--version", "--print_completion"):
        exits_well(argv)
    elif command in ("serve", "join"):
        _, rest = split(command, rest)
        if values(rest, "--config"):
            parse(command, rest)
    elif command in ("fit", "simulate"):
        local = without(rest, "--local", "--max_restarts") if values(rest, "--local") else rest
        local = with_local_resume(local) if values(local, "--resume") == [AUTO] else local
        if is_shipped_config_alone(argv):
            return
        if not (runs and command == "simulate" and not values(rest, "--resume") and not is_far(rest)):
            parse(command, local)
        else:
            output = values(rest, "--output") or [f"run-{next(_numbers)}"]
            shutil.rmtree(output[-1], ignore_errors=True)
            limits = ["--max_updates", "3", "--max_time", "1h", "--progress", "quiet", "--output", output[-1]]
            if not values(rest, "--data.num_test") and any("raafl.data.FineTuning" in text for text in _configs(rest)):
                limits += ["--data.num_test", "16"]
            exits_well(["simulate", *without(rest, "--output", "--max_updates", "--max_time", "--target"), *limits])
    elif command == "key":
        for output in values(rest, "--output") if runs else []:  # a page may make one anew
            Path(output).unlink(missing_ok=True)
        if runs:
            exits_well(argv)
    elif command == "plan":
        check_plan(rest, runs=runs)
    elif command == "reproduce":
        check_paper(rest)
    elif command == "compare":
        check_comparison(Path(rest[0]) if Path(rest[0]).exists() else ROOT / rest[0])
    elif command == "sweep" and "--wandb" not in rest:
        assert read_sweep(Path(rest[0])).comparison()
    elif runs and command not in NEVER_RUN:
        exits_well(argv)


def check_comparison(path: Path) -> None:
    """Read a comparison, or a grid's first cell, and parse its first row; tests/lab/compare runs such files."""
    if is_grid(path):
        grid = read_grid(path)
        comparison = grid.comparison(grid.cells[0])
    else:
        comparison = read(path)
    label, options = next(iter(comparison.rows.items()))
    assert resolve(comparison.config, label, (*comparison.options, *options), comparison.seeds)


def check_paper(rest: list[str]) -> None:
    """List the papers' tables, and see that the one that is named is there; its runs take hours."""
    with io.StringIO() as out, redirect_stdout(out):
        exits_well(["reproduce"])
        named = [word for word in rest[:2] if not word.startswith("-")]
        assert all(name in out.getvalue() for name in named), f"raafl reproduce does not list {named}"


def check_plan(rest: list[str], *, runs: bool) -> None:
    """Run a plan; parse what measures, and what answers those who measure."""
    from raafl.commands.plan import _split

    _, fields = _split(rest)
    if values(fields, "--config") and not is_far(fields):
        parse("plan", fields)
    if runs and not {"--measure", "--answer"} & set(rest) and not is_far(fields):
        exits_well(["plan", *without(rest, "--updates"), "--updates", "20"])


def is_shipped_config_alone(argv: list[str]) -> bool:
    """Whether a command simulates a config of raafl's as it is: tests/config/test_shipped_configs.py builds and runs those."""
    return argv[:2] == ["simulate", "--config"] and len(argv) == 3 and (ROOT / argv[2]).parent == ROOT / "configs"


def is_far(argv: list[str]) -> bool:
    """Whether a config wants data or weights that a reader has to fetch first."""
    texts = _configs(argv)
    if not any("data" in yaml.safe_load(text) for text in texts) or any(FAR.search(text) for text in texts):
        return True
    return any(FAR.search(word) for word in argv)


def _configs(argv: list[str]) -> list[str]:
    """The configs that are named, without comments."""
    return [re.sub(r"^#.*", "", Path(file).read_text(), flags=re.M) for file in values(argv, "--config")]


def exits_well(argv: list[str]) -> None:
    """Run raafl in this process; exit code 0."""
    try:
        with cached_models.reuse_findings():
            code = main(argv)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 0
    assert code == 0, f"raafl {' '.join(argv)} ended with {code}"
