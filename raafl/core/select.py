"""Answer the second of the five questions: which submodel, and how much work, does a client get?"""

from __future__ import annotations

import math
import random
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from raafl.core.local import Local
from raafl.core.options import Amount, Training
from raafl.core.payload import MAX_CACHED, TransferCost
from raafl.core.state import GlobalState
from raafl.core.types import Assignment, ClientInfo, Part, Work, derive_seed
from raafl.devices.profiles import Profile, TaskTime
from raafl.errors import BadInput
from raafl.rules import Rules
from raafl.submodel.cost import Cost
from raafl.submodel.spec import Spec


@dataclass(frozen=True, slots=True)
class OwnTests:
    """Number of test samples of each client, on which it evaluates its trained submodel; needed to predict times."""

    # number of test samples by client, for clients that use the run's data; clients without test samples are
    # absent
    sizes: Mapping[int, int] = field(default_factory=dict)
    # fraction of its data that a client with its own data sets aside for tests
    share: float = 0.0

    def of(self, client: ClientInfo) -> float:
        """Return the number of test samples of ``client``.

        For a client with its own data, an estimate from its training samples.
        """
        if client.own_data:
            return client.num_samples * self.share / (1.0 - self.share)
        return float(self.sizes.get(client.id, 0))

    def most(self, client: ClientInfo) -> int:
        """Return an upper bound of the number of test samples of ``client``; exact unless the client has its own data."""
        own = 1.0 / (1.0 - self.share) if client.own_data and self.share else 0.0
        return int(self.of(client) + own)


def time_on(profile: Profile, cost: Cost, samples: float, tested: float = 0.0) -> TaskTime:
    """Predict the time in which a device trains a task and then evaluates the result.

    A sample to evaluate counts as a third of a training sample, since it needs the forward pass only.
    """
    passes = samples + tested / 3
    time = profile.task_time(
        cost.flops_per_sample * passes,
        cost.down_bytes,
        cost.up_bytes,
        cost.moved_bytes_per_sample * passes,
        cost.padding_flops_per_sample * passes,
        cost.num_exchanges,
        cost.kernels_per_sample * passes,
    )
    if cost.launches is None or not profile.host_op_s:
        return time
    return replace(time, compute_s=passes * profile.gpu_s(*cost.launches))


