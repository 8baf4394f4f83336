"""Whole runs against what they must equal: each other where a method becomes another, and a plain loop in torch."""

from __future__ import annotations

import pytest
import torch

from raafl.algorithms import fed_async, fed_avg, fed_buff, fed_dyn, fed_nova, fed_opt, fed_per, fed_prox, fed_raa, moon
from raafl.core.algorithm import Training
from raafl.data import Iid
from tests.helpers.plain_loop import Plain, close, run, train, values

pytestmark = pytest.mark.timeout(120)


# ---- where one method becomes another ----

ONE_FRAGMENT = {"fragments": 1, "rescale": False}
SAME = {
    "fed_dyn without regularisation is unweighted fed_avg": (fed_dyn(alpha=0.0), fed_avg(by_samples=False)),
    "moon without contrast is fed_avg": (moon(mu=0.0), fed_avg()),
    "fed_per with nothing of one's own is fed_avg": (fed_per(layers=[]), fed_avg()),
    "fed_prox without a pull is fed_avg": (fed_prox(prox=0.0), fed_avg()),
    "one fragment in rounds is unweighted fed_avg": (
        fed_raa(**ONE_FRAGMENT, trigger="all", alpha=1.0, staleness="constant", prox=0.0),
        fed_avg(by_samples=False),
    ),
    "one fragment at each arrival is fed_async": (
        fed_raa(**ONE_FRAGMENT, alpha=0.4, staleness="polynomial", staleness_a=0.7, prox=0.2),
        fed_async(alpha=0.4, staleness="polynomial", staleness_a=0.7, prox=0.2),
    ),
    "rescaling a whole model is no scaling": (
        fed_raa(fragments=1, rescale=True, alpha=0.5),
        fed_raa(fragments=1, rescale=False, alpha=0.5),
    ),
    "staleness to the power of nothing is constant": (
        fed_async(alpha=0.5, staleness="polynomial", staleness_a=0.0),
        fed_async(alpha=0.5, staleness="constant"),
    ),
    "a hinge far away is constant": (
        fed_async(alpha=0.5, staleness="hinge", staleness_b=1e9),
        fed_async(alpha=0.5, staleness="constant"),
    ),
}


@pytest.mark.parametrize("name", SAME)
def test_the_same_to_the_last_bit(tmp_path, name):
    one, other = SAME[name]
    first, second = run(tmp_path, "one", one), run(tmp_path, "other", other)
    assert first.digest == second.digest
    assert first.summary["final"] == second.summary["final"]


def test_fed_nova_with_equal_steps_is_fed_avg_but_for_rounding(tmp_path):
    close(values(run(tmp_path, "one", fed_nova())), values(run(tmp_path, "other", fed_avg())))


def test_weighing_by_samples_makes_a_difference_here(tmp_path):
    """Else the equality above would hold for nothing."""
    assert run(tmp_path, "a", fed_avg()).digest != run(tmp_path, "b", fed_avg(by_samples=False)).digest


def test_alone_and_never_stale_all_of_these_are_one_step_after_the_other(tmp_path):
    alone = {"clients": 1, "max_updates": 6}
    chain = run(tmp_path, "fed_avg", fed_avg(), **alone)
    replaced = run(tmp_path, "fed_async", fed_async(alpha=1.0), **alone)
    buffered = run(tmp_path, "fed_buff", fed_buff(buffer_size=1, server_lr=1.0, staleness="constant"), **alone)
    assert chain.digest == replaced.digest
    close(values(buffered), values(chain))  # theta + (new - theta) rounds, so not to the last bit
    assert buffered.summary["staleness"]["max"] == 0


def test_fed_buff_of_a_whole_round_is_unweighted_fed_avg(tmp_path):
    """Four clients, K = 4, all alike: nobody is stale within a round, and the mean of deltas is the mean of models."""
    alike = {"devices": None, "partition": Iid(), "max_updates": 4}
    buffered = run(tmp_path, "a", fed_buff(buffer_size=4, staleness="constant"), **alike)
    rounds = run(tmp_path, "b", fed_avg(by_samples=False), **alike)
    close(values(buffered), values(rounds))


def test_fed_buff_of_a_whole_round_with_a_server_optimizer_is_fed_opt(tmp_path):
    """One round, as above: of the second, the first three to report have begun before the merge."""
    alike = {"devices": None, "partition": Iid(), "max_updates": 4}
    buffered = fed_buff(buffer_size=4, staleness="constant", server_optimizer="yogi", server_lr=0.02)
    one, other = run(tmp_path, "a", buffered, **alike), run(tmp_path, "b", fed_opt("yogi", server_lr=0.02), **alike)
    close(values(one), values(other), atol=1e-4)  # fed_opt weighs by samples, 359 or 360 each


# ---- the plain loop ----


def test_fed_avg_is_the_plain_loop(tmp_path):
    finished = run(tmp_path, "r", fed_avg())
    plain, waiting = Plain(finished), []
    for trained, _, num_samples, _ in plain.arrivals():
        waiting.append((num_samples, trained))
        if len(waiting) == 4:
            total = sum(n for n, _ in waiting)
            plain.theta = {k: sum(n * t[k] for n, t in waiting) / total for k in plain.theta}
            plain.version += 1
            waiting.clear()
    assert plain.version == finished.summary["versions"] == 6
    close(plain.theta, values(finished))


