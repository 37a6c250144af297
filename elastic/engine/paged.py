"""Runs a model's own initialisation for real, on any device, without ever holding the whole model.

The user's constructor and ``init_weights()`` run as they are.  A dispatch mode sees every operation: the
storage of a parameter or buffer is a *page*, which exists only while it is touched, as in FSDP.  A page that
leaves is handed to ``keep``, which cuts out what this process needs, and its memory is freed.  So the values
are those of plain torch on one device, whatever the code does with them, and the memory is that of the
largest tensors in use at once.  (Recording on the meta device and replaying does not work: ``trunc_normal_``
looks at values, and does nothing on meta tensors.)

Most pages are written anew when they come back, since constructors draw values that ``init_weights()``
replaces.  If the old values are read instead, they are lost, because nobody can foresee the read.  Then
another pass begins from the same seed; it knows which pages are read again, and lays their values aside in
host memory until the read.  A pass that has lost values goes on in order to find more such pages, up to the
point at which values decide what the code does.  The last pass lays the values of all pages aside, so there
are never more than ``PASSES`` passes.  (Slices at other members are no help: a page that comes back is needed
whole, by all members at the same time, in the middle of an operation.)
"""

from __future__ import annotations

import gc
import random
import sys
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules import module as hooks
from torch.nn.parameter import is_lazy
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from elastic.engine.meta import without_memory
from elastic.errors import ModelError

RESIDENT = 2**28
"""Bytes of pages that may stay in memory although no operation touches them.  The page that was touched last
stays in any case.
"""
PASSES = 4
"""Largest number of passes.  Two are enough unless values decide what the code does, or where it raises,
after values were lost.
"""
FILLS = frozenset(
    f"aten::{name}_"
    for name in (
        "bernoulli",
        "cauchy",
        "copy",
        "exponential",
        "fill",
        "geometric",
        "log_normal",
        "normal",
        "random",
        "uniform",
        "zero",
    )
)
"""Operations that write every element of their first argument and read none of it."""
EMPTY = frozenset(
    {"aten::empty", "aten::empty_like", "aten::empty_strided", "aten::new_empty", "aten::new_empty_strided"}
)
"""Operations whose result has no values yet."""
OUTSIDE = frozenset(
    {"numpy", "__array__", "__dlpack__", "data_ptr", "tolist", "untyped_storage", "storage", "share_memory_"}
)
"""Methods of a tensor that give its memory away, so that its page must stay."""
TAGS = frozenset({torch.Tag.data_dependent_output, torch.Tag.dynamic_output_shape})
"""Tags of operations whose results decide what the code does next."""

Keep = Callable[[str, Tensor], None]
"""``keep(name, whole)`` takes what it needs of a tensor before its memory is freed; it may be called again
with later values.
"""
Lay = Callable[[str, int], None]
"""``lay(name, nbytes)`` is called before values are laid aside in host memory; it raises if there is no room.
"""


class _ValuesLost(BaseException):
    """The pass cannot go on: values that it would look at are lost.  It is no Exception, so that the user's
    code does not catch it.
    """


@dataclass
class _MemoryPage:
    number: int
    storage: torch.UntypedStorage
    size: int
    tensors: list[tuple[str, Tensor]] = field(default_factory=list)
    """The registered tensors in this storage, with their names; "" stands for one that is not part of the
    model in the end.
    """
    written: bool = True
    """False as long as the memory is as ``torch.empty`` gave it; then there is nothing to lose."""
    values: bool = True
    """True if the memory has the values that it has in plain torch; False once it was freed, until the values
    are back or written anew.
    """
    visit: int = 0
    """Number of times that the page left with values."""
    kept: set[tuple[str, int]] = field(default_factory=set)
    """Names, and identities of the tensors, under which the present values were kept."""
    aside: torch.UntypedStorage | None = None


Order = Sequence[tuple[str, torch.Size]]
"""The name and the shape of every parameter and buffer in the order in which they are registered; "" if it is
replaced later.
"""


