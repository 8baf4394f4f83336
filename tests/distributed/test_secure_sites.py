"""Masked updates between sites over TLS, whose keys are certified; and noise of a site's own under the masks."""

from __future__ import annotations

import re
import signal
from dataclasses import replace

import pytest

from raafl.algorithms import fed_avg
from raafl.commands.serve import serve
from raafl.core.options import SecureAggregation
from raafl.core.types import Arrived, Joined
from raafl.errors import BadInput
from raafl.runtime.replay import replay
from raafl.runtime.server.host import _at_start
from raafl.sites.policy import SitePolicy, SitePrivacy
from raafl.sites.secure_messages import UNCERTIFIED
from raafl.sites.secure_server import SecureAggregator
from tests.distributed.test_come_and_go import SEEN, WAITS, On, after, lost, parsed, settled
from tests.helpers.certificates import federation
from tests.helpers.joining_clients import SERVER, remote
from tests.helpers.small_runs import experiment, finish

pytestmark = pytest.mark.timeout(120)
OPTIONS = (
    "--clients=3",
    "--max_updates=6",
    "--algorithm=fed_avg",
    "--secure_aggregation.min_cover=3",
    "--secure_aggregation.clip_norm=1.0",
)


def at(site, **options):
    return {"credentials": federation().site(site), **options}


def test_three_sites_open_their_sum_and_get_the_model_of_a_simulation(tmp_path, caplog):
    made, config = parsed(tmp_path, *OPTIONS, second_s=0.02)
    clients = [(1, at("north")), (2, at("south")), (3, at("east", policy=SitePolicy(same_values=True)))]
    with remote(made, config, tmp_path, clients) as fleet:
        run = fleet.serve()
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0]
        assert UNCERTIFIED not in caplog.text and UNCERTIFIED not in fleet.joiners[0].words()
    assert run.summary["updates_merged"] == 6 and {len(row["group"]) for row in run.events("arrived")} == {3}
    assert run.digest == finish(replace(made, output=str(tmp_path / "simulated"))).digest
    assert replay(run.folder)["equal"] is True


def test_a_server_that_weights_one_client_alone_is_refused_by_all(tmp_path, monkeypatch, caplog):
    """It says that the others have a sample each, so that the sum is client 1's update; the strictest policy counts."""
    plain = SecureAggregator._group

    def lying(self, chosen):
        group = plain(self, chosen)
        victim = group.members[0]
        return replace(group, members=tuple(one if one is victim else replace(one, counted=1) for one in group.members))

    monkeypatch.setattr(SecureAggregator, "_group", lying)
    made, config = parsed(tmp_path, *OPTIONS, second_s=0.02)
    clients = [(1, at("north")), (2, at("south", policy=SitePolicy(max_share=0.8))), (3, at("east"))]
    on = On((lambda event: isinstance(event, Arrived) and event.update.refusal == "not-opened", None))
    with remote(made, config, tmp_path, clients) as fleet:
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0]
        for joiner in fleet.joiners:
            assert re.search(r"9\d\.\d% of a sum would be of site '\w+', .* allows max_share 0.8", joiner.words())
    assert run.summary["updates_merged"] == 0 and run.summary["finished"] == SEEN
    assert "takes no part in a sum: not-opened: bad-group: 9" in caplog.text


def test_noise_of_a_site_goes_under_the_masks(tmp_path):
    """The second site clips to 0.1 and adds noise of 0.3."""
    pytest.importorskip("dp_accounting", reason="needs the extra privacy")
    made, config = parsed(tmp_path, *OPTIONS, second_s=0.02)
    policy = SitePolicy(privacy=SitePrivacy(clip_norm=0.1, noise_multiplier=3.0), state=str(tmp_path / "site"))
    clients = [(1, at("north")), (2, at("south", policy=policy)), (3, at("east"))]
    with remote(made, config, tmp_path, clients) as fleet:
        run = fleet.serve()
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0]
    assert run.summary["updates_merged"] == 6 and run.summary["secure_aggregation"]["unsound"] == 0
    assert len((tmp_path / "site" / "ledger.jsonl").read_text().splitlines()) == 2  # releases, one a round
    assert replay(run.folder)["equal"] is False  # the noise is kept nowhere
    settled(run)


