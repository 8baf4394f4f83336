"""Turn the merges of a federation into the update of one client: a subfederation is a client whose local training is a federation.

Its update is the mean of its clients' updates, with the submodel, number, samples and steps of those that have one submodel in
common (`Contribution`). From these a merge knows for each element what it weighs, in kilobytes where a second tensor of
weights would double the transfer. A server above that server adds them up in the same way, to any depth.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import fields, is_dataclass, replace
from typing import Any, cast

from raafl.core.algorithm import Algorithm, Merge
from raafl.core.local import Local
from raafl.core.options import Subfederation, Subfederations, Training
from raafl.core.roster import Roster
from raafl.core.sample import Sample
from raafl.core.state import GlobalState
from raafl.core.types import NUM_TESTED, Assignment, ClientInfo, Contribution, Received, Settled, Update, Work
from raafl.devices.profiles import Profile
from raafl.submodel import FULL, FlatTensors, Spec, SpecError, Submodels
from raafl.submodel.declared import within as inside

SIMULATED = "subfederations.size"
"""Setting by which a simulated run has subfederations."""
CONTRIBUTIONS, JOURNAL = "contributions", "journal"
"""Keys in the plain data of a subfederation's answer."""

MOST_SUBMODELS = 64
"""Submodels of each client in one answer of its subfederation, at most: as many as the merges of a task in which all differ."""
_PEAK = "memory/peak_bytes"
_OF_THE_RUN_ABOVE = (
    *("max_updates", "max_time", "target", "checkpoint_every", "checkpoint_s", "keep_best", "push_to_hub", "logger"),
    "monitor",
)


def common(spec: Spec, within: Spec) -> Spec:
    """Return the submodel that two submodels share.

    Raises:
        SpecError: they share no unit of an axis, or no block; or nothing that trains.
    """
    pairs: list[tuple[tuple[str, tuple[int, ...]], ...]] = []
    for one, other in ((spec.kept, within.kept), (spec.blocks, within.blocks)):
        mine, theirs = dict(one), dict(other)
        names = [*mine, *(name for name in theirs if name not in mine)]
        shared = {
            name: sorted({*mine.get(name, theirs.get(name, ()))} & {*theirs.get(name, mine.get(name, ()))})
            for name in names
        }
        if empty := [name for name, indices in shared.items() if not indices]:
            raise SpecError(
                f"the submodel {spec} has nothing of {empty[0]} in common with {within}, from the server above"
            )
        pairs.append(tuple((name, tuple(indices)) for name, indices in shared.items()))
    trained = _in_both(spec.trained, within.trained)
    if trained == () and () not in (spec.trained, within.trained):
        raise SpecError(f"the submodel {spec} trains nothing of {within}, from the server above")
    exits = _in_both(spec.exits, within.exits)
    return replace(spec, kept=pairs[0], blocks=pairs[1], trained=trained, exits=exits)


def _in_both(one: tuple[str, ...] | None, other: tuple[str, ...] | None) -> tuple[str, ...] | None:
    """Return the tensors, modules or exits that lie in both of two lists of names; None = all."""
    if one is None or other is None:
        return other if one is None else one
    return tuple(name for these, those in ((one, other), (other, one)) for name in these if inside(name, those))


def is_within(submodels: Submodels, spec: Spec, within: Spec) -> bool:
    """Check that each element that ``spec`` trains is one that ``within`` trains; raises `SpecError` for no submodel at all."""
    spec, within = submodels.normal(spec), submodels.normal(within)
    if spec == within or within.is_full:
        return True
    theirs = {entry.name for entry in submodels.layout(within, "trained").entries}
    if not theirs.issuperset(entry.name for entry in submodels.layout(spec, "trained").entries):
        return False
    for axis, indices in within.kept:
        kept = spec.indices(axis)
        if kept is None or not set(indices).issuperset(kept):
            return False
    return True


def to_json(contributions: Iterable[Contribution]) -> list[list[Any]]:
    """Return contributions as plain data, for a message or a row of the journal."""
    return [[one.spec.to_json(), one.num_updates, one.num_samples, one.num_steps] for one in contributions]