class Fact(NamedTuple):
    """The facts besides its values that the engine takes from a parameter or buffer when the model is built,
    and never later.
    """

    trained: bool
    kind: type
    hooks: int
    """The number of hooks on its gradient."""


def facts_of(model: nn.Module) -> dict[str, Fact]:
    """Returns the facts of each parameter and buffer, by name."""
    tensors = (*model.named_parameters(), *model.named_buffers())
    return {
        name: Fact(each.requires_grad, type(each), len(each._backward_hooks or ())) for name, each in tensors
    }


def sharing(model: nn.Module) -> tuple[str, str] | None:
    """Returns the names of a parameter and of another tensor of ``model`` that has part of the same memory;
    None if there is none.
    """
    ends = dict[int, list[tuple[int, int, str, bool]]]()
    parameters = dict(model.named_parameters())
    for name, each in (*parameters.items(), *model.named_buffers()):
        if not is_lazy(each) and each.numel():
            first = int(each.storage_offset()) * each.element_size()
            last = (
                first
                + int(1 + sum((n - 1) * step for n, step in zip(each.shape, each.stride(), strict=True)))
                * each.element_size()
            )
            ends.setdefault(torch.Tensor.untyped_storage(each)._cdata, []).append(
                (first, last, name, name in parameters)
            )
    for there in ends.values():
        for (_, last, name, is_parameter), (first, _, other, other_is) in pairwise(sorted(there)):
            if first < last and (is_parameter or other_is):
                return name, other
    return None


def names_of(build: Callable[[], nn.Module]) -> tuple[Order, dict[str, Fact]]:
    """Builds the model on the meta device; returns its :data:`Order`, and the facts of its parameters and
    buffers by name.
    """
    order: list[Tensor] = []
    with _registering(order.append), without_memory():
        model = build()
    names = {id(tensor): name for name, tensor in (*model.named_parameters(), *model.named_buffers())}
    return [(names.get(id(tensor), ""), tensor.shape) for tensor in order], facts_of(model)


def refuse_other_than_values(before: Mapping[str, Fact], built: Collection[str], model: nn.Module) -> None:
    """Raises :class:`ModelError` if ``init_weights()`` has done more to ``model`` than set values.

    ``before`` has the facts of the model on the meta device, and ``built`` has the names of the tensors
    before ``init_weights()``.
    """
    after = facts_of(model)
    if more := next((name for name in built if name not in before), ""):
        raise ModelError(
            f"the constructor makes {more!r} on a real device, but not on the meta device, where "
            "tensors have no values; make the same tensors on every device: "
            "nn.utils.parametrizations.orthogonal needs use_trivialization=False"
        )
    if more := next((name for name in after if name not in before), ""):
        raise ModelError(
            f"init_weights() added {more!r} to the model, or put it in the place of a tied or empty "
            "tensor; register it in the constructor: every worker calls the constructor, but "
            "init_weights() only in a new run"
        )
    for name, fact in before.items():
        if (now := after.get(name, fact)).trained != fact.trained:
            done, word = ("froze", "freeze") if fact.trained else ("unfroze", "unfreeze")
            raise ModelError(
                f"init_weights() {done} {name!r}; {word} it in the constructor or in build(): every "
                "worker calls these, but init_weights() only in a new run"
            )
        if now[1:] != fact[1:]:
            what = (
                f"made {name!r} a {now.kind.__name__}"
                if now.kind != fact.kind
                else f"changed the hooks on the gradient of {name!r}"
            )
            raise ModelError(f"init_weights() {what}; do this in the constructor or in build()")
    if names := sharing(model):
        raise ModelError(
            f"after init_weights() {names[0]!r} and {names[1]!r} share memory; make them one parameter "
            "in the constructor, as self.head.weight = self.embed.weight does, or copy the values"
        )


