"""A server for many runs, over TLS, with runs that are listeners of the test's own process."""

from __future__ import annotations

import json
from contextlib import contextmanager, nullcontext, redirect_stderr, redirect_stdout, suppress
from dataclasses import replace
from io import StringIO
from subprocess import CompletedProcess

import pytest

from raafl.commands.cli import main
from raafl.config.remote_options import check_run_name
from raafl.config.trust import of_text
from raafl.errors import BadInput, RunFailed
from raafl.runtime.protocol import no_tensors
from raafl.runtime.supervisor import Child
from raafl.sites.certificates import read_certificate
from raafl.sites.hosted_runs import Asked, HostedRun, configs
from raafl.sites.run_server import Answer, Question, RunServer, ask, check_config
from raafl.sites.server import Sites
from raafl.transport import Kind, Message, PeerLost, Refused, codec
from raafl.transport.tcp.handover import inherited_socket
from raafl.transport.tcp.listener import Listener, TokenBucket, connect
from tests.helpers.certificates import federation
from tests.helpers.forked_command import wait_for
from tests.helpers.refusals import refuses

CONFIG = """
clients: 2
model: {class_path: model_zoo.MLP, init_args: {in_features: 64, hidden: [8]}}
data: {class_path: raafl.data.Digits}
algorithm: fed_avg
max_updates: 4
"""


@pytest.fixture
def sites(tmp_path):
    path = tmp_path / "sites.yaml"
    path.write_text("north: {clients: [1]}\n")
    return Sites(path, frozenset)


@pytest.fixture
def server(tmp_path, sites, monkeypatch):
    """A server whose runs get no process."""
    monkeypatch.setattr("raafl.sites.run_server.RunServer._start", lambda self, name, run: False)
    monkeypatch.setattr("raafl.sites.run_server.check_config", lambda *_, **__: None)
    (tmp_path / "runs").mkdir()
    made = RunServer(tmp_path / "runs", "127.0.0.1:0", federation().server, sites, ["operator"])
    made._turns = TokenBucket(at_once=10**6)
    with made:
        yield made


def asks(server, do, by="operator", **fields):
    return ask(server.address, Question(do, **fields), federation().site(by).client_login())


@contextmanager
def running(run):
    """Stand in for the process of a run; yields the connections that it gets."""
    got = []
    with run.kept(), run.receiving() as made:
        files = replace(federation().server, run=run.name)
        with Listener(inherited_socket(made.detach()), files, lambda pair, peer: got.append((pair, peer)), print):
            yield got
        for pair, _ in got:
            pair.close()


def call(server, run, client=1):
    login = replace(federation().site(), run=run).client_login()
    return connect(server.address, client, login, timeout_s=10.0)


def test_a_submitted_config_is_a_run_which_sites_may_list_but_not_change(server):
    (row,) = asks(server, "submit", run="first", config=CONFIG, min_clients=2).runs
    assert (row["run"], row["state"], row["by"]) == ("first", "submitted", "operator")
    server.look()
    (seen,) = asks(server, "list", by="north").runs
    assert seen == {"run": "first", "id": row["id"], "state": "submitted"}
    for do in ("submit", "show", "stop", "resume"):
        with pytest.raises(RunFailed, match=f"site 'north' may not {do} runs: use the certificate of an operator"):
            asks(server, do, by="north", run="first", config=CONFIG)
    with pytest.raises(RunFailed, match="run 'first' exists: give another --name"):
        asks(server, "submit", run="first", config=CONFIG)
    run = HostedRun(server._folder, "first")
    assert (run.asked.by, run.asked.min_clients) == ("operator", 2)
    assert run.config.read_text() == CONFIG


def test_a_site_that_is_not_listed_or_was_revoked_is_not_answered(server, sites):
    with pytest.raises(Refused, match="unknown-site"):
        asks(server, "list", by="east")
    sites._revoked.value = frozenset([_serial("operator")])
    with pytest.raises(Refused, match="revoked"):
        asks(server, "list")


def _serial(site):
    return read_certificate(federation().site(site).cert).serial_number


test_a_submitted_config_runs_no_code_of_its_author = refuses(
    lambda **fields: _trial(**fields),
    ({"config": CONFIG.replace("model_zoo.MLP", "os.system")}, "model is 'os.system', which is not raafl's own"),
    ({"config": "a: !!python/object:os.system x"}, "the config of run 'a' is refused"),
    ({"config": "- 1"}, "the config of run 'a' is refused"),
    ({"run": "../a"}, "run is '../a': give 1 to 63 of the characters"),
    ({"run": "A"}, "run is 'A': give 1 to 63 of the characters"),
    ({"run": ""}, "run is '': give 1 to 63"),
    ({"run": "x" * 64}, "give 1 to 63"),
)


