"""One bucket: a flat tensor with its parameters as views, this rank's master shard, and the gradient accumulator.

Note [Storages of a bucket]
    ``flat``    the compute copy, all elements. Parameters are views of it. With sharded parameters its memory is
                given back unless the bucket is gathered (storage.py); views survive that, so autograd's saved views
                are valid again after every gather.
    ``master``  what the optimizer updates: this rank's shard (or everything, if the optimizer is not sharded). Where
                the compute copy stays in memory and has the master's dtype, ``master`` *is* a slice of ``flat``.
    ``home``    what a gather reads: the master, or for frozen buckets a shard in the compute dtype.
    ``grad``    accumulator (fp32 by default) over the same elements as ``master``; holds something for the parameters
                in ``valid``, zeros in the gaps, and is still to be multiplied by ``factor`` if there is one.

Note [Data, not nn.Parameter views]
    ``p.data = view`` keeps a parameter's identity and gives it a version counter of its own. A view that shared the
    flat tensor's counter would make autograd report "modified by an inplace operation" after each refill.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero import ops
from lt_zero.config.precision import DtypePolicy
from lt_zero.core.comm import Comm, Pending
from lt_zero.core.edits import EditWatch
from lt_zero.core.guard import Owner, guard, own, sentinel, unguard
from lt_zero.core.layout import BucketLayout, Piece, plan_bucket
from lt_zero.core.storage import FlatStorage, flat_empty


@dataclass(frozen=True)
class Sharding:
    """A ZeRO stage (arXiv:1910.02054, section 5) as data: what each rank holds only a shard of."""

    optim: bool
    grads: bool
    params: bool

    @classmethod
    def of_stage(cls, stage: int) -> Sharding:
        return cls(optim=stage >= 1, grads=stage >= 2, params=stage >= 3)


class State(Enum):
    RELEASED = auto()
    GATHERING = auto()
    RESIDENT = auto()


class Bucket:
    """Parameters of one dtype that are gathered, reduced and released together.

    Args:
        name: of the unit, for messages.
        parameters: with their names.
        dtype: of the gathered weights.
        sharding: what a rank holds only a shard of.
        comm: the collectives.
        owner: who answers for released parameters.
        policy: dtypes of master weights, accumulators and gradients on the wire.
    """

    def __init__(
        self,
        name: str,
        parameters: list[tuple[str, Parameter]],
        dtype: torch.dtype,
        sharding: Sharding,
        comm: Comm,
        owner: Callable[[], Owner | None],
        policy: DtypePolicy | None = None,
    ) -> None:
        self.name, self.sharding, self.comm = name, sharding, comm
        self.params = [p for _, p in parameters]
        self.layout: BucketLayout = plan_bucket([(n, p.shape) for n, p in parameters], comm.world)
        self.shapes = [span.shape for span in self.layout.spans]
        self.dtype, policy = dtype, policy or DtypePolicy()
        self.original = [p.dtype for p in self.params]
        self.master_dtype, self.grad_dtype = policy.master_of(dtype), policy.accumulate_of(dtype)
        self.step_dtype, self._wire = policy.step_of(dtype), policy.wire_of(dtype)
        self.own = self.layout.shard(comm.rank) if sharding.optim or sharding.params else (0, self.layout.numel)
        self._pieces = self.layout.pieces(*self.own)
        self._storage: FlatStorage | None = None
        if sharding.params:
            self._storage = FlatStorage(self.layout.numel, dtype, comm.device)
        self.flat = self._storage.tensor if self._storage else comm.allocate(self.layout.numel, dtype)  # 1D
        self.views = [self.flat[s.lo : s.hi].view(s.shape) for s in self.layout.spans]
        self.master: Tensor | None = None  # 1D, elements [own)
        self.grad: Tensor | None = None  # 1D, elements [own)
        self.factor: Tensor | None = None  # 0D fp32; see fused.py, Note [Deferred factor]
        self.written = False  # the step at hand has put the updated weights into the compute copy already
        self.valid: set[int] = set()  # parameters that were reduced since their gradient was cleared
        self.used: set[int] = set()  # those of them that had a gradient on this rank
        self.local: Tensor | None = None  # 1D, all elements: gradients not reduced yet (stages 0 and 1)
        self.state = State.RESIDENT
        self._home: Tensor | None = None
        self._owner = owner
        self.edits = EditWatch(self)
        self._pending: Pending | None = None

    # ---- construction ------------------------------------------------------------------------------------------

    @torch.no_grad()
    def adopt(self, fetch: Callable[[Parameter], Tensor]) -> None:
        """Move the parameters' values into the bucket, agree with rank 0, and keep what this rank owns.

        ``fetch`` returns a parameter's full value.
        """
        train = any(p.requires_grad for p in self.params)
        # Digits that the compute copy has no room for are kept: in the master weights, or beside frozen weights.
        full, wider = self.flat, any(d.itemsize > self.dtype.itemsize for d in self.original)
        if not self.aliased and (train or (wider and self.master_dtype != self.dtype)):
            full = flat_empty(self.layout.numel, self.master_dtype, self.flat.device)
        for parameter, view, span in zip(self.params, self.views, self.layout.spans, strict=True):
            full[span.lo : span.hi].view(span.shape).copy_(fetch(parameter))
            unguard(parameter)
            parameter.data = view
            own(parameter, self._owner)
        self.comm.broadcast(full, self.name)
        if full is not self.flat:
            self.flat.copy_(full)
            self._home = self._kept(full[self.own[0] : self.own[1]], self.master_dtype)
            if train:
                self.master, self._home = self._home, None
        elif train:
            self.enable_training()
        elif self.sharding.params:
            self._home = self._kept(self.flat[self.own[0] : self.own[1]], self.dtype)
        self.edits.note()
        self.release()

    @torch.no_grad()
    def enable_training(self) -> None:
        """Make the master weights (again a no-op when they exist); called late when frozen parameters are unfrozen."""
        if self.master is not None:
            return
        lo, hi = self.own
        if self.aliased:
            self.master = self.flat[lo:hi]
        else:
            kept = self._home if self._home is not None else self.flat[lo:hi]
            reuse = self._home is not None and kept.dtype == self.master_dtype
            self.master, self._home = kept if reuse else self._kept(kept, self.master_dtype), None

    def _kept(self, values: Tensor, dtype: torch.dtype) -> Tensor:
        """A copy that stays; what gathers read lies where all ranks of the host can read it."""
        if self.sharding.params:
            copy = self.comm.allocate(values.numel(), dtype)
            self.comm.after_write()
        else:
            copy = flat_empty(values.numel(), dtype, values.device)
        return copy.copy_(values)

    @property
    def aliased(self) -> bool:
        """Whether the master weights are a slice of the compute copy. See Note [Storages of a bucket]."""
        return not self.sharding.params and self.master_dtype == self.dtype

    @property
    def home(self) -> Tensor:
        home = self.master if self.master is not None else self._home
        assert home is not None
        return home

    # ---- residency ---------------------------------------------------------------------------------------------

    def launch_gather(self) -> None:
        """RELEASED -> GATHERING: allocate the flat storage and start filling it."""
        assert self.state is State.RELEASED, (self.name, self.state)
        with torch.inference_mode(False), torch.no_grad():
            assert self._storage is not None
            self._storage.allocate()
            self.flat[self.own[0] : self.own[1]].copy_(self.home)
            self._pending = self.comm.all_gather(self.flat, self.name, self.home)
        self.state = State.GATHERING

    def gather(self) -> None:
        """To RESIDENT from any state: parameters are readable afterwards."""
        if self.state is State.RELEASED:
            self.launch_gather()
        if self.state is State.GATHERING:
            assert self._pending is not None
            self._pending.wait()
            self._pending = None
            with torch.inference_mode(False):
                for parameter, view in zip(self.params, self.views, strict=True):
                    unguard(parameter)
                    parameter.data = view
            self.state = State.RESIDENT
            self.edits.note()

    def release(self) -> None:
        """To RELEASED, if the parameters are sharded: give the memory back, leave sentinels."""
        if not self.sharding.params or self.state is State.RELEASED:
            return
        if self.state is State.GATHERING:
            assert self._pending is not None
            self._pending.wait()  # freeing memory that is being written into corrupts whoever gets it next
            self._pending = None
            self.state = State.RELEASED
        else:
            self.edits.check()
            self.state = State.RELEASED
            with torch.inference_mode(False):
                for parameter, shape in zip(self.params, self.shapes, strict=True):
                    unguard(parameter)
                    parameter.data = sentinel(parameter, shape)
                    guard(parameter, self._owner)
        assert self._storage is not None
        self._storage.free()

    @property
    def resident(self) -> bool:
        return self.state is State.RESIDENT

    def guard(self) -> None:
        """Keep the values but watch for uses outside of the owning unit's forward. See guard.py."""
        if self.sharding.params and self.state is State.RESIDENT:
            for parameter in self.params:
                guard(parameter, self._owner)

    def unguard(self) -> None:
        assert self.state is State.RESIDENT
        if self.sharding.params:
            for parameter in self.params:
                unguard(parameter)

    # ---- gradients ---------------------------------------------------------------------------------------------

    def send_dtype(self, have: torch.dtype) -> torch.dtype:
        """In which dtype gradients of dtype ``have`` are sent: if not configured, in it where that loses nothing."""
        if self._wire is not None:
            return self._wire
        return have if self.sharding.optim and self.comm.sums_wide else self.grad_dtype

    @property
    def wants_grad(self) -> bool:
        return any(p.requires_grad for p in self.params)

    def has_grads(self) -> bool:
        """Whether a parameter has a gradient that was not taken yet."""
        return any(p.grad is not None for p in self.params)

    def grads_complete(self) -> bool:
        """Whether each trainable parameter has received its gradient in the running backward."""
        return all(p.grad is not None for p in self.params if p.requires_grad)

    @torch.no_grad()
    def take_grads(self, out: Tensor, add: bool, factor: float = 1.0) -> None:
        """Move the parameters' gradients times ``factor`` into ``out`` (1D, all elements), or add them there.

        Absent ones count as zeros.
        """
        targets, grads = [], []  # what takes two passes in torch
        for index, (parameter, span) in enumerate(zip(self.params, self.layout.spans, strict=True)):
            grad, target = parameter.grad, out[span.lo : span.hi].view(span.shape)
            if grad is None:
                if not add:
                    target.zero_()
                continue
            grad = grad.to_dense() if grad.layout is not torch.strided else grad
            if (grad.dtype != out.dtype or factor != 1.0) and ops.fits(out, grad, add):
                targets.append(target)
                grads.append(grad)
            elif add:
                target.add_(grad)
            elif factor == 1.0 or target.dtype.itemsize > grad.dtype.itemsize:
                target.copy_(grad)
                target.mul_(factor) if factor != 1.0 else None
            else:
                torch.mul(grad, factor, out=target)  # multiplied before it is rounded
            self.used.add(index)
            parameter.grad = None
        if targets and add:
            ops.accumulate(targets, grads)
        elif targets:
            ops.cast_scale(targets, grads, factor=factor)
        if not add:
            for lo, hi in self.layout.gaps:
                out[lo:hi].zero_()

    @torch.no_grad()
    def accumulate_local(self) -> None:
        """Add the parameters' gradients into the unreduced local accumulator."""
        add = self.local is not None
        if self.local is None:
            self.local = torch.empty(self.layout.numel, dtype=self.grad_dtype, device=self.flat.device)
        self.take_grads(self.local, add)

    def launch_reduce(self, send: Tensor, scratch: Tensor) -> Pending:
        """Start averaging ``send`` (1D, all elements) over the ranks into the accumulator."""
        if self.grad is None:
            self.grad = flat_empty(self.own[1] - self.own[0], self.grad_dtype, send.device)
        self.settle_factor()
        add = bool(self.valid)
        self.valid.update(i for i, p in enumerate(self.params) if p.requires_grad)
        collective = self.comm.all_reduce if self.own == (0, self.layout.numel) else self.comm.reduce_scatter
        return collective(self.grad, send, scratch, add, self.name)

    @torch.no_grad()
    def clear_grads(self, indices: set[int]) -> None:
        """Forget the accumulated gradients of the given parameters."""
        self.valid -= indices
        self.used -= indices
        if not self.valid and not self.used:
            self.local = self.grad = self.factor = None  # forward has the memory; the next reduction starts from zero
            return
        for index in indices:
            span = self.layout.spans[index]
            if self.local is not None:
                self.local[span.lo : span.hi].zero_()
        for piece in self.pieces():
            if self.grad is not None and piece.index in indices:
                self.grad[piece.offset : piece.offset + piece.numel].zero_()

    # ---- values ------------------------------------------------------------------------------------------------

    def pieces(self) -> tuple[Piece, ...]:
        """What this rank's master and accumulator hold of each parameter."""
        return self._pieces

    def pieces_of(self, index: int) -> list[Piece]:
        """What this rank holds of parameter ``index``: nothing or one piece."""
        return [p for p in self._pieces if p.index == index]

    def grad_of(self, piece: Piece) -> Tensor:
        """The accumulated gradient (1D) of one of this rank's pieces."""
        self.settle_factor()
        assert self.grad is not None
        return self.grad[piece.offset : piece.offset + piece.numel]

    def defer(self, factor: Tensor) -> None:
        """Multiply the accumulated gradients by ``factor`` (0D fp32) when somebody needs them."""
        self.factor = factor if self.factor is None else self.factor * factor

    @torch.no_grad()
    def settle_factor(self) -> None:
        """Multiply by what was deferred."""
        factor, self.factor = self.factor, None
        if factor is not None and self.grad is not None:
            self.widen_fp16()
            self.grad.mul_(factor)

    def widen_fp16(self) -> None:
        """Before unscaling: an fp16 accumulator goes on in fp32, as without the scale small gradients would vanish."""
        if self.grad is not None and self.grad.dtype == torch.float16:
            self.grad = self.grad.float()

    @property
    def staged(self) -> bool:
        """Whether the optimizer steps copies in another dtype. See optimizer.py, Note [Staged buckets]."""
        return not self.step_dtype == self.master_dtype == self.grad_dtype

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the updated master weights into the compute copy; a gathered copy of sharded parameters is dropped."""
        written, self.written = self.written, False
        if self.sharding.params:
            self.release()
        elif self.master is not None and not self.aliased and not written:
            self.flat[self.own[0] : self.own[1]].copy_(self.master)

    @torch.no_grad()
    def launch_publish(self) -> Pending | None:
        """Start bringing the other ranks' updates into the compute copy; ``write_back`` of all buckets came before."""
        if self.master is None or self.sharding.params or not self.sharding.optim:
            return None
        return self.comm.all_gather(self.flat, self.name, self.flat)

    @torch.no_grad()
    def write(self, index: int, value: Tensor) -> None:
        """Set parameter ``index`` to ``value`` (full shape, the same on every rank) in every copy this rank holds."""
        row = value.detach().reshape(-1)
        self.comm.before_write()
        if self.state is State.RESIDENT:
            self.views[index].copy_(value)
        for piece in self.pieces():
            if piece.index == index:
                self.home_or_flat()[piece.offset : piece.offset + piece.numel].copy_(row[piece.lo : piece.hi])
        self.comm.after_write()

    def home_or_flat(self) -> Tensor:
        if self.master is not None or self._home is not None:
            return self.home
        return self.flat[self.own[0] : self.own[1]]

    @torch.no_grad()
    def adopt_edits(self) -> None:
        """Take rank 0's values of the (resident) compute copy into the master weights of all ranks."""
        self.comm.before_write()
        self.comm.broadcast(self.flat, self.name)
        self.comm.after_write()
        self.keep_edits()
        self.edits.note()

    @property
    def separate(self) -> bool:
        """Whether something more precise than the compute copy, or at least apart from it, is kept."""
        return not self.aliased and (self.master is not None or self._home is not None)

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Take over what was changed in this rank's part of the (resident) compute copy."""
        if self.separate:
            mine = self.flat[self.own[0] : self.own[1]].to(self.home.dtype)
            # Only what was edited: the master is more precise than the copy that was shown.
            edited = self.home.to(self.dtype) != self.flat[self.own[0] : self.own[1]]
            self.home[edited] = mine[edited]


def weak_owner(owner: Owner) -> Callable[[], Owner | None]:
    """A reference that lets the engine be collected while parameters still point to it."""
    return weakref.ref(owner)
