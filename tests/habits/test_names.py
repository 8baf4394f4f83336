"""Old words stay out of public names: each has a plain one, which docs/glossary.md or the code next to it explains."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from tests.habits.source import modules, place, tree

SOURCES = ("raafl", "model_zoo", "benchmarks")
PLAIN = {
    "Asked": "SizeUse",
    "Built": "TrainableSubmodel",
    "Cohorts": "BatchedExecutor",
    "Dealt": "RandomPartition",
    "Down": "DownlinkCodec",
    "Draws": "RngStream",
    "Entering": "InputCapture",
    "Filled": "HookList",
    "Fleet": "SelectContext",
    "Foreign": "UntrustedValue",
    "Found": "DiscoveredAxes",
    "HELD": "WHOLE_LAYERS",
    "KeepOut": "Suspend",
    "Located": "CoordinateWise",
    "Meeting": "ConnectOptions",
    "Misfit": "ShapeConflict",
    "Noting": "PartialRecorder",
    "OverRanks": "RankExecutor",
    "Pair": "Connection",
    "Pull": "ProximalTerm",
    "Ranks": "TorchrunTransport",
    "Screened": "NormFilter",
    "Seen": "TraceResult",
    "Several": "HookList",
    "Sockets": "TcpTransport",
    "Span": "ClientGroup",
    "Spot": "Occurrence",
    "Standing": "RefusalBackoff",
    "TooMany": "TooManySamples",
    "Turns": "TokenBucket",
    "Unshared": "NotMergeable",
    "Unsound": "InvalidPayload",
    "Up": "UplinkCodec",
    "Waiting": "TriggerContext",
    "Watch": "SizeTracker",
    "Wire": "TransferCost",
    "alone_s": "no_peer_s",
    "answered": "on_update",
    "aside": "isolated_run, suspended",
    "bears": "max_failures",
    "by_the_loop": "sequential",
    "cleaned": "sanitize_tree",
    "crew": "process_group",
    "dealt": "random_partition",
    "drawn": "on_round_start, sampling",
    "elsewhere": "swap_parameters",
    "entering": "capture",
    "foreign": "sanitize",
    "found": "the thing that was found",
    "greet": "server_handshake",
    "handed": "python_objects",
    "held": "choose_base, attach_base, whole_layers",
    "introduce": "client_handshake",
    "keep_out": "suspend",
    "keep_whole": "exclude_axis",
    "kept_out": "suspended",
    "line_of": "user_frame",
    "made": "synthetic, instance, result",
    "mine": "ours",
    "noted": "partials, metric_partials",
    "patience_s": "no_client_timeout_s",
    "place_of": "user_frame",
    "said": "format_error, declarations",
    "standing": "quarantine",
    "table_of": "load_untrusted_yaml",
    "told": "sent_to_clients",
    "undone": "on_rollback",
}
"""Each old word, and the name or names that took its place; docs/glossary.md has the terms."""

CONTRACTS = {
    ("raafl/config/options.py", "alone_s"): "a field of configs: waits.alone_s",
    ("raafl/lab/plan/plan.py", "by_the_loop"): "a key of `raafl plan --json`",
    ("raafl/runtime/client/join.py", "alone_s"): "the same field as an argument",
}


def public_names(path: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and the name of a module, and of each class, function, attribute and parameter that it makes public."""
    yield 1, path.parent.name if path.name == "__init__.py" else path.stem
    yield from members(tree(path))


def members(node: ast.Module | ast.ClassDef) -> Iterator[tuple[int, str]]:
    """Yield the public names that a module or a class gives to something."""
    for part in node.body:
        named = (
            part.targets if isinstance(part, ast.Assign) else [part.target] if isinstance(part, ast.AnnAssign) else []
        )
        yield from ((part.lineno, name.id) for name in named if isinstance(name, ast.Name) and name.id[0] != "_")
        if not isinstance(part, ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef) or part.name.startswith("_"):
            continue
        yield part.lineno, part.name
        if isinstance(part, ast.ClassDef):
            yield from members(part)
        else:
            every = [*part.args.posonlyargs, *part.args.args, *part.args.kwonlyargs]
            yield from ((part.lineno, arg.arg) for arg in every)


def old_words(*packages: str) -> list[str]:
    """Return the public names of packages that are old words, without those that a contract fixes."""
    return [
        f"{place(path, line)} {name}: better {PLAIN[name]}"
        for path in modules(*packages)
        for line, name in public_names(path)
        if name in PLAIN and (place(path, line).partition(":")[0], name) not in CONTRACTS
    ]


def test_no_public_name_is_an_old_word():
    wrong = old_words(*SOURCES)
    assert not wrong, "\n".join(wrong)


def test_each_contract_is_still_there():
    for (name, word), why in CONTRACTS.items():
        (path,) = modules(name)
        assert word in {name for _, name in public_names(path)}, why


def test_the_checker_sees_modules_classes_functions_attributes_and_parameters():
    module = ast.parse(
        "A = 1\nb: int = 2\n_c = 3\nclass D:\n    e = 1\n    def f(self, g, *, h): ...\n    def _i(self, j): ...\n"
    )
    assert {name for _, name in members(module)} == {"A", "b", "D", "e", "f", "self", "g", "h"}
