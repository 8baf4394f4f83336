"""Provide everything about the submodels of one model: which exist, where they lie, how to build them, what they cost."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, Literal, TypeVar, get_args

import torch
from torch import Tensor, nn

from raafl.errors import BadInput, nearest
from raafl.rules import Rules
from raafl.submodel.cut.layers import BatchNorm, persistent_buffers, statistics_of, still_buffers, without_values
from raafl.submodel.declared import Exit, Stack, absent, check_names, find_exits, find_stacks, stand_ins, within
from raafl.submodel.extract import CopyPlan
from raafl.submodel.flat import FlatTensors, Layout, is_merged
from raafl.submodel.spec import FULL, Axis, AxisTable, Runs, Spec, SpecError

if TYPE_CHECKING:
    from raafl.submodel.batch_norm import Pooling
    from raafl.submodel.cost import Cost
    from raafl.submodel.cost.predicted import Method
    from raafl.submodel.find.discover import DiscoveredAxes
    from raafl.submodel.frozen import Bases, FrozenBase


T = TypeVar("T")

MAX_CACHED = 512
"""Results remembered of each kind; the oldest goes first."""

_MISSING: Any = object()


class Caches:
    """Cache of results by kind and key. Threads may share it; in the worst case two compute the same result at once."""

    def __init__(self) -> None:
        self._kept: dict[str, OrderedDict[Any, Any]] = {}
        self._lock = threading.Lock()

    def get(self, kind: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return a cached result; compute and store it if it is missing."""
        cache = self._kept.get(kind)
        if cache is None:
            cache = self._kept.setdefault(kind, OrderedDict())
        found: T = cache.get(key, _MISSING)
        if found is _MISSING:
            found = make()
            with self._lock:
                cache[key] = found
                while len(cache) > MAX_CACHED:
                    cache.popitem(last=False)
        return found

    def clear(self) -> None:
        """Delete all cached results."""
        self._kept.clear()


@dataclass(frozen=True, slots=True)
class Shrunk:
    """A physically smaller module and the storage of its tensors."""

    module: nn.Module  # module whose parameters and buffers are views of ``present``
    # storage of the submodel's tensors except frozen ones, which are shared with other modules; fill it before use,
    # training changes it
    present: FlatTensors
    trained: FlatTensors  # tensors that are sent back, a view of the first part of ``present``


Part = Literal["present", "sent", "trained"]


