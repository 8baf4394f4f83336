"""Label tensor dimensions, to find out which elements of different tensors belong to the same unit of a model.

A dimension is a product of atoms, the first varying slowest: after ``view(batch, heads, width)`` the features of a projection are
``heads * width``. An atom is a leaf, of which nothing more is known; or a product, once a view has split it; or joined, with the
indices of several dimensions one after the other, once it was sliced or concatenated. Where an operation needs two dimensions to be
equal, their atoms are united (union-find), factor by factor. Elements that cannot be dropped are pinned, with the reason.

>>> labels = Labels()
>>> features, bias = labels.new(12), labels.new(12)
>>> heads, width = labels.regroup([features], [3, 4])
>>> labels.unify(features, bias)
>>> labels.pin(width, "the scores are divided by its size")
>>> [(atom.size, atom.pin and atom.pin.text) for atom in bias.leaves()]
[(3, None), (4, 'the scores are divided by its size')]
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass


class ShapeConflict(Exception):
    """Raised if two dimensions cannot be equal, or if one cannot be split in the requested way."""


@dataclass(frozen=True, slots=True)
class Reason:
    """Reason for which units cannot be dropped: in words, with the line of the user's code that causes it, if known."""

    text: str
    place: str = ""

    def __str__(self) -> str:
        return f"{self.text} ({self.place})" if self.place else self.text


class Atom:
    """Group of indices of a tensor dimension, such as the features of a hidden layer; several tensors may have the same group.

    A later operation may split the group into factors (as a reshape does) or into parts (of a concatenation).

    `size`: number of indices in the group.
    `pin`: reason for which no index can be dropped; None = indices can be dropped.
    `span`: reason for which dropping some indices would change the results of others, as in a norm that computes
    statistics over them; None = there is none.
    `marks`: ways in which operations have used the group: "read" = they summed over it, as a matrix product does;
    "batch" = they made one product for each index, as for each attention head; "scored" = they summed over it in such
    a product; "gated" = they multiplied its values by others; "given" = it comes from an input, whose size may differ
    in another batch.
    `factors`: groups whose product this one is after a reshape, outermost first; empty = it was not split into
    factors.
    `parts`: dimensions that are concatenated in this one; empty = it is not a concatenation.
    """

    __slots__ = ("_same_as", "factors", "marks", "parts", "pin", "size", "span")

    def __init__(self, size: int, like: Atom | None = None) -> None:
        """Create a label for ``size`` units of a dimension; pin, span and marks are copied from the label ``like``."""
        self.size = size
        self.pin: Reason | None = like.pin if like is not None else None
        self.span: Reason | None = like.span if like is not None else None
        self.marks: frozenset[str] = like.marks if like is not None else frozenset()
        self.factors: tuple[Atom, ...] = ()
        self.parts: list[Dim] = []
        self._same_as: Atom | None = None

    def now(self) -> Atom:
        """Return the group that stands for this one and all groups found to be the same (union-find)."""
        atom = self
        while atom._same_as is not None:
            atom = atom._same_as
        if atom is not self:
            self._same_as = atom
        return atom

    def become(self, other: Atom) -> None:
        """Record that this group and ``other`` are the same."""
        self._same_as = other


class Dim:
    """Label of one tensor dimension: the groups of indices that it combines, such as heads and the features of each head.

    `atoms`: groups of indices, outermost first; the dimension's size is the product of their sizes.
    `is_read`: whether a matrix product has summed over it, as over the input side of a weight.
    `is_made`: whether a product or look-up has produced it, as the output side of a weight does.
    """

    __slots__ = ("atoms", "is_made", "is_read")

    def __init__(self, atoms: Sequence[Atom] = ()) -> None:
        """Label a dimension that is the product of ``atoms`` (undivided factors), the outermost first; none = size 1."""
        self.atoms = tuple(atoms)
        self.is_read = self.is_made = False

    @property
    def size(self) -> int:
        """Number of indices of the dimension."""
        return math.prod(atom.size for atom in self.atoms)

    def leaves(self) -> list[Atom]:
        """Return the groups of indices that this dimension combines; a group that was split is replaced by its factors.

        Groups of size 1 are left out.
        """
        found: list[Atom] = []
        for atom in self.atoms:
            atom = atom.now()
            if atom.factors:
                found += Dim(atom.factors).leaves()
            elif atom.size != 1:
                found.append(atom)
        return found

    def units(self) -> Iterator[Atom]:
        """Yield the groups of indices in this dimension that are not split further, those inside concatenations included."""
        for atom in self.leaves():
            if atom.parts:
                for part in atom.parts:
                    yield from part.units()
            else:
                yield atom