def from_json(data: object) -> tuple[Contribution, ...]:
    """Restore contributions from the result of `to_json`.

    Raises:
        ValueError: a number is out of range, or of another type.
        SpecError: a submodel has another form.
    """
    if not isinstance(data, list) or not data:
        raise ValueError("contributions is no list")
    found = []
    for row in data:
        if not isinstance(row, list) or len(row) != 4:
            raise ValueError("a contribution has other fields")
        spec, num_updates, *counts = row
        if type(num_updates) not in (int, float) or not 0 < num_updates < 2**53:
            raise ValueError("a contribution has no number of updates")
        if any(type(count) is not int or not 0 <= count < 2**53 for count in counts) or counts[0] < 1:
            raise ValueError("a contribution has no number of samples or steps")
        found.append(Contribution(Spec.from_json(spec), float(num_updates), *counts))
    return tuple(found)


def check_contributions(
    contributions: Sequence[Contribution], submodels: Submodels, spec: Spec, below: int
) -> tuple[Contribution, ...]:
    """Check a subfederation's contributions to its update for a task of ``spec``; return them with one entry per submodel.

    `below`: number of clients that the subfederation may stand for.

    Raises:
        ValueError: there are more updates than clients, or more than `MOST_SUBMODELS` submodels of each.
        SpecError: a submodel is not part of what was sent.
    """
    # before any of them is looked at: each costs a pass over the model, in a check and in the merge
    if len(contributions) > MOST_SUBMODELS * below:
        raise ValueError(
            f"{len(contributions)} contributions of {below} clients, at most {MOST_SUBMODELS} of each count"
        )
    spec, total = spec.without_base, 0.0
    own, by_spec = submodels.normal(spec), dict[Spec, list[Contribution]]()
    for one in contributions:
        if not is_within(submodels, one.spec, spec):
            raise SpecError(f"the submodel {one.spec} is no part of {spec}")
        normal = submodels.normal(one.spec)
        by_spec.setdefault(spec if normal == own else normal, []).append(one)
        total += one.num_updates
    if total > below * (1 + 1e-9):
        raise ValueError(f"{total:g} updates of {below} clients")
    return tuple(
        Contribution(
            each,
            math.fsum(one.num_updates for one in ones),
            sum(one.num_samples for one in ones),
            sum(one.num_steps for one in ones),
        )
        for each, ones in by_spec.items()
    )


def members(options: Subfederations, clients: Sequence[ClientInfo]) -> list[ClientInfo]:
    """Return the clients of a simulated run with ``clients`` in subfederations, or of the one whose own run it is.

    A subfederation has the device of its widest client, for the run's choice of submodels, with a link of its own.
    """
    groups = [[clients[client - 1] for client in group] for group in options.members(len(clients))]
    if options.number is not None:
        return groups[options.number - 1]
    found = []
    for number, group in enumerate(groups, start=1):
        widest = max((one.profile for one in group), key=lambda one: (one.memory_bytes, one.flops_per_s))
        profile = Profile(
            "subfederation",
            widest.flops_per_s,
            options.down_bytes_per_s or math.inf,
            options.up_bytes_per_s or math.inf,
            options.latency_s,
            widest.memory_bytes,
        )
        num_samples = sum(one.num_samples for one in group)
        found.append(ClientInfo(number, num_samples, profile, own_data=True, below=len(group)))
    return found


def below(experiment: Any, number: int) -> Any:
    """Return the settings of a simulated subfederation's own run, which the run of ``experiment`` starts and ends."""
    options = experiment.subfederations
    num_clients = len(options.members(experiment.clients)[number - 1])
    return replace(
        experiment,
        algorithm=algorithm_below(experiment.algorithm, num_clients, options.buffer_size),
        subfederation=options.task,
        subfederations=replace(options, number=number),
        samples=type(experiment.samples)(),
        progress="quiet",
        **dict.fromkeys(_OF_THE_RUN_ABOVE),
    )


def problems_of(experiment: Any) -> Iterator[str]:
    """Yield an error for each setting that a run with simulated subfederations does not support."""
    size = experiment.subfederations.size
    if size > experiment.clients:
        yield f"subfederations.size is {size}, more than there are clients: give at most {experiment.clients}"
    if experiment.subfederation.is_on:
        yield "subfederation and subfederations are both given: a simulated run has no server above, leave the first out"
    refused = {
        "overlap": experiment.overlap,
        "train.lr_schedule": experiment.train.lr_schedule != "constant",
        "batch_clients: fast": experiment.batch_clients == "fast",
    }
    for name, is_on in refused.items():
        if is_on:
            yield f"subfederations.size is {size}, with which {name} does not work: leave it out"


