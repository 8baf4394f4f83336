"""Decide how each torch function is computed on stacks: together, client by client, or by vmap's own rule.

vmap's rules for elementwise functions have a client's bits, and so have most others, but not all: products, norms, sums, losses,
convolutions and attention are tried here, once for each form; recurrent layers, and what draws, go client by client. A batch of
clients is compared with sequential training before it is relied on (`raafl.runtime.executors.batched`), so a function missing here
costs speed, never a bit.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import islice
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_structure

from raafl.data.federated import ClientData
from raafl.data.loaders import Fetch
from raafl.exact_key import exact_key
from raafl.local.stacked.stacks import (
    CACHE_LINE_BYTES,
    CPU,
    Known,
    Parted,
    Unstackable,
    by_slices,
    embedding,
    linear,
    outside,
    product,
    stack_of,
    together_is_equal,
)
from raafl.submodel.nested_batch import batch_tensors

Function = Callable[..., Any]

_BRANCHES: dict[Any, Function] = {
    Tensor.__bool__: bool,
    Tensor.__float__: float,
    Tensor.__int__: int,
    Tensor.__index__: int,
    Tensor.item: Tensor.item,
    Tensor.tolist: Tensor.tolist,
    torch.is_nonzero: bool,
}
"""Operations that turn a tensor into a Python number, on which code may branch: all clients must have the same."""

_BY_SLICES: frozenset[Any] = frozenset(
    (
        torch.conv1d,
        torch.conv2d,
        torch.conv3d,
        torch.conv_transpose1d,
        F.conv_transpose2d,
        F.conv_transpose3d,
        F.layer_norm,
        F.group_norm,
        F.batch_norm,
        F.instance_norm,
        F.rms_norm,
        F.local_response_norm,
        F.embedding_bag,
        F.bilinear,
        F.adaptive_avg_pool1d,
        F.adaptive_avg_pool2d,
        F.adaptive_avg_pool3d,
        F.nll_loss,
        F.mse_loss,
        F.l1_loss,
        F.smooth_l1_loss,
        F.huber_loss,
        F.kl_div,
        F.binary_cross_entropy,
        F.binary_cross_entropy_with_logits,
        F.cosine_similarity,
        torch.matmul,
        Tensor.matmul,
        Tensor.__matmul__,
        Tensor.__rmatmul__,
        torch.mm,
        Tensor.mm,
        torch.bmm,
        Tensor.bmm,
        torch.addmm,
        Tensor.addmm,
        torch.baddbmm,
        torch.einsum,
        torch.dot,
        torch.mv,
        torch.outer,
    )
)

_NOT_BY_VMAP: frozenset[Any] = frozenset(
    (F.embedding_bag, F.bilinear, F.local_response_norm, F.batch_norm, F.instance_norm)
)
"""Those of them for which torch's vmap has no rule of its own, or one that leaves running statistics as they were."""

_CONVOLUTIONS: frozenset[Any] = frozenset(
    (torch.conv1d, torch.conv2d, torch.conv3d, torch.conv_transpose1d, F.conv_transpose2d, F.conv_transpose3d)
)
"""Those of them for which vmap's rule, one convolution in groups, is slower on a CPU than one call per client."""

_REDUCTIONS: frozenset[Any] = frozenset(
    (
        torch.sum,
        Tensor.sum,
        torch.mean,
        Tensor.mean,
        torch.var,
        Tensor.var,
        torch.std,
        Tensor.std,
        torch.norm,
        Tensor.norm,
        torch.linalg.vector_norm,
        torch.logsumexp,
        Tensor.logsumexp,
    )
)

_MAY_DRAW: frozenset[Any] = frozenset(
    (
        F.scaled_dot_product_attention,
        F.multi_head_attention_forward,
        torch.lstm,
        torch.gru,
        torch.rnn_tanh,
        torch.rnn_relu,
        torch.lstm_cell,
        torch.gru_cell,
        torch.rnn_tanh_cell,
        torch.rnn_relu_cell,
        F.gumbel_softmax,
        F.rrelu,
        torch.rand,
        torch.randn,
        torch.randint,
        torch.randperm,
        torch.rand_like,
        torch.randn_like,
        torch.randint_like,
        torch.bernoulli,
        Tensor.bernoulli,
        torch.normal,
        torch.multinomial,
        Tensor.multinomial,
        torch.poisson,
    )
)
"""Random operations; they run client by client with each one's generator if an argument is a stack or clients would draw alike."""