def _trial(run="a", config=CONFIG):
    """Do what the run's process does with a submitted config, before it imports anything."""
    of_text(config, f"run '{check_run_name(run)}'", trusted=False)


def test_a_submitted_config_may_not_say_where_it_writes():
    for field in ("output: /etc", "resume: /etc", "push_to_hub: a/b"):
        for trusted in (False, True):
            name, _, value = field.partition(": ")
            with pytest.raises(BadInput, match=f"run 'a' is refused: {name} is '{value}': leave it out"):
                of_text(CONFIG + field, "run 'a'", trusted=trusted)
    text = of_text(CONFIG + "output: null\nresume: null\npush_to_hub: null\n", "run 'a'", trusted=False)
    assert not any(word in text for word in ("output", "resume", "push_to_hub")), "as --print_config writes them"
    of_text(CONFIG + "privacy: {clip_norm: 1.0, seed_file: null}\n", "run 'a'", trusted=False)


@pytest.mark.parametrize(
    ("field", "says"),
    [
        ("clientss: 3", "the field 'clientss' does not exist in raafl: did you mean 'clients'?"),
        (
            "partition: {class_path: raafl.data.Dirichlet, init_args: {alfa: 1}}",
            "partition.alfa is 1, which Dirichlet does not take: did you mean 'alpha'?",
        ),
    ],
)
def test_a_misspelt_name_is_no_matter_of_trust(field, says):
    with pytest.raises(BadInput) as error:
        of_text(f"{CONFIG}{field}\n", "run 'a'", trusted=False)
    assert str(error.value) == f"the config of run 'a' is refused: {says}"


@pytest.mark.parametrize("trusted", [False, True])
def test_a_server_that_trusts_configs_still_decides_where_results_go(tmp_path, monkeypatch, trusted):
    """With --trust_config a submitted config may name any class, but not the hub's account of the server's owner."""

    def in_process(command, **_):
        code = 0
        with redirect_stdout(StringIO()), redirect_stderr(StringIO()) as errors, suppress(SystemExit):
            code = main(command[3:])
        return CompletedProcess(command, code, b"", errors.getvalue().encode())

    monkeypatch.setattr("raafl.sites.run_server.subprocess.run", in_process)
    with pytest.raises(BadInput, match="run 'a' is refused: push_to_hub is 'me/mine': leave it out"):
        check_config(tmp_path, "a", CONFIG + "push_to_hub: me/mine\n", trusted=trusted)
    foreign = CONFIG.replace("raafl.data.Digits", "tests.helpers.lora_models.Tokens")
    with nullcontext() if trusted else pytest.raises(BadInput, match="which is not raafl's own"):
        check_config(tmp_path, "a", foreign, trusted=trusted)


FOLDER = "algorithm: {class_path: ca2fl, init_args: {memory: disk, memory_folder: /etc}}\n"
test_a_submitted_config_names_no_file_or_port_of_the_server = refuses(
    lambda **fields: _trial(**fields),
    (
        {"config": CONFIG + "privacy: {clip_norm: 1.0, seed_file: /etc/noise}\n"},
        "privacy.seed_file is '/etc/noise', which names what the server would write",
    ),
    ({"config": CONFIG + FOLDER}, "algorithm.memory_folder is '/etc', which names what the server would write"),
    (
        {"config": CONFIG + "monitor: 0.0.0.0:9000\n"},
        "monitor is '0.0.0.0:9000', which names what the server would open",
    ),
)


def test_a_config_in_the_folder_counts_once_it_was_read_twice_the_same(server, caplog):
    folder = server._folder
    (folder / "mine.yaml").write_text("clients: 1\n")
    (folder / "Not a run.yaml").write_text("clients: 1\n")
    server.look()
    assert asks(server, "list").runs == []
    (folder / "mine.yaml").write_text("clients: 22\n")
    server.look()
    assert asks(server, "list").runs == []
    server.look()
    (row,) = asks(server, "list").runs
    assert (row["run"], row["by"]) == ("mine", None)
    assert caplog.text.count("Not a run.yaml is no run: run is 'Not a run': give 1 to 63") == 1