class TasksAbove:
    """Tasks that the server above gives to this run, a subfederation: without one, nobody trains.

    An update counts for the task in which its client began, so that each task starts from the values that were sent.

    Attributes:
        waits: whether the run waits for the next task.
        num_merges: number of merges of the present task so far.
        spec: submodel that the present task has sent; clients train parts of it.
    """

    def __init__(
        self,
        options: Subfederation,
        algorithm: Algorithm,
        state: GlobalState,
        roster: Roster,
        drop_waiting: Callable[[], None],
    ) -> None:
        """Create the tracker of tasks from the server above; ``drop_waiting`` discards the updates that wait for a merge."""
        self.options, self._algorithm, self._state, self._roster = options, algorithm, state, roster
        self._drop_waiting = drop_waiting
        self.waits, self.num_merges, self.spec, self._begun_s = True, 0, FULL, 0.0

    def begin(self, event: Received, now: float) -> None:
        """Begin a task from the values sent; what waits for a merge, or is being trained, does not count any more."""
        state, roster = self._state, self._roster
        late = [item.update.client for item in state.waiting]
        if late:
            # this merge only empties the sums: the model's values are overwritten below
            self._algorithm.merge.apply(state)
        self._drop_waiting()
        for client in late:
            roster.readmit(client)
        roster.late = set(roster.active)
        state.submodels.plan(event.spec, "sent").scatter_(state.values, event.tensors)
        state.edition += 1
        self.waits, self.num_merges, self.spec, self._begun_s = False, 0, event.spec, now

    def merged(self, now: float) -> None:
        """Count a merge, which may end the task."""
        self.num_merges += 1
        if self.options.ends(self.num_merges, now - self._begun_s):
            self.waits, self._roster.late = True, set(self._roster.active)

    def next_to_start(self, concurrency: int | None) -> ClientInfo | None:
        """Remove and return the next client to start; None if the last merge of the task has updates enough on their way."""
        roster = self._roster
        if self.waits:
            return None
        if self.options.merges == self.num_merges + 1:
            needed = self._algorithm.trigger.needed(1, len(self._state.waiting))
            if needed is not None and roster.num_at_work + len(roster.sending) >= needed:
                return None
        return roster.next_to_start(concurrency)

    def within(self, work: Work) -> Work:
        """Return the work of a client, cut to the submodel that the server above has sent."""
        return work if self.spec.is_full else replace(work, spec=common(work.spec, self.spec))


