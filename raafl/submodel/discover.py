"""Find a model's axes by following each layer's output through the traced graph, with a rule for each layer type."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn import functional as F

from raafl.submodel.axes import Axis, Shapes
from raafl.submodel.flow import Flow, Form, Groups
from raafl.submodel.lora import note_ranks
from raafl.submodel.rules import composites, flattened, keep_whole, rule_of
from raafl.submodel.spec import SpecError
from raafl.submodel.width import follow_widths, is_sealed, sealed_models

if TYPE_CHECKING:
    from torch.fx import Graph, Node

_REMEDY = "declare `submodel_axes` on the model, or train the full model"

_UNARY = {
    "relu", "relu_", "relu6", "leaky_relu", "elu", "celu", "selu", "gelu", "silu", "mish", "sigmoid", "tanh",
    "softplus", "hardtanh", "hardsigmoid", "hardswish", "dropout", "dropout1d", "dropout2d", "dropout3d",
    "alpha_dropout", "contiguous", "clone", "detach", "float", "double", "half", "bfloat16", "to", "type", "abs", "neg",
    "exp", "sqrt", "square", "clamp", "pow", "requires_grad_",
}  # fmt: skip
_BINARY = {
    "add",
    "add_",
    "iadd",
    "sub",
    "sub_",
    "isub",
    "mul",
    "mul_",
    "imul",
    "truediv",
    "div",
    "div_",
    "maximum",
    "minimum",
}
_POOLS = {
    "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d",
    "adaptive_avg_pool2d", "adaptive_avg_pool3d", "adaptive_max_pool1d", "adaptive_max_pool2d", "interpolate",
}  # fmt: skip
_SIZES = {"size", "dim", "numel", "len", "ndimension"}
_ATTRIBUTES = {
    "shape",
    "ndim",
    "dtype",
    "device",
    "layout",
    "requires_grad",
    "is_cuda",
    "itemsize",
    "nbytes",
    "__class__",
}
"""What may be read of a value without giving its elements away."""
_MODULES = (torch, F, operator, torch.Tensor, torch._C._nn)


@dataclass(frozen=True, slots=True)
class Found:
    """What discovery has found.

    Attributes:
        axes: in the order of their layers.
        kept_whole: for each width that was kept whole, the reason.
        problem: why the forward could not be followed; only composites then have axes.
    """

    axes: list[Axis]
    kept_whole: dict[str, str]
    problem: str | None = None


def discover_axes(
    module: nn.Module, shapes: Shapes, aliases: Mapping[str, str], *, residual_width: bool = False
) -> Found:
    """Return the axes of ``module``: those that its composites have inside, and those along which its forward couples.

    Outputs are never on an axis, nor is anything that an operation without a rule reads. Where there are LoRA layers, their
    ranks are the axes, and nothing else is: the base stays whole.
    """
    groups = Groups(shapes, aliases, residual_width=residual_width)
    if note_ranks(module, groups):
        return Found(*groups.settle())
    follower, problem = _Follower(module, groups), None
    try:
        graph = None if is_sealed(module) or _is_composite(module) else _trace(module)
    except SpecError as error:
        graph, problem = None, str(error)
    problem = problem or _unknown(module)
    for node in graph.nodes if graph is not None else ():
        follower.visit(node)
    if residual_width:
        follow_widths(module, groups, follower.visited)
    inside = [(path, layer) for path, layer in composites(module) if id(layer) not in follower.visited]
    for path, layer in inside:
        rule = rule_of(layer)
        made = None if rule is None else rule.follow(layer, path, None, groups)
        if made is not None:
            groups.pin(made.group, f"layer '{path}' gives it to code that is not followed")
    axes, kept_whole = groups.settle()
    if inside:
        places = {name: place for place, name in enumerate(shapes)}
        axes.sort(key=lambda axis: min(places[member.name] for member in axis.members))
    return Found(axes, kept_whole, problem)


def _unknown(module: nn.Module) -> str | None:
    """Name the sealed model that has blocks of a type without a rule."""
    for path, model in sealed_models(module):
        if next(composites(model), None) is None:
            name, block = next(
                (
                    (f"{name}.0", part[0])
                    for name, part in model.named_modules()
                    if isinstance(part, nn.ModuleList) and part
                ),
                ("", model),
            )
            where = ".".join(part for part in (path, name) if part)
            return (
                f"axes of {type(model).__name__} were not found: no rule says how layer '{where}' "
                f"({type(block).__name__}) shrinks; {_REMEDY}"
            )
    return None


def _is_composite(module: nn.Module) -> bool:
    rule = rule_of(module)
    return rule is not None and rule.is_composite


def _trace(module: nn.Module) -> Graph:
    from torch.fx import Tracer

    class RuleTracer(Tracer):
        """Stops at every layer that has a rule, not only at those of torch."""

        def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
            return rule_of(m) is not None or is_sealed(m) or super().is_leaf_module(m, module_qualified_name)

    try:
        return RuleTracer().trace(module)
    except Exception as error:
        kind = type(module).__name__
        forward = type(module).forward  # nobody's own: torch's, or Lightning's, which only calls torch's
        if forward.__name__ == "_forward_unimplemented" or forward.__module__.startswith(
            ("lightning.", "pytorch_lightning.")
        ):
            raise SpecError(
                f"axes of {kind} were not found: it has no forward, in which its layers are called; {_REMEDY}"
            ) from error
        reason = str(error)
        if reason.startswith("Proxy object cannot be iterated"):
            reason = "it loops over an input, or passes it on by * or **: name inputs one by one, as in forward(self, x, mask)"
        raise SpecError(f"axes of {kind} were not found: {_place(error)}: {reason}; {_REMEDY}") from error


def _place(error: BaseException) -> str:
    """Return the last line outside torch where a trace failed."""
    place, frame = "its forward cannot be traced", error.__traceback__
    while frame is not None:
        code = frame.tb_frame.f_code
        if "/torch/" not in code.co_filename and "/raafl/submodel/" not in code.co_filename:
            place = f"forward cannot be traced at {code.co_qualname}, line {frame.tb_lineno}"
        frame = frame.tb_next
    return place


class _Follower:
    """Carries flows from node to node; a node that is not in ``flows`` has a fixed width or is no tensor."""

    def __init__(self, module: nn.Module, groups: Groups) -> None:
        self.module, self.groups = module, groups
        self.flows: dict[Node, Flow] = {}
        self.visited: set[int] = set()

    def visit(self, node: Node) -> None:
        """Work out the flow of one node from those before it."""
        if node.op == "call_module":
            flow = self._layer(node)
        elif node.op in ("call_function", "call_method"):
            flow = self._operation(node)
        else:
            flow = None
            if node.op == "output":
                self._pin_inputs(node, "it is an output of the model")
        if flow is not None:
            self.flows[node] = flow

    def _layer(self, node: Node) -> Flow | None:
        name = str(node.target)
        layer = self.module.get_submodule(name)
        rule = rule_of(layer)
        if rule is None or not node.args or is_sealed(layer):
            # composites inside have axes of their own, whoever calls them; so has a sealed model (`follow_widths`)
            if not (is_sealed(layer) and self.groups.residual_width):
                keep_whole(layer, name, self.groups)
            self._pin_inputs(node, f"layer '{name}' ({type(layer).__name__}) has no rule")
            return None
        for other in node.all_input_nodes:
            if other is not node.args[0] and other in self.flows:
                self.groups.pin(self.flows[other].group, f"layer '{name}' takes it as a second input")
        self.visited.add(id(layer))
        return rule.follow(layer, name, self._flow(node.args[0]), self.groups)

    def _flow(self, value: Any) -> Flow | None:
        return self.flows.get(value)

    def _operation(self, node: Node) -> Flow | None:
        name = node.target if isinstance(node.target, str) else getattr(node.target, "__name__", str(node.target))
        known = isinstance(node.target, str) or any(getattr(home, name, None) is node.target for home in _MODULES)
        known = known or getattr(node.target, "__module__", "").startswith(("torch", "_operator", "builtins"))
        if known and name == "getattr":
            if node.args[1] not in _ATTRIBUTES:
                self._pin_inputs(node, f"its attribute '{node.args[1]}' is not followed")
            return None
        if known and name in _SIZES:
            return None
        first = self._flow(node.args[0]) if node.args else None
        if known and name == "getitem" and first is not None:
            taken = _item(first, node.args[1])
            if taken is None:
                self._pin_inputs(node, f"operation '{node.name}' (getitem) is not followed")
            return taken
        if known and name in _UNARY and len(node.all_input_nodes) == 1:
            return first
        if known and name in _BINARY:
            return self._binary(node)
        if known and name in _POOLS and (first is None or first.form == "channels"):
            return first
        if known and name == "flatten" and first is not None:
            start, end = (_argument(node, 1, "start_dim", 0), _argument(node, 2, "end_dim", -1))
            return flattened(first, start, end, f"operation '{node.name}'", self.groups)
        reshaped = self._reshape(node, name, first) if known and first is not None else None
        if reshaped is None:
            self._pin_inputs(node, f"operation '{node.name}' ({name}) is not followed")
        return reshaped

    def _reshape(self, node: Node, name: str, flow: Flow) -> Flow | None:
        """Follow the reshapes and reductions that leave the axis where it can be told."""
        if name in ("view", "reshape"):
            shape = node.args[1:] if len(node.args) != 2 else node.args[1]
            if isinstance(shape, list | tuple) and len(shape) == 2 and shape[1] == -1 and shape[0] != -1:
                return flattened(flow, 1, -1, f"operation '{node.name}'", self.groups)
        if name in ("mean", "sum", "amax"):
            return self._reduce(node, flow)
        if flow.form == "channels" and flow.ndim == 3 and name in ("transpose", "swapaxes"):
            swapped = {dim % 3 for dim in node.args[1:3] if isinstance(dim, int)}
            return Flow(flow.group, "last") if swapped == {1, 2} else None
        return None

    def _reduce(self, node: Node, flow: Flow) -> Flow | None:
        """Follow a mean over all pixels, or over the positions before the axis (the last dimension but one)."""
        dims = _argument(node, 1, "dim", None)
        dims = [dims] if isinstance(dims, int) else list(dims or ())
        keepdim = _argument(node, 2, "keepdim", False)
        if flow.form == "channels" and {dim % flow.ndim for dim in dims} == set(range(2, flow.ndim)):
            return flow if keepdim else Flow(flow.group, "last")
        before = -2 if not flow.ndim else flow.ndim - 2
        if flow.form not in ("last", "repeat" if flow.ndim else "last") or [
            dim % flow.ndim if flow.ndim else dim for dim in dims
        ] != [before]:
            return None
        return Flow(flow.group, flow.form, max(flow.ndim - 1, 0))

    def _binary(self, node: Node) -> Flow | None:
        operands = node.all_input_nodes
        carrying = [operand for operand in operands if operand in self.flows]
        if not carrying:
            return None
        flow = self.flows[carrying[0]]
        for operand in operands:
            other = self.flows.get(operand)
            if other is not None and _alike(other, flow) and self._same_size(flow, other):
                self.groups.join(flow.group, other.group)
            elif other is not None or not self._tensor_operand(node, operand, flow):
                self._pin_inputs(node, f"operation '{node.name}' joins it with a value of another width")
                return None
        return flow

    def _same_size(self, one: Flow, other: Flow) -> bool:
        return self.groups.sizes[one.group] == self.groups.sizes[other.group]

    def _tensor_operand(self, node: Node, operand: Node, flow: Flow) -> bool:
        """Put a parameter or buffer that is added or multiplied on the flow's axis; return whether that is possible."""
        name = self.groups.aliases.get(str(operand.target), str(operand.target))
        if operand.op != "get_attr" or name not in self.groups.shapes:
            return False
        shape = self.groups.shapes[name]
        dim = len(shape) - (1 if flow.form == "last" else flow.ndim - 1)
        if flow.form not in ("last", "channels") or dim >= len(shape):
            return False
        if dim < 0 or shape[dim] == 1:
            return True
        if shape[dim] != self.groups.sizes[flow.group]:
            return False
        self.groups.add(flow.group, name, dim)
        return True

    def _pin_inputs(self, node: Node, reason: str) -> None:
        for operand in node.all_input_nodes:
            if operand in self.flows:
                self.groups.pin(self.flows[operand].group, reason)
            elif operand.op == "get_attr":
                for dim in range(len(self.groups.shapes.get(str(operand.target), ()))):
                    self.groups.fix(str(operand.target), dim, reason)


def _argument(node: Node, place: int, name: str, default: Any) -> Any:
    return node.args[place] if len(node.args) > place else node.kwargs.get(name, default)


def _alike(one: Flow, other: Flow) -> bool:
    return one.form == other.form and (one.ndim == other.ndim or one.form == "last")


def _item(flow: Flow, index: Any) -> Flow | None:
    """Return the flow of one tensor of a tuple, or of a slice that leaves the last dimension whole."""
    if flow.form in ("tuple", "both"):
        form: Form = "repeat" if flow.form == "both" and index == 0 else "last"
        return Flow(flow.group, form, flow.ndim) if isinstance(index, int) else None
    if flow.form not in ("last", "repeat") or not flow.ndim:
        return None
    parts = index if isinstance(index, tuple) else (index,)
    if len(parts) >= flow.ndim or not all(isinstance(part, int | slice) for part in parts):
        return None
    return Flow(flow.group, flow.form, flow.ndim - sum(isinstance(part, int) for part in parts))
