"""FedAsync and FedBuff as APPFL and FLGo have them, written out, on the order of arrivals of a run of raafl.

A run's journal gives the order; each reference repeats that project's own rule on it. Read at
APPFL 9ed44c12 and 1bd7471e (`algorithm/aggregator`), FLGo a8a7f054 (`flgo/algorithm`).
"""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from raafl.algorithms import fed_async, fed_buff
from raafl.parts.merge.mean import Mean, Staleness
from tests.helpers.plain_loop import Plain, close, run, values

pytestmark = pytest.mark.timeout(120)
N, K = 4, 3


class Arrivals(Plain):
    """The run's arrivals as another project's server sees them: a client, its model, and the model that it got.

    `theta` is the server's, `version` its number of changes.
    """

    def by_client(self):
        clients = [row["client"] for row in self.rows if row["event"] == "arrived"]
        return zip(clients, self.arrivals(), strict=True)


def moved(theta, factor, to, start):
    """theta + factor (to - start), as dictionaries."""
    return {name: tensor + factor * (to[name] - start[name]) for name, tensor in theta.items()}


def appfl_steps(finished, alpha, size):
    """APPFL: alpha s / N (local - global), where global is the model *now*, summed over `size` arrivals; a client's staleness
    counts the changes since its own last arrival."""
    server, since, step = Arrivals(finished), {}, []
    for client, (trained, _, _, _) in server.by_client():
        factor = alpha * (server.version - since.get(client, 0) + 1) ** -0.5 / N
        step.append(moved({k: torch.zeros_like(v) for k, v in trained.items()}, factor, trained, server.theta))
        if len(step) == size:
            server.theta = {k: v + sum(one[k] for one in step) for k, v in server.theta.items()}
            server.version += 1
            step.clear()
        since[client] = server.version
    assert finished.summary["staleness"]["max"] > 1 and not step
    return server.theta


def test_appfl_fed_async_is_ours_with_its_alpha_shared_by_the_clients(tmp_path):
    finished = run(tmp_path, "r", fed_async(alpha=0.9 / N, staleness="polynomial"))
    close(appfl_steps(finished, 0.9, 1), values(finished))


def test_appfl_fed_buff_measures_from_the_model_as_it_is(tmp_path):
    """So it is a buffered mean of models, which raafl composes, and not the paper's mean of what clients changed."""
    algorithm = replace(fed_buff(K), merge=Mean(0.9 * K / N, Staleness("polynomial"), by_samples=False))
    finished = run(tmp_path, "r", algorithm)
    close(appfl_steps(finished, 0.9, K), values(finished))
    paper = run(tmp_path, "p", fed_buff(K, server_lr=0.9 * K / N))
    with pytest.raises(AssertionError, match="not close"):
        close(appfl_steps(paper, 0.9, K), values(paper))


def test_flgo_fed_async_is_ours(tmp_path):
    """One arrival at a time: FLGo averages what arrives in the same unit of time, which a clock of real numbers never does."""
    finished = run(tmp_path, "r", fed_async(alpha=0.6, staleness="polynomial"))
    server, asked = Arrivals(finished), {}
    for client, (trained, _, _, _) in server.by_client():
        mixed = 0.6 * (server.version - asked.get(client, 0) + 1) ** -0.5
        server.theta = moved(server.theta, mixed, trained, server.theta)
        server.version += 1
        asked[client] = server.version
    close(server.theta, values(finished))


def test_flgo_fed_buff_is_ours_without_staleness(tmp_path):
    finished = run(tmp_path, "r", fed_buff(K, server_lr=0.8, staleness="constant"))
    server, count, change = Arrivals(finished), 0, None
    for _, (trained, received, _, _) in server.by_client():
        less = {k: received[k] - trained[k] for k in trained}
        change = less if change is None else {k: change[k] + less[k] for k in change}
        count += 1
        if count == K:
            server.theta = {k: v - 0.8 * (change[k] / K) for k, v in server.theta.items()}
            server.version, count, change = server.version + 1, 0, None
    assert finished.summary["staleness"]["max"] > 1
    close(server.theta, values(finished))