def initialise(
    build: Callable[[], nn.Module],
    device: torch.device,
    seed: int,
    keep: Keep,
    lay: Lay,
    moved: Callable[[], None],
    resident: int = RESIDENT,
) -> tuple[int, int]:
    """Builds and initialises the model on ``device``, page by page.  At the end ``keep`` has got each of its
    tensors with its final values.

    ``moved`` is called before each operation.  Returns the number of passes, and the largest number of bytes
    of pages at once.  Raises what the user's code and the callbacks raise.
    """
    (order, facts), needed, peak = names_of(build), set[tuple[int, int]](), 0
    for number in range(1, PASSES + 1):
        pages = Pages(order, facts, needed, keep, lay, moved, resident, everything=number == PASSES)
        try:
            with seeded(seed):
                pages.run(build, device)
        except _ValuesLost:
            pass
        except Exception:
            if not pages.again:
                raise
        peak = max(peak, pages.peak)
        if not pages.again:
            return number, peak
        needed |= pages.again
        del pages
        gc.collect()  # modules are full of cycles, and what they hold must be free before the next pass
    raise AssertionError("values were lost in a pass that lays aside everything")


@contextmanager
def seeded(seed: int) -> Iterator[None]:
    """Seeds every usual source of randomness, and puts those of Python and numpy back at the end."""
    torch.manual_seed(seed)
    numpy: Any = sys.modules.get("numpy")
    before, theirs = random.getstate(), numpy.random.get_state() if numpy else None
    random.seed(seed)
    if numpy:
        numpy.random.seed(seed % 2**32)
    try:
        yield
    finally:
        random.setstate(before)
        if numpy:
            numpy.random.set_state(theirs)


@contextmanager
def _registering(tell: Callable[[Tensor], None]) -> Iterator[None]:
    """Calls ``tell`` with each parameter and buffer that a module registers."""

    def hook(module: nn.Module, name: str, tensor: Tensor | None) -> None:
        if tensor is not None:
            tell(tensor)

    with ExitStack() as stack:
        stack.callback(hooks.register_module_parameter_registration_hook(hook).remove)
        stack.callback(hooks.register_module_buffer_registration_hook(hook).remove)
        yield


class _Outside(TorchFunctionMode):
    """Notices calls that reach a tensor's memory without an operation, and tensors that get another
    memory.
    """

    def __init__(self, pages: Pages) -> None:
        super().__init__()
        self.pages = pages

    def __torch_function__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if self.pages.busy:
            return func(*args, **kwargs)
        name = getattr(func, "__name__", "")
        if name in OUTSIDE and isinstance(args[0], Tensor):
            with self.pages.own():
                self.pages.stays(args[0])
        result = func(*args, **kwargs)
        if name == "__set__" and getattr(func, "__self__", None) is Tensor.data:
            with self.pages.own():
                self.pages.moved_to_other_memory(args[0])
        return result


