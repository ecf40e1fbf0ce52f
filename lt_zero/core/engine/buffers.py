"""Keeps buffers the same on all ranks: rank 0's are sent before training forwards, as DDP does.

Note [Which buffers are sent]
    DDP sends all buffers before the first forward of each accumulation window. Here a buffer is sent so until it has
    not changed on any rank for ``_PROBATION`` windows; afterwards it rests, until any rank sees a change. So masks and
    tables of angles cost nothing, and buffers that forward, backward or code between steps change are what DDP's are.

    Nothing is decided by one rank. What each rank saw is a byte per buffer in the exchange of used parameters, which
    all ranks launch at the end of backward and have waited for before the next window (step_flags.py). A resting
    buffer that changes in forward or backward is therefore sent from the next window on, as with DDP.

    A change is seen by version counters and identities. They miss ``buffer.data`` and kernels that write to raw
    pointers, so values are compared, too: in each window of a probation, and every ``_INTERVAL`` windows of a rest.

Note [Late changes]
    What changes a resting buffer after that exchange and before the next forward, or is found by its values, has been
    used by one forward at least. The ranks then compare their values. The same ones (a loaded checkpoint, a schedule)
    begin another probation. Different ones are sent from then on, with a warning.
"""

from __future__ import annotations

import math
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lt_zero.common.compat import versions_of, without_torch_function
from lt_zero.common.module_hooks import ProcessLocal, buffer_of
from lt_zero.common.users_code import warn
from lt_zero.core.comm.ranks import Ranks
from lt_zero.core.comm.work import Work
from lt_zero.core.engine.fp32_modules import BATCH_NORMS
from lt_zero.core.engine.layout import split_by_size
from lt_zero.core.engine.step_flags import Section

_PROBATION = 4  # windows without a change after which a buffer rests
_INTERVAL = 50  # windows between looks at the values of resting buffers
_CHUNK = 1 << 25  # bytes of one broadcast of several buffers
_ROW = 1024  # elements, of digests
_CHANGED, _LATE = 1, 2  # what a rank saw of a buffer; the larger one counts
_WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}


@dataclass(eq=False)
class _Buffer:
    """A buffer of a module, which may be replaced at any time.

    Attributes:
        left: windows of its probation that are left; 0: it rests, or changes.
        changes: it is sent in each window.
        seen: what this rank has to tell the others.
        tensor, version, digest: as it was when all ranks had the same values.
        form: its dtype and shape, which the ranks have agreed upon.
    """

    module: nn.Module
    key: str
    name: str
    left: int = _PROBATION
    changes: bool = False
    seen: int = 0
    tensor: Tensor | None = None
    version: int = -1
    digest: int = 0
    form: str = ""

    @property
    def now(self) -> Tensor | None:
        return buffer_of(self.module, self.key)

    @property
    def is_sent(self) -> bool:
        return self.changes or self.left > 0


