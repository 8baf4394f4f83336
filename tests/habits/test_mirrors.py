"""Tests of core, runtime and submodel lie at the path of the module that they test, or a list says which file tests it."""

from __future__ import annotations

from tests.habits.source import ROOT, modules

MIRRORED = ("raafl/core", "raafl/runtime", "raafl/submodel")
ELSEWHERE = {
    "raafl/core/algorithm.py": "tests/core/test_coordinator.py",
    "raafl/core/exchange.py": "tests/runtime/test_exchange.py",
    "raafl/core/local.py": "tests/local/test_task_steps.py",
    "raafl/core/records_json.py": "tests/devices/test_series.py",
    "raafl/core/snapshots.py": "tests/compression/test_streams.py",
    "raafl/core/types.py": "tests/core/test_coordinator.py",
    "raafl/runtime/client/join.py": "tests/commands/test_join.py",
    "raafl/runtime/client/multiprocess.py": "tests/launch/test_spanning.py",
    "raafl/runtime/client/secure.py": "tests/runtime/server/test_secure.py",
    "raafl/runtime/client/setup.py": "tests/runtime/client/test_memory.py",
    "raafl/runtime/client/site/admit.py": "tests/distributed/test_site_policy.py",
    "raafl/runtime/client/site/offer.py": "tests/commands/test_join.py",
    "raafl/runtime/client/worker.py": "tests/runtime/test_exchange.py",
    "raafl/runtime/driver.py": "tests/runtime/test_simulation.py",
    "raafl/runtime/executors/base.py": "tests/conformance/test_executors.py",
    "raafl/runtime/executors/rank_worker.py": "tests/runtime/executors/test_ranks.py",
    "raafl/runtime/executors/shared_evaluation.py": "tests/conformance/test_executors.py",
    "raafl/runtime/fields.py": "tests/runtime/test_protocol.py",
    "raafl/runtime/fit.py": "tests/distributed/test_torchrun.py",
    "raafl/runtime/resumption.py": "tests/runtime/server/test_link.py",
    "raafl/runtime/server/link_tracker.py": "tests/runtime/server/test_link.py",
    "raafl/runtime/server/evaluator.py": "tests/runtime/server/test_wall_clock.py",
    "raafl/runtime/server/terms.py": "tests/runtime/server/test_session_hello.py",
    "raafl/runtime/setup.py": "tests/runtime/test_simulation.py",
    "raafl/runtime/simulate_over_ranks.py": "tests/distributed/test_torchrun.py",
    "raafl/submodel/cost/fused.py": "tests/submodel/cost/test_flops.py",
    "raafl/submodel/cost/ledger.py": "tests/submodel/cost/test_flops.py",
    "raafl/submodel/cut/layers.py": "tests/submodel/cut/test_shrink.py",
    "raafl/submodel/cut/multihead.py": "tests/submodel/cut/test_shrink.py",
    "raafl/submodel/find/candidates.py": "tests/submodel/find/test_discover.py",
    "raafl/submodel/find/products.py": "tests/submodel/find/test_operations.py",
    "raafl/submodel/find/reductions.py": "tests/submodel/find/test_operations.py",
    "raafl/submodel/find/size_tracker.py": "tests/submodel/cut/test_sizes.py",
    "raafl/submodel/find/whole_layers.py": "tests/submodel/depth/test_tails.py",
    "raafl/submodel/find/windows.py": "tests/submodel/find/test_discover.py",
    "raafl/submodel/isolated_run.py": "tests/submodel/find/test_examples.py",
    "raafl/submodel/module_state/containers.py": "tests/submodel/module_state/test_state.py",
    "raafl/submodel/module_state/reach.py": "tests/submodel/module_state/test_state.py",
    "raafl/submodel/module_state/values.py": "tests/submodel/module_state/test_state.py",
    "raafl/submodel/submodels.py": "tests/submodel/test_extract.py",
}
"""Modules that are tested as part of something larger. Shorten this: a module that gets a file of its own leaves it."""


def mirrored(name: str) -> str:
    """Return the path at which the tests of a module belong."""
    folder, _, file = name.removeprefix("raafl/").rpartition("/")
    return f"tests/{folder}/test_{file}"


def test_every_module_has_its_tests_where_one_looks_for_them():
    names = [str(path.relative_to(ROOT)) for path in modules(*MIRRORED) if path.name != "__init__.py"]
    alone = {name for name in names if not (ROOT / mirrored(name)).is_file()}
    assert sorted(alone - ELSEWHERE.keys()) == [], "write tests at the mirrored path"
    assert sorted(ELSEWHERE.keys() - alone) == [], "take these out of ELSEWHERE"
    assert sorted(file for file in ELSEWHERE.values() if not (ROOT / file).is_file()) == []