class Pages(TorchDispatchMode):
    """One pass.  ``needed`` has pairs (page, visit): the values that the page had in this visit are read
    again later.
    """

    def __init__(
        self,
        order: Order,
        facts: Mapping[str, Fact],
        needed: set[tuple[int, int]],
        keep: Keep,
        lay: Lay,
        moved: Callable[[], None],
        resident: int,
        everything: bool,
    ) -> None:
        super().__init__()
        self.order, self.facts, self.needed, self.keep, self.lay = order, facts, needed, keep, lay
        self.moved, self.resident, self.everything = moved, resident, everything
        self.again: set[tuple[int, int]] = set()
        """The pairs (page, visit) whose values were lost and then read."""
        self.peak = 0
        self.registered = 0
        self.pages: dict[int, _MemoryPage] = {}
        self.live = OrderedDict[int, _MemoryPage]()
        """The pages in memory that may leave; the one that was touched last comes last."""
        self.there = 0
        """Bytes of all pages in memory, also of those that stay."""
        self.name_of: dict[int, str] = {}
        """The name of a registered tensor, by its identity."""
        self.empty: dict[int, StorageWeakRef] = {}
        """Memory that no operation has written to yet; a reference keeps its key from being used again."""
        self.busy = False
        """True while this class works; its own operations are none of the user's."""

    @classmethod
    def _should_skip_dynamo(cls) -> bool:
        """Spares each process the import of torch's compiler, which takes seconds and is of no use here."""
        return False

    @contextmanager
    def own(self) -> Iterator[None]:
        before, self.busy = self.busy, True
        try:
            yield
        finally:
            self.busy = before

    # ---- the pass

    def run(self, build: Callable[[], nn.Module], device: torch.device) -> None:
        with _registering(self._register), torch.device(device), torch.no_grad(), _Outside(self), self:
            model = build()
            with self.own():
                for name, tensor in (*model.named_parameters(), *model.named_buffers()):
                    self._add(name, tensor)  # a copied module has registered nothing
            built = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}
            model.init_weights()  # type: ignore[operator]
        self._finish(model, built)

    def _finish(self, model: nn.Module, built: Collection[str]) -> None:
        """Hands to ``keep`` each tensor whose final values it has not got yet, and frees all pages."""
        final: dict[str, Tensor] = {
            **dict(model.named_parameters(remove_duplicate=False)),
            **dict(model.named_buffers(remove_duplicate=False)),
        }
        for name in self.facts:
            if name not in final:
                raise ModelError(
                    f"init_weights() removed {name!r} from the model; keep it, since checkpoints contain it"
                )
            self._add(name, final[name])
        refuse_other_than_values(self.facts, built, model)
        for page in list(self.live.values()):
            self._leave(page)
        for name in self.facts:
            tensor, its = final[name], self.pages.get(final[name].untyped_storage()._cdata)
            if its is not None and (name, id(tensor)) in its.kept:
                continue
            if its is not None:
                self._touch([its])
            self.keep(name, tensor.detach())

    def _register(self, tensor: Tensor) -> None:
        with self.own():
            name, shape = self.order[self.registered] if self.registered < len(self.order) else ("", None)
            self.registered += 1
            self._add(name if shape == tensor.shape else "", tensor)

    def _add(self, name: str, tensor: Tensor) -> None:
        """Makes a page of the memory of ``tensor``, if it is not part of one already."""
        page = self._page_of(tensor)
        if page is not None and name and id(tensor) not in self.name_of:
            page.tensors.append((name, tensor))
            self.name_of[id(tensor)] = name

    def _page_of(self, tensor: Tensor) -> _MemoryPage | None:
        """Returns the page of a parameter or buffer.  Memory that cannot be freed and taken again is no
        page.
        """
        storage = tensor.untyped_storage()
        found = self.pages.get(storage._cdata)
        if found is None and tensor.device.type != "meta" and storage.nbytes() and storage.resizable():
            found = _MemoryPage(
                len(self.pages), storage, storage.nbytes(), written=storage._cdata not in self.empty
            )
            self.pages[storage._cdata] = self.live[storage._cdata] = found
            self._arrived(found.size)
            self._make_room(1, 0)
        return found

    # ---- what the code does

    def __torch_dispatch__(self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if not self.busy:
            with self.own():
                self._before(func, args, kwargs)
        result = func(*args, **kwargs)
        if not self.busy and func._schema.name in EMPTY:
            with self.own():
                self.empty[result.untyped_storage()._cdata] = StorageWeakRef(result.untyped_storage())
        return result

    def _before(self, func: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> None:
        self.moved()
        schema = func._schema.name
        if schema.endswith("_like") or schema.startswith("aten::new_"):  # these look at shapes alone
            return
        tensors = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
        keys = dict.fromkeys(each.untyped_storage()._cdata for each in tensors)
        if touched := [self.pages[key] for key in keys if key in self.pages]:
            if func.is_view:
                self._bring(touched)  # torch refuses a view of memory that is not there
            else:
                self._touch(touched, self._overwritten(func, args, kwargs, tensors))
        if not func.is_view:
            for key in keys:
                self.empty.pop(key, None)
        if self.again and TAGS.intersection(func.tags):
            raise _ValuesLost

    def _overwritten(
        self, func: Any, args: Sequence[Any], kwargs: dict[str, Any], tensors: Sequence[Tensor]
    ) -> _MemoryPage | None:
        """Returns the page that the operation writes wholly, without reading any of it."""
        target = args[0] if func._schema.name in FILLS else kwargs.get("out")
        if not isinstance(target, Tensor) or not target.is_contiguous():
            return None
        key = target.untyped_storage()._cdata
        page = self.pages.get(key)
        if (
            page is None
            or target.nbytes != page.size
            or sum(each.untyped_storage()._cdata == key for each in tensors) > 1
        ):
            return None
        return page

    def stays(self, tensor: Tensor) -> None:
        """Lets the page of ``tensor`` stay in memory to the end, because somebody has its address."""
        page = self.pages.get(torch.Tensor.untyped_storage(tensor)._cdata)
        if page is not None:
            self._touch([page])
            self.live.pop(page.storage._cdata, None)
            if self.again:
                raise _ValuesLost

    def moved_to_other_memory(self, tensor: Tensor) -> None:
        """Makes a page of the memory that ``tensor``, registered before, was given by an assignment to its
        ``data``.
        """
        name = self.name_of.get(id(tensor))
        page = self._page_of(tensor) if name is not None else None
        if page is not None and name is not None:
            page.tensors.append((name, tensor))

    # ---- memory

    def _bring(self, pages: Sequence[_MemoryPage]) -> None:
        """Brings ``pages`` into memory, with the values that were laid aside."""
        touched = [page.storage._cdata for page in pages if page.storage._cdata in self.live]
        for key in touched:
            self.live.move_to_end(key)
        absent = [page for page in pages if not page.storage.nbytes()]
        self._make_room(len(touched), sum(page.size for page in absent))
        for page in absent:
            page.storage.resize_(page.size)
            if page.aside is not None:
                page.storage.copy_(page.aside, non_blocking=False)
                page.aside, page.values = None, True
            self.live[page.storage._cdata] = page
            self._arrived(page.size)

    def _touch(self, pages: Sequence[_MemoryPage], overwritten: _MemoryPage | None = None) -> None:
        """Prepares for an operation that reads and writes ``pages``.  A page without its values is noted in
        ``again``, unless it is ``overwritten``.
        """
        self._bring(pages)
        for page in pages:
            if not page.values and page.written and page is not overwritten:
                self.again.add((page.number, page.visit - 1))
            page.values = page.written = True
            page.kept.clear()

    def _arrived(self, size: int) -> None:
        self.there += size
        self.peak = max(self.peak, self.there)

    def _make_room(self, touched: int, coming: int) -> None:
        """Lets pages leave, the least recently touched first, until the rest and ``coming`` bytes fit into
        ``resident``, or ``touched`` + 1 pages are left.

        The last ``touched`` pages of ``live`` are in use.
        """
        while self.there + coming > self.resident and len(self.live) > touched + 1:
            self._leave(next(iter(self.live.values())))

    def _leave(self, page: _MemoryPage) -> None:
        if page.values and page.written:
            for name, tensor in page.tensors:
                if tensor.untyped_storage()._cdata == page.storage._cdata:
                    self.keep(name, tensor.detach())
                    page.kept.add((name, id(tensor)))
        if page.values and page.written:
            if self.everything or (page.number, page.visit) in self.needed:
                self.lay(
                    next(
                        (name for name, _ in page.tensors),
                        "a tensor that is no part of the model in the end",
                    ),
                    page.size,
                )
                page.aside = torch.UntypedStorage(page.size, device="cpu").copy_(
                    page.storage, non_blocking=False
                )
            page.visit += 1
        page.values = False
        page.storage.resize_(0)
        self.there -= page.size
        del self.live[page.storage._cdata]