@pytest.mark.parametrize("prox", [0.0, 0.3])
def test_fed_async_is_the_plain_loop(tmp_path, prox):
    finished = run(tmp_path, "r", fed_async(alpha=0.7, staleness="polynomial", staleness_a=0.5, prox=prox))
    plain = Plain(finished, prox=prox)
    for trained, _, _, version in plain.arrivals():
        alpha = 0.7 * (plain.version - version + 1) ** -0.5
        plain.theta = {k: (1 - alpha) * v + alpha * trained[k] for k, v in plain.theta.items()}
        plain.version += 1
    assert finished.summary["staleness"]["max"] > 1
    close(plain.theta, values(finished))


@pytest.mark.quick_cases("3")
@pytest.mark.parametrize("size", [1, 3, 10])
def test_fed_buff_is_the_plain_loop(tmp_path, size):
    """Buffers of 1, 3 and 10: at once, a whole number of merges, and what is left over at the end."""
    finished = run(tmp_path, "r", fed_buff(buffer_size=size, server_lr=0.8), max_updates=None, max_time=1.4)
    plain, waiting = Plain(finished), []

    def merge():
        plain.theta = {k: v + 0.8 * sum(s * d[k] for s, d in waiting) / len(waiting) for k, v in plain.theta.items()}
        plain.version += 1
        waiting.clear()

    for trained, received, _, version in plain.arrivals():
        scale = (plain.version - version + 1) ** -0.5
        waiting.append((scale, {k: trained[k] - received[k] for k in trained}))
        if len(waiting) == size:
            merge()
    if waiting:
        merge()
    assert plain.version == finished.summary["versions"] > 1
    close(plain.theta, values(finished))


def test_fed_adam_is_the_plain_loop(tmp_path):
    finished = run(tmp_path, "r", fed_opt(server_lr=0.02, tau=1e-2))
    plain, waiting = Plain(finished), []
    m = {k: torch.zeros_like(v) for k, v in plain.theta.items()}
    v = {k: torch.full_like(t, 1e-4) for k, t in plain.theta.items()}
    for trained, received, num_samples, _ in plain.arrivals():
        waiting.append((num_samples, {k: trained[k] - received[k] for k in trained}))
        if len(waiting) < 4:
            continue
        total = sum(n for n, _ in waiting)
        for k, theta in plain.theta.items():
            delta = sum(n * d[k] for n, d in waiting) / total
            m[k] = 0.9 * m[k] + 0.1 * delta
            v[k] = 0.99 * v[k] + 0.01 * delta**2
            theta += 0.02 * m[k] / (v[k].sqrt() + 1e-2)
        plain.version += 1
        waiting.clear()
    close(plain.theta, values(finished))


def test_fed_raa_is_the_plain_loop(tmp_path):
    """Fragments cut out and put back by hand: rows of the first layer, columns of the second, the last bias whole."""
    finished = run(tmp_path, "r", fed_raa(alpha=0.6, staleness="polynomial", staleness_a=0.5, rescale=False, prox=0.0))
    plain, bounds = Plain(finished), {1: (0, 5), 2: (5, 12), 3: (12, 24)}
    out, counts = {}, {1: 0, 2: 0, 3: 0}
    for row in plain.rows:
        if row["event"] == "assigned":
            start, stop = bounds[row["region"]]
            part = {
                "layers.1.weight": plain.theta["layers.1.weight"][start:stop],
                "layers.1.bias": plain.theta["layers.1.bias"][start:stop],
                "layers.3.weight": plain.theta["layers.3.weight"][:, start:stop],
                "layers.3.bias": plain.theta["layers.3.bias"],
            }
            out[row["id"]] = (row, {name: tensor.clone() for name, tensor in part.items()})
        elif row["event"] == "arrived":
            task, part = out.pop(row["assignment"])
            start, stop = bounds[task["region"]]
            new = train(part, *plain.samples[task["client"]], task["seed"], 3)
            alpha = 0.6 * (plain.version - task["version"] + 1) ** -0.5
            for tensor, place, name in (
                (plain.theta["layers.1.weight"], (slice(start, stop),), "layers.1.weight"),
                (plain.theta["layers.1.bias"], (slice(start, stop),), "layers.1.bias"),
                (plain.theta["layers.3.weight"], (slice(None), slice(start, stop)), "layers.3.weight"),
                (plain.theta["layers.3.bias"], (slice(None),), "layers.3.bias"),
            ):
                tensor[place] = (1 - alpha) * tensor[place] + alpha * new[name]
            plain.version += 1
            counts[task["region"]] += 1
    assert min(counts.values()) >= 3
    close(plain.theta, values(finished))


def test_epochs_and_steps_are_the_same_where_they_meet(tmp_path):
    """Client data of 1437 digits, batches of 64: an epoch is 23 steps."""
    alone = {"clients": 1, "max_updates": 2}
    epochs = run(tmp_path, "a", fed_avg(), train=Training(num_epochs=2), **alone)
    steps = run(tmp_path, "b", fed_avg(), train=Training(num_epochs=None, num_steps=46), **alone)
    assert epochs.digest == steps.digest
    assert {row["num_steps"] for row in epochs.rows()} == {"46"}