_DROPOUTS: frozenset[Any] = frozenset(
    (
        F.dropout,
        F.dropout1d,
        F.dropout2d,
        F.dropout3d,
        F.alpha_dropout,
        F.feature_alpha_dropout,
        torch.dropout,
    )
)


class Stacked(TorchFunctionMode):
    """Context inside vmap over clients, in which torch functions give exactly the bits of separate calls for each client.

    Where `known` is None, products, norms and sums are one call for all clients, whose last bits differ; random numbers
    are each client's own all the same.
    """

    def __init__(self, num: int, states: list[Tensor | int], known: Known | None, device: torch.device = CPU) -> None:
        super().__init__()
        self._num, self._states, self._known, self._device = num, states, known, device

    def __torch_function__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        if func is F.linear:
            return (
                linear(self._known, self._num, *args, **kwargs) if _has_stack(args, kwargs) else func(*args, **kwargs)
            )
        if func is F.cross_entropy and _has_stack(args, kwargs):
            return cross_entropy(self._known, self._num, args, kwargs)
        if func is F.embedding:
            return embedding(self._num, args, kwargs) if _has_stack(args, kwargs) else func(*args, **kwargs)
        if func in _BRANCHES:
            return self._agreed(func, *args) if _has_stack(args, kwargs) else func(*args, **kwargs)
        if self._is_plain(func, args, kwargs) and _has_stack(args, kwargs):
            is_alone = func in _NOT_BY_VMAP or (func in _CONVOLUTIONS and self._device.type == "cpu")
            if is_alone or not (self._known is None or together_is_equal(self._known, func, args, kwargs, self._num)):
                return by_slices(func, args, kwargs, self._num)
            return func(*args, **kwargs)
        if func in _MAY_DRAW or (func in _DROPOUTS and _trains(*args, **kwargs)):
            if kwargs.get("generator") is not None:
                raise Unstackable(
                    "the training step uses a random generator of its own: use torch's global one to train clients as one batch"
                )
            return by_slices(func, args, kwargs, self._num, self._states, self._device)
        return func(*args, **kwargs)

    def _is_plain(self, func: Function, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
        """Check whether a function draws no random numbers and is batched only if that leaves its bits unchanged."""
        if func is F.scaled_dot_product_attention:  # vmap can batch attention on a GPU, but not on a CPU
            return self._device.type != "cpu" and not _drops(*args, **kwargs)
        return func in _BY_SLICES or func in _REDUCTIONS

    def _agreed(self, function: Callable[..., Any], value: Tensor) -> object:
        """Convert a tensor to the Python number that is equal for all clients; raises `Parted` if their numbers differ."""
        stack = stack_of(value)
        assert stack is not None
        with outside():
            numbers = [_BRANCHES[function](part) for part in stack.detach().unbind(0)]
        if any(repr(number) != repr(numbers[0]) for number in numbers):
            raise Parted(
                f"training_step converts a tensor to a Python number ({function.__name__}), which differs between "
                "clients: use a tensor operation, such as torch.where, to train clients as one batch"
            )
        return numbers[0]


def _has_stack(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> bool:
    plain = [*args, *kwargs.values()]
    if any(stack_of(one) is not None for one in plain):
        return True
    # nested arguments are rare, and slow to search
    inside = [one for one in plain if isinstance(one, tuple | list | dict)]
    return bool(inside) and any(stack_of(leaf) is not None for leaf in tree_leaves(inside))


def _trains(input: object, p: float = 0.5, training: bool = True, inplace: bool = False, **more: object) -> bool:
    return bool(more.get("train", training)) and p > 0


def _drops(
    query: object,
    key: object,
    value: object,
    attn_mask: object = None,
    dropout_p: float = 0.0,
    *_: object,
    **__: object,
) -> bool:
    return dropout_p > 0


_IGNORED = -100
_USUAL = {
    "weight": None,
    "size_average": None,
    "ignore_index": _IGNORED,
    "reduce": None,
    "reduction": "mean",
    "label_smoothing": 0.0,
}


def cross_entropy(known: Known | None, num: int, args: Sequence[Any], kwargs: Mapping[str, Any]) -> object:
    """Compute `F.cross_entropy` for all clients' stacked logits, inside vmap.

    `known`: record of whether one call on stacked tensors gives the same bits as one call per client.

    The mean loss of logits (batch, classes), with labels that are class indices, is computed for all clients at once.
    Any other form is computed client by client.
    """
    usual = len(args) == 2 and all(value is None or value == _USUAL[name] for name, value in kwargs.items())
    logits, labels = (stack_of(one) for one in args[:2]) if usual else (None, None)
    if logits is None or labels is None or logits.dim() != 3 or labels.dim() != 2 or labels.is_floating_point():
        return by_slices(F.cross_entropy, args, kwargs, num)
    # Reading labels would wait for the GPU, so ignored labels are masked there instead.
    if labels.device.type == "cpu" and bool(labels.eq(_IGNORED).any()):
        return by_slices(F.cross_entropy, args, kwargs, num)
    with outside() as inside:
        return inside(_CrossEntropy.apply(known, logits, labels))


class _CrossEntropy(torch.autograd.Function):
    """Mean cross entropy of logits (clients, n, classes) and labels (clients, n), with the bits of torch's own function."""

    @staticmethod
    def forward(ctx: Any, known: Known | None, logits: Tensor, labels: Tensor) -> Tensor:
        logs = torch.log_softmax(logits, -1)
        ctx.save_for_backward(logs, labels)
        if known is None:
            is_used = labels.ne(_IGNORED)
            chosen = logs.gather(2, labels.clamp(min=0).unsqueeze(-1)).squeeze(-1)
            return -(chosen * is_used).sum(1) / is_used.sum(1)
        if labels.device.type != "cpu":  # labels on a GPU are not read, so some may have to be ignored
            return torch.stack([F.nll_loss(*own) for own in zip(logs.unbind(0), labels.unbind(0), strict=True)])
        # gather only the terms first, so that the rounding of their sum depends on nothing but how many there are
        added = logs.gather(2, labels.unsqueeze(-1)).squeeze(-1)
        return product(known, "nll", _losses_together, _loss_alone, added)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, ...]:
        logs, labels = ctx.saved_tensors
        if labels.device.type == "cpu":
            each = -(g / labels.shape[1]).view(-1, 1, 1).expand(*labels.shape, 1)
        else:
            is_used = labels.ne(_IGNORED)
            each = -(g / is_used.sum(1)).view(-1, 1, 1).expand(*labels.shape, 1)
            each, labels = each.masked_fill(~is_used.unsqueeze(-1), 0.0), labels.clamp(min=0)
        of_logs = torch.zeros_like(logs).scatter_(2, labels.unsqueeze(-1), each)
        return None, torch.ops.aten._log_softmax_backward_data(of_logs, logs, -1, logs.dtype), None


def _losses_together(logs: Tensor) -> Tensor:
    """Return each client's negative mean of log probabilities (clients, n), added in the order of `F.nll_loss`."""
    num, n = logs.shape
    # torch adds rows one after another only if their length is a multiple of its widest vector
    each = logs.new_zeros(n, -(-num // _LANES) * _LANES)
    torch.neg(logs.t(), out=each[:, :num])
    # `F.nll_loss` adds groups of 16 terms after the first one, then the remaining terms, then the first one
    groups, total = (n - 1) // _GROUP, each[1 + (n - 1) // _GROUP * _GROUP :].sum(0)
    if groups:
        total += each[1 : 1 + groups * _GROUP].view(groups, _GROUP, -1).transpose(0, 1).contiguous().sum(0).sum(0)
    return total.add_(each[0])[:num] / n


_GROUP, _LANES = 16, 64


def _loss_alone(logs: Tensor) -> Tensor:
    """Compute one client's loss by `F.nll_loss` from the log probabilities of its labels."""
    return F.nll_loss(logs.unsqueeze(1), torch.zeros(len(logs), dtype=torch.int64))


_AHEAD_BYTES = 1 << 24  # bytes of batches that are gathered from the data set in one call

Rows = Iterator[Tensor]
"""The numbers of the samples in each of a client's batches."""


class Batch:
    """Batches of several clients that are trained together, for one step.

    Attributes:
        kinds: positions of the clients, grouped by the structure, shapes and dtypes of their batches.
        sizes: number of samples in each client's batch.
        num: number of clients in the batch.
    """

    def __init__(
        self, kinds: Sequence[Any], leaves: Sequence[Sequence[Any]], forms: dict[Any, TreeSpec], sizes: Sequence[int]
    ) -> None:
        """Store the clients' batches as lists of tensors, with the structure and size of each."""
        self._all, self._leaves, self._forms, self.num, self.sizes = kinds, leaves, forms, len(kinds), sizes
        self.kinds: defaultdict[Any, list[int]] = defaultdict(list)
        for client, kind in enumerate(kinds):
            self.kinds[kind].append(client)

    def stacked(self, clients: Sequence[int]) -> tuple[list[Any], TreeSpec]:
        """Return these clients' batches as a flat list of stacked tensors, with the structure that rebuilds a batch from it.

        The batches must have the same structure and shapes. Values that are not tensors are taken from the first
        client.
        """
        columns = zip(*(self._leaves[client] for client in clients), strict=True)
        stacks = [torch.stack(column) if isinstance(column[0], Tensor) else column[0] for column in columns]
        return stacks, self._forms[self._all[clients[0]]]


class Stack(Batch):
    """Batches of several clients for one step, all of one size, held as tensors that are already stacked."""

    def __init__(self, size: int, num: int, tensors: Sequence[Tensor], forms: dict[Any, TreeSpec]) -> None:
        """Store the batches of ``num`` clients of ``size`` samples, which lie in ``tensors`` one after another."""
        super().__init__([size] * num, [], forms, [size] * num)
        self._stacks: list[Any] = [_aligned(one).view(num, size, *one.shape[1:]) for one in tensors]

    def stacked(self, clients: Sequence[int]) -> tuple[list[Any], TreeSpec]:
        """Return these clients' batches as a flat list of stacked tensors, with the structure that rebuilds a batch from it."""
        form = self._forms[self._all[0]]
        if len(clients) == self.num:
            return self._stacks, form
        rows = torch.tensor(clients)
        return [stack.index_select(0, rows.to(stack.device)) for stack in self._stacks], form


def _aligned(one: Tensor) -> Tensor:
    """Return the tensor, or a copy if its memory is not aligned as that of a new tensor is."""
    return one.clone() if one.data_ptr() % CACHE_LINE_BYTES else one


def batches(
    clients: Sequence[ClientData],
    generators: Sequence[torch.Generator],
    lengths: Sequence[tuple[int | None, int | None]],
    counts: Sequence[int],
    batch_size: int | None,
    fetch_of: Callable[[ClientData], Fetch] = lambda data: data.fetch,
) -> Iterator[Batch]:
    """Yield the joint batch of all clients for each step.

    `generators`: generator of each client, which draws the order of its samples.
    `lengths`: number of epochs and number of steps of each task, one of which is None.
    `batch_size`: local batch size; None = that of the data.
    `fetch_of`: function that returns how batches of a client are made from the numbers of their samples.
    """
    first = clients[0]
    forms: dict[Any, TreeSpec] = {}
    num_bytes = 0
    if first.gathers:
        sample = first.fetch(torch.zeros(1, dtype=torch.int64))
        form = tree_structure(sample)
        forms = defaultdict(lambda: form)
        num_bytes = sum(tensor.nbytes for tensor in sample) * (batch_size or first.batch_size or 1) * len(clients)
    ahead = max(_AHEAD_BYTES // max(num_bytes, 1), 1)
    one_source = first.source is not None and all(client.source is first.source for client in clients)
    shapes = {(client.num_samples, client.batch_size, client.drop_last) for client in clients}
    if one_source and counts[0] == counts[-1] and len(shapes) == 1:
        yield from _in_step(clients, generators, fetch_of(first), counts[0], batch_size, ahead, forms)
        return
    tasks = zip(clients, generators, lengths, strict=True)
    rows = [client.rows(generator, batch_size, *length) for client, generator, length in tasks]
    if not first.gathers:
        yield from _one_by_one([fetch_of(client) for client in clients], rows, counts)
        return
    if one_source:
        yield from _of_one_source(fetch_of(first), rows, counts, ahead, forms)
        return
    feeds = [_ahead(fetch_of(client), own, ahead) for client, own in zip(clients, rows, strict=True)]
    for going in _going(counts):
        found = [next(feed) for feed in feeds[:going]]
        sizes = [size for size, _ in found]
        yield Batch(sizes, [leaves for _, leaves in found], forms, sizes)


def _in_step(
    clients: Sequence[ClientData],
    generators: Sequence[torch.Generator],
    fetch: Fetch,
    count: int,
    batch_size: int | None,
    ahead: int,
    forms: dict[Any, TreeSpec],
) -> Iterator[Batch]:
    """Yield batches of clients with a common data set and equal batch sizes, gathered for several steps in one call."""
    first, num = clients[0], len(clients)
    sizes = first.sizes(batch_size)
    for index in range(count):
        place = index % len(sizes)
        if not place:
            orders = [client.epoch(generator) for client, generator in zip(clients, generators, strict=True)]
            order, gathered = torch.stack(orders), list[Any]()
        if not gathered:
            start, size = sum(sizes[:place]), sizes[place]
            steps = min(ahead, sizes[place:].count(size), count - index)
            # order by step, so that the batches of one step are adjacent
            rows = order[:, start : start + steps * size].reshape(num, steps, size).transpose(0, 1)
            split = [tensor.split_with_sizes([num * size] * steps) for tensor in fetch(rows.flatten())]
            gathered = [*zip(*split, strict=True)][::-1]
        yield Stack(size, num, gathered.pop(), forms)


def _going(counts: Sequence[int]) -> Iterator[int]:
    """Yield for each step how many clients still train, from their numbers of steps ``counts`` in descending order."""
    for index in range(counts[0]):
        yield sum(count > index for count in counts)


def _of_one_source(
    fetch: Callable[[Tensor], Sequence[Tensor]],
    rows: Sequence[Rows],
    counts: Sequence[int],
    ahead: int,
    forms: dict[Any, TreeSpec],
) -> Iterator[Batch]:
    """Yield batches of clients with a common data set, gathered for several steps in one call."""
    steps = _going(counts)
    while some := list(islice(steps, ahead)):
        wanted = [[next(own) for own in rows[:going]] for going in some]
        sizes = [[one.shape[0] for one in step] for step in wanted]
        gathered = fetch(torch.cat([one for step in wanted for one in step]))
        of_steps = zip(*(tensor.split_with_sizes([sum(step) for step in sizes]) for tensor in gathered), strict=True)
        for own, tensors in zip(sizes, of_steps, strict=True):
            if min(own) == max(own):
                yield Stack(own[0], len(own), tensors, forms)
            else:
                yield Batch(own, list(zip(*(one.split_with_sizes(own) for one in tensors), strict=True)), forms, own)


def _ahead(
    fetch: Callable[[Tensor], Sequence[Tensor]], rows: Rows, ahead: int
) -> Iterator[tuple[int, Sequence[Tensor]]]:
    """Yield the size and tensors of one client's batches, gathered for several steps in one call."""
    while some := list(islice(rows, ahead)):
        sizes = [one.shape[0] for one in some]
        leaves = zip(*(tensor.split_with_sizes(sizes) for tensor in fetch(torch.cat(some))), strict=True)
        yield from zip(sizes, leaves, strict=True)


def _one_by_one(fetches: Sequence[Fetch], rows: Sequence[Rows], counts: Sequence[int]) -> Iterator[Batch]:
    """Yield batches of any structure, each fetched by a call of its own."""
    forms: dict[Any, TreeSpec] = {}
    for going in _going(counts):
        kinds, every, sizes = [], [], []
        for fetch, own in zip(fetches[:going], rows, strict=False):
            numbers = next(own)
            leaves, form = tree_flatten(fetch(numbers))
            strange = [one for one in leaves if not isinstance(one, Tensor) and batch_tensors(one)]
            if strange:
                raise Unstackable(
                    f"a batch has tensors inside a {type(strange[0]).__name__}: return tuples, lists or dicts of tensors to "
                    "train clients as one batch"
                )
            alike = tuple((one.shape, one.dtype) if isinstance(one, Tensor) else exact_key(one) for one in leaves)
            kind = len(numbers), form, alike
            forms[kind] = form
            kinds.append(kind)
            every.append(leaves)
            sizes.append(len(numbers))
        yield Batch(kinds, every, forms, sizes)