class BufferSync(ProcessLocal):
    """The buffers of ``root``, which ``peers`` have; ``enabled``: whether they are sent before training forwards."""

    def __init__(self, root: nn.Module, peers: Ranks, enabled: bool) -> None:
        self._root = root
        self._peers = peers
        self.enabled = enabled and peers.size > 1
        self._tables = [module._buffers for module in root.modules()]
        self._buffers = self._find()
        # Some rank's buffers have other names, shapes or dtypes than those that the ranks have agreed upon.
        self._relayout = bool(self._buffers)
        self._sent: tuple[Work, Tensor] | None = None  # the exchange of what ranks saw
        self._windows = 0
        self._unfinished = False  # a training forward has had no backward yet
        self.due = True  # the next training forward is the first one of a window

    # ---- a step --------------------------------------------------------------------------------------------------

    def before_forward(self, sync: bool) -> None:
        """Begin a training forward; ``sync``: its gradients are the last of a window. Collective if one begins."""
        due, self.due = self.due, sync
        if self.enabled and due:
            late = self._agree()
            self._observe(_LATE, values=False)
            if self._relayout:
                self._agree_on_layout()
            self._settle(late)
            self._windows += 1
            if sent := [buffer for buffer in self._buffers if buffer.is_sent]:
                self._send(sent)
                self._note(sent)
            for buffer in sent:
                buffer.left = max(buffer.left - 1, 0)
        self._unfinished = True

    def end_backward(self) -> None:
        self._unfinished = False

    def leave_to_rounds(self) -> None:
        """Send nothing from now on: rounds look after the buffers (core/rounds.py). The same on all ranks."""
        self.enabled = False

    def section(self) -> Section:
        """The flags of a step that say what ranks saw."""
        return Section("buffers", self._report, launched=self._exchanged)

    def _report(self) -> list[int]:
        """Report to the other ranks, in numbers.

        One for each buffer says what this rank saw of it since all ranks had the same values. The last is 1 if this
        rank has other buffers than those that the ranks agreed upon.
        """
        if not self.enabled:
            return []
        self._observe(_CHANGED, values=self._windows % _INTERVAL == 0)
        others = sum(map(len, self._tables)) != len(self._buffers)
        others |= any(_form(b.now) != b.form for b in self._buffers if b.changes or b.seen)
        return [*(buffer.seen for buffer in self._buffers), int(others)]

    def _exchanged(self, work: Work, seen: Tensor) -> None:
        """Note that ``seen`` has the largest numbers of all ranks when ``work`` is done."""
        self._sent = (work, seen) if self.enabled else None

    def sync(self) -> None:
        """Give all ranks rank 0's buffers. Collective."""
        self._send(self._find())
        if self.enabled:
            self._note(self._buffers)

    # ---- what changed ----------------------------------------------------------------------------------------------

    def _observe(self, when: int, values: bool) -> None:
        """Note which buffers have changed on this rank. ``values``: compare those of resting ones, too.

        Those of buffers that were made in inference mode, which have no versions, are compared always.
        """
        if not self._buffers:
            return
        with without_torch_function():
            tensors, asked = [buffer.now for buffer in self._buffers], list[_Buffer]()
            for buffer, tensor, version in zip(self._buffers, tensors, _versions(tensors), strict=True):
                if tensor is buffer.tensor and version == buffer.version:
                    counted = tensor is None or version >= 0
                    if (buffer.left or values or not counted) and not (buffer.changes or buffer.seen):
                        asked.append(buffer)
                elif not (buffer.changes or buffer.seen):
                    buffer.seen = _CHANGED if buffer.left else when
                    for other in self._kin(buffer):
                        other.seen = max(other.seen, buffer.seen)
            for buffer, digest in zip(asked, digests([buffer.now for buffer in asked]), strict=True):
                if digest != buffer.digest:
                    buffer.seen = max(buffer.seen, _CHANGED if buffer.left else _LATE)

    def _kin(self, buffer: _Buffer) -> Iterator[_Buffer]:
        """The buffers that change with it: torch's kernel for batch norms updates statistics without a version."""
        if isinstance(buffer.module, BATCH_NORMS):
            yield from (b for b in self._buffers if b.module is buffer.module and not b.changes)

    def _note(self, sent: Sequence[_Buffer]) -> None:
        """Note that all ranks have the same values. The digest of a resting buffer stays."""
        with without_torch_function():
            tensors = [buffer.now for buffer in self._buffers]
            for buffer, tensor, version in zip(self._buffers, tensors, _versions(tensors), strict=True):
                buffer.tensor, buffer.version = tensor, version
            watched = [buffer for buffer in sent if not buffer.changes]
            for buffer, digest in zip(watched, digests([buffer.tensor for buffer in watched]), strict=True):
                buffer.digest = digest

    def _agree(self) -> list[_Buffer]:
        """Take over what all ranks saw; returns the buffers that changed late."""
        if self._sent is None:
            return []
        (work, flags), self._sent = self._sent, None
        work.wait()
        *seen, relayout = flags.tolist()
        self._relayout |= bool(relayout)
        late = []
        for buffer, what in zip(self._buffers, seen, strict=True):
            if what == _LATE and not buffer.is_sent:
                late.append(buffer)
            elif what:
                buffer.changes, buffer.left = True, 0
            buffer.seen = 0 if what else buffer.seen
        return late

    def _settle(self, late: Sequence[_Buffer]) -> None:
        """Send late buffers from now on: for ever if ranks have different values. See Note [Late changes]."""
        if not late:
            return
        with without_torch_function():
            mine = digests([buffer.now for buffer in late])
        ranks = self._peers.host_gather(mine, "values of buffers")
        differ = []
        for buffer, values in zip(late, zip(*ranks, strict=True), strict=True):
            buffer.left = _PROBATION
            if len(set(values)) > 1:
                buffer.changes, buffer.left = True, 0
                differ.append(repr(buffer.name))
        if differ and self._peers.rank == 0:
            warn(
                f"Buffer {', '.join(differ[:5])} began to change outside of forward and backward, or through `.data`, "
                "after steps in which it had not, and to different values on different ranks. Forwards since then used "
                "each rank's own; from now on rank 0's are sent before each forward. To have that from the first "
                "change on, make it in the training step and in place.",
            )

    # ---- which buffers there are -------------------------------------------------------------------------------------

    def _find(self) -> list[_Buffer]:
        """The buffers, sorted by name: a script that registers the elements of a set has an order on each rank."""
        found = [
            _Buffer(module, key, f"{path}.{key}" if path else key)
            for path, module in self._root.named_modules()
            for key in module._buffers.keys()  # noqa: SIM118 - those of compiled modules cannot be iterated over
        ]
        return sorted(found, key=lambda buffer: buffer.name)

    def _agree_on_layout(self) -> None:
        """Take over that buffers were added, removed, or replaced by others of another shape or dtype. Collective.

        Raises:
            RuntimeError: on all ranks, if they have different ones.
        """
        known = {(buffer.module, buffer.key): buffer for buffer in self._buffers}
        self._tables = [module._buffers for module in self._root.modules()]
        self._buffers = []
        self._relayout = False
        for found in self._find():
            before = known.get((found.module, found.key), found)
            found.form = _form(found.now)
            self._buffers.append(before if before.form == found.form else found)
        forms = [(buffer.name, buffer.form) for buffer in self._buffers]
        mine = zlib.crc32(repr(forms).encode())
        extremes = torch.tensor([mine, -mine])
        # The maximum and the negative minimum over the ranks: their sum is 0 if all have the same.
        self._peers.host_max(extremes, "shapes of buffers").wait()
        if not extremes.sum():
            return
        ranks = [dict(theirs) for theirs in self._peers.host_gather(forms, "shapes of buffers")]
        number = next(number for number, theirs in enumerate(ranks) if theirs != ranks[0])
        first, other = ranks[0], ranks[number]
        name = next(name for name in {**first, **other} if first.get(name) != other.get(name))
        raise RuntimeError(
            f"Buffer {name!r} is {first.get(name, 'missing')} on rank {self._peers.ranks[0]} and "
            f"{other.get(name, 'missing')} on rank {self._peers.ranks[number]}, so it cannot be sent. Give it the "
            "same shape and dtype on all ranks, or set broadcast_buffers: false."
        )

    # ---- sending -----------------------------------------------------------------------------------------------------

    @torch.no_grad()
    def _send(self, buffers: Sequence[_Buffer]) -> None:
        """Give all ranks rank 0's values of ``buffers``. Collective."""
        tied: dict[int, list[_Buffer]] = {}
        for buffer in buffers:
            if (tensor := buffer.now) is not None and tensor.numel():
                if tensor.layout is not torch.strided:
                    raise TypeError(
                        f"Buffer {buffer.name!r} is {tensor.layout}, which cannot be sent to other ranks. Register a "
                        "dense tensor, or keep it as an attribute that is no buffer."
                    )
                tied.setdefault(id(tensor), []).append(buffer)
        # Large elements first: each buffer of a chunk begins at a multiple of its element size, and can be viewed.
        groups = sorted(tied.values(), key=lambda group: -_of(group).itemsize)
        with torch.inference_mode(False):
            for chunk in split_by_size([_of(group).nbytes for group in groups], _CHUNK):
                self._send_chunk([groups[index] for index in chunk])

    def _send_chunk(self, groups: Sequence[list[_Buffer]]) -> None:
        """Send one tensor for each of ``groups``, which all buffers of the group share."""
        rows = [_bytes(_of(group)).to(self._peers.device) for group in groups]
        # A large buffer is sent from and to its own memory, unless autograd may have saved it.
        row = rows[0] if len(rows) == 1 and not self._unfinished else torch.cat(rows)
        shapes = zlib.crc32(repr([_form(_of(group)) for group in groups]).encode())
        self._peers.broadcast(row, f"buffers (shapes {shapes:08x})")
        if self._peers.rank == 0:
            return
        for group, values in zip(groups, row.split([row.numel() for row in rows]), strict=True):
            tensor = _of(group)
            value = values.view(tensor.dtype).view(tensor.shape)
            overlaps = any(size > 1 and stride == 0 for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            # The graph of a forward that has had no backward yet keeps the values that it has used.
            if tensor.is_inference() or overlaps or self._unfinished:
                made = value.to(tensor.device, copy=True)
                for buffer in group:
                    setattr(buffer.module, buffer.key, made)
            elif value.data_ptr() != tensor.data_ptr():
                tensor.copy_(value)


def _of(group: Sequence[_Buffer]) -> Tensor:
    tensor = group[0].now
    assert tensor is not None
    return tensor


def _form(tensor: Tensor | None) -> str:
    return "missing" if tensor is None else f"{str(tensor.dtype).removeprefix('torch.')} {tuple(tensor.shape)}"


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes (1D) of a tensor: gloo does not know every dtype."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)


def _versions(tensors: Sequence[Tensor | None]) -> list[int]:
    """The version counters of tensors, -1 for those that have none."""
    counted = [tensor is not None and not tensor.is_inference() for tensor in tensors]
    found = iter(versions_of(t for t, has in zip(tensors, counted, strict=True) if has and t is not None))
    return [next(found) if has else -1 for has in counted]


@torch.no_grad()
def digests(tensors: Sequence[Tensor | None]) -> list[int]:
    """A checksum of the bits of each tensor; equal bits have equal ones. The host waits for a GPU once."""
    found = [_digest(tensor) for tensor in tensors]
    if len({digest.device for digest in found}) == 1:
        return [int(value) for value in torch.stack(found).tolist()]
    return [int(digest) for digest in found]


def _digest(tensor: Tensor | None) -> Tensor:
    """A checksum (0D int64) of the bits of a tensor that depends on their order."""
    if tensor is None or tensor.numel() == 0:
        return torch.zeros((), dtype=torch.int64)
    data = _bytes(tensor)
    words = data.view(_WORDS[math.gcd(data.numel(), 8)])
    whole = words.numel() // _ROW * _ROW
    rows, rest = words[:whole].view(-1, _ROW), words[whole:]
    sums = (rows.sum(1, dtype=torch.int64), rows.sum(0, dtype=torch.int64), rest.to(torch.int64))
    parts = [(part * torch.arange(1, part.numel() + 1, device=part.device)).sum() for part in sums if part.numel()]
    return torch.stack([part * factor for factor, part in zip((1, 31, 1009), parts, strict=False)]).sum()
