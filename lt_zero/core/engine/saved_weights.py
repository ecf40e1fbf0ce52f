"""Weights that autograd saves while a unit runs whose weights are released after its forward.

Note [Saved weights]
    The hooks on a module's outputs see what it returns in containers that can be walked. An output may leave in others
    (a deque, a generator, a closure, an attribute of another object), and then nothing gathers the weights before
    autograd reads them. So the forward of a unit that will be released runs under saved-tensor hooks: of a weight,
    autograd keeps only where it lies in the flat tensor, and reading it takes the lease (engine.py, Note [Leases]) and
    gathers. What autograd keeps then refers to no memory of the bucket, and a reference that is left when the bucket is
    released is a view that user code holds (compute_copy.py, ``State.LENT``).

    What is saved where these hooks do not see it (inside of other hooks that the unit enters, in transforms of
    ``torch.func``, on other threads) is a view, or a parameter itself, and keeps the memory, too.

    torch does not check the version of tensors that are saved under hooks, so these hooks do.
    Hooks that were entered around the unit (``save_on_cpu``, activation checkpointing) get every tensor as before.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import saved_tensors_hooks

from lt_zero.common.compat import (
    leave_for_transforms,
    python_references,
    saved_tensor_hooks,
    saves_under_hooks,
    storage_key,
)
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.gather import Call, Unit

Pack = Callable[[Tensor], Any]
Unpack = Callable[[Any], Tensor]

_entered: list[saved_tensors_hooks] = []  # hooks that engines entered, innermost last


def _innermost_of_engines() -> saved_tensors_hooks | None:
    """The innermost saved-tensor hooks, if an engine entered them."""
    hooks = saved_tensor_hooks()
    return _entered[-1] if _entered and hooks == (_entered[-1].pack_hook, _entered[-1].unpack_hook) else None


@contextmanager
def _left() -> Iterator[None]:
    """Context without the hooks of engines, unless user code entered others inside of them."""
    left = []
    while (hooks := _innermost_of_engines()) is not None:
        hooks.__exit__()
        left.append(_entered.pop())
    try:
        yield
    finally:
        while left:
            left[-1].__enter__()
            _entered.append(left.pop())


class _SavedWeight:
    """The place of a weight, or of a view of one, in its bucket."""

    __slots__ = ("bucket", "call", "changes", "index", "offset", "shape", "stride", "unit", "version")

    def __init__(self, tensor: Tensor, unit: Unit, bucket: Bucket, index: int) -> None:
        # No reference to the parameter: see ``references_of``.
        self.unit, self.bucket, self.index, self.version = unit, bucket, index, bucket.params[index]._version
        self.changes, self.call = bucket.changes, unit.calls[-1] if unit.calls else None
        self.offset, self.shape, self.stride = tensor.storage_offset(), tensor.shape, tensor.stride()

    def read(self) -> Tensor:
        view = self.bucket.compute.flat.as_strided(self.shape, self.stride, self.offset)
        # A step is an edit in place, too.
        version = self.bucket.params[self.index]._version + self.bucket.changes - self.changes
        if version != self.version:
            raise modified(view, version, self.version)
        # ``data`` has a version counter of its own: refilling the flat tensor would count as a write to the view.
        return view.data


class _Passed:
    """A tensor that the hooks around the unit have packed, and the weight that it may refer to."""

    __slots__ = ("packed", "weight")

    def __init__(self, packed: Any, weight: _SavedWeight | None) -> None:
        self.packed, self.weight = packed, weight


class SavedWeights:
    """Saved-tensor hooks around the forwards of units that are released afterwards.

    Args:
        units: all units of the engine whose parameters are sharded.
        needed: called in backward before a weight is read: the unit, and the call that saved it if it was the unit's.

    Attributes:
        opened: whether hooks were entered since the last ``end_pass``, which has nothing to do otherwise.
    """

    def __init__(self, units: Iterable[Unit], needed: Callable[[Unit, Call | None, Bucket], None]) -> None:
        self._needed, self.opened = needed, False
        self._owners = {
            storage_key(bucket.compute.flat): (unit, bucket, [span.lo for span in bucket.layout.spans])
            for unit in units
            for bucket in unit.sharded
        }
        self._hooks = saved_tensors_hooks(self._pack, self._unpack)
        self._around: dict[tuple[Pack, Unpack], saved_tensors_hooks] = {}  # hooks around -> those that pass on to them
        leave_for_transforms(_left)

    def open(self) -> bool:
        """Enter the hooks; returns whether ``close`` has to be called. No-op if they are the innermost already."""
        # A transform of torch.func is running, and forbids saved-tensor hooks.
        if not saves_under_hooks():
            return False
        innermost, outer = _innermost_of_engines(), saved_tensor_hooks()
        if innermost is not None and (innermost is self._hooks or innermost in self._around.values()):
            return False
        self.opened = True
        hooks = self._hooks if outer is None else self._passing_on_to(*outer)
        hooks.__enter__()
        _entered.append(hooks)
        return True

    def close(self) -> bool:
        """Leave the hooks that were entered last, if they are the innermost; returns whether they were."""
        if (hooks := _innermost_of_engines()) is None:
            return False
        hooks.__exit__()
        _entered.pop()
        return True

    @staticmethod
    def count() -> int:
        """The number of saved-tensor hooks that engines have entered, and not left."""
        return len(_entered)

    def leave_interrupted(self, before: int) -> None:
        """Leave hooks of forwards that KeyboardInterrupt or its like has ended, for which ``close`` was not called.

        ``before``: ``count`` around them. To leave hooks is to drop the innermost ones, whichever these are, so a
        context of the user's around a unit (activation checkpointing) has dropped those of the unit in place of its
        own. All contexts inside have ended, so as many are left over as were not closed.
        """
        while len(_entered) > before:
            _entered.pop().__exit__()
        self._around.clear()

    def end_pass(self) -> None:
        """Leave hooks that user code's own hooks covered when their unit ended; forget hooks around the pass."""
        while _entered and self.close():
            pass
        self._around.clear()
        self.opened = False

    def _passing_on_to(self, pack: Pack, unpack: Unpack) -> saved_tensors_hooks:
        if (pack, unpack) not in self._around:

            def pass_on(tensor: Tensor) -> _Passed:
                return _Passed(pack(tensor), self._weight(tensor))

            def read(passed: _Passed) -> Tensor:
                if passed.weight is not None:
                    self._gather(passed.weight)
                return unpack(passed.packed)

            self._around[(pack, unpack)] = saved_tensors_hooks(pass_on, read)
        return self._around[(pack, unpack)]

    def _pack(self, tensor: Tensor) -> _SavedWeight | tuple[Tensor, int]:
        """The place of a weight; an activation, with the version at which it was saved."""
        if (weight := self._weight(tensor)) is not None:
            return weight
        # Not the tensor itself: an output that its own node saves would form a cycle.
        return tensor.detach(), tensor._version

    def _unpack(self, saved: _SavedWeight | tuple[Tensor, int]) -> Tensor:
        if isinstance(saved, _SavedWeight):
            self._gather(saved)
            return saved.read()
        tensor, version = saved
        if tensor._version != version:
            raise modified(tensor, tensor._version, version)
        return tensor

    def _weight(self, tensor: Tensor) -> _SavedWeight | None:
        """The place of ``tensor`` if it is a weight or a view of one; None for any other tensor."""
        if tensor.layout is not torch.strided or (found := self._owners.get(storage_key(tensor))) is None:
            return None
        unit, bucket, starts = found
        # A view in another dtype has to be kept: the bucket is lent.
        if tensor.dtype != bucket.dtype or tensor.is_conj() or tensor.is_neg():
            return None
        return _SavedWeight(tensor, unit, bucket, max(bisect_right(starts, tensor.storage_offset()) - 1, 0))

    def _gather(self, saved: _SavedWeight) -> None:
        call, bucket = saved.call, saved.bucket
        if not (bucket.readable and (call is None or call.held)):
            self._needed(saved.unit, call, bucket)


def references_of(unit: Unit) -> list[int]:
    """The number of Python objects that refer to each sharded parameter of ``unit``.

    A call of the unit after which there are more has stored some, maybe where saved-tensor hooks read them.
    """
    return [python_references(parameter) for bucket in unit.sharded for parameter in bucket.params]


def modified(tensor: Tensor, version: int, saved: int) -> RuntimeError:
    """torch's error for a saved tensor that was modified in place."""
    return RuntimeError(
        "one of the variables needed for gradient computation has been modified by an inplace operation: "
        f"[{tensor.type()} {list(tensor.shape)}] is at version {version}; expected version {saved} instead. Hint: "
        "the backtrace further above shows the operation that failed to compute its gradient. The variable in "
        "question was changed in there or anywhere later. Good luck!"
    )