class TaskBelow:
    """Sums over the clients of a subfederation during one task of the server above, up to its last merge."""

    def __init__(self) -> None:
        self._sums: defaultdict[Spec, list[float]] = defaultdict(lambda: [0.0, 0, 0])
        self._metrics: defaultdict[str, list[float]] = defaultdict(lambda: [0.0, 0.0])
        self._tested = 0.0

    def add(self, settled: Settled) -> None:
        """Count an update that was merged."""
        update, assignment = settled.update, settled.assignment
        if settled.outcome != "merged" or update is None or assignment is None:
            return
        own = Contribution(assignment.spec.without_base, 1.0, update.num_samples, update.num_steps)
        for one in update.contributions or (own,):
            sums = self._sums[one.spec]
            for index, number in enumerate((one.num_updates, one.num_samples, one.num_steps)):
                sums[index] += number
        self._tested += update.metrics.get(NUM_TESTED, 0.0)
        for name, value in update.metrics.items():
            if name not in (NUM_TESTED, _PEAK):
                self._metrics[name][0] += value * update.num_samples
                self._metrics[name][1] += update.num_samples

    def contributions(self, num_merges: int) -> tuple[Contribution, ...]:
        """Return the contribution of the clients with each submodel to a mean merge: the sums divided by ``num_merges``."""
        return tuple(
            Contribution(
                spec,
                updates / num_merges,
                max(round(samples / num_merges), 1),
                round(steps / num_merges),
            )
            for spec, (updates, samples, steps) in self._sums.items()
        )

    def metrics(self) -> dict[str, float]:
        """Return the clients' metrics, averaged by their samples."""
        tested = {NUM_TESTED: self._tested} if self._tested else {}
        return {name: total / weight for name, (total, weight) in self._metrics.items()} | tested

    def update(
        self,
        assignment: Assignment,
        submodels: Submodels,
        received: FlatTensors,
        values: FlatTensors,
        *,
        sends: str,
        num_merges: int,
        most_samples: int,
        journal: str = "",
    ) -> Update:
        """Return the answer to a task of the server above.

        Args:
            assignment: the task.
            submodels: submodels of the model.
            received: values that were sent, in the layout that is sent.
            values: the subfederation's model after its last merge of the task.
            sends: what the server above merges, "values" or "delta".
            num_merges: number of merges of the task.
            most_samples: number of samples that the server above was told of.
            journal: head of the journal of the subfederation's run.
        """
        contributions = self.contributions(num_merges)
        tensors = submodels.plan(assignment.spec).gather(values)
        pooling = submodels.pooling()
        with nullcontext() if pooling is None else pooling.as_sent(tensors):
            if sends == "delta":
                for dtype, buffer in tensors.buffers.items():
                    buffer.sub_(received.buffers[dtype][: buffer.numel()].to(buffer.device))
        update = Update(
            assignment.id,
            assignment.client,
            assignment.incarnation,
            tensors,
            min(sum(one.num_samples for one in contributions), most_samples),
            sum(one.num_steps for one in contributions),
            self.metrics(),
        )
        update.contributions = contributions
        update.extra = {CONTRIBUTIONS: to_json(contributions), JOURNAL: journal}
        update.refusal = None if tensors.is_finite() else "non-finite"
        return update


def problem_above(algorithm: Algorithm, merge: Merge) -> str | None:
    """Explain why the clients of a method cannot be subfederations; None = they can.

    `merge`: the method's merge, with the wrappers of the run's options.
    """
    local, name = algorithm.local, algorithm.name
    if not all(one.merges_means for one in _chain(merge)):
        return f"the merge of {name} ({merge}) needs each client's own update, not a mean of several"
    if local.down or local.up or local.traits.resident or local.traits.up_as is not None:
        return f"clients of {name} send more than the values of their submodel"
    if type(local).exchange is not Local.exchange:
        return f"tasks of {name} exchange messages with the server"
    if merge.personalizes:
        return f"{name} sends each client values of its own"
    return None


def _chain(merge: Merge | None) -> Iterator[Merge]:
    """Yield a merge and all merges nested in it, from the outermost to the innermost."""
    while merge is not None:
        yield merge
        merge = getattr(merge, "inner", None)


def algorithm_below(algorithm: Algorithm, num_clients: int, buffer_size: int | None = None) -> Algorithm:
    """Return the method that trains the subfederations of a simulated run with ``algorithm``, so that its result is exact.

    It has all clients in each merge, and no step of the server's own beyond their mean.

    Args:
        algorithm: the method above.
        num_clients: number of clients below.
        buffer_size: number of updates in a merge of a method with a buffer; None = one of each client.
    """
    plain = {"server_lr": 1.0, "lr": 1.0, "alpha": 1.0, "beta": 0.0}
    merge = algorithm.merge
    names = {field.name for field in fields(cast(Any, merge))} if is_dataclass(merge) else set[str]()
    merge = replace(cast(Any, merge), **{name: value for name, value in plain.items() if name in names})
    return replace(
        algorithm,
        sample=Sample(),
        select=algorithm.select.below(),
        trigger=algorithm.trigger.below(buffer_size or num_clients),
        merge=merge,
    )


def problem_below(algorithm: Algorithm) -> str | None:
    """Explain why a method cannot train a subfederation; None = it can."""
    merge = algorithm.merge.innermost
    if not merge.merges_means or getattr(merge, "beta", 0.0) != 0.0:
        return (
            f"algorithm is {algorithm.name}, whose merge ({merge}) is more than a mean: give fed_avg, fed_prox or fed_buff, "
            "or diloco with outer_momentum 0; a server's optimizer works above"
        )
    if (problem := problem_above(algorithm, algorithm.merge)) is not None:
        return f"algorithm is {algorithm.name}: {problem}"
    return None