def test_a_group_of_too_few_sites_is_not_opened(tmp_path):
    made, config = parsed(tmp_path, *OPTIONS, second_s=0.02)
    clients = [(1, at("north")), (2, at("south", policy=SitePolicy(partners=["east"]))), (3, at("south"))]
    on = On((lambda event: isinstance(event, Arrived) and event.update.refusal == "not-opened", None))
    with remote(made, config, tmp_path, clients) as fleet:
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, 0]
        assert (
            "summed over clients of 2 sites that trained, and secure_aggregation.min_cover is 3"
            in fleet.joiners[0].words()
        )
        assert re.search(
            r"site 'north', key (\w{4}:){15}\w{4}, which policy.partners does not list", fleet.joiners[1].words()
        )
    assert run.summary["updates_merged"] == 0 and run.summary["finished"] == SEEN


IN_A_BUFFER = ("--algorithm=fed_buff", "--algorithm.buffer_size=3")


@pytest.mark.parametrize("method", [("--algorithm=fed_avg",), IN_A_BUFFER], ids=["fed_avg", "fed_buff"])
def test_a_run_with_too_few_clients_for_a_sum_ends_once_it_has_waited_for_others(tmp_path, method):
    options = [*(option for option in OPTIONS if "fed_avg" not in option), *method]
    waits = replace(WAITS, alone_s=1.5)
    made, config = parsed(tmp_path, *options, waits=waits, second_s=0.02)
    clients = [(1, at("north")), (2, at("south")), (3, at("east"))]
    with remote(made, config, tmp_path, clients) as fleet:
        on = On((after(3, lambda event: isinstance(event, Joined)), lambda: fleet.joiners[2].send(signal.SIGKILL)))
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [1, 1, -signal.SIGKILL]
    assert run.summary["finished"] == "failed: 2 of 3 clients for 1.5 s (waits.alone_s)"
    assert run.summary["updates_refused"] == {}  # the others are not to blame


def test_two_clients_of_a_round_wait_for_a_third_that_was_killed_and_joins_again(tmp_path):
    made, config = parsed(tmp_path, *OPTIONS, second_s=0.02)
    clients = [(1, at("north")), (2, at("south")), (3, at("east")), (3, at("east"))]
    with remote(made, config, tmp_path, clients, held_back=[3]) as fleet:
        third, again = fleet.joiners[2:]
        joins = after(3, lambda event: isinstance(event, Joined))
        ends_by_itself = (lambda event: False, None)
        on = On((joins, lambda: third.send(signal.SIGKILL)), (lost(3), again.begin), ends_by_itself)
        run = fleet.serve(on.inbox)
        assert [joiner.exit_code() for joiner in fleet.joiners] == [0, 0, -signal.SIGKILL, 0]
    assert run.summary["updates_refused"] == {} and run.summary["updates_merged"] == 6
    settled(run)
    assert replay(run.folder)["equal"] is True


@pytest.mark.parametrize(("min_cover", "least"), [(2, 3), (4, 4)])
def test_a_run_that_would_start_with_too_few_clients_for_a_sum_is_refused(tmp_path, min_cover, least):
    """Whether resumed or new; a supervisor restarts a run with one client, and it waits for more."""
    made = experiment(tmp_path / "run", fed_avg(), secure_aggregation=SecureAggregation(min_cover=min_cover))
    says = f"min_clients is {least - 1}, but secure_aggregation sums the updates of {least} clients or more: give {least} to 4"
    with pytest.raises(BadInput, match=says):
        serve(made, "", "127.0.0.1:0", SERVER, min_clients=least - 1)
    assert not (tmp_path / "run").exists()
    assert _at_start(made, 1, is_new=False) == least and _at_start(made, 4, is_new=True) == 4
