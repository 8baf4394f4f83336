"""Join a server above as one client whose local training is a federation (`raafl join --subfederation FILE`).

The main thread runs the server of the clients below, as `raafl serve` does. A second thread is a client of the server above, as
`raafl join` runs it; its trainer hands each task to the run below, and waits for the merge that ends it.
"""

from __future__ import annotations

import logging
import queue
import threading
from argparse import Namespace
from collections.abc import Callable, Sequence
from copy import copy
from pathlib import Path
from typing import TYPE_CHECKING, Any

from raafl.commands.auto import parse_run
from raafl.commands.join import credentials, open_gate_of
from raafl.commands.serve import allow_list, serve
from raafl.config.shared import sections
from raafl.core.coordinator import Coordinator
from raafl.core.hooks import RunHooks
from raafl.core.subfederation import TaskBelow, differences
from raafl.core.types import Assignment, ClientInfo, Event, Received, Settled, Update
from raafl.data.federated import ClientData
from raafl.devices.gpus import Place
from raafl.errors import BadInput, RunFailed, cause
from raafl.local.context import ALONE, Stopped, TaskContext
from raafl.local.train import LocalTrainer
from raafl.runtime.client.join import join
from raafl.runtime.client.setup import ClientSetup
from raafl.runtime.client.worker import TaskRefused
from raafl.runtime.server.link import Inbox
from raafl.runtime.setup import client_parts
from raafl.submodel import FlatTensors

if TYPE_CHECKING:
    from raafl.config.experiment import Experiment
    from raafl.config.parse import Parsed
    from raafl.runtime.run import Run

_LOOK_S = 0.2  # seconds between two checks that the server above still wants the task
_log = logging.getLogger(__name__)


def join_above(own: Namespace, rest: Sequence[str]) -> tuple[tuple[dict[str, Any], Path], Parsed]:
    """Serve the clients below, on tasks of the server above, until that ends; return summary and folder, and the run's config.

    Args:
        own: options of `raafl join`.
        rest: options of the run below, as `options_below` returns them.

    Raises:
        BadInput: an option, a config or a certificate is invalid.
    """
    parsed = parse_run("serve", rest)
    certs = own.below_certs or own.certs
    below = Namespace(
        certs=certs, sites=own.below_sites, run=None, **dict.fromkeys(("tls_ca", "tls_cert", "tls_key", "tls_crl"))
    )
    proof = credentials(below, server=True)
    bridge = Bridge(own, parsed.experiment)
    result = serve(
        parsed.experiment,
        parsed.config_yaml,
        own.below_address,
        proof,
        sites=allow_list(below, proof),
        min_clients=own.below_min_clients,
        inbox=bridge.inbox,
        observer=bridge,
    )
    return result, parsed