def differences(
    above: Algorithm, below: Algorithm, training: Training, num_merges: int | None, num_clients: int
) -> list[str]:
    """Return the reasons why the result differs from that of one flat federation, one line each; empty = it is equal.

    `training`: training of the clients below. `num_merges`: merges of a task; None = as many as a time allows.
    `num_clients`: number of clients below.
    """
    found = []
    if num_merges != 1:
        found.append("a task has several merges here (subfederation.merges), as in hierarchical FedAvg")
    lr = getattr(below.merge.innermost, "server_lr", getattr(below.merge.innermost, "lr", 1.0))
    alpha = getattr(below.merge.innermost, "alpha", 1.0)
    if lr != 1.0 or alpha != 1.0:
        found.append(f"a merge here moves the model by {lr * alpha:g} of its clients' mean change")
    if weighs_by(above.merge.innermost) != weighs_by(below.merge.innermost):
        found.append("updates weigh otherwise here than above, equally or by samples")
    trigger = below.trigger
    takes_all = trigger.waits_for_all or getattr(trigger, "size", None) == num_clients
    if below.sample.cohort is not None or not takes_all:
        found.append("a merge here may leave clients out")
    if above.local != below.local:
        found.append("clients here train otherwise than the method above says (prox, for example)")
    if training.lr_schedule != "constant":
        found.append("the schedule of the learning rate follows the merges here")
    return found


def weighs_by(merge: Merge) -> str:
    """Return the unit of an update's weight in a merge: equal, samples or tokens."""
    if (by := getattr(merge, "weights", None)) is not None:
        return str(by)
    return "samples" if getattr(merge, "by_samples", False) else "equal"


def with_contributions(update: Update, submodels: Submodels, spec: Spec, below: int, most_samples: int) -> None:
    """Take over what a subfederation says of its update into the update; its samples and steps are those of its clients.

    Args:
        update: the update.
        submodels: submodels of the model.
        spec: submodel of the task.
        below: number of clients that the subfederation stands for.
        most_samples: number of samples that it has said its clients have.

    Raises:
        ValueError: a number is out of range, or of another type.
        SpecError: a submodel is not part of what was sent.
    """
    told, journal = dict(update.extra), update.extra.get(JOURNAL, "")
    if not isinstance(journal, str) or len(journal) > 128 or not journal.isalnum():
        raise ValueError("journal is no digest")
    found = check_contributions(from_json(told.pop(CONTRIBUTIONS, None)), submodels, spec, below)
    update.extra = {name: value for name, value in told.items() if name != JOURNAL}
    update.contributions, update.journal = found, journal
    update.num_steps, num_samples = sum(one.num_steps for one in found), sum(one.num_samples for one in found)
    update.num_samples = num_samples
    if num_samples > most_samples:
        update.limit_samples(most_samples)


def config_problems(
    algorithm: Algorithm, merge: Merge, takes: Mapping[str, int | None], is_below: bool, hides: Sequence[str]
) -> list[str]:
    """Return the problems of a run's config with subfederations, one line each.

    Args:
        algorithm: the method.
        merge: its merge, with the wrappers of the run's options.
        takes: settings by which the run has subfederations among its clients, by name; None = that is not set.
        is_below: whether the run is a subfederation itself.
        hides: sections that are on by which the server hides single updates, or blurs their mean.
    """
    found = []
    for setting, value in takes.items():
        if value is None:
            continue
        found += [
            f"{setting} is {value}, but {name} is on, for which a subfederation would be a single client: "
            f"give {name} to each subfederation, which is nearer to the clients"
            for name in hides
        ]
        if not hides and (problem := problem_above(algorithm, merge)) is not None:
            found.append(f"{setting} is {value}, but {problem}: leave it out")
    if takes.get(SIMULATED) is not None and not found:
        below = algorithm_below(algorithm, 1)
        problem = problem_below(below)
        if problem is None and below.select.names_trained:
            problem = (
                f"{SIMULATED} is {takes[SIMULATED]}, but {algorithm.name} gives each client layers of its own to train, of which "
                "a subfederation cannot give its clients parts: leave it out"
            )
        found += [] if problem is None else [problem]
    if is_below and (problem := problem_below(algorithm)) is not None:
        found.append(problem)
    return found
