"""The server's list of sites: what it lets in, and what happens when it changes."""

from __future__ import annotations

import queue
import random
import threading
import time

import pytest

from raafl.errors import BadInput
from raafl.sites.server import SiteRules, Sites, read_sites
from raafl.transport import PeerLost, Refused
from raafl.transport.tcp.listener import Peer, connect
from raafl.transport.tcp.transport import TcpTransport
from raafl.transport.transport import ConnectOptions
from tests.helpers.certificates import federation

LIST = "north: {clients: [1, 2]}\nsouth: {clients: 3, max_samples: 50, own_data: false, profile: {flops_per_s: [1.0e9, 2.0e9]}}\n"


@pytest.fixture
def path(tmp_path):
    (tmp_path / "sites.yaml").write_text(LIST)
    return tmp_path / "sites.yaml"


def peer(client, site, serial=1):
    return Peer(client, site, serial, "test")


def problem(sites, who):
    try:
        sites.authorize(who)
    except Refused as refused:
        return refused.reason
    return None


def changed(sites):
    """Return whether a list is new, once a changed file has been at rest."""
    return [sites.reread(), sites.reread()][-1]


def test_who_is_let_in(path):
    sites = Sites(path, lambda: frozenset({7}))
    assert [problem(sites, peer(client, "north")) for client in (1, 2, 3)] == [None, None, "unknown-client"]
    assert problem(sites, peer(1, "east")) == "unknown-site"
    assert problem(sites, peer(1, "north", serial=7)) == "revoked"
    assert problem(sites, Peer(9, None, 0, "test")) is None, "a process of the same command has no site"
    with pytest.raises(Refused, match="site 'south' may not be client 1: it may be 3"):
        sites.authorize(peer(1, "south"))
    assert sites.rules(3).max_samples == 50 and sites.rules(9) == SiteRules()
    assert sites.rules(3) == SiteRules(frozenset({3}), 50, False, {"flops_per_s": (1e9, 2e9)})


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("north: [1]", "north is \\[1\\]: write"),
        ("north: {clients: []}", "clients is \\[\\]: give the ids"),
        ("north: {clients: [0]}", "clients is \\[0\\]"),
        ("north: {clients: [true]}", "clients is"),
        ("north: {client: [1]}", "north.client is unknown: did you mean 'clients'"),
        ("north: {clients: 1, max_samples: -1}", "max_samples is -1: give a whole number"),
        ("north: {clients: 1, own_data: maybe}", "own_data is 'maybe': give true or false"),
        ("north: {clients: 1, profile: {flops: 1}}", "profile.flops is unknown: did you mean 'flops_per_s'"),
        ("north: {clients: 1, profile: {flops_per_s: [2, 1]}}", "give the largest value, or"),
        ("a: {clients: 1}\nb: {clients: [1]}", "client 1 is listed for 'a' and for 'b'"),
        ("- north", "not a mapping of fields"),
        ("north: *x", "line 1, column 8: found undefined alias 'x'"),
        ("a: {clients: 1}\n'a': {clients: 2}", "line 2, column 1: 'a' is given twice: write one entry `SITE"),
        ("a: &a {clients: 1}\nb: {<<: *a}", "not YAML with plain values"),
    ],
)
def test_a_list_that_makes_no_sense(path, text, why):
    path.write_text(text)
    with pytest.raises(BadInput, match=why):
        read_sites(path)


def test_an_empty_list_lets_in_nobody_and_a_missing_one_is_bad_input(path):
    path.write_text("# nobody yet\n")
    assert problem(Sites(path, frozenset), peer(1, "north")) == "unknown-site"
    path.write_text("")
    assert read_sites(path) == {}
    path.unlink()
    with pytest.raises(BadInput, match=r"cannot be read .No such file.*give --sites FILE"):
        read_sites(path)


def test_a_slip_of_an_editor_changes_nothing(path, caplog):
    sites = Sites(path, frozenset)
    path.write_text("north: {clients: [1, 2]\n")
    assert not changed(sites) and problem(sites, peer(1, "north")) is None
    assert "the earlier list of sites stays in force" in caplog.text
    path.write_text("south: {clients: [3]}\n")
    assert changed(sites) and problem(sites, peer(1, "north")) == "unknown-site"
    assert not changed(sites)
    path.unlink()
    assert not changed(sites) and problem(sites, peer(3, "south")) is None
    path.mkdir()
    assert not changed(sites) and problem(sites, peer(3, "south")) is None
    assert "cannot be read (Is a directory): list the sites there" in caplog.text
    path.rmdir()
    path.write_text("north: {clients: [1]}\n")
    assert changed(sites) and problem(sites, peer(1, "north")) is None


def test_a_list_that_is_emptied_and_then_written_keeps_everybody(path):
    """As many editors save a file; the look between the two sees no site."""
    sites = Sites(path, frozenset)
    path.write_text("")
    assert not sites.reread() and problem(sites, peer(1, "north")) is None
    path.write_text(LIST + "# saved\n")
    assert not changed(sites) and problem(sites, peer(3, "south")) is None
    path.write_text("")
    assert changed(sites) and problem(sites, peer(1, "north")) == "unknown-site", "an empty list that stays is meant"


