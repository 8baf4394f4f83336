"""Parse a command line, and choose the method if the config leaves the choice to raafl (`algorithm: auto`)."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from raafl.config.argv import name_of, without
from raafl.config.parse import Parsed, parse
from raafl.errors import BadInput

if TYPE_CHECKING:
    from raafl.lab.plan.choose import Choice


def parse_run(command: str, argv: Sequence[str], *, config_yaml: str | None = None) -> Parsed:
    """Parse a command line into an experiment; with `algorithm: auto`, choose its method.

    The chosen method is written into the config, so that resuming, replays and clients use the same. Each process of a
    run makes the same choice from the same config; methods are tried first only where one process decides: in a simulation
    (each rank of one tries alike), and by a server that is asked to.

    Raises the same errors as `parse`.

    `config_yaml`: text of a config that is safe to read; options override it. None = take the config from ``argv``.
    """
    parsed = parse(command, argv, config_yaml=config_yaml)
    if parsed.experiment.algorithm.name != "auto":
        return parsed
    from raafl.lab.plan.choose import choose, is_open, trial_share

    experiment = parsed.experiment
    if not is_open(experiment.algorithm):
        return parsed
    experiment.check(needs_end=False)
    if (size := experiment.subfederations.size) is not None:
        raise BadInput(f"algorithm is auto, and subfederations.size is {size}: name a method, such as fed_buff")
    simulated = command in ("simulate", "plan")
    share = trial_share(experiment.algorithm, simulated=simulated)
    if share > 0 and command in ("fit", "join"):
        raise BadInput(
            f"algorithm.trials is {share}, but of a real run's processes only the server tries methods: name the method that "
            "`raafl simulate` or `raafl serve` has chosen, join without --config, or leave algorithm.trials out"
        )
    choice = choose(experiment, share=share, only_plan=command == "plan")
    return _with_choice(command, argv, choice, config_yaml)


def _with_choice(command: str, argv: Sequence[str], choice: Choice, config_yaml: str | None = None) -> Parsed:
    """Parse a command line again, with the chosen method in place of `auto`.

    `config_yaml`: text of a config that is safe to read, which options override; None = ``argv`` names the config.
    """
    others = [item for item in argv if name_of(item).startswith("--algorithm.")]
    rest = without(argv, "--algorithm", *map(name_of, others))
    again = parse(command, [*rest, *choice.candidate.options()], config_yaml=config_yaml)
    algorithm = replace(again.experiment.algorithm, chosen=choice.to_json())
    return replace(again, experiment=replace(again.experiment, algorithm=algorithm))