class Bridge(RunHooks):
    """Observer of the subfederation's run, which acts as a client of the server above on a thread of its own.

    Attributes:
        inbox: events of the run below, among them the tasks of the server above.
    """

    def __init__(self, own: Namespace, below: Experiment) -> None:
        self.inbox, self._own, self._below = Inbox(), own, below
        self._run: Run | None = None
        self._task = TaskBelow()
        self._out: _Task | None = None  # task that the run below trains; only its main loop's thread may use it
        self._asked: dict[int, _Task] = {}  # tasks that the loop has not begun, by id
        self._answers: queue.SimpleQueue[Update] = queue.SimpleQueue()
        self._are_here, self._is_closed = threading.Event(), threading.Event()
        self._reason: str | None = None  # why the session with the server above has ended; None = it has not
        self._num_samples = self._num_clients = 0

    # ---- called on the main loop of the run below ----

    def begin(self, run: Any, saved: object = None) -> None:
        """Keep the run, whose model and data the client above needs, too."""
        self._run = run

    def start(self) -> None:
        """Begin to look for the server above; it is joined once as many clients are here as the run below waits for."""
        threading.Thread(target=self._join, name="server above", daemon=True).start()

    def on_settled(self, settled: Settled, now: float) -> None:
        """Count an update below that was merged."""
        self._task.add(settled)

    def on_event(self, event: Event, coordinator: Coordinator, now: float) -> None:
        """Answer the server above once the last merge of its task is made."""
        if coordinator.started and not self._are_here.is_set():
            self._count(coordinator)
            self._are_here.set()
        if isinstance(event, Received):
            self._out, self._task = self._asked.pop(event.task, None), TaskBelow()
        above = coordinator.above
        if self._out is None or above is None or not above.waits:
            return
        task, self._out = self._out, None
        assert self._run is not None and self._run.record.folder is not None
        state = coordinator.state
        update = self._task.update(
            task.assignment,
            state.submodels,
            task.received,
            state.values,
            sends=task.sends,
            num_merges=above.num_merges,
            most_samples=self._num_samples,
            journal=self._run.record.folder.head,
        )
        self._answers.put(update)

    def _count(self, coordinator: Coordinator) -> None:
        """Add up the subfederation's clients and samples; an absent client counts as the config describes it."""
        assert self._run is not None
        known = {client.id: client for client in self._run.parts.clients} | coordinator.roster.clients
        self._num_clients = sum(client.stands_for for client in known.values())
        self._num_samples = sum(client.num_samples for client in known.values())

    def stop_asked(self) -> str | None:
        """Return why the server above has ended, with which the run below ends, too."""
        return self._reason

    def close(self) -> None:
        """End the task that the client above may wait for."""
        self._is_closed.set()

    # ---- the client that the server above sees ----

    def _join(self) -> None:
        own = self._own
        try:
            while not self._are_here.wait(_LOOK_S):
                if self._is_closed.is_set():
                    return
            gate = open_gate_of(own, self._say)
            reason = join(
                own.address,
                own.client,
                credentials(own, server=False),
                self._with_gate(gate),
                needs_config=True,
                proxy=own.proxy,
                say=self._say,
                gate=gate,
                alone_s=self._below.waits.alone_s,
            )
            self._reason = reason or "max_updates"
        except (BadInput, RunFailed, OSError) as error:
            self._reason = f"failed: {cause(error)}"
        except Exception as error:
            self._reason = f"failed: {cause(error)}"
            raise

    def _with_gate(self, gate: Any) -> Callable[[str | None], ClientSetup]:
        """Make a function that sets up this client from the config of the server above, if the site's policy allows it."""

        def make(config_yaml: str | None) -> ClientSetup:
            found = parse_run("join", [], config_yaml=config_yaml)

            def build() -> ClientSetup:
                return self.setup(found.experiment, found.config_yaml)

            if gate is None:
                return build()
            from raafl.sites.admit import admit

            return admit(gate, found.experiment, found.config_yaml, build)

        return make

    def setup(self, above: Experiment, config_yaml: str) -> ClientSetup:
        """Build the client of the server above.

        Raises:
            BadInput: the run below cannot do what that above asks for.
        """
        assert self._run is not None
        client, parts = self._own.client, self._run.parts
        if not 1 <= client <= above.clients:
            raise BadInput(f"client is {client}: the run above has clients 1 to {above.clients}")
        if above.overlap or above.train.lr_schedule != "constant":
            raise BadInput(
                "the run above has overlap, or a schedule of the learning rate, which a subfederation cannot follow: set "
                "overlap to false and train.lr_schedule to constant there; a schedule may stand in the config below"
            )
        submodels, trainer = client_parts(above, parts.data, above.fabric.on(Place.here(None, above.fabric.device).gpu))
        if submodels.layout() != parts.submodels.layout():
            raise BadInput("the model of the run above is another one than that of the run below: give both the same")
        info = ClientInfo(
            client, self._num_samples, above.profiles()[client - 1], own_data=True, below=self._num_clients
        )
        options, num = self._below.subfederation, self._below.clients
        why = differences(above.algorithm, self._below.algorithm, self._below.train, options.merges, num)
        notes = [f"not equal to one flat federation: {reason}" for reason in why]
        trained = _Trainer(trainer, self)
        alike = sections(config_yaml, own_data=True)
        data = copy(parts.data.client(1))  # no task reads it: its number of samples alone counts, for the site's policy
        data.num_samples = self._num_samples
        return ClientSetup(above, info, submodels, trained, data, alike, notes, config_yaml=config_yaml)

    def train(self, assignment: Assignment, received: FlatTensors, sends: str, context: TaskContext) -> Update:
        """Have a task done by the clients below.

        Raises:
            TaskRefused: the task asks for what clients below cannot do, or the run below has ended.
            Stopped: the server above does not want the answer any more.
        """
        if assignment.num_epochs is not None or assignment.num_steps is not None or assignment.extra:
            raise TaskRefused(
                "the task of the server above sets a client's steps, or other details of its training, which clients "
                "below get from their own server: leave the method's options out that do so above"
            )
        task = self._asked[assignment.id] = _Task(assignment, received.clone(), sends)
        number, version, spec = assignment.id, assignment.version, assignment.spec.without_base
        self.inbox.put(Received(number, version, spec, task.received, task.received.fingerprint()))
        while True:
            if context.is_stopped:
                raise Stopped
            if self._is_closed.is_set():
                raise TaskRefused("the run below has ended")
            try:
                update = self._answers.get(timeout=_LOOK_S)
            except queue.Empty:
                continue
            if update.assignment == assignment.id and update.incarnation == assignment.incarnation:
                return update

    def _say(self, text: str) -> None:
        _log.info(f"server above: {text}", extra={"prefix": "raafl, ", "private": True})


class _Task:
    """Task of the server above, which the subfederation trains as one client."""

    def __init__(self, assignment: Assignment, received: FlatTensors, sends: str) -> None:
        self.assignment, self.received, self.sends = assignment, received, sends


class _Trainer(LocalTrainer):
    """Stand-in for a client's trainer: a task is trained by the clients of the subfederation below."""

    def __init__(self, plain: LocalTrainer, bridge: Bridge) -> None:
        self.__dict__.update(plain.__dict__)
        self._bridge = bridge

    def run(
        self, assignment: Assignment, received: FlatTensors, data: ClientData, context: TaskContext = ALONE
    ) -> Update:
        """Let the clients below do a task; see `LocalTrainer.run`."""
        return self._bridge.train(assignment, received, self.sends, context)