def test_an_empty_config_does_not_count_yet(server):
    config = server._folder / "mine.yaml"
    config.touch()
    for _ in range(3):
        server.look()
    assert asks(server, "list").runs == []
    config.write_text("clients: 1\n")
    server.look()
    server.look()
    assert [row["run"] for row in asks(server, "list").runs] == ["mine"]


def test_a_name_is_free_again_once_its_config_and_run_folder_are_gone(server):
    run = HostedRun(server._folder, "mine")

    def states():
        server.look()
        server.look()
        return [row["state"] for row in asks(server, "list").runs]

    run.config.write_text("clients: 1\n")
    assert states() == ["submitted"]
    run.run_folder.mkdir()
    run.end(0)
    assert states() == ["completed"]
    run.config.unlink()
    assert states() == []
    run.config.write_text("clients: 1\n")  # the run folder is still there, so this is the same run
    assert states() == ["completed"]
    run.config.unlink()
    run.run_folder.rmdir()
    assert states() == []
    run.config.write_text("clients: 2\n")
    assert states() == ["submitted"]


def test_a_look_asks_once_whether_a_run_has_a_process(server, monkeypatch):
    for name, code in (("done", 0), ("mine", None)):
        run = HostedRun(server._folder, name)
        run.config.write_text("clients: 1\n")
        run.ask_first()
        if code is not None:
            run.end(code)
    asked, is_kept = [], HostedRun.is_kept.fget
    monkeypatch.setattr(HostedRun, "is_kept", property(lambda run: asked.append(run.name) or is_kept(run)))
    monkeypatch.setattr(Child, "start", lambda child: None)
    server.look()
    assert sorted(asked) == ["done", "mine"]


def test_a_run_that_cannot_be_begun_does_not_keep_others_from_it(server, caplog, monkeypatch):
    begun, ask_first = [], HostedRun.ask_first

    def ask(run, *who):
        if run.name == "a":
            raise OSError(28, "No space left on device")
        ask_first(run, *who)

    def unable(run):
        raise OSError(30, "Read-only file system")

    def start(server, name, run):
        if name == "b":
            raise OSError(12, "Cannot allocate memory")
        begun.append(name)
        return True

    monkeypatch.setattr(HostedRun, "ask_first", ask)
    monkeypatch.setattr(RunServer, "_start", start)
    monkeypatch.setattr(HostedRun, "forget", unable)
    for name in "abc":
        (server._folder / f"{name}.yaml").write_text("clients: 1\n")
    ask_first(HostedRun(server._folder, "gone"))
    for _ in range(5):
        server.look()
    assert begun == ["c", "c", "c", "c"]
    assert caplog.text.count("run 'gone' cannot be forgotten: [Errno 30] Read-only file system") == 1
    assert caplog.text.count("run 'a' cannot be begun: [Errno 28] No space left on device") == 1
    assert caplog.text.count("run 'b': its process cannot be started: [Errno 12] Cannot allocate memory") == 1


def test_a_question_that_comes_byte_by_byte_occupies_a_place_for_so_long_only(server, monkeypatch):
    monkeypatch.setattr("raafl.sites.run_server._QUESTION_S", 0.5)
    pair = connect(server.address, 0, federation().site().client_login(), timeout_s=10.0)
    head = codec.encode_head(Message(Kind.RUNS, meta={"do": "list"}))
    pair._socket.write([head[:-1]])
    wait_for(lambda: server._num_answering == 1, "the question")
    with pytest.raises(PeerLost):
        pair.recv(no_tensors, 10.0)
    wait_for(lambda: server._num_answering == 0, "the end of the question")
    pair.close()


def test_a_client_is_led_to_the_run_that_it_asks_for(server):
    for name in ("one", "two"):
        asks(server, "submit", run=name, config=CONFIG)
    server.look()
    runs = {name: HostedRun(server._folder, name) for name in ("one", "two")}
    with running(runs["one"]) as at_one, running(runs["two"]) as at_two:
        watched = set(server._loop._watches)
        with call(server, "two") as pair:
            pair.send(Message(Kind.CONFIG))
            (theirs, peer), *_ = wait_for(lambda: at_two, "the connection")
            assert server._loop._watches.keys() <= watched, (
                "a socket that is another process's would wake this one for ever"
            )
            assert theirs.recv(no_tensors, 5.0).kind is Kind.CONFIG
            assert (peer.client, peer.site) == (1, "north") and not at_one
        assert [row["state"] for row in asks(server, "list").runs] == ["running", "running"]
        with pytest.raises(Refused, match=r"no-run: .*the server offers no such run: it has one, two"):
            call(server, "three")
    with pytest.raises(PeerLost, match="stopped: the run has no process at the moment"):
        call(server, "one")
    for code, said in (
        (0, r"run-ended: .*run 'one' has completed: the server offers none now"),
        (1, r"run-failed: .*run 'one' has failed"),
        (130, r"run-ended: .*run 'one' has stopped"),  # since it was asked to
    ):
        if code == 130:
            runs["one"].stop()
        runs["one"].end(code)
        with pytest.raises(Refused, match=said):
            call(server, "one")