class Submodels:
    """The submodels of one model: its axes, layouts and costs. It stores no values, except those of frozen parameters.

    An axis is a group of tensor dimensions that shrink together. A module may declare its structure by methods that
    return plain data, without importing raafl:

    - ``submodel_axes()``: axes and their tensor dimensions, see `raafl.submodel.find.declared_axes`.
      Without it, axes are found by following a training step, see `discover_axes`.
    - ``submodel_blocks()``: paths of lists whose blocks may be left out; the forward must loop over them.
    - ``submodel_exits()``: output heads after some blocks, see `find_exits`.
    - ``submodel_resize(counts)``: called on a small copy of any submodule with the number of kept units of each axis
      that has shrunk.
    - ``submodel_sent``: names of parameters that do not train but are sent, since the server changes them.
    - ``submodel_bases``: names of precisions in which frozen parameters may be stored, the module's own first;
      ``submodel_hold(base)`` converts a copy of the module to another one, in place.
    - ``submodel_plain()``: for a layer with packed frozen weights, an ordinary layer of the same shapes, on which axes
      of a large model are checked.

    In names of stacks and exits, the path of the submodule that declares them comes first.
    """

    # submodels of the whole model, if this object covers a part of its tensors (`raafl.core.exchange`)
    whole: Submodels | None = None

    def __init__(
        self,
        module: nn.Module,
        example_batch: Any = None,
        *,
        residual_width: bool | None = None,
        batch_norm: BatchNorm | None = None,
        only_ranks: bool = True,
        rules: Rules | None = None,
    ) -> None:
        """Read the shapes of ``module``, whose parameters may be on the meta device; see `skeleton`.

        Args:
            module: the full model; neither changed nor kept.
            example_batch: any batch of the training data, for axes and costs; values are read only where a step needs them.
            residual_width: whether widths over which norms compute statistics may shrink, too; None = the module's attribute
                ``submodel_residual_width``, else False.
            batch_norm: "merged" = clients send running statistics; "static" = they stay unchanged, to be computed at the end
                (see `collect_statistics`); None = the module's attribute ``submodel_batch_norm``, else merged.
            only_ranks: where there are LoRA layers, whether their ranks are the only axes; False = a frozen base has axes, too.
            rules: rules of the run, by which costs are predicted; None = those of a new run.
        """
        asked = getattr(module, "submodel_residual_width", False) if residual_width is None else residual_width
        self.residual_width, self.only_ranks, self.rules = bool(asked), only_ranks, rules or Rules()
        chosen: Any = batch_norm or getattr(module, "submodel_batch_norm", "merged")
        self.batch_norm: BatchNorm = chosen
        if self.batch_norm not in get_args(BatchNorm):
            raise BadInput(f"batch_norm is '{self.batch_norm}': give merged or static")
        self.module = module = without_values(module)
        self.example_batch, self._caches = example_batch, Caches()
        self._parameters = dict(module.named_parameters())
        self._buffers = persistent_buffers(module)
        self.parameter_names = frozenset(self._parameters)
        self._requires_grad = frozenset(n for n, p in self._parameters.items() if p.requires_grad)
        sent = getattr(module, "submodel_sent", ())
        self.frozen = {n: p for n, p in self._parameters.items() if not p.requires_grad and n not in sent}
        self.base: FrozenBase | None = None
        first = {id(p): name for name, p in self._parameters.items()}
        every = module.named_parameters(remove_duplicate=False)
        self.aliases = {name: first[id(p)] for name, p in every if name != first[id(p)]}
        self.discovered: DiscoveredAxes | None = None
        # by (tensor, dimension): reason for which it cannot shrink; filled when `axes` is first read
        self.whole_dims: dict[tuple[str, int], str] = {}
        self.refuted: dict[str, str] = {}
        self._overlapping: dict[str, str] = {}

    @cached_property
    def _table(self) -> AxisTable:
        shapes = {name: tuple(tensor.shape) for name, tensor in {**self._parameters, **self._buffers}.items()}
        for name, buffer in self.module.named_buffers():
            shapes.setdefault(name, tuple(buffer.shape))
        from raafl.submodel.find.declared_axes import declared_axes, without_overlaps

        declare = getattr(self.module, "submodel_axes", None)
        if declare is not None:
            return AxisTable(declared_axes(declare(), shapes, self.aliases), shapes)

        from raafl.submodel.find.discover import discover_axes

        options = {"residual_width": self.residual_width, "only_ranks": self.only_ranks}
        found = discover_axes(self.module, self.example_batch, shapes, self.aliases, **options)
        self.discovered = found
        self.whole_dims = {place: str(reason) for place, reason in found.whole.items()}
        axes, self._overlapping = without_overlaps(found.axes)
        return AxisTable(axes, shapes)

    @property
    def axes(self) -> dict[str, Axis]:
        """Axes (groups of dimensions that shrink together) by name, in the model's order. If none, `why_whole` has the reason."""
        return self._table.axes

    @property
    def kept_whole(self) -> dict[str, str]:
        """Reason for which a layer's width cannot shrink, by layer."""
        found = self.discovered if self._table else None
        return {**({} if found is None else found.kept_whole), **self._overlapping, **self.refuted}

    @property
    def problem(self) -> str | None:
        """Reason for which no axes were found automatically, so that only those that the module declares exist; None = found."""
        found = self.discovered if self._table else None
        return None if found is None else found.problem

    @property
    def reasons(self) -> dict[str, str]:
        """Reason for which a layer cannot shrink, by layer; under "forward", why the model could not be traced, if so."""
        return self.kept_whole | ({} if self.problem is None else {"forward": self.problem})

    def exclude_axis(self, reasons: Mapping[str, str]) -> None:
        """Exclude axes from being cut, each for a reason; called before any submodel is used.

        Raises:
            SpecError: one of the axes does not exist.
        """
        new = {name: reason for name, reason in reasons.items() if name not in self.refuted}
        for name in new:
            if name not in self.axes:
                raise SpecError(f"axis '{name}' is not one of this model's; {nearest(name, self.axes)}")
        if not new:
            return
        table, self.refuted = self._table, {**self.refuted, **new}
        self.whole_dims |= {(m.name, m.dim): why for name, why in new.items() for m in table.axes[name].members}
        self._table = AxisTable([axis for axis in table.axes.values() if axis.name not in new], table.shapes)
        self._caches.clear()

    def why_whole(self) -> str:
        """Explain why the model has no axes: name the layer that prevents them, and the remedy."""
        if self.problem is not None:
            return self.problem
        whole = [f"'{name}' ({reason})" for name, reason in list(self.kept_whole.items())[:3]]
        found = f"kept whole are {', '.join(whole)}" if whole else "its forward calls no layers"
        is_declared = hasattr(self.module, "submodel_axes")
        return f"{found}: {'its `submodel_axes` leaves none' if is_declared else 'declare `submodel_axes` on it'}"

    @cached_property
    def stacks(self) -> dict[str, Stack]:
        """Stacks (lists of blocks, any of which may be left out) by name."""
        return find_stacks(self.module)

    @cached_property
    def exits(self) -> dict[str, Exit]:
        """Exits (output heads after some blocks) by name."""
        return find_exits(self.module)

    @property
    def parameters(self) -> dict[str, int]:
        """Number of elements of each parameter, in the order of registration; a tied parameter counts once."""
        return {name: parameter.numel() for name, parameter in self._parameters.items()}

    # ---- axes, blocks and exits ----

    def normal(self, spec: Spec) -> Spec:
        """Return ``spec`` in canonical form, where parts kept whole are not named; raise `SpecError` if it does not fit."""
        if spec is FULL or spec == FULL:
            return FULL
        return self.cached("normal", spec, lambda: self._normal(spec))

    def _normal(self, spec: Spec) -> Spec:
        if spec.kept:
            self._check_axes(spec)
        check_names(spec, list(self._parameters), self.aliases, self.stacks, self.exits)
        kept = tuple((axis, k) for axis, k in spec.kept if not self._table.is_whole(axis, k))
        blocks = tuple((stack, k) for stack, k in spec.blocks if len(k) < len(self.stacks[stack]))
        all_kept = spec.exits is not None and len(spec.exits) == len(self.exits) and not stand_ins(spec, self.exits)
        parts = kept, blocks, spec.trained, None if all_kept else spec.exits, self.bases.normal(spec.base)
        return spec if parts == (spec.kept, spec.blocks, spec.trained, spec.exits, spec.base) else Spec(*parts)

    def _check_axes(self, spec: Spec) -> None:
        table = self._table
        try:
            table.check(spec)
        except SpecError as error:
            if self.problem is not None and any(name not in table.axes for name, _ in spec.kept):
                raise SpecError(f"{error}; {self.problem}" if table.axes else self.problem) from None
            for name, _ in spec.kept:
                if name in self.kept_whole:
                    raise SpecError(f"{error}; '{name}' cannot shrink: {self.kept_whole[name]}") from None
            raise

    # ---- layouts and copy plans ----

    def layout(self, spec: Spec = FULL, part: Part = "present") -> Layout:
        """Return the layout of a submodel's tensors.

        Args:
            spec: submodel whose tensors are described.
            part: tensors to include: "present" = all that a client needs; "sent" = what it receives, all but frozen
                parameters that were attached (see `attach_base`); "trained" = what it sends back, trained parameters
                and floating-point buffers. "present" begins with "sent", and "sent" with "trained".
        """
        spec = self.normal(spec)
        return self.cached("layout", (spec, part), lambda: self._layout(spec, part))

    def _layout(self, spec: Spec, part: Part) -> Layout:
        if spec.base is not None:
            return self.base_variant(spec).layout(spec.without_base, part)
        trains, lengths = self._trains(spec), self._table.lengths(spec) if spec.kept else {}
        absent = self._absent(spec)
        static = self.batch_norm == "static"
        still = still_buffers(self.module, trains, self._buffers, static=static, frozen=spec.trained is not None)
        found: dict[str, list[tuple[str, list[int], torch.dtype]]] = {"trained": [], "other": [], "frozen": []}
        for name, tensor in (*self._parameters.items(), *self._buffers.items()):
            if within(name, absent):
                continue
            cut = lengths.get(name, {})
            shape = [cut.get(dim, size) for dim, size in enumerate(tensor.shape)]
            is_trained = name in trains if name in self._parameters else is_merged(tensor.dtype) and name not in still
            kind = "trained" if is_trained else "frozen" if name in self.frozen else "other"
            found[kind].append((name, shape, tensor.dtype))
        if part == "trained":
            return Layout.pack(found["trained"])
        held = part == "sent" and self.base is not None
        return Layout.pack(found["trained"] + found["other"] + ([] if held else found["frozen"]))

    def _trains(self, spec: Spec) -> frozenset[str]:
        if spec.trained is None:
            return self._requires_grad
        named = [*((name, name) for name in self._parameters), *self.aliases.items()]
        chosen = {own for name, own in named if within(name, spec.trained)}
        return frozenset(chosen & self._requires_grad)

    def selections(self, spec: Spec) -> dict[str, dict[int, Runs]]:
        """Return the elements that a submodel keeps, as ranges, by tensor and dimension; ``spec`` must come from `normal`."""
        return self._table.selections(spec) if spec.kept else {}

    def _absent(self, spec: Spec) -> tuple[str, ...]:
        return absent(spec, self.stacks if spec.blocks else {}, self.exits)

    def plan(
        self, spec: Spec = FULL, part: Part = "trained", whole: Part = "present", only: frozenset[str] | None = None
    ) -> CopyPlan:
        """Return the plan that copies tensors between the whole model and a submodel; cached.

        Args:
            spec: submodel whose tensors are copied.
            part: tensors of the submodel to copy, see `layout`.
            whole: tensors of the whole model from or to which they are copied, see `layout`.
            only: names of the tensors to copy; None = all that belong to both parts.
        """
        spec = self.normal(spec)
        return self.cached("plan", (spec, part, whole, only), lambda: self._plan(spec, part, whole, only))

    def _plan(self, spec: Spec, part: Part, whole: Part, only: frozenset[str] | None) -> CopyPlan:
        full, small = self.layout(part=whole), self.layout(spec, part)
        if only is not None:
            full, small = full.only(only), small.only(only)
        return CopyPlan(spec, full, small, self.selections(spec))

    def cached(self, what: str, key: Hashable, make: Callable[[], T]) -> T:
        """Return a cached result; compute and store it if it is missing; arguments as for `Caches.get`."""
        return self._caches.get(what, key, make)

    # ---- frozen tensors ----

    @cached_property
    def bases(self) -> Bases:
        """Frozen parameters in each precision in which the model may have them."""
        from raafl.submodel.frozen import Bases

        return Bases(self.module, self.frozen)

    def attach_base(self, values: nn.Module | FlatTensors, rebuild: Callable[[], nn.Module] | None = None) -> None:
        """Attach the values of the frozen parameters. From then on they are not sent, since server and client each have them.

        Args:
            values: an instance of this model with values, or the global state. Its frozen values are shared, not
                copied, so they must not change.
            rebuild: function that builds that instance anew, so that memory holds one precision only; None = hold all.
        """
        if not self.frozen:
            return
        from raafl.submodel.frozen import FrozenBase

        named = dict(values.named_parameters()) if isinstance(values, nn.Module) else values
        self.base = FrozenBase({name: named[name] for name in self.frozen})
        self.bases.take(self.base, rebuild)
        self._caches.clear()

    def base_variant(self, spec: Spec) -> Submodels:
        """Return `Submodels` of the model with frozen parameters in ``spec``'s precision; self if they are in it already."""
        base = self.normal(spec).base
        return self if base is None else self.cached("form", base, lambda: self._form(base))

    def _form(self, base: str) -> Submodels:
        module = self.bases.module(base)
        form = type(self)(
            module, self.example_batch, residual_width=self.residual_width, batch_norm=self.batch_norm, rules=self.rules
        )
        form._table, form.discovered = self._table, self.discovered
        form.attach_base(module)
        if form.layout(part="trained") != self.layout(part="trained"):
            raise BadInput(f"submodel_hold('{base}') of {type(module).__name__} must change only frozen parameters")
        return form

    def base_of(self, spec: Spec) -> FrozenBase | None:
        """Return the frozen parameters in the precision that ``spec`` names; None if they are not loaded."""
        return self.bases.values(spec.base)

    def idle_bytes(self, spec: Spec = FULL) -> int:
        """Return the bytes of frozen parameters that a client stores, but that this submodel lacks or uses only in part."""
        if self.base is None:
            return 0
        return self.base.idle_bytes(self.layout(spec), self.selections(self.normal(spec)))

    # ---- creating submodules ----

    def shrink(
        self,
        spec: Spec = FULL,
        rescale: bool = False,
        device: torch.device | str = "cpu",
        present: FlatTensors | None = None,
        base: FrozenBase | None = None,
    ) -> Shrunk:
        """Return a physically smaller module for ``spec``. Fill its storage with `CopyPlan.gather`, or from received tensors.

        The full model is never allocated. Tensors have the same names as in the full model.

        Args:
            spec: submodel to build.
            rescale: whether to multiply the output of layers that have lost units by 1/(share kept) while training.
            device: device on which to build the module.
            present: storage to use, in ``layout(spec)``; None = new storage.
            base: frozen parameters shared with other modules; the storage then has the layout ``layout(spec, "sent")``.
        """
        spec = self.normal(spec)
        if spec.base is not None:
            return self.base_variant(spec).shrink(spec.without_base, rescale, device, present, base)
        layout = self.layout(spec) if base is None else self.layout(spec, "sent")
        if present is None:
            present = FlatTensors.empty(layout, device)
        elif present.layout.fingerprint != layout.fingerprint:
            raise BadInput("the layout of argument 'present' is not that of this submodel: make it from layout(spec)")
        selections = self.selections(spec)
        from raafl.submodel.cut.shrink import Structure, build

        structure = Structure(
            module=self.module,
            selections=selections,
            trains=self._trains(spec),
            absent=self._absent(spec),
            stand_ins=stand_ins(spec, self.exits),
            counts={name: len(kept) for name, kept in spec.kept},
            **({} if self.discovered is None else self.discovered.structure_arguments()),
            frozen={} if base is None else base.selected(self.layout(spec), selections, present.device),
        )
        module = build(structure, present, rescale=rescale)
        if self.batch_norm == "static":
            from raafl.submodel.batch_norm import keep_static

            keep_static(module)
        return Shrunk(module, present, present.prefix(self.layout(spec, "trained")))

    def pooling(self) -> Pooling | None:
        """Return the form in which running statistics are sent, so that merges are exact; None if there are none to merge."""
        if self.batch_norm == "static" or not statistics_of(self.module):
            return None
        from raafl.submodel.batch_norm import Pooling

        return Pooling(self.module)

    def state(self, module: nn.Module) -> FlatTensors:
        """Return a copy of the parameters and persistent buffers of ``module``, an instance of this model with values."""
        return FlatTensors.from_named(dict(module.named_parameters()) | persistent_buffers(module), self.layout())

    def load_(self, module: nn.Module, state: FlatTensors) -> None:
        """Copy ``state`` (values of the whole model) into ``module`` (an instance of this model, not on the meta device)."""
        tensors: Mapping[str, Tensor] = dict(module.named_parameters()) | persistent_buffers(module)
        with torch.no_grad():
            for name, value in state.items():
                tensors[name].copy_(value)

    # ---- costs ----

    def cost(self, spec: Spec = FULL, batch_size: int = 1) -> Cost:
        """Predict the cost of training a submodel; see `raafl.submodel.cost.predicted.predict`. Cached.

        Only the number of kept units matters, not which ones.
        """
        return self.cached("cost of", (spec, batch_size), lambda: self._typical_cost(spec, batch_size))

    def _typical_cost(self, spec: Spec, batch_size: int) -> Cost:
        key = (self.normal(spec).leading, batch_size)
        return self.cached("cost", key, lambda: self._cost(*key))

    def _cost(self, spec: Spec, batch_size: int) -> Cost:
        if spec.base is not None:
            return self.base_variant(spec).cost(spec.without_base, batch_size)
        return self.predicted_cost(spec, batch_size)

    def predicted_cost(self, spec: Spec, batch_size: int, method: Method | None = None) -> Cost:
        """Predict the cost of a task anew: of the user's own step, or of the steps of ``method``, whatever these raise."""
        from raafl.submodel.cost.predicted import predict

        def make(spec: Spec, present: FlatTensors | None = None) -> Any:
            module = self.shrink(spec, method is not None and method.rescale, device="meta", present=present).module
            return self.with_own_step(module) if method is None else module

        layouts = {part: self.layout(spec, part) for part in get_args(Part)}
        return predict(
            make,
            spec,
            self.example_batch,
            batch_size,
            layouts,
            self.parameter_names,
            self.idle_bytes(spec),
            self.rules,
            is_whole=self.whole is None,
            method=method,
        )

    def with_own_step(self, module: nn.Module) -> nn.Module:
        """Return a small module without values, whose training step is the one whose cost is predicted."""
        return module
