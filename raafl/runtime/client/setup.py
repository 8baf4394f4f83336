"""Build the model, data and trainer of a client once, for all of its connections."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING

from raafl.config.experiment import Experiment
from raafl.config.shared import sections
from raafl.core.types import ClientInfo
from raafl.data.federated import ClientData, FederatedData
from raafl.data.partition import Iid
from raafl.devices.gpus import Place
from raafl.errors import BadInput
from raafl.local.client_group import ClientProcesses, num_processes
from raafl.local.numerics import set_numerics
from raafl.local.train import LocalTrainer
from raafl.parts.trigger import AllReported
from raafl.rules import Rules
from raafl.runfolder.signing import Signer
from raafl.runtime.client.memory import settle_heap, with_memory
from raafl.runtime.client.receipts import Receipts
from raafl.runtime.client.secure import SecureSide, SiteTerms
from raafl.runtime.client.site.gate import Gate
from raafl.runtime.client.worker import Client
from raafl.runtime.identity import Identity
from raafl.runtime.lifecycle.environment import conditions
from raafl.runtime.secure_groups import masking
from raafl.runtime.setup import client_infos, client_parts, compression_plan, load_data
from raafl.submodel import Submodels
from raafl.transport import Connection

if TYPE_CHECKING:
    from raafl.runtime.client.site_keys import SiteKeys
    from raafl.transport.tcp.credentials import TlsFiles


@dataclass
class ClientSetup:
    """Model, data and trainer of a client, used by all of its connections."""

    experiment: Experiment
    info: ClientInfo
    submodels: Submodels  # structure of the submodels of the model
    trainer: LocalTrainer
    data: ClientData
    sections: dict[str, str]  # digest of each section of the config that the server compares
    notes: list[str] = field(default_factory=list)  # notes for the user, one line each
    # group of the processes that train this client together; None = one process
    process_group: ClientProcesses | None = None
    gate: Gate = field(default_factory=Gate)  # gate that checks each task against the policy of the client's site
    receipts: Receipts | None = None  # writer of receipts for sent updates; None = no receipts are written
    config_yaml: str = ""  # text of the client's config

    @classmethod
    def build(
        cls, experiment: Experiment, config_yaml: str, client: int, *, own_data: bool, data_named: bool = False
    ) -> ClientSetup:
        """Build a client from a config.

        Raises:
            BadInput: the client does not exist, its model or data cannot be built, or its memory is too small.
        """
        replace(experiment, output=None, resume=None).check(needs_end=False)
        if not 1 <= client <= experiment.clients:
            raise BadInput(f"client is {client}: this run has clients 1 to {experiment.clients}")
        alike = sections(config_yaml, own_data=own_data or data_named)
        # torchrun's ranks are all this client's; without it, the processes here are those of `fit --local`, the server's first
        server_device = None if "RANK" in os.environ else experiment.server_device
        place = Place.here(server_device, experiment.fabric.device)
        setup = cls.make(experiment, client, place, own_data=own_data, alike=alike, num_processes=num_processes())
        setup.config_yaml = config_yaml
        return setup

    @classmethod
    def make(
        cls,
        experiment: Experiment,
        client: int,
        place: Place,
        *,
        own_data: bool = False,
        alike: dict[str, str] | None = None,
        num_processes: int = 1,
    ) -> ClientSetup:
        """Build a client from an experiment that was checked already.

        `alike`: digest of each config section that must be the same on the server; None = none is compared.
        """
        set_numerics(experiment.threads, experiment.fabric)
        if own_data:
            data = whole(experiment)
            mine = data.make_client(1, copied=True)
            profile = experiment.profiles()[client - 1]
            info = ClientInfo(client, mine.num_samples, profile, own_data=True)
        else:
            data = load_data(experiment)
            mine = data.make_client(client, copied=True)
            info = client_infos(experiment, data)[client - 1]
        submodels, trainer = client_parts(experiment, data, experiment.fabric.at(place))
        info, notes = with_memory(experiment, info, submodels, data, trainer.fabric.device, place, num_processes)
        settle_heap(experiment, info, submodels, data, trainer.fabric.device, num_processes)
        return cls(experiment, info, submodels, trainer, mine, alike or {}, notes)

    @contextmanager
    def receipts_kept(self, share: float, say: Callable[[str], None], signer: Signer | None = None) -> Iterator[None]:
        """Return a context in which the client writes a receipt (a signed record) for each update that it sends.

        `signer`: holder of the key that signs receipts; None = this user's own key.
        """
        self.receipts = Receipts.open(
            self.info.id,
            self.config_yaml,
            conditions(self.experiment),
            share=share,
            own_data=self.info.own_data,
            signer=signer,
        )
        if self.receipts is None:
            say("no receipts are stored, since no file can be written in the state folder")
            yield
            return
        say(f"keeps receipts in {self.receipts.folder}")
        with closing(self.receipts):
            yield

    def client(
        self,
        pair: Connection,
        *,
        unsent: int | None = None,
        on_welcome: Callable[[], None] = lambda: None,
        files: TlsFiles | None = None,
    ) -> Client:
        """Return the object that receives and trains this client's tasks on a connection; see `Client`.

        `files`: TLS files, whose private key signs the client's public keys in secure aggregation; None = no files.
        `unsent`: id of a task whose update could not be sent on an earlier connection; None = none.
        """
        merge = masking(self.experiment)
        client = Client(
            self.info,
            pair,
            self.submodels,
            self.trainer,
            self.data,
            self.experiment.waits,
            config=self.sections or None,
            unsent=unsent,
            on_welcome=on_welcome,
            plan=compression_plan(self.experiment, self.submodels),
            process_group=self.process_group,
            secure=None if merge is None else SecureSide(pair, self.submodels, merge, self._site_terms(files)),
        )
        client.gate, client.receipts = self.gate, self.receipts
        return client

    def _site_terms(self, files: TlsFiles | None) -> SiteTerms:
        """Return what the client's site contributes to secure aggregation; ``files`` None = it has no certificate."""
        equal = {name: digest for name, digest in self.sections.items() if digest != "own"}
        equal.pop("data", None)  # of other clients it may be their own
        facts = Identity.of(self.submodels, equal).to_meta()
        facts.pop("raafl")  # clients of several versions may take part
        run = hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
        alike = self.experiment.compress.down == "none"  # else each has what it was sent before, too
        in_rounds = isinstance(self.experiment.algorithm.trigger, AllReported)
        return SiteTerms(run, _site_keys(files, self.gate), self.gate.max_share, in_rounds, alike)


def _site_keys(files: TlsFiles | None, gate: Gate) -> SiteKeys | None:
    if files is None:
        return None
    from raafl.certs.revocations import Revocations
    from raafl.runtime.client.site_keys import SiteKeys  # here: ranks of torchrun import nothing of certificates

    revoked = frozenset if files.crl is None else Revocations(files.crl, files.ca).latest
    return SiteKeys(files.ca, files.cert, files.key, revoked, gate.partners)


def whole(experiment: Experiment) -> FederatedData:
    """Return all training data of the experiment as the data of one client."""
    partition = Iid(test_share=experiment.partition.test_share)
    return FederatedData(experiment.data(), partition, 1, experiment.seed, Rules(experiment.rules))
