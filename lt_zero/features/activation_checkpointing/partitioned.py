"""Saved inputs that tensor ranks have alike: each rank keeps a part, and they gather the parts for recomputation.

DeepSpeed's and Megatron's partitioned activations (ZeRO-R, arXiv:1910.02054, section 6.1).

Note [What is split]
    Only tensors that are the same on all tensor ranks, bit by bit. A plain tensor does not tell whether it is: the
    input of a block is, a rank's own heads or a mask of its own are not, and a tensor that is split by mistake would
    be lost. So nothing is assumed, or learned from an earlier step: at each call of a checkpointed module the ranks
    send each other one number per input, a digest of its bits, dtype and layout. The numbers travel while the module
    computes, and are read at the next call, or when backward begins to recompute; until then inputs stay whole. Those
    whose numbers are equal are split then; others rest whole.

Note [Gathers meet]
    All ranks have to gather the same tensors in the same order. They recompute the same modules in the same order, as
    collectives inside of their layers need, too; else ``PartRanks`` raises. But whether a tensor is stored already
    depends on the rank: a graph that one rank keeps alive, for logging, keeps the entries of its masks. So in place of
    a digest a rank says which entry a tensor shares, and shares it only if all ranks do.
"""

from __future__ import annotations

import hashlib
import logging
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lt_zero.common import accelerator
from lt_zero.common.compat import version_of
from lt_zero.core.comm.part_ranks import Comparison, PartRanks
from lt_zero.features.activation_checkpointing.saved_activations import Storage, StoredActivation, changed
from lt_zero.features.activation_checkpointing.stores import ActivationStore, SavedBytes, SavedElements, Shown

log = logging.getLogger("lt_zero")

_INPUTS = 15  # of a call that are compared; so many numbers are sent in any case, as calls of ranks may differ
_WORDS = 1 << 20  # of a digest at a time, which bounds its temporary memory to 16 MB
_MIX = -0x61C8864680B583EB, -0x40A7B892E31B1A47, -0x6B2FB644ECCEEE15  # SplitMix64's constants