def test_nobody_on_the_way_can_lead_a_client_to_another_run(server, monkeypatch):
    asks(server, "submit", run="one", config=CONFIG)
    server.look()
    with running(HostedRun(server._folder, "one")) as got:
        login = replace(federation().site(), run="two").client_login()
        login.preamble = replace(federation().site(), run="one").client_login().preamble
        with pytest.raises(Refused, match="wrong-run"):
            connect(server.address, 1, login, timeout_s=10.0)
        login = federation().site().client_login()  # one that has asked for no run
        login.preamble = replace(federation().site(), run="one").client_login().preamble
        with pytest.raises(Refused, match="wrong-run"):
            connect(server.address, 1, login, timeout_s=10.0)
        assert not got


def test_a_client_that_names_no_run_is_told_so(server):
    with connect(server.address, 1, federation().site().client_login(), timeout_s=10.0) as pair:
        pair.send(Message(Kind.CONFIG))
        answer = pair.recv(no_tensors, 5.0)
    assert answer.kind is Kind.STOP and "join one with --run NAME, or all with --any" in answer.meta["reason"]


def test_what_is_no_question_is_refused_and_the_server_goes_on(server, caplog):
    for meta in ({}, {"do": "exec", "run": "", "config": ""}, {"do": "list", "run": 3, "config": ""}):
        with connect(server.address, 0, federation().site().client_login(), timeout_s=10.0) as pair:
            pair.send(Message(Kind.RUNS, meta=meta))
            with pytest.raises((PeerLost, Refused)):
                pair.recv(no_tensors, 5.0)
    assert caplog.text.count("a question of north was refused: bad-meta") == 3
    assert asks(server, "list").runs == []


def test_runs_that_are_asked_too_often(server):
    server._turns = TokenBucket(at_once=1, every_s=1000)
    asks(server, "list", by="north")
    with pytest.raises(PeerLost, match="too-often: site 'north'"):
        asks(server, "list", by="north")
    asks(server, "list")  # which does not cost the operator's turns


def test_how_a_run_stands(tmp_path):
    run = HostedRun(tmp_path, "a")
    run.config.write_text("")
    run.ask_first("operator", 3)
    assert run.state == "submitted" and [found.name for found in configs(tmp_path)] == ["a"]
    with run.kept():
        assert run.state == "running"
        with pytest.raises(BadInput, match="run 'a' is kept by another process"), run.kept():
            pass
    run.end(130)
    assert run.state == "submitted", "a signal that nobody asked for: the machine was shut down"
    run.stop()
    assert run.state == "stopped"
    run.resume()
    assert run.state == "submitted" and run.asked.min_clients == 3
    for code, state in ((0, "completed"), (1, "failed"), (2, "failed")):
        run.end(code)
        assert run.state == state
    assert json.loads((tmp_path / ".raafl/a/asked.json").read_text())["id"] == run.asked.id
    assert isinstance(run.asked, Asked)


def test_answers_are_checked_and_fit_to_be_printed():
    good = {"run": "a", "id": "1", "state": "running", "by": "\x1b[31m"}
    assert Answer.from_meta({"problem": "", "runs": [good], "details": {}}).runs[0]["by"] == "\\x1b[31m"
    for row in ({**good, "run": "../a"}, {**good, "state": "\x1b"}, {**good, "id": 3}, 3):
        with pytest.raises(Refused):
            Answer.from_meta({"problem": "", "runs": [row], "details": {}})
    for meta in ({}, {"problem": 3, "runs": [], "details": {}}, {"problem": "", "runs": {}, "details": {}}):
        with pytest.raises(Refused):
            Answer.from_meta(meta)


def test_a_question_is_bounded():
    fields = {"do": "submit", "run": "a", "config": ""}
    for more in ({"config": "x" * 200_001}, {"run": "x" * 201}, {"min_clients": 0}, {"min_clients": True}):
        with pytest.raises(Refused, match="bad-meta"):
            Question.from_meta({**fields, **more})