@dataclass(frozen=True, slots=True)
class SelectContext:
    """Everything that the choice of a client's work (an algorithm's `select` part) may depend on.

    Attributes:
        state: the global model with its version and merge counts; read only.
        clients: every client that has joined and is not lost, by id.
        rng: the run's random generator; a replay repeats its draws.
        training: the run's settings of local training.
        batch_size: local batch size, for predictions of memory.
        cache: results that the part has computed and wants to reuse. `Select.on_join` and `Select.on_loss` clear it
            unless the part overrides them.
        seed: the run's seed, for random choices that must not depend on earlier draws.
        local: the algorithm's local part, for predictions of cost.
        plan: compression of updates, for predictions of transfer times; None = no compression.
        own_tests: number of test samples on which each client evaluates its trained submodel.
        drop_last: whether an epoch drops its last batch when that is smaller than the others.
        overlap: whether a client trains its next task, or its first steps, while its update travels.
        rules: rules of the run, by which times are predicted.
        captured: whether steps on a GPU are CUDA graphs, as far as is known, so that each has one launch.
    """

    state: GlobalState
    clients: Mapping[int, ClientInfo]
    rng: random.Random
    training: Training
    batch_size: int
    cache: MutableMapping[Any, Any] = field(default_factory=dict)
    seed: int = 0
    local: Local = field(default_factory=Local)
    plan: TransferCost | None = None
    own_tests: OwnTests = field(default_factory=OwnTests)
    drop_last: bool = False
    overlap: bool = False
    rules: Rules = field(default_factory=Rules)
    captured: bool = False
    _costs: dict[Spec, Cost] = field(default_factory=dict, init=False, compare=False, repr=False)

    def of(self, clients: Iterable[ClientInfo]) -> SelectContext:
        """Return a copy of this `SelectContext` with only these ``clients`` and an empty cache."""
        return replace(self, clients={client.id: client for client in clients}, cache={})

    def cost(self, spec: Spec, extra: Mapping[str, Any] | None = None) -> Cost:
        """Predict the cost (FLOPs, memory, bytes) of a task that trains ``spec``.

        If the frozen parameters exist in several precisions and ``spec`` names none, the cost is that of the lowest
        precision. A task fits a client if it fits in this precision; `choose_base` then chooses the highest that fits.

        Args:
            spec: submodel of the task.
            extra: further settings of the task (`Work.extra`); None = none.
        """
        if not extra and (known := self._costs.get(spec)) is not None:
            return known
        cost = self._predicted(spec, extra or {})
        if not extra:
            if len(self._costs) >= MAX_CACHED:
                self._costs.clear()
            self._costs[spec] = cost
        return cost

    def _predicted(self, spec: Spec, extra: Mapping[str, Any]) -> Cost:
        if spec.base is None and (bases := self.state.submodels.bases.names):
            spec = replace(spec, base=bases[-1])
        own = type(self.local)
        # whether the method overrides `cost`, and not the simpler `estimate`
        is_own = own.cost is not Local.cost and own.estimate is Local.estimate
        predict = self.local.cost if self.rules.follows_methods or is_own else self.local.estimate
        cost = predict(self.state.submodels, spec, self.batch_size, extra)
        cost = cost if self.plan is None else self.plan.cost(cost, spec, extra)
        if not self.rules.times_by_launches:
            cost = replace(cost, launches=None)
        elif self.captured and cost.launches is not None:
            cost = replace(cost, launches=cost.launches.captured())
        # with overlap, the update being sent takes memory beside the next task
        return replace(cost, peak_bytes=cost.peak_bytes + cost.up_bytes) if self.overlap else cost

    def choose_base(self, client: ClientInfo, spec: Spec, extra: Mapping[str, Any] | None = None) -> Spec:
        """Choose the precision of the frozen parameters for ``client``: the highest that fits its memory, or else the lowest.

        Args:
            client: client whose memory must hold the task.
            spec: submodel of the task; returned unchanged if it already names a precision.
            extra: further settings of the task (`Work.extra`); None = none.
        """
        bases = self.state.submodels.bases.names
        if not bases or spec.base is not None:
            return spec
        budget, forms = client.profile.memory_bytes, [replace(spec, base=base) for base in bases]
        return next((one for one in forms if self.cost(one, extra).peak_bytes <= budget), forms[-1])

    def samples(self, num_samples: int, work: Amount) -> int:
        """Return the number of samples that a task trains on, by which its time counts.

        Args:
            num_samples: number of training samples of the client.
            work: length of the task.
        """
        if not self.rules.counts_trained_samples:
            return self.training.nominal_samples(work, num_samples, self.batch_size)
        return self.training.trained_samples(work, num_samples, self.batch_size, self.drop_last)

    def task_time(self, client: ClientInfo, work: Work | Assignment) -> TaskTime:
        """Predict the seconds that ``client`` needs to download, train, evaluate and upload a task with this ``work``."""
        samples = self.samples(client.num_samples, work)
        spec = self.choose_base(client, work.spec, work.extra)
        return time_on(client.profile, self.cost(spec, work.extra), samples, self.tested(client, work.extra))

    def real_time(
        self, client: ClientInfo, predicted: TaskTime, now: float, task: int, up_from_s: float = 0.0
    ) -> TaskTime:
        """Return the actual duration of a task on a simulated device whose speed may vary; see `raafl.devices.variation`.

        Args:
            client: client that trains the task.
            predicted: the task's predicted time, from `task_time`.
            now: time of the assignment, in seconds of the run's clock.
            task: number of tasks that the client had before, as in `Assignment.task`.
            up_from_s: time before which the upload cannot begin, since an earlier one takes the link.
        """
        if not client.profile.varies:
            return predicted
        from raafl.devices.variation import real_time

        draw = partial(derive_seed, self.seed, "device", client.id)
        return real_time(client.profile, predicted, now, task, draw, up_from_s)

    def time_ratio(self, client: ClientInfo, assignment: Assignment, seconds: float) -> float | None:
        """Return the measured time of a task divided by its predicted time; None if either is not positive.

        A ratio within 1e-6 of 1 becomes exactly 1, since on a virtual clock only rounding makes such a difference.

        Args:
            client: client that trained the task.
            assignment: assignment of the task.
            seconds: measured time of the task.
        """
        predicted_s = self.cost_s(client, assignment)
        if predicted_s <= 0 or seconds <= 0:
            return None
        ratio = seconds / predicted_s
        return 1.0 if math.isclose(ratio, 1.0, rel_tol=1e-6) else ratio

    def task_options(self, client: ClientInfo) -> dict[str, Any]:
        """Return the entries of `Work.extra` that all tasks of ``client`` share; see `Local.task_options`."""
        return self.local.task_options(client, self.state.submodels, self.training, self.batch_size, self.drop_last)

    def tested(self, client: ClientInfo, extra: Mapping[str, Any] | None = None) -> float:
        """Return the number of test samples on which ``client`` evaluates a task's result; 0 = it does not evaluate.

        Args:
            client: client that trains the task.
            extra: further settings of the task (`Work.extra`); None = none.
        """
        return self.own_tests.of(client) if self.local.evaluates_on_client(extra or {}) else 0.0

    def cost_s(self, client: ClientInfo, work: Work | Assignment) -> float:
        """Predict the seconds that ``client`` needs for ``work`` in total; the papers' c(n, j) for client n, submodel j."""
        return self.task_time(client, work).total_s

    def problems(self, ask: Callable[[ClientInfo], object]) -> list[str]:
        """Apply a check to every client and return its error messages.

        Args:
            ask: function called with each client; it raises `BadInput` to report a problem.
        """
        found = []
        for client in self.clients.values():
            try:
                ask(client)
            except BadInput as error:
                found.append(str(error))
        return found

    def fits(self, client: ClientInfo, spec: Spec) -> bool:
        """Check whether the predicted peak memory of a task with this submodel fits into the memory of ``client``."""
        budget = client.profile.memory_bytes
        return budget == float("inf") or self.cost(spec).peak_bytes <= budget