class Undecided:
    """A saved tensor that stays whole until it is decided whether this rank keeps a part of it.

    Args:
        source: the bytes, 1D uint8.
        ranks: that keep the other parts.
        name: of the module that saves it.

    Attributes:
        source: None once it is decided, unless it is kept.
        nbytes: that are held.
    """

    def __init__(self, source: Tensor, ranks: PartRanks, name: str) -> None:
        self.source: Tensor | None = source
        self.nbytes = self._numel = source.numel()
        self._version, self._changed = version_of(source), 0
        self._ranks: PartRanks | None = ranks  # None: this rank has all of it
        self._stored: StoredActivation | None = None
        self._name = name

    def rest(self, storage: Storage | None) -> None:
        """Keep the whole tensor in ``storage``; None: where it is."""
        self._move(self.source, storage)
        self._ranks = None

    def split(self, storage: Storage) -> None:
        """Keep a part in ``storage``; the other ranks call this, too."""
        if self.source is None or self._ranks is None:
            return
        size = -(-self._numel // self._ranks.size)
        part = self.source[self._ranks.rank * size :][:size]
        # Parts have one size: in an all-gather each rank sends the same number of bytes.
        if part.numel() < size:
            part = torch.cat([part, part.new_zeros(size - part.numel())])
        self._move(part, storage)

    def _move(self, tensor: Tensor | None, storage: Storage | None) -> None:
        if self.source is None or tensor is None or storage is None:
            return
        # From here on the storage watches for changes, but one until now is in the bytes that it gets.
        self._changed = version_of(self.source) - self._version
        self.source, self.nbytes, self._stored = None, tensor.numel(), storage.put(tensor)

    def prefetch(self) -> bool:
        return self._stored is None or self._stored.prefetch()

    def bring(self) -> Tensor:
        """All of the tensor, 1D uint8. Collective if it is split.

        Raises:
            RuntimeError: the source was changed while it was whole.
        """
        if self.source is not None:
            self._changed = version_of(self.source) - self._version
        if self._changed:
            raise changed(self._version + self._changed, self._version)
        if self._stored is None:
            assert self.source is not None
            return self.source
        found = self._stored.bring()
        return self._ranks.all_gather(found, self._name)[: self._numel] if self._ranks is not None else found

    def free(self) -> None:
        self.source = None
        if self._stored is not None:
            self._stored.free()


class _Use:
    """The graph's handle of a tensor: its entry, and the tensor itself until all ranks are known to share it."""

    def __init__(self, entry: SavedElements, whole: Undecided | None) -> None:
        self.entry, self.whole = entry, whole


class _Input(NamedTuple):
    """A tensor that a call saves.

    Attributes:
        number: is compared; None: the ranks' tensors are not the same.
        decide: is called with whether all ranks have the same number.
    """

    number: Tensor | int | None
    decide: Callable[[bool], object]


class PartitionedStore(ActivationStore):
    """Stores of tensors that all tensor ranks save a part each. See the notes of this file.

    Args:
        ranks: that may save the same tensors.
        tells: whether this rank warns.
        storage, device, least: as for ``ActivationStore``.

    Attributes:
        split, whole: inputs that were split, and that were not, so far.
    """

    def __init__(
        self,
        storage: Storage,
        device: torch.device,
        ranks: PartRanks,
        tells: bool = True,
        least: int | None = None,
    ) -> None:
        super().__init__(storage, device, least)
        self.split = self.whole = 0
        self._ranks, self._tells, self._digests = ranks, tells, _Digests()
        self._calls, self._name = 0, ""  # of modules, and of the last one
        # Uses share a copy; otherwise each would be gathered.
        self._shares_copies = True
        self._rest = None if storage.is_at_hand else storage  # of whole tensors; None: they stay where they are
        self._compared: deque[tuple[Comparison, list[_Input]]] = deque()
        # Equal on ranks that have made the same entries.
        self._numbers = weakref.WeakKeyDictionary[SavedElements, int]()

    @contextmanager
    def saving(self, name: str, tensors: Sequence[Tensor]) -> Iterator[None]:
        """Context for a call of module ``name`` that saves ``tensors``. Collective."""
        with self._lock, torch.no_grad():
            self._reap()
            self._settle()
            uses = self._compare(name, tensors)
        with saved_tensors_hooks(partial(self._pack_use, uses), self.unpack):
            yield

    def end_backward(self) -> None:
        super().end_backward()
        if self._tells and self._calls:
            self._tells = False
            if not self.split:
                log.warning(
                    "activation_checkpointing.partition_activations splits nothing: no saved input of at least 4096 "
                    "bytes is the same on the %d tensor ranks. Remove the key.",
                    self._ranks.size,
                )

    def clear(self) -> None:
        self._compared.clear()
        super().clear()

    def _put(self, elements: Tensor) -> SavedBytes:
        return Undecided(elements, self._ranks, self._name)

    # ---- forward ---------------------------------------------------------------------------------------------------

    def _compare(self, name: str, tensors: Sequence[Tensor]) -> dict[Any, deque[tuple[_Use, Shown]]]:
        """Start to compare the tensors that a call saves; returns the inputs that ``_pack_use`` will get."""
        self._calls, self._name = self._calls + 1, name
        uses, inputs = dict[Any, deque[tuple[_Use, Shown]]](), list[_Input]()
        for place, tensor in enumerate(tensors):
            if (found := self._stored_elements(tensor)) is None:
                inputs.append(_Input(None, lambda same: None))
                continue
            local, shown = found
            entry, is_new = self._entry_of(local, shown)
            whole = entry.stored if is_new else Undecided(shown.take(local), self._ranks, name)
            assert isinstance(whole, Undecided)
            use = _Use(entry, None if is_new else whole)
            uses.setdefault((local.untyped_storage(), shown.key(local)), deque()).append((use, shown))
            if is_new and whole.source is not None:
                # The same on all ranks that make an entry in this place of this call, and nowhere else.
                self._numbers[entry] = _number(("entry", self._calls, place))
                number = self._digests.of(whole.source) + _number((shown.dtype, shown.geometry))
                inputs.append(_Input(number, partial(self._decide, weakref.ref(entry))))
            else:
                inputs.append(_Input(self._numbers.get(entry), partial(self._decide_shared, weakref.ref(use))))
        # Always one length, whatever a rank saves: else ranks that differ would wait for each other forever.
        told = [0 if each.number is None else each.number for each in inputs[:_INPUTS]]
        numbers = _row([_number((name, len(inputs))), *told, *[0] * (_INPUTS - len(told))], self.device)
        self._compared.append((self._ranks.compare(numbers, name), inputs))
        return uses

    def _pack_use(self, uses: dict[Any, deque[tuple[_Use, Shown]]], tensor: Tensor) -> Callable[[], Tensor]:
        with self._lock, torch.no_grad():
            found = self._stored_elements(tensor)
            if found is None:
                return self.pack(tensor)
            self._counts["packed"] += 1
            local, shown = found
            key = (local.untyped_storage(), shown.key(local))
            # Autograd packs the tensors in the order of the arguments, so the first one with this view is meant.
            use, shown = uses[key].popleft()
            if not uses[key]:
                del uses[key]  # it refers to the storage
            return partial(self._restore_use, use, shown)

    # ---- what the ranks have alike ---------------------------------------------------------------------------------

    def _settle(self) -> None:
        """Read the numbers of earlier calls, and split tensors with equal ones."""
        while self._compared:
            comparison, inputs = self._compared.popleft()
            same_call, *same = comparison.equal()
            for place, each in enumerate(inputs):
                each.decide(same_call and each.number is not None and place < _INPUTS and same[place])

    def _decide(self, ref: weakref.ref[SavedElements], same: bool) -> None:
        entry = ref()
        if entry is None or not isinstance(entry.stored, Undecided):  # freed
            return
        # Only here does the rank know what it keeps of the tensor; until now all of it was counted.
        before = entry.nbytes
        if same:
            entry.stored.split(self.storage)
        else:
            entry.stored.rest(self._rest)
        self.split, self.whole = self.split + same, self.whole + (not same)
        self._counts["bytes"] -= before - entry.nbytes

    def _decide_shared(self, ref: weakref.ref[_Use], same: bool) -> None:
        use = ref()
        if use is None or use.whole is None or use.whole.source is None:
            return
        if same:
            self._share(use.entry)
        else:
            use.entry = self._new_entry(use.whole.source)
            self._decide(weakref.ref(use.entry), False)
        use.whole = None

    def _restore_use(self, use: _Use, shown: Shown) -> Tensor:
        with self._lock, torch.no_grad():
            # First: the numbers of the last call decide whether this tensor is gathered.
            self._settle()
            return self._restore(use.entry, shown)


class _Digests:
    """Checksums of bytes that see other elements, and the same ones in another order."""

    def __init__(self) -> None:
        self._keys = torch.empty(0, dtype=torch.int64)

    def of(self, elements: Tensor) -> Tensor:
        """The checksum (0D int64) of bytes (1D uint8)."""
        whole = elements.numel() // 8 * 8
        if elements.storage_offset() % 8:  # no view as int64
            elements = elements.clone()
        words, rest = elements[:whole].view(torch.int64), elements[whole:].long()
        total = self._sum(rest)
        for chunk in words.split(_WORDS):
            # A factor for each chunk, as the keys are the same in all of them.
            total = total * 0x100000001B3 + self._sum(chunk)
        return total

    def _sum(self, words: Tensor) -> Tensor:
        # Not linear: of a product with an odd number the highest bit is that of the word, so that signs would cancel.
        keys = self._keys_for(words)
        mixed = (words ^ keys).mul_(_MIX[1])
        mixed ^= mixed >> 29
        return mixed.mul_(keys).sum()

    def _keys_for(self, words: Tensor) -> Tensor:
        """An odd number (int64) without a pattern for each of at most ``_WORDS`` words: SplitMix64."""
        if self._keys.numel() < words.numel() or self._keys.device != words.device:
            numel = min(_WORDS, 1 << max(10, words.numel().bit_length()))
            mixed = torch.arange(1, numel + 1, device=words.device) * _MIX[0]
            for shift, factor in ((30, _MIX[1]), (27, _MIX[2]), (31, 1)):
                mixed = (mixed ^ (mixed >> shift)) * factor
            self._keys = mixed | 1
        return self._keys[: words.numel()]


def _number(told: object) -> int:
    """62 bits of a digest."""
    return int.from_bytes(hashlib.blake2b(repr(told).encode(), digest_size=8).digest(), "big") >> 2


def _row(numbers: Sequence[Tensor | int], device: torch.device) -> Tensor:
    """The numbers as one tensor (1D int64) on ``device``; the host does not wait for it."""
    row = accelerator.send(torch.tensor([0 if isinstance(number, Tensor) else number for number in numbers]), device)
    for place, number in enumerate(numbers):
        if isinstance(number, Tensor):
            row[place] = number
    return row