class Labels:
    """Registry of labels (`Dim`) of tensor dimensions: records which dimensions shrink together, are split, or cannot shrink."""

    def __init__(self, place: Callable[[], str] = str) -> None:
        """Create an empty registry of labels; ``place`` returns the running line of the user's code, for messages."""
        self.place = place
        self.is_spanning = True

    def new(self, size: int, pinned: str = "") -> Dim:
        """Create the label of a new dimension, which need not shrink together with any other."""
        if size == 1:
            return Dim()
        dim = Dim([Atom(size)])
        if pinned:
            self.pin(dim, pinned)
        return dim

    def given(self, size: int) -> Dim:
        """Create the label of an input's dimension, which cannot shrink and may have another size in another batch."""
        dim = self.new(size, "it is an input")
        self.mark(dim, "given")
        return dim

    def pin(self, dim: Dim, why: str | Reason) -> None:
        """Record that a dimension cannot shrink, and why; an earlier reason stays."""
        self._note(dim, why, "pin")

    def span(self, dim: Dim, why: str | Reason) -> None:
        """Record that statistics, such as a norm's, are computed over a dimension.

        While the attribute `is_spanning` is False, nothing is recorded.
        """
        if self.is_spanning:
            self._note(dim, why, "span")

    def _note(self, dim: Dim, why: str | Reason, attribute: str) -> None:
        for atom in dim.units():
            if getattr(atom, attribute) is None:
                # look the line up once, and only if needed, since that is slow
                why = Reason(why, self.place()) if isinstance(why, str) else why
                setattr(atom, attribute, why)

    def mark(self, dim: Dim, *marks: str) -> None:
        """Record ways in which operations use a dimension, such as to sum over it; see `Atom` for their names."""
        for atom in dim.units() if marks else ():
            atom.marks |= frozenset(marks)

    # ---- the same elements in other dimensions ----

    def regroup(self, dims: Sequence[Dim], sizes: Sequence[int]) -> list[Dim]:
        """Return the labels of the dimensions after a reshape.

        A reshape keeps the elements in row-major order. So groups of indices stay in sequence, and a group that does
        not fit into a new dimension is split.

        Raises:
            ShapeConflict: a group would have to be split where it cannot be split.
        """
        rest = [atom for dim in dims for atom in dim.leaves()]
        if math.prod(sizes) != math.prod(atom.size for atom in rest):
            raise ShapeConflict
        found = []
        for size in sizes:
            atoms: list[Atom] = []
            while size > 1:
                atom = rest[0].now()
                if atom.factors:
                    rest[:1] = Dim(atom.factors).leaves()
                elif size % atom.size == 0:
                    atoms.append(atom)
                    size //= atom.size
                    del rest[0]
                elif atom.size % size == 0:
                    self._split(atom, size)
                else:
                    raise ShapeConflict
            found.append(Dim(atoms))
        return found

    def unify(self, one: Dim, other: Dim) -> None:
        """Record that two dimensions are the same, index by index, so that they must shrink together.

        Raises:
            ShapeConflict: their sizes differ.
        """
        if one is other:
            return
        if one.size != other.size:
            raise ShapeConflict
        ours, theirs = one.leaves(), other.leaves()
        while ours and theirs:
            a, b = ours[0].now(), theirs[0].now()
            if a.factors:
                ours[:1] = Dim(a.factors).leaves()
            elif b.factors:
                theirs[:1] = Dim(b.factors).leaves()
            elif a.size == b.size:
                del ours[0], theirs[0]
                if a is not b:
                    self._merge(a, b)
            elif a.size % b.size == 0:
                self._split(a, b.size)
            elif b.size % a.size == 0:
                self._split(b, a.size)
            else:  # shapes such as (2, 3) and (3, 2): dropping an index of one would break the other
                self.pin(Dim([*ours, *theirs]), "it is factored in two ways that do not fit")
                return

    def take(self, dim: Dim, start: int, length: int) -> Dim:
        """Return the label of a slice of a dimension."""
        if start == 0 and length == dim.size:
            return dim
        atoms = dim.leaves()
        inner = math.prod(atom.size for atom in atoms[1:])
        if atoms and length and start % inner == 0 and length % inner == 0:
            # the slice takes whole indices of the first factor, so all other factors stay complete
            first = self._cut(atoms[0], start // inner, length // inner)
            return Dim([*first.atoms, *atoms[1:]])
        self.pin(dim, "a slice takes a part of it")
        return self.new(length, "it is a part of something else")

    def join(self, dims: Sequence[Dim]) -> Dim:
        """Return the label of a dimension that concatenates others."""
        dims = [dim for dim in dims if dim.size]
        if len(dims) == 1:
            return dims[0]
        atom = Atom(sum(dim.size for dim in dims))
        atom.parts = list(dims)
        return Dim([atom])

    # ---- atoms ----

    def _split(self, atom: Atom, outer: int) -> None:
        """Split an undivided factor of a dimension into one of size ``outer`` and one of the remaining size."""
        inner = atom.size // outer
        high, low = Atom(outer, atom), Atom(inner, atom)
        sizes = [part.size for part in atom.parts]
        if sizes and all(size % inner == 0 for size in sizes):
            # Each part consists of whole runs of `inner` elements, as q, k and v consist of heads: unify the runs of
            # all parts.
            for place, part in enumerate(atom.parts):
                runs, run = self.regroup([part], [part.size // inner, inner])
                self.unify(run, Dim([low]))
                atom.parts[place] = runs
            high.parts, low = atom.parts, low.now()
        elif sizes and (period := self._period(sizes, outer)):
            # Each run of `inner` elements has the same parts: unify these, so that all runs lose the same elements.
            for place, part in enumerate(atom.parts):
                self.unify(part, atom.parts[place % period])
            low.parts = atom.parts[:period]
            self.pin(Dim([high]), "its parts are alike, and only go together")
        elif sizes:
            self.pin(Dim([atom]), "a view cuts through what was joined")
            high.pin = low.pin = next(unit.pin for unit in Dim([atom]).units())
        atom.factors, atom.parts = (high, low), []

    def _period(self, sizes: list[int], outer: int) -> int:
        """Return the number of parts in each of ``outer`` equal runs of parts with these sizes; 0 if the runs differ."""
        period, rest = divmod(len(sizes), outer)
        return period if not rest and sizes == sizes[:period] * outer else 0

    def _merge(self, a: Atom, b: Atom) -> None:
        """Merge the labels of two equally large dimensions into one; neither may be a product of several factors."""
        if a.parts and b.parts:
            self._merge_joined(a, b)
            return
        if a.parts:
            a, b = b, a  # the label without parts is merged into the other
        for attribute in ("pin", "span"):
            if (reason := getattr(a, attribute)) is not None:
                self._note(Dim([b]), reason, attribute)
        self.mark(Dim([b]), *a.marks)
        a.become(b)

    def _merge_joined(self, a: Atom, b: Atom) -> None:
        borders = sorted({*self._borders(a), *self._borders(b)})
        for atom in (a, b):
            for border in borders:
                self._cut_at(atom, border)
        if self._borders(a) != self._borders(b):
            self.pin(Dim([a]), "it is joined in two ways that do not fit")
            self.pin(Dim([b]), "it is joined in two ways that do not fit")
            return
        for one, other in zip(list(a.parts), list(b.parts), strict=True):
            self.unify(one, other)
        a.become(b)

    def _borders(self, atom: Atom) -> list[int]:
        """Return the index at which each part of a concatenated dimension ends."""
        ends, end = [], 0
        for part in atom.parts:
            end += part.size
            ends.append(end)
        return ends

    def _cut(self, atom: Atom, start: int, length: int) -> Dim:
        """Return the label of ``length`` consecutive units of an atom (an undivided factor of a dimension), from ``start`` on."""
        if start == 0 and length == atom.size:
            return Dim([atom])
        if not atom.parts and atom.pin is not None:
            dim = Dim([Atom(length, atom)])  # a pinned atom never shrinks, so parts of it need no own labels
            return dim if length > 1 else Dim()
        if not atom.parts:
            lengths = (start, length, atom.size - start - length)
            atom.parts = [Dim([Atom(size, atom)]) if size > 1 else Dim() for size in lengths if size]
            return atom.parts[1 if start else 0]
        for border in (start, start + length):
            self._cut_at(atom, border)
        ends = self._borders(atom)
        inside = [p for p, end in zip(atom.parts, ends, strict=True) if start < end <= start + length]
        if sum(part.size for part in inside) != length:
            raise ShapeConflict
        return self.join(inside)

    def _cut_at(self, atom: Atom, border: int) -> None:
        """Split the part of a concatenated dimension that contains the index ``border`` there, unless that cuts a factor."""
        for place, (part, end) in enumerate(zip(list(atom.parts), self._borders(atom), strict=True)):
            begin = end - part.size
            if begin < border < end:
                left, right = self.take(part, 0, border - begin), self.take(part, border - begin, end - border)
                atom.parts[place : place + 1] = [left, right]
                return
