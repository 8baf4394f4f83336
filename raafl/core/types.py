"""Define the records of a run: clients, work, assignments, updates, events and actions.

Times are seconds on the run's clock since its start: virtual time in a simulation, else the wall clock.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from raafl.devices.profiles import Profile
from raafl.errors import TaskFailed
from raafl.submodel.flat import FlatTensors
from raafl.submodel.spec import FULL, Spec

OUT_OF_MEMORY = "out-of-memory"
"""Why an update is refused, `Update.refusal`, of a client whose memory was too small for the task."""


POLICY = "policy"
"""Why an update is refused, `Update.refusal`, of a client whose site does not allow the task; no more is told of it."""

UNANSWERED = frozenset({OUT_OF_MEMORY, POLICY})
"""Refusals by which a client says itself that there will be no update."""

HUGE_NORM, OVERFLOW = "huge-norm", "overflow"
"""Why an update is refused: its norm is far above those accepted before; its merge would leave numbers that are not finite."""

DIVERGED = frozenset({"non-finite", HUGE_NORM, OVERFLOW})
"""Refusals that a client may owe to the global model that it was sent."""

NUM_TESTED = "test/num_samples"
"""In `Update.metrics`: on how many samples the client has measured what it trained."""


class Warn(str):
    """A warning about a setting that is probably a mistake: logged, written to the summary, and an error under ``strict``."""


@dataclass(frozen=True, slots=True)
class ClientInfo:
    """The server's description of a client.

    Attributes:
        id: client id, 1 to N; the rank under torchrun.
        num_samples: number of training samples, |D_n|.
        profile: speed, memory and link of the client's device.
        incarnation: number of times the client joined before; tells a client that came back from the one that was lost.
        own_data: whether the client trains on data of its own instead of its share of the run's.
    """

    id: int
    num_samples: int
    profile: Profile = field(default_factory=Profile)
    incarnation: int = 0
    own_data: bool = False


@dataclass(frozen=True, slots=True)
class Work:
    """Result of a `select` part: the submodel of a client, and how much to train it.

    Attributes:
        spec: submodel to train.
        region: index j of the region whose merges q(j) this work counts towards; 0 for a whole model.
        num_epochs: number of local epochs; None = the run's setting.
        num_steps: number of local steps; None = the run's setting.
        extra: small plain data for the local part, as JSON can hold it.
    """

    spec: Spec = FULL
    region: int = 0
    num_epochs: int | None = None
    num_steps: int | None = None
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)


@dataclass(frozen=True, slots=True)
class Assignment:
    """One task: train a submodel of a given version, for a given length, from a given seed.

    Attributes:
        id: number of the assignment, unique in the run, counted from 1.
        client: id of the client.
        incarnation: number of times that the client had joined before, as in `ClientInfo`.
        task: number of tasks that the client had before.
        version: global version tau from which the submodel is cut.
        seed: determines data order, dropout and every other draw of the task.
        pace_s: least duration of the task in a wall-clock run, in seconds, to emulate a slow device; 0 = as fast as
            possible.
        lr_scale: factor on the optimizer's learning rate, from the run's schedule.
        extra: plain data for the local part, from `Work.extra`.
    """

    id: int
    client: int
    incarnation: int
    task: int
    version: int
    spec: Spec
    region: int
    num_epochs: int | None
    num_steps: int | None
    seed: int
    assigned_s: float
    pace_s: float = 0.0
    extra: Mapping[str, Any] = field(default_factory=dict, hash=False)
    lr_scale: float = 1.0


@dataclass(frozen=True, slots=True)
class SumGroup:
    """A group of updates of which the server may read the sum only (docs/secure-aggregation.md); each update carries it.

    Attributes:
        members: ids of the assignments whose updates are summed.
        scale: largest weight in the sum; all weights were divided by it.
        masked: whether masks hide the update, so that a digest of its tensors tells nothing about it.
    """

    members: tuple[int, ...]
    scale: float
    masked: bool = False


@dataclass(slots=True)
class Update:
    """A client's answer to an assignment.

    Its tensors are borrowed: they may be overwritten once `Coordinator.handle` has returned.

    Attributes:
        tensors: trained values, or their difference from the received ones (`Merge.sends`); followed by the bundles until the
            coordinator has split them off (`raafl.core.payload`).
        num_samples: number of training samples per epoch, |D_n|; weight of the update in a mean.
        metrics: means over the task of the training loss and of all other values that the module logged.
        train_s: seconds that the task took on the client, by the run's clock.
        down_s, up_s: seconds of these in which the task was sent and its answer received.
        fingerprint: hex digest of the tensors' bytes, for the journal.
        extra: small plain data from the client's local part for the merge. Since the client chose it, a merge that uses
            it checks it in `Merge.reject_reason`.
        bundles: tensors that the local part sends beside the values (`Local.up`), by name; borrowed as well.
        group: group of updates that the server can only read as a sum; None = this update is read by itself.
    """

    assignment: int
    client: int
    incarnation: int
    tensors: FlatTensors
    num_samples: int
    num_steps: int = 0
    metrics: dict[str, float] = field(default_factory=dict)
    train_s: float = 0.0
    down_s: float = 0.0
    up_s: float = 0.0
    bytes_down: int = 0
    bytes_up: int = 0
    fingerprint: str = ""
    extra: Mapping[str, Any] = field(default_factory=dict)
    bundles: Mapping[str, FlatTensors] = field(default_factory=dict)
    group: SumGroup | None = None
    refusal: str | None = None  # set by the transport when the content may not be merged (non-finite, wrong layout)

    @property
    def needs_fingerprint(self) -> bool:
        """Whether the journal still lacks a digest of the tensors for a replay to compare; masked tensors get none."""
        return not self.fingerprint and (self.group is None or not self.group.masked)


# ---- events: what the coordinator is told ----


@dataclass(frozen=True, slots=True)
class Joined:
    """Event: a client has joined and is idle."""

    client: ClientInfo


@dataclass(frozen=True, slots=True)
class Arrived:
    """Event: an update has arrived completely."""

    update: Update


@dataclass(frozen=True, slots=True)
class Lost:
    """Event: a client disconnected; the task that it was working on is lost.

    Attributes:
        failure: error of the user's code on the client, if it caused the loss; else None.
        counts: whether the client missed a task's deadline, which counts like a refused update.
    """

    client: int
    reason: str
    incarnation: int | None = None
    failure: TaskFailed | None = None
    counts: bool = False


@dataclass(frozen=True, slots=True)
class Timer:
    """Event: a timer of `SetTimer` is due."""

    id: int


@dataclass(frozen=True, slots=True)
class Stop:
    """Event: the runtime ends the run, because of a target, a limit or the user."""

    reason: str


Event = Joined | Arrived | Lost | Timer | Stop


# ---- actions: what the coordinator asks for ----


@dataclass(frozen=True, slots=True)
class Assign:
    """Action: send this assignment with its submodel, cut from the present global state."""

    assignment: Assignment


@dataclass(frozen=True, slots=True)
class SetTimer:
    """Action: deliver `Timer(id)` at this time."""

    id: int
    at: float


@dataclass(frozen=True, slots=True)
class Evaluate:
    """Action: evaluate the present global model."""

    version: int


@dataclass(frozen=True, slots=True)
class Checkpoint:
    """Action: save a checkpoint of the present state."""

    version: int


@dataclass(frozen=True, slots=True)
class Settled:
    """Action: record the end of an assignment; issued exactly once for each.

    Attributes:
        outcome: end of the assignment: merged, refused:REASON, lost:REASON or unused.
        version: global version after the merge, or at the time of the end.
        staleness: number of merges between the assignment's version and its own merge, t - tau.
    """

    assignment: Assignment | None
    client: int
    outcome: str
    version: int
    staleness: int
    update: Update | None = None


@dataclass(frozen=True, slots=True)
class Dismiss:
    """Action: disconnect a client for which no submodel is small enough, or whose data raised ``error``."""

    client: int
    incarnation: int
    reason: str
    error: Exception | None = field(default=None, compare=False)


@dataclass(frozen=True, slots=True)
class Suspend:
    """Action: assign nothing to a client until a given time, since too many of its updates were refused; it stays connected."""

    client: int
    until: float
    reason: str


@dataclass(frozen=True, slots=True)
class Fail:
    """Action: end the run as failed: save the state, then send `Stop` with this reason."""

    reason: str


@dataclass(frozen=True, slots=True)
class Finish:
    """Action: end the run; no further action follows it."""

    reason: str


Action = Assign | SetTimer | Evaluate | Checkpoint | Settled | Dismiss | Suspend | Fail | Finish

EPSILON = "epsilon"
"""Reason of a run that has ended because its next merge would have spent more privacy than it may."""

ENDS = ("max_updates", "max_time", "target", EPSILON)
"""Reasons of a run that has come to its end; one that ends for any other can be resumed."""

RESTART = "restart"
"""Why clients are lost whose server was started anew."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Conditions for the start, evaluations, checkpoints and the end of a run.

    Attributes:
        min_clients: number of clients that must have joined before work starts.
        count_lost: whether clients lost before the start count as joined, since they cannot come back.
        max_updates: number of merged updates after which the run ends; None = no limit.
        max_time_s: time at which the run ends, in seconds of its clock; None = no limit.
        eval_every: number of versions from one evaluation to the next.
        checkpoint_every: number of versions from one checkpoint to the next; None = only at the end.
        num_clients: number of clients N; the run fails for refused updates only when all N have taken part and all are
            refused.
        max_weight: bound on the weight of a client with own data, as a multiple of the lower median of the present clients'
            samples; None = no bound. Other clients cannot claim more than their share.
        max_refused: number of refusals in a row after which a client is suspended.
    """

    min_clients: int = 1
    count_lost: bool = True
    max_updates: int | None = None
    max_time_s: float | None = None
    eval_every: int = 1
    checkpoint_every: int | None = None
    num_clients: int = 1
    max_weight: float | None = None
    max_refused: int = 3


def derive_seed(*parts: int | str) -> int:
    """Return a 63-bit seed that is a hash of all arguments, such as (run seed, client, task number)."""
    text = "/".join(map(str, parts)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1
