"""`raafl --print_completion`, as a shell uses it; and configs by their names."""

from __future__ import annotations

import shutil
import subprocess

import pytest

from raafl.algorithms import ALGORITHMS
from raafl.commands.cli import main
from raafl.config.argv import shipped, with_paths
from raafl.errors import BadInput
from tests.habits.source import ROOT

pytest.importorskip("shtab")
pytestmark = pytest.mark.timeout(300)


@pytest.fixture(scope="module")
def script() -> str:
    from raafl.commands.cli import USAGE
    from raafl.commands.completion import script

    return script(
        "bash", {name: "" for name in ("fit", "simulate", "serve", "replay", "watch", "algorithms") if name in USAGE}
    )


@pytest.mark.parametrize(
    ("typed", "offered"),
    [
        (["s"], {"serve", "simulate"}),
        (["simulate", "--algorithm", "fed_a"], {"fed_async", "fed_avg"}),
        (
            ["simulate", "--algorithm.stale"],
            {"--algorithm.staleness", "--algorithm.staleness_a", "--algorithm.staleness_b"},
        ),
        (["fit", "--train.num_s"], {"--train.num_steps"}),
        (["simulate", "--submodels.batch_norm", ""], {"merged", "static", "null"}),
        (["replay", "--un"], {"--until"}),
        (["serve", "--min"], {"--min_clients"}),
        (["watch", "--progress", "v"], {"verbose"}),
        (["algorithms", "platon"], {"platon"}),
    ],
)
def test_bash_offers(script, typed, offered, tmp_path):
    if shutil.which("bash") is None:
        pytest.skip("there is no bash")
    words = " ".join(f"'{word}'" for word in ["raafl", *typed])
    asked = (
        f"COMP_WORDS=({words}); COMP_CWORD={len(typed)}; COMPREPLY=()\n"
        f"_shtab_raafl raafl '{typed[-1]}' '{['raafl', *typed][-2]}' 2>/dev/null\n"
        'printf "%s\\n" "${COMPREPLY[@]}"\n'
    )
    done = subprocess.run(
        ["bash"], input=script + "\n" + asked, capture_output=True, text=True, timeout=60, cwd=tmp_path
    )
    assert set(done.stdout.split()) == offered, done.stderr


def test_the_command_prints_a_script_or_says_what_is_wrong(capsys):
    assert main(["--print_completion", "fish"]) == 2
    assert "print_completion is 'fish', not a supported shell: give bash, zsh or tcsh" in capsys.readouterr().err
    assert main(["--print_completion=zsh"]) == 0
    shown = capsys.readouterr().out
    assert shown.startswith("#compdef raafl") and all(name in shown for name in ALGORITHMS)


def test_shipped_configs_go_by_name_and_files_come_first(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    assert set(shipped()) == {file.stem for file in (ROOT / "configs").glob("*.yaml")}
    path = str(ROOT / "configs" / "quickstart.yaml")
    assert with_paths(["--config", "quickstart", "--seed", "1"]) == ["--config", path, "--seed", "1"]
    assert with_paths(["--config=configs/quickstart.yaml"]) == [f"--config={path}"]
    unchanged = [
        "--config",
        "mine.yaml",
        "--config=configs/mine.yaml",
        "--config",
        "/a/quickstart.yaml",
        "--name",
        "ist",
    ]
    assert with_paths(unchanged) == unchanged
    (tmp_path / "quickstart.yaml").write_text("")
    assert with_paths(["--config", "quickstart.yaml"]) == ["--config", "quickstart.yaml"]
    with pytest.raises(
        BadInput,
        match="'quikstart', which is neither a file nor a config that comes with raafl: did you mean 'quickstart'",
    ):
        with_paths(["--config", "quikstart"])
