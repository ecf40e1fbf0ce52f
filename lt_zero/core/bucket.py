"""One bucket: a flat tensor with its parameters as views, this rank's master shard, and the gradient accumulator.

Note [Storages of a bucket]
    ``flat``    the compute copy, all elements. Parameters are views of it. With sharded parameters its memory is
                given back unless the bucket is gathered (storage.py); views survive that, so autograd's saved views
                are valid again after every gather.
    ``master``  what the optimizer updates: this rank's shard (or everything, if the optimizer is not sharded). Where
                the compute copy stays in memory and has the master's dtype, ``master`` *is* a slice of ``flat``.
    ``home``    the values as precise as they are kept: the master, or for frozen buckets a shard in the compute dtype.
                A gather reads it, unless ``source`` is something else.
    ``grad``    accumulator (fp32 by default) over the same elements as ``master``; holds something for the parameters
                in ``valid``, zeros in the gaps, and is still to be multiplied by ``factor`` if there is one.

Note [Data, not nn.Parameter views]
    ``p.data = view`` keeps a parameter's identity and gives it a version counter of its own. A view that shared the
    flat tensor's counter would make autograd report "modified by an inplace operation" after each refill.

Note [States in files]
    With a shelf, the master weights and the optimizer's states rest in files (offload/home.py). Whoever asks for
    ``master`` gets it read; the optimizer asks for bucket after bucket, so that reading overlaps with stepping. As
    gathers cannot wait for that, sharded parameters have a copy of their own in the compute dtype (``weights``), in
    memory or, if parameters are offloaded, in another file; a master of the same dtype does both.

Note [States in host memory]
    With a device that has memory of its own, offloaded states live in host memory (ZeRO-Offload, arXiv:2101.06840):
    gradients are reduced on the device and added there, the CPU kernel steps, the compute copy returns. ``copy_``
    between the two orders itself with what runs on the device, and the host waits for it.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass
from enum import Enum, auto
from functools import partial

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero import ops
from lt_zero.config.precision import DtypePolicy
from lt_zero.core.comm import After, Comm, Pending
from lt_zero.core.edits import EditWatch
from lt_zero.core.guard import Owner, guard, own, sentinel, unguard
from lt_zero.core.layout import BucketLayout, Piece, plan_bucket
from lt_zero.core.shelf import Shelf
from lt_zero.core.storage import FlatStorage, flat_empty
from lt_zero.offload.home import FileHome, tidy


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
        shelf: where states rest; None: in memory.
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
        shelf: Shelf | None = None,
    ) -> None:
        self.name, self.sharding, self.comm = name, sharding, comm
        self.shelf = shelf or Shelf()
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
        self._master: Tensor | None = None  # 1D, elements [own); None if there is none, or it rests in a file
        self._grad: Tensor | None = None  # 1D, elements [own); None if there is none, or it rests in a file
        self.accumulated = False  # whether there is an accumulator
        self.factor: Tensor | None = None  # 0D fp32; see fused.py, Note [Deferred factor]
        self.written = False  # the step at hand has put the updated weights into the compute copy already
        self.valid: set[int] = set()  # parameters that were reduced since their gradient was cleared
        self.used: set[int] = set()  # those of them that had a gradient on this rank
        self.local: Tensor | None = None  # 1D, all elements: gradients not reduced yet (stages 0 and 1)
        self.state = State.RESIDENT
        self._home: Tensor | None = None
        self._weights: Tensor | None = None  # 1D, elements [own): what gathers read if the master is in a file
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
            self._keep(full[self.own[0] : self.own[1]], train)
        elif train:
            self.enable_training()
        elif self.sharding.params:
            self._keep(self.flat[self.own[0] : self.own[1]], train)
        self.edits.note()
        self.release()
        self.tidy()

    def _keep(self, values: Tensor, train: bool) -> None:
        """Keep this rank's part beside the compute copy: as master weights, or as the home of frozen ones."""
        dtype = self.master_dtype if train or self.flat.dtype != values.dtype else self.dtype
        if train and self.shelf.optim:
            self.shelf.home("master", dtype).tensor.copy_(values)
            self._keep_weights(values)
        elif train and self.shelf.host_optim:
            self._master = self.shelf.host_empty(values.numel(), dtype).copy_(values)
            self._keep_weights(values)
        elif train:
            self._master = self._kept(values, dtype)
        elif self.shelf.params and self.sharding.params:
            self.shelf.home("weights", dtype).tensor.copy_(values)
        elif self.shelf.host_params:
            self._home = self.shelf.host_empty(values.numel(), dtype).copy_(values)
        else:
            self._home = self._kept(values, dtype)

    def _keep_weights(self, values: Tensor) -> None:
        """See Note [States in files]."""
        if not self.sharding.params:
            return
        if self.shelf.params is None and self.shelf.host_params:
            self._weights = self.shelf.host_empty(values.numel(), self.dtype).copy_(values)
        elif self.shelf.params is None:
            self._weights = self._kept(values, self.dtype)
        elif "master" not in self.shelf.homes or self.master_dtype != self.dtype:
            self.shelf.home("weights", self.dtype).tensor.copy_(values)

    @torch.no_grad()
    def enable_training(self) -> None:
        """Make the master weights (again a no-op when they exist); called late when frozen parameters are unfrozen."""
        if self.trains:
            return
        lo, hi = self.own
        if self.aliased:
            self._master = self.flat[lo:hi]
        elif self._home is not None and self._home.dtype == self.master_dtype and not self.shelf.moves_optim:
            self._master, self._home = self._home, None
        else:
            self._keep(self.home if self.separate or self.sharding.params else self.flat[lo:hi], train=True)
            self._home = None
            self.tidy()  # a frozen one may never be stepped

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
        return not self.sharding.params and self.master_dtype == self.dtype and not self.shelf.moves_optim

    @property
    def trains(self) -> bool:
        """Whether there are master weights."""
        return self._master is not None or "master" in self.shelf.homes

    @property
    def master(self) -> Tensor | None:
        """What the optimizer updates (1D, elements [own)). Read from its file if it rests there."""
        home = self.shelf.homes.get("master")
        return home.bring() if home is not None else self._master

    @property
    def master_rows(self) -> Tensor:
        """``master`` as it lies, whether or not its values are there."""
        home = self.shelf.homes.get("master")
        rows = home.tensor if home is not None else self._master
        assert rows is not None
        return rows

    @property
    def home(self) -> Tensor:
        return self._brought(write=True)

    def _brought(self, write: bool) -> Tensor:
        """``home``; without ``write`` nothing has to be written back."""
        if self._master is not None:
            return self._master
        home = self.shelf.homes.get("master") or self.shelf.homes.get("weights")
        if home is not None:
            return home.bring(write)
        assert self._home is not None
        return self._home

    def values(self) -> Tensor:
        """``home``, for reading only."""
        return self._brought(write=False)

    @property
    def source(self) -> Tensor | FileHome:
        """What a gather reads. See Note [States in files]."""
        if self._weights is not None:
            return self._weights
        homes = self.shelf.homes
        return homes.get("weights") or homes.get("master") or self.home

    @property
    def weights_nbytes(self) -> int:
        """Bytes of what gathers read, if that is a tensor of its own."""
        return self._weights.nbytes if self._weights is not None else 0

    def refresh(self) -> None:
        """Bring the copy that gathers read up to date with the master weights, which are in memory."""
        target = self.copy_target()
        if "weights" in self.shelf.homes and self.sharding.params and self.trains:
            self.shelf.homes["weights"].hold().copy_(self.master_rows)
        elif target is not None and not self.written:
            target.copy_(self.master_rows)
        self.written = True

    def copy_target(self) -> Tensor | None:
        """Where the compute copy of this rank's weights stays in memory, if it does."""
        if not self.sharding.params:
            return self.flat[self.own[0] : self.own[1]] if self.separate else None
        return self._weights

    def tidy(self) -> None:
        """Put what rests in files away."""
        tidy(list(self.shelf.homes.values()))

    # ---- residency ---------------------------------------------------------------------------------------------

    def launch_gather(self) -> None:
        """RELEASED -> GATHERING: allocate the flat storage and start filling it."""
        assert self.state is State.RELEASED, (self.name, self.state)
        with torch.inference_mode(False), torch.no_grad():
            assert self._storage is not None
            self._storage.allocate()
            source = self.source
            if isinstance(source, FileHome):
                source.prefetch()
            else:
                self.flat[self.own[0] : self.own[1]].copy_(source)
                self._pending = self.comm.all_gather(self.flat, self.name, source)
        self.state = State.GATHERING

    def gather(self) -> None:
        """To RESIDENT from any state: parameters are readable afterwards."""
        if self.state is State.RELEASED:
            self.launch_gather()
        if self.state is State.GATHERING:
            with torch.inference_mode(False), torch.no_grad():
                self._land()
                for parameter, view in zip(self.params, self.views, strict=True):
                    unguard(parameter)
                    parameter.data = view
            self.state = State.RESIDENT
            self.edits.note()

    def _land(self) -> None:
        """Wait for a gather that was launched."""
        source = self.source
        if self._pending is None:
            assert isinstance(source, FileHome)
            self.flat[self.own[0] : self.own[1]].copy_(source.bring(write=False))
            tidy([source])
            self._pending = self.comm.all_gather(self.flat, self.name)
        self._pending.wait()
        self._pending = None

    def release(self) -> None:
        """To RELEASED, if the parameters are sharded: give the memory back, leave sentinels."""
        if not self.sharding.params or self.state is State.RELEASED:
            return
        if self.state is State.GATHERING:
            self._land()  # freeing memory that is being written into corrupts whoever gets it next
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
        numel = self.own[1] - self.own[0]
        if not self.accumulated and self.shelf.optim is None:
            host = self.shelf.host_optim
            make = self.shelf.host_empty if host else partial(flat_empty, device=send.device)
            self.grad = make(numel, self.grad_dtype)
        elif not self.accumulated:
            self.shelf.home("grad", self.grad_dtype).hold()
            self.accumulated = True
        self.settle_factor()
        add, out = bool(self.valid), self.grad
        assert out is not None
        self.valid.update(i for i, p in enumerate(self.params) if p.requires_grad)
        collective = self.comm.all_reduce if self.own == (0, self.layout.numel) else self.comm.reduce_scatter
        if not self.shelf.host_optim:
            return collective(out, send, scratch, add, self.name)
        landing = flat_empty(numel, out.dtype, send.device)
        pending = collective(landing, send, scratch, False, self.name)
        return After(pending, lambda: out.add_(landing.to(out.device)) if add else out.copy_(landing))

    @property
    def grad(self) -> Tensor | None:
        """The accumulator (1D, elements [own)). Read from its file if it rests there."""
        if not self.accumulated or self._grad is not None:
            return self._grad
        return self.shelf.homes["grad"].bring()

    @grad.setter
    def grad(self, value: Tensor | None) -> None:
        if self.rests_grad:
            self.shelf.homes["grad"].discard()
        self._grad, self.accumulated = value, value is not None

    def read_grad(self) -> Tensor:
        """``grad``, which is there, for reading only."""
        return self._grad if self._grad is not None else self.shelf.homes["grad"].bring(write=False)

    @property
    def rests_grad(self) -> bool:
        """Whether there is an accumulator that rests in a file."""
        return self.accumulated and self._grad is None

    def put_grad_away(self) -> None:
        """Start writing an accumulator that rests in a file; ``stow_grad`` ends it."""
        if self.rests_grad:
            self.shelf.homes["grad"].put_away()

    def stow_grad(self) -> None:
        """Have no memory for an accumulator that rests in a file."""
        if self.rests_grad:
            tidy([self.shelf.homes["grad"]])

    @property
    def grad_nbytes(self) -> int:
        """Bytes of memory of the accumulator."""
        home = self.shelf.homes.get("grad")
        if self._grad is None and home is not None:
            return home.nbytes if home.takes_memory else 0
        return self._grad.nbytes if self._grad is not None else 0

    @torch.no_grad()
    def clear_grads(self, indices: set[int]) -> None:
        """Forget the accumulated gradients of the given parameters."""
        self.valid -= indices
        self.used -= indices
        if not self.valid and not self.used:
            self.local, self.grad, self.factor = None, None, None  # the next reduction starts from zero
            return
        for index in indices:
            span = self.layout.spans[index]
            if self.local is not None:
                self.local[span.lo : span.hi].zero_()
        for piece in self.pieces():
            if self.accumulated and piece.index in indices:
                self.grad_of(piece).zero_()
        self.stow_grad()

    # ---- values ------------------------------------------------------------------------------------------------

    def pieces(self) -> tuple[Piece, ...]:
        """What this rank's master and accumulator hold of each parameter."""
        return self._pieces

    def pieces_of(self, index: int) -> list[Piece]:
        """What this rank holds of parameter ``index``: nothing or one piece."""
        return [p for p in self._pieces if p.index == index]

    def grad_of(self, piece: Piece, write: bool = True) -> Tensor:
        """The accumulated gradient (1D) of one of this rank's pieces; without ``write`` for reading only."""
        self.settle_factor()
        grad = self.grad if write else self.read_grad()
        assert grad is not None
        return grad[piece.offset : piece.offset + piece.numel]

    def defer(self, factor: Tensor) -> None:
        """Multiply the accumulated gradients by ``factor`` (0D fp32) when somebody needs them."""
        self.factor = factor if self.factor is None else self.factor * factor

    @torch.no_grad()
    def settle_factor(self) -> None:
        """Multiply by what was deferred."""
        factor, self.factor = self.factor, None
        if factor is not None and self.accumulated:
            self.widen_fp16()
            grad = self.grad
            assert grad is not None
            grad.mul_(factor.to(grad.device))

    def widen_fp16(self) -> None:
        """Before unscaling: an fp16 accumulator goes on in fp32, as without the scale small gradients would vanish."""
        if self.accumulated and self.grad_dtype == torch.float16:
            grad = self.grad
            assert grad is not None
            self.grad = grad.float()

    @property
    def staged(self) -> bool:
        """Whether the optimizer steps copies in another dtype. See optimizer.py, Note [Staged buckets]."""
        return not self.step_dtype == self.master_dtype == self.grad_dtype

    @torch.no_grad()
    def write_back(self) -> None:
        """Put the updated master weights into the compute copy; a gathered copy of sharded parameters is dropped."""
        if self.sharding.params:
            self.release()
        copied = self.shelf.host_optim or not self.sharding.params
        # What rests in files was refreshed bucket by bucket.
        if self.trains and not self.aliased and copied and self.shelf.optim is None:
            self.refresh()
            self.tidy()
        self.written = False

    @torch.no_grad()
    def launch_publish(self) -> Pending | None:
        """Start bringing the other ranks' updates into the compute copy; ``write_back`` of all buckets came before."""
        if not self.trains or self.sharding.params or not self.sharding.optim:
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
        if self.shelf.homes or self.shelf.host_optim:
            self._refresh_all()
        self.comm.after_write()

    def _refresh_all(self) -> None:
        """The home was changed by hand."""
        if self.trains and self.shelf.moves_optim and self.sharding.params:
            self.written = False
            self.refresh()
            self.written = False
        self.tidy()

    def home_or_flat(self) -> Tensor:
        if self.trains or self._home is not None or self.shelf.homes:
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
        return not self.aliased and (self.trains or self._home is not None or bool(self.shelf.homes))

    @torch.no_grad()
    def keep_edits(self) -> None:
        """Take over what was changed in this rank's part of the (resident) compute copy."""
        if self.separate:
            home = self.home
            shown = self.flat[self.own[0] : self.own[1]].to(home.device)
            # Only what was edited: the master is more precise than the copy that was shown.
            edited = home.to(self.dtype) != shown
            home[edited] = shown[edited].to(home.dtype)
            if self.shelf.homes:
                self._refresh_all()


def weak_owner(owner: Owner) -> Callable[[], Owner | None]:
    """A reference that lets the engine be collected while parameters still point to it."""
    return weakref.ref(owner)
