"""The values of sharded parameters outside of their unit's forward: ``gathered``, functions that are called on guarded
parameters, and whether the model still has its parameters.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.common.arguments import expect, wrong
from lt_zero.common.compat import can_assign_data, in_transform, versions_of, without_torch_function
from lt_zero.core.engine.absent_tensor import AbsentTensor
from lt_zero.core.engine.bucket import Bucket
from lt_zero.core.engine.engine import Engine
from lt_zero.core.engine.full_values import full_flat
from lt_zero.core.engine.guard import HANDS_OUT, VIEWS, called, describe, owner_of
from lt_zero.core.engine.loading import read_into
from lt_zero.core.engine.materialize import Builder


def described(tensor: Tensor) -> tuple[torch.Size, torch.dtype, torch.device]:
    return tensor.shape, tensor.dtype, tensor.device


def _parameters_of(target: Any) -> list[Parameter]:
    """List the parameters that a user passed to ``gathered``.

    Raises:
        TypeError: it is something else.
    """
    remedy = "pass a module, a parameter of it, or several"
    if isinstance(target, Parameter):
        return [target]
    if not isinstance(target, (nn.Module, Iterable)) or isinstance(target, (str, Mapping)):
        raise wrong("The target of lt_zero.gathered", target, remedy)
    found = list(target.parameters() if isinstance(target, nn.Module) else target)
    for item in found:
        expect(item, Tensor, "A target of lt_zero.gathered", remedy)
    return found


@contextmanager
def gathered(target: nn.Module | Parameter | Iterable[Parameter], write: bool = False) -> Iterator[None]:
    """Make the full values of parameters readable inside the context, at every stage. Collective: enter on all ranks.

    Args:
        target: a parameter, several, or a module (all of its parameters).
        write: keep changes made inside. The values of rank 0 win (of a tensor in parts, those of the first rank that
            has the part); master weights and compute copies of all ranks follow. Without it, changes of sharded
            parameters are an error.

    Parameters that no engine owns are left as they are, so the code also runs without ZeRO. Those that were built in
    ``lt_zero.Init`` may be an engine's or not yet.

    Raises:
        RuntimeError: on all ranks, if some do not enter and something is to be gathered or written; at the end, if
            parameters without an engine were changed without ``write``, or only some parts of a tensor were changed, or
            ``p.data`` was assigned a tensor of another shape, dtype or device.
    """
    found: dict[Bucket, Engine] = {}
    held: dict[Bucket, bool] = {}  # -> whether it was gathered; a bucket in use outside of this context is not held
    built: dict[Builder, list[Parameter]] = {}
    for parameter in _parameters_of(target):
        engine: Any = owner_of(parameter)
        if isinstance(engine, Builder):
            built.setdefault(engine, []).append(parameter)
        if engine is None or id(parameter) not in getattr(engine, "owner", {}):
            continue
        bucket = engine.owner[id(parameter)][0]
        bucket.wait_background_step()
        if bucket not in found:
            found[bucket] = engine
            if not bucket.readable or not bucket.exact or engine.gatherer.is_only_pinned(bucket):
                held[bucket] = bucket.resident
    if held and in_transform():
        raise RuntimeError(
            "lt_zero.gathered was entered inside of a transform of torch.func (grad, vmap, jvp, jacrev, ...), where "
            "nothing can be gathered. Enter it around the call of the transform."
        )
    sets = [bucket.holders(0) for bucket in found if write or bucket.released]
    # In one order on all ranks: some are in several of these sets.
    for ranks in sorted({each.ranks: each for each in sets}.values(), key=attrgetter("ranks")):
        ranks.roll_call("lt_zero.gathered")
    for bucket in held:
        found[bucket].gatherer.hold(bucket)
    for bucket in found if write else ():
        bucket.edits.expect_adoption(True)
    before = [(engine, bucket, _versions(bucket)) for bucket, engine in found.items() if write and _has_parts(bucket)]
    try:
        with ExitStack() as stack:
            for builder, parameters in built.items():
                stack.enter_context(builder.gathered(parameters, write))
            yield
        if write:
            _put_back_assigned(found)
            _check_changed(before)
            for bucket in found:
                bucket.adopt_edits()
    except BaseException:
        for bucket in found:
            # Forget the edits, or a lost edit would be reported instead of this error.
            bucket.edits.drop_assigned()
            bucket.edits.note()
        raise
    finally:
        for bucket in found:
            bucket.edits.expect_adoption(False)
        for bucket, keep in held.items():
            found[bucket].gatherer.let_go(bucket, keep)


def _put_back_assigned(buckets: Iterable[Bucket]) -> None:
    """Copy tensors that were assigned to ``p.data`` to the memory of their buckets, which would not follow them.

    Raises:
        RuntimeError: one has another shape, dtype or device than the parameter.
    """
    for bucket in buckets:
        for index in bucket.edits.assigned():
            value = bucket.params[index].data
            view = bucket.compute.views[index]
            if described(value) != described(view):
                raise RuntimeError(
                    f"`.data` of {bucket.layout.spans[index].name!r} was assigned a tensor of {tuple(value.shape)}, "
                    f"{value.dtype}, {value.device} inside lt_zero.gathered(write=True), and the parameter has "
                    f"{tuple(view.shape)}, {view.dtype}, {view.device}. Copy the values: `p.data.copy_(tensor)`."
                )
        bucket.edits.put_back()


def _has_parts(bucket: Bucket) -> bool:
    return not all(span.spec.is_whole for span in bucket.layout.spans)


def _versions(bucket: Bucket) -> list[int]:
    """Version counters, one of which changes when a parameter, or its memory, is written to."""
    return versions_of([*bucket.params, bucket.compute.flat])


def _check_changed(before: list[tuple[Engine, Bucket, list[int]]]) -> None:
    """Check that each part of a tensor was changed, or none. Collective, unless ``before`` is empty.

    Raises:
        RuntimeError: on all ranks, some were.
    """
    for peers in dict.fromkeys(engine.peers for engine, _, _ in before):
        mine = [_versions(bucket) != versions for engine, bucket, versions in before if engine.peers is peers]
        # The first rank of each group wins.
        first = [bucket.group.rank == 0 for engine, bucket, _ in before if engine.peers is peers]
        told = peers.host_gather(
            [changed if wins else None for changed, wins in zip(mine, first, strict=True)], "edits"
        )
        for number, column in enumerate(zip(*told, strict=True)):
            if {True, False} <= set(column):
                names = [span.name for span in before[number][1].layout.spans]
                shown = ", ".join(names[:3]) + (", ..." if len(names) > 3 else "")
                raise RuntimeError(
                    f"Inside lt_zero.gathered(write=True) some ranks changed parameters ({shown}), and others, which "
                    "have other parts of these tensors, did not. Make the same changes on all ranks."
                )


def restore_whole(engine: Engine, join: bool = False) -> None:
    """Give every rank its full parameters in their original dtypes, and remove the engine. Collective.

    ``join``: replace parameters of which ranks have parts by whole ones, which the module cannot run with.
    """
    replaced: dict[int, Parameter] = {}
    for bucket in engine.buckets:
        flat = full_flat(bucket)
        bucket.gather()
        with torch.no_grad():
            views = bucket.layout.views(flat)
            for parameter, value, dtype in zip(bucket.params, views, bucket.compute.original, strict=True):
                whole = engine.parts.join(parameter, value) if join else value
                # Copy to the CPU: a full model need not fit on a GPU.
                full = whole.to("cpu", dtype, copy=True)
                if whole is value and can_assign_data(parameter, full):
                    parameter.data = full
                else:
                    replaced[id(parameter)] = Parameter(full, parameter.requires_grad)
    engine.detach()
    for module in engine.root.modules() if replaced else ():
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            module.register_parameter(name, replaced.get(id(parameter), parameter))
    # Reading files has started threads again.
    engine.offload_manager.rest()


# ---- the model's parameters and buffers ------------------------------------------------------------------------------


def owns_all(engine: Engine) -> bool:
    """True if the model has the parameters that it had when it was sharded."""
    return {id(p) for p in engine.root.parameters()} == engine.owner.keys()


def was_converted(engine: Engine) -> bool:
    """True if a parameter of the model was cast, moved or reshaped on any rank. Collective."""
    members = {id(parameter) for parameter in engine.root.parameters()}

    def is_converted(bucket: Bucket, index: int) -> bool:
        parameter = bucket.params[index]
        return id(parameter) in members and described(parameter.data) != described(bucket.compute.views[index])

    mine = any(is_converted(bucket, index) for bucket in engine.buckets for index in bucket.edits.assigned())
    return any(engine.peers.host_gather(mine, "converted parameters"))


@torch.no_grad()
def take_over_assigned(engine: Engine) -> None:
    """Take over what was written to parameters between two runs. Collective.

    Between runs a module whose weights are all there is an ordinary one: it may be trained on by other code, or
    parameters may be assigned (``p.data = ...``, ``prune.remove``). As in DDP's construction, all ranks get the values
    of rank 0 where they differ.

    Raises:
        RuntimeError: on all ranks, with the names of parameters that were cast, moved or reshaped on one.
    """
    names = {id(parameter): name for name, parameter in engine.root.named_parameters()}
    assigned = set[int]()
    changed = list[str]()
    for number, bucket in enumerate(engine.buckets):
        bucket.wait_background_step()
        for index in bucket.edits.assigned():
            parameter = bucket.params[index]
            view = bucket.compute.views[index]
            if described(parameter.data) == described(view):
                assigned.add(number)
            elif id(parameter) in names:
                # Parameters without a name get the engine's values when the model is whole again.
                what = f"{tuple(view.shape)}, {view.dtype}, {view.device}"
                changed.append(f"{names[id(parameter)]!r} (it was {what})")
    told = engine.peers.host_gather((assigned, changed), "assigned parameters")
    if every := list(dict.fromkeys(name for _, some in told for name in some)):
        more = f" and {len(every) - 5} more" if len(every) > 5 else ""
        raise RuntimeError(
            f"Parameter {', '.join(every[:5])}{more} was cast, moved or reshaped after the model was sharded. Do this "
            "before training starts, or make a new model, with weights that `trainer.strategy.export(path)` has "
            "written; to change values, copy them inside `lt_zero.gathered(parameter, write=True)`."
        )
    differ = engine.find_changed_apart(incomplete=True)
    given = set[int]().union(*(some for some, _ in told))
    for number, bucket in enumerate(engine.buckets):
        if number in given or bucket in differ:
            bucket.edits.put_back()
            bucket.adopt_edits()
        elif not bucket.sharding.params:
            bucket.edits.check(values=True)


# ---- functions that are called on guarded parameters outside of their unit's forward: guard.py -----------------------


def _named(parameters: list[Tensor]) -> tuple[str, str]:
    """Texts of a message: those of ``parameters`` that are not in memory, and what ``gathered`` has to get."""
    found: dict[Engine, list[str]] = {}
    for parameter in parameters:
        engine: Any = owner_of(parameter)
        bucket, index = engine.owner[id(parameter)]
        if not bucket.resident:
            found.setdefault(engine, []).append(bucket.layout.spans[index].name)
    first, *others = [(names[0], type(engine.root).__name__) for engine, names in found.items()]
    if not others:
        return f"parameter {first[0]!r}", "parameter"
    told = [f"{first[0]!r} of {first[1]}", *(f"{name!r} of another {kind}" for name, kind in others)]
    return f"parameters {' and '.join(told)}", "[parameter, ...]"


def use_outside(engine: Engine, parameters: list[Tensor], func: Callable[..., Any], args: Any, kwargs: Any) -> Any:
    """Call a function that needs the values of guarded ``parameters``, of which ``engine`` owns the first.

    Where values can be had, they are made readable, and the function is called again: the parameters that are still
    guarded then are those of others.

    Raises:
        RuntimeError: outside of forward and backward the values of a released parameter cannot be read.
    """
    used: dict[Bucket, Engine] = {}
    for parameter in parameters:
        owner: Any = owner_of(parameter)
        if not isinstance(owner, Engine):
            # A model that is being built gathers its own parameters, and calls the function again.
            return owner.on_guarded_use(parameters, func, args, kwargs)
        used[owner.owner[id(parameter)][0]] = owner
    # A list, so that each engine is asked.
    if any([each.finish_steps() for each in dict.fromkeys(used.values())]):
        return func(*args, **kwargs)
    bucket, index = engine.owner[id(parameters[0])]
    if in_transform():
        raise RuntimeError(
            f"The values of parameter {bucket.layout.spans[index].name!r} are read inside of a transform of torch.func "
            f"(grad, vmap, jvp, jacrev, ...). They are sharded over {engine.world.size} ranks and cannot be gathered "
            "there: wrap the whole call in `with lt_zero.gathered(parameter):` on every rank."
        )
    if getattr(func, "__name__", "") == "copy_" and args[0] is parameters[0] and len(parameters) == 1:
        value = args[1] if isinstance(args[1], Tensor) else read_into(args[1], bucket, index)
        with without_torch_function():
            shape = parameters[0].shape
            rounded = engine.is_rounded(bucket, value)
            value = engine.parts.cut(bucket.params[index], value if value.shape == shape else value.expand(shape))
            bucket.write(index, value, rounded)
        return args[0]
    resident = all(bucket.resident for bucket in used)
    if not resident and func is Tensor.__repr__:
        return describe(args[0])
    if not resident and func is Tensor.__format__ and args[0].dim() > 0:
        return repr(args[0])
    if any(each.running for each in used.values()):
        for pinned, each in used.items():
            if each.running:
                each.gatherer.pin(pinned, again=torch.is_grad_enabled())
                pinned.edits.note_read(hands_out=func in HANDS_OUT)
        return func(*args, **kwargs)
    if resident:
        with without_torch_function():
            return func(*args, **kwargs)
    # Texts: what is made below may outlive the parameters.
    names, target = _named(parameters)
    world = engine.world.size

    def refuse(function: str) -> RuntimeError:
        return RuntimeError(
            f"The values of {names} are sharded over {world} ranks and not in memory here "
            f"(`{function}` needs them). Wrap the code in `with lt_zero.gathered({target}):` on "
            "every rank (`write=True` to change values); to save weights use `trainer.save_checkpoint`, "
            "`trainer.strategy.export(path)` or `trainer.strategy.full_state_dict()`."
        )

    def refuse_saved(function: str) -> RuntimeError:
        return RuntimeError(
            f"The values of {names} are sharded over {world} ranks, and `state_dict()` has names, "
            f"shapes and dtypes only (`{function}` needs values). Take the values from "
            "`trainer.strategy.full_state_dict()` (called on every rank, full on rank 0), or call `state_dict()` "
            "inside of `with lt_zero.gathered(module):` on every rank; to save weights use `trainer.save_checkpoint` "
            "or `trainer.strategy.export(path)`."
        )

    if func in VIEWS and args[0] is parameters[0]:
        # ``state_dict()`` calls ``detach``, and puts the result into the state dict.
        refuses = refuse_saved if func is Tensor.detach else refuse
        with without_torch_function():
            me = parameters[0]
            shape = tuple(me.shape)
            dtype = me.dtype
            device = me.device
            needs_grad = me.requires_grad and func not in HANDS_OUT
        absent = AbsentTensor(shape, dtype, refuses, device, needs_grad=needs_grad)
        return absent if func in HANDS_OUT else func(absent, *args[1:], **kwargs)
    # Lightning's finetuning callbacks search an optimizer's parameters with ``torch.equal``.
    if func is torch.equal:
        one, other = args
        if one is other or one.shape != other.shape:
            return one is other
        with gathered([p for p in args if isinstance(p, Parameter)]):
            return torch.equal(one, other)
    raise refuse(called(func))
