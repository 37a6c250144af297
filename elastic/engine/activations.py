"""Moves activations of blocks to the host's memory until the backward pass, or keeps them with eight bits a
number.

Autograd calls a hook when it keeps a tensor, and another one when it needs the tensor again.  Here the hooks
act on the whole memory of a tensor and not on single views of it, so strides stay as they were, and nothing
is stored twice.  Three kinds of memory stay as they are: weights, tensors that are not the block's own
(positions, masks), and small ones (the statistics of norms and of attention).

* Offload.  A stream of its own copies a block's activations to pinned memory while the next block runs; then
  the device's memory is free.  In the backward pass the activations of a block come back while the backward
  pass of the block after it runs.  The host waits for nothing, and the bits stay the same.
* Compression to int8 (blockwise: Dettmers and others 2022, section 2.1) or to fp8, for the backward pass
  only.  The forward pass is exact.  The result is a function of one microbatch, so all layouts give the same
  bits.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._pytree import tree_leaves

from elastic.engine import fp8
from elastic.engine.host_memory import host_memory
from elastic.engine.parameters.visits import parameters_of
from elastic.engine.streams import stream
from elastic.models.spec import ShardingTable, each_once

SMALL = 8
"""Memory smaller than a block's input divided by this number stays as it is.

In common models the keys of attention are larger than that, and the statistics of norms and of attention
about a tenth of it.
"""
ROW = 128
"""Number of neighbours in memory that share a scale, a float32, in int8."""
LARGEST = 127
"""Largest number in int8."""
MASKED = -128
"""The number that stands for -inf in int8."""
NAN = 0x7F
"""The bits of NaN in E4M3, which has no infinity; it stands for -inf."""
LOSSY = (torch.float32, torch.bfloat16, torch.float16)
"""The formats that are compressed."""

Restore = Callable[[], Tensor]
"""Returns a tensor in memory that has the values of the memory that was held."""
Hold = Callable[[Tensor], Restore | None]
"""Takes over the memory of a tensor that autograd keeps.  If it returns None, the memory stays as it is."""


def apply_activations(model: nn.Module, table: ShardingTable, policy: str) -> None:
    """Lets each block of ``model`` keep its activations in the form that ``policy`` names: a value of the
    setting ``activations`` other than "keep".
    """
    run = _Offload().run if policy == "offload" else partial(_run, _FORMATS[policy])
    for block in each_once(model, table.blocks):
        block.forward = partial(run, block, block.forward)


def _run(hold: Hold, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
    given = [each for each in tree_leaves((args, kwargs)) if isinstance(each, Tensor)]
    own = [each.untyped_storage().nbytes() for each in given if each.requires_grad]
    if not own or not torch.is_grad_enabled():
        return forward(*args, **kwargs)
    others = (
        *parameters_of(block),
        *block.buffers(),
        *fp8.held_by(block),
        *(each for each in given if not each.requires_grad),
    )
    kept = _Keeping(hold, {each.untyped_storage()._cdata for each in others}, own[0] // SMALL)
    with torch.autograd.graph.saved_tensors_hooks(kept.pack, _unpack):
        return forward(*args, **kwargs)


class _Converted:
    """Memory that is kept in another form, and is restored at its first use."""

    def __init__(self, restore: Restore) -> None:
        self.restore = restore
        self.restored: Tensor | None = None

    def memory(self) -> Tensor:
        if self.restored is None:
            self.restored = self.restore()
        return self.restored


class _StandIn(NamedTuple):
    """A tensor in held memory, in the place of the tensor."""

    held: _Converted
    like: dict[str, Any]
    """Its dtype and device."""
    place: tuple[Any, ...]
    """Its offset, shape and strides."""


@dataclass
class _Keeping:
    """Takes what autograd keeps of one run of a block."""

    hold: Hold
    others: set[int]
    """The memory that is not the block's own."""
    small: int
    known: dict[tuple[StorageWeakRef, int], _Converted | None] = field(default_factory=dict)
    """The form in which each memory is held.  The key is the memory and the number of its changes so far.
    None: it stays as it is.
    """

    def pack(self, tensor: Tensor) -> Tensor | _StandIn:
        memory = tensor.untyped_storage()
        if (
            type(tensor) not in (Tensor, FakeTensor)
            or memory.nbytes() < self.small
            or memory._cdata in self.others
        ):
            return tensor
        key = StorageWeakRef(memory), tensor._version
        if key not in self.known:
            restore = self.hold(tensor.detach() if tensor._base is None else tensor._base.detach())
            self.known[key] = None if restore is None else _Converted(restore)
        held, place = self.known[key], (tensor.storage_offset(), tensor.shape, tensor.stride())
        return (
            tensor
            if held is None
            else _StandIn(held, {"dtype": tensor.dtype, "device": tensor.device}, place)
        )