class Select(Part, ABC):
    """Base class of the part of an algorithm that decides which submodel a client gets, and how long it trains it."""

    @property
    def cuts(self) -> bool:
        """Whether a client may get less than the whole model, so that its axes have to be proven."""
        return True

    @property
    def needs_last_update(self) -> bool:
        """Whether a client's next work depends on its last update, so that it can be chosen only after that has arrived."""
        return False

    @property
    def names_trained(self) -> bool:
        """Whether what trains of a submodel differs from client to client otherwise than by axes and blocks (`Spec.trained`)."""
        return False

    def below(self) -> Select:
        """Return the part that selects for the clients of a simulated subfederation, to which this part's submodels are sent.

        What it selects is cut to the submodel that was sent, so parts whose submodels do not lie within each other return one
        that selects the whole model.
        """
        return self

    @abstractmethod
    def __call__(self, client: ClientInfo, fleet: SelectContext) -> Work:
        """Select the submodel and number of steps for an idle client; raises `BadInput` if no submodel fits it."""

    def on_join(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Update ``fleet.cache`` when ``client`` joins or rejoins."""
        self.forget(client, fleet)

    def on_loss(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Update ``fleet.cache`` when ``client`` is lost."""
        self.forget(client, fleet)

    def forget(self, client: ClientInfo, fleet: SelectContext) -> None:
        """Remove what depends on ``client`` (come, gone, or its memory lower) from ``fleet.cache``; by default, everything."""
        fleet.cache.clear()

    def on_round_start(self, out: Sequence[ClientInfo], fleet: SelectContext) -> None:
        """Prepare for a round after its clients were drawn; the work of each is chosen afterwards, one by one.

        Args:
            out: clients of the round: those just drawn, and those of earlier rounds that are still at work.
            fleet: context with everything that the part may read.
        """
        return

    def on_update(self, client: ClientInfo, assignment: Assignment, seconds: float, fleet: SelectContext) -> None:
        """Record that an update of ``client`` has arrived.

        Args:
            client: client that sent the update.
            assignment: task that the update answers.
            seconds: time from the assignment to the update's arrival.
            fleet: context with everything that the part may read.
        """
        return

    def check(self, fleet: SelectContext) -> list[str]:
        """Return every problem of this part that can be found before training starts, one line each."""
        return []

    def notes(self, fleet: SelectContext) -> list[str]:
        """Return remarks on the choice of submodels, for the user at the start of a run, one line each.

        A remark is a `Warn` if a setting is probably a mistake.
        """
        return []