def races(path, num, seed):
    """Write the list in pieces, replace, remove and damage it, with looks in between; return how often a list was new."""
    rng, sites, news = random.Random(seed), Sites(path, frozenset), 0
    lists = {
        "a": "north: {clients: [1, 2]}\nsouth: {clients: [3]}\n",
        "b": "north: {clients: [1]}\neast: {clients: [2]}\n",
    }
    whole = {text: read_of(path, text) for text in (*lists.values(), LIST)}
    path.write_text(LIST)
    for _ in range(num):
        text = rng.choice([*lists.values(), LIST])
        half = text[: rng.randrange(len(text))]
        for content in rng.choice(
            [["", half, text], [REPLACED, text], [None, text], ["north: {clients: [1", text], [half, text]]
        ):
            put(path, content)
            for _ in range(rng.choice([0, 1])):  # a change counts at the second look that finds it at rest
                news += sites.reread()
            assert sites._sites.value in whole.values(), "never half a list"
        if rng.random() < 0.5:
            news += changed(sites)
            assert sites._sites.value == whole[text]
    return news


REPLACED = "the next is put in its place"


def put(path, content):
    """Write a list over the old one, put it in its place by a rename, or remove the old one."""
    if content is None:
        path.unlink(missing_ok=True)
    elif content is REPLACED:
        new = path.with_suffix(".new")
        new.write_text(LIST)
        new.replace(path)
    else:
        path.write_text(content)


def read_of(path, text):
    path.write_text(text)
    return read_sites(path)


def test_a_list_that_is_written_while_it_is_read_counts_as_a_whole(path):
    assert races(path, 60, 1) > 10


@pytest.mark.slow("ten thousand changes of a file")
@pytest.mark.long("test_a_list_that_is_written_while_it_is_read_counts_as_a_whole")
def test_a_list_that_is_written_ten_thousand_times(path, capsys):
    news = races(path, 10_000, 2)
    with capsys.disabled():
        print(f" 10000 changes, {news} new lists ", end="")


def test_threads_that_ask_while_the_list_changes_get_one_list_or_the_other(path):
    """No answer is an error, and none lets in whom neither list has."""
    sites, stop, wrong, asked = Sites(path, frozenset), threading.Event(), [], []

    def ask():
        while not stop.is_set():
            for who in (peer(1, "north"), peer(3, "south"), peer(9, "east")):
                try:
                    if (why := problem(sites, who)) not in (None, "unknown-site", "unknown-client") or (
                        who.client == 9 and not why
                    ):
                        wrong.append(why)
                except Exception as error:
                    wrong.append(error)
            asked.append(1)

    threads = [threading.Thread(target=ask) for _ in range(3)]
    for thread in threads:
        thread.start()
    for number in range(20):
        path.write_text("south: {clients: [3]}\n" if number % 2 else LIST)
        changed(sites)
    stop.set()
    for thread in threads:
        thread.join()
    assert wrong == [] and len(asked) > 3


def test_a_broken_list_does_not_hold_up_a_revocation(path, tmp_path):
    crl, serials = tmp_path / "revoked.crl", set()
    sites = Sites(path, lambda: frozenset(serials), (crl,))
    path.write_text("north: {clients: [1, 2]\n")
    serials.add(7)
    crl.write_text("new")
    assert changed(sites) and problem(sites, peer(1, "north", serial=7)) == "revoked"


def test_what_is_taken_out_is_cut_within_a_second_and_others_stay(path):
    sites, admitted, refused = Sites(path, frozenset), queue.Queue(), queue.Queue()
    server = TcpTransport(
        ConnectOptions(address="127.0.0.1:0", credentials=federation().server, authorize=sites.authorize)
    )
    with server, sites.watch(server.recheck):
        server.listen(lambda client, peer, connection: admitted.put((client, connection())), refused.put)
        address = server.address.partition(",")[0]
        here = {}
        for client, site in ((1, "north"), (3, "south")):
            here[client] = connect(address, client, federation().site(site).client_login(), timeout_s=30)
            number, ours = admitted.get(timeout=30)
            here[-number] = ours
        path.write_text("north: {clients: [1, 2]}\n")
        since = time.monotonic()
        with pytest.raises(PeerLost, match="unknown-site: site 'south' is not on the server's list"):
            here[-3].recv(lambda *_: None, 30)
        assert time.monotonic() - since < 1.0
        with pytest.raises(PeerLost):
            here[3].recv(lambda *_: None, 30)
        with pytest.raises(Refused, match="site 'south' is not on the server's list"):
            connect(address, 3, federation().site("south").client_login(), timeout_s=30)
        assert refused.get(timeout=30) == "unknown-site"
        here[-1].check()
        here[1].check()
        for connection in here.values():
            connection.close()