def _unpack(kept: Tensor | _StandIn) -> Tensor:
    if isinstance(kept, Tensor):
        return kept
    memory, (offset, shape, strides) = kept.held.memory(), kept.place
    if isinstance(memory, FakeTensor):
        return memory.view(kept.like["dtype"]).as_strided(shape, strides, offset)
    return torch.empty(0, **kept.like).set_(memory.untyped_storage(), offset, shape, strides)


def _flat(tensor: Tensor, dtype: torch.dtype) -> Tensor:
    """Returns all memory of ``tensor`` in one dimension."""
    memory = tensor.untyped_storage()
    # ``set_`` would leave fake memory in a reference cycle, and ``peak.py`` would count it too long
    if isinstance(tensor, FakeTensor):
        return tensor.as_strided((memory.nbytes() // tensor.element_size(),), (1,), 0).view(dtype)
    return torch.empty(0, dtype=dtype, device=tensor.device).set_(memory)


# ---- compression


def _compressed(compress: Callable[[Tensor, Tensor], Restore], tensor: Tensor) -> Restore | None:
    """Compresses a tensor of a :data:`LOSSY` format that fills its memory; returns None for any other tensor.
    A kernel may leave gaps in memory, and the numbers in gaps must not decide about scales.

    Attention may keep a mask with -inf, and -inf stays -inf.  Any other number that is not finite becomes
    some number that is not finite.
    """
    if (
        tensor.dtype not in LOSSY
        or tensor.numel() * tensor.element_size() != tensor.untyped_storage().nbytes()
    ):
        return None
    flat = _flat(tensor, tensor.dtype)
    masked = flat == -torch.inf
    return compress(flat.masked_fill(masked, 0), masked)


def _int8(flat: Tensor, masked: Tensor) -> Restore:
    rows = F.pad(flat, (0, -len(flat) % ROW)).view(-1, ROW).float()
    scales = (rows.abs().amax(1, keepdim=True) / LARGEST).clamp_min(torch.finfo(torch.float32).tiny)
    numbers = (rows / scales).round().to(torch.int8)
    numbers.view(-1)[: len(flat)].masked_fill_(masked, MASKED)
    return partial(_from_int8, numbers, scales, len(flat), flat.dtype)


def _from_int8(numbers: Tensor, scales: Tensor, size: int, dtype: torch.dtype) -> Tensor:
    return (numbers.float().masked_fill(numbers == MASKED, -torch.inf) * scales).to(dtype).view(-1)[:size]


def _fp8(flat: Tensor, masked: Tensor) -> Restore:
    numbers, inverse = fp8.scaled(flat, fp8.FORWARD)
    numbers.view(torch.uint8).masked_fill_(masked, NAN)
    return partial(_from_fp8, numbers, inverse, flat.dtype)


def _from_fp8(numbers: Tensor, inverse: Tensor, dtype: torch.dtype) -> Tensor:
    return (numbers.float().nan_to_num(nan=-torch.inf, neginf=-torch.inf) * inverse).to(dtype)


_FORMATS: dict[str, Hold] = {"int8": partial(_compressed, _int8), "fp8": partial(_compressed, _fp8)}
"""The functions by the names that the setting ``activations`` accepts, beside "keep" and "offload"."""


# ---- offload


class _Offload:
    """Offloads a model block by block: the copies of a block end while the next block runs."""

    def __init__(self) -> None:
        self.last: Callable[[], _MovedBlock | None] = lambda: None
        """Returns the copies of the last block, unless they are no longer used."""

    def run(self, block: nn.Module, forward: Any, *args: Any, **kwargs: Any) -> Any:
        copies = _MovedBlock(self.last())
        out = _run(copies.hold, block, forward, *args, **kwargs)
        copies.leave()
        self.last = weakref.ref(copies)
        return out


class _MovedBlock:
    """The memory that one run of a block keeps, on its way to the host and back.  It lives as long as one of
    its copies.
    """

    def __init__(self, before: _MovedBlock | None) -> None:
        self.before = before
        self._copies: list[weakref.ref[_MovedMemory]] = []
        self._copied: torch.cuda.Event | None = None
        """The end of the last transfer, on a GPU."""
        self._fetched = False
        self._backs: list[Tensor] = []
        """Memory that the last transfer fills; until the stream that allocated it has waited, nobody else may
        get it.
        """

    def hold(self, tensor: Tensor) -> Restore | None:
        if not tensor.is_floating_point() and tensor.dtype != torch.bool:
            return None
        copy = _MovedMemory(self, tensor)
        self._copies.append(weakref.ref(copy))
        return copy.restore

    def leave(self) -> None:
        """Begins the copies to the host, and frees the device's memory of the previous block: its copies had
        the time in which this block ran.
        """
        copies = self._used()
        with self._transfer(copies):
            for copy in copies:
                copy.host.copy_(copy.found(), non_blocking=True)
        if self.before is not None:
            self.before.wait()
            for copy in self.before._used():
                copy.free()

    def fetch(self) -> None:
        """Begins the copies back to the device; a second call does nothing."""
        if self._fetched:
            return
        self._fetched = True
        copies = [copy for copy in self._used() if copy.source is None]
        self._backs = [torch.empty(copy.host.shape, dtype=torch.uint8, device=copy.device) for copy in copies]
        with self._transfer(copies):
            for copy, back in zip(copies, self._backs, strict=True):
                copy.back = back.copy_(copy.host, non_blocking=True)

    def wait(self) -> None:
        """Lets the present stream wait for the transfer that began last."""
        if self._copied is not None:
            torch.cuda.current_stream().wait_event(self._copied)
        self._backs.clear()

    def _used(self) -> list[_MovedMemory]:
        return [copy for reference in self._copies if (copy := reference()) is not None]

    @contextmanager
    def _transfer(self, copies: list[_MovedMemory]) -> Iterator[None]:
        if not copies or copies[0].device.type != "cuda":
            yield
            return
        side = stream("offload", copies[0].device)
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            yield
        self._copied = side.record_event()


class _MovedMemory:
    """One piece of memory on its way to the host and back.  All transfers are on one stream, so host memory
    may be taken again at once.
    """

    def __init__(self, copies: _MovedBlock, source: Tensor) -> None:
        self.copies, self.device, self.version = copies, source.device, source._version
        self.source: Tensor | None = source
        """The memory itself, until the next block has run."""
        self.back: Tensor | None = None
        hosts, size = host_memory(pinned=source.is_cuda), source.untyped_storage().nbytes()
        # A power of two, so that microbatches of many lengths take few sizes: pieces stay for ever.
        # It costs nothing: torch pins memory in powers of two anyway, and memory that is not pinned is taken
        # only where it is written.
        whole = hosts.take(1 << (size - 1).bit_length())
        self.host = whole[:size]
        weakref.finalize(self, hosts.give, whole)

    def found(self) -> Tensor:
        """Returns the memory itself.  Raises RuntimeError if it was changed; without hooks autograd raises it
        in the backward pass.
        """
        assert self.source is not None
        if self.source._version != self.version:
            raise RuntimeError(
                f"a tensor of shape {list(self.source.shape)} was changed in place, but the backward "
                "pass needs its old values; write x = x + y in place of x += y"
            )
        return _flat(self.source, torch.uint8)

    def free(self) -> None:
        self.found()
        self.source = None

    def restore(self) -> Tensor:
        if self.source is None:
            self.copies.fetch()  # unless the block after this one did
            self.copies.wait()
        if self.copies.before is not None:
            self.copies.before.fetch()
        if self.source is not None:
            return self.found()
        back, self.back = self.back, None
        assert back is not None
        return back
