"""The memory of activations: forward and backward of a module run on tensors without values, and storages are counted.

Note [What is counted]
    Operations run on tensors that have a shape, a dtype and a device, but no memory. Every storage that one makes
    counts until nothing refers to it, so what autograd saves is in, and so are temporary tensors between operations.
    Weights, buffers and batches exist before, and gradients of parameters are model states, which ``estimate`` counts;
    these are left out. torch chooses operations as on a CPU; what an operation allocates inside of itself is not seen.
    Code that asks for a value gets 0.
"""

from __future__ import annotations

import copy
import inspect
import weakref
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from itertools import accumulate, chain
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks
from torch.nn import Parameter
from torch.nn import functional as F

from lt_zero.common.compat import announce_device, in_running_backward
from lt_zero.common.compat.of_dispatch import DispatchMode, without_values
from lt_zero.common.tensor_tree import iter_tensors, map_tensors
from lt_zero.config import ZeroConfig
from lt_zero.config.precision import dtype_policy, resolve_mode
from lt_zero.core.engine.dtypes import DtypePolicy
from lt_zero.core.engine.find_units import find_repeated
from lt_zero.core.engine.fp32_hooks import install_fp32_modules
from lt_zero.core.engine.fp32_modules import Fp32Modules
from lt_zero.core.engine.partition import fp32_modules_of
from lt_zero.features import is_installed, require

Step = Callable[[Any, Any], Tensor]  # of a model and a batch; the loss

_ASIDE = torch.device("meta")  # stands for host memory and files: no operation computes there


@dataclass(frozen=True)
class ActivationForecast:
    """Bytes of activations of one micro-batch on one rank.

    Attributes:
        kept: by forward for backward, when the last of the repeated blocks has run.
        loss: at most in addition, from there to the first of their backwards: logits and loss.
        block: at most in addition, at any other time: inside of a block.
        aside: saved inputs in host memory or in files, at most.
    """

    kept: int
    loss: int
    block: int
    aside: int

    @property
    def most(self) -> int:
        """Bytes on the device at most."""
        return self.kept + max(self.loss, self.block)


def estimate_activations(
    model: nn.Module,
    batch: Any,
    config: ZeroConfig | dict[str, Any] | None = None,
    *,
    step: Step | None = None,
    precision: str | None = None,
) -> ActivationForecast:
    """The activations of a step of ``model``. Allocates nothing, computes nothing, and leaves the model as it is.

    Args:
        model: a module on any device, also "meta". Its blocks are recomputed as ``config`` says.
        batch: tensors, also of the device "meta", in any containers: what ``step`` gets.
        config: as for ``ZeroStrategy``; the precision, ``activation_checkpointing`` and ``long_sequences``
            count.
        step: called with the model and the batch; returns the loss. Default: ``training_step`` of a LightningModule,
            the loss that a model of transformers returns for token ids, or the cross-entropy of any other model's
            output.
        precision: as for ``Trainer``; default: that of the config, or "32-true".

    Raises:
        ConfigError: the config does not fit the model.
        ValueError: precision and config contradict each other.
    """
    config = ZeroConfig.of(config)
    policy = dtype_policy(config, resolve_mode(config, precision or "32-true"))
    with without_values(), torch.enable_grad(), ExitStack() as stack:
        copied = _copy(model, policy, fp32_modules_of(model, policy), stack)
        values = map_tensors(batch, _empty_like)
        ledger = Ledger()
        _tile(copied, config, stack)
        if policy.autocast and policy.compute is not None:
            stack.enter_context(torch.autocast("cpu", policy.compute, cache_enabled=False))
        if config.activation_checkpointing.mode != "none":
            _recompute(copied, config, partial(step or default_step, copied, values), stack)
        ledger.leave_out(chain(copied.parameters(), copied.buffers(), iter_tensors(values)))
        _watch(copied, ledger)
        stack.enter_context(ledger)
        loss = (step or default_step)(copied, values)
        loss.backward()
    return ledger.forecast()


# ---- storages ------------------------------------------------------------------------------------------------------


class Ledger(DispatchMode):
    """Writes down when operations make storages, when nothing refers to them any more, and moments between.

    Attributes:
        ends: the number of changes before the last block of forward had run, and when its backward began.
    """

    def __init__(self) -> None:
        super().__init__()
        self._changes: list[tuple[int, bool, int]] = []  # number of a storage, whether it is aside, bytes
        self._numbers: weakref.WeakKeyDictionary[torch.UntypedStorage, int] = weakref.WeakKeyDictionary()
        self._left_out = {-1}
        self.ends: list[int | None] = [None, None]

    def run(self, op: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        if op is torch.ops.aten._local_scalar_dense.default:  # of ``item()``, ``int()``, ``if``
            return 0.0 if args[0].is_floating_point() else args[0].dtype != torch.bool and 0
        result = op(*args, **kwargs)
        for tensor in iter_tensors(result):
            storage = tensor.untyped_storage()
            if storage not in self._numbers:
                number = len(self._changes)
                is_aside = tensor.device == _ASIDE
                nbytes = storage.nbytes()
                self._numbers[storage] = number
                self._changes.append((number, is_aside, nbytes))
                weakref.finalize(storage, self._changes.append, (number, is_aside, -nbytes)).atexit = False
        return result

    def leave_out(self, tensors: Iterable[Tensor]) -> None:
        """Count none of the storages of ``tensors``, neither before nor later."""
        for tensor in tensors:
            self._left_out.add(self._numbers.setdefault(tensor.untyped_storage(), -1))

    @property
    def now(self) -> int:
        """The number of changes so far."""
        return len(self._changes)

    def forecast(self) -> ActivationForecast:
        """Sum up the storages at each moment."""
        counted = [(0 if number in self._left_out else nbytes, aside) for number, aside, nbytes in self._changes]
        device = list(accumulate((0 if aside else nbytes for nbytes, aside in counted), initial=0))
        others = accumulate((nbytes if aside else 0 for nbytes, aside in counted), initial=0)
        end = len(device) - 1
        last, begins = (end if moment is None else moment for moment in self.ends)
        kept = device[last]
        rest = max(*device[: last + 1], *device[begins:])
        return ActivationForecast(kept, max(device[last : begins + 1]) - kept, max(0, rest - kept), max(others))


class _Aside:
    """Stands for the store of saved inputs: they leave the device, and come back when a block is recomputed."""

    @contextmanager
    def saving(self, name: str, tensors: Any) -> Iterator[None]:
        def bring(saved: Tensor) -> Tensor:
            return torch.empty_like(saved, device="cpu")

        with saved_tensors_hooks(lambda tensor: tensor.to(_ASIDE), bring):
            yield


# ---- features ------------------------------------------------------------------------------------------------------


def _tile(model: nn.Module, config: ZeroConfig, stack: ExitStack) -> None:
    """Compute in tiles what the configuration says, until ``stack`` is closed. What is in tiles already is not checked.

    Raises:
        ConfigError: the model does not fit.
    """
    if not is_installed("tiles"):
        return
    from lt_zero.features.tiles.huggingface import install
    from lt_zero.features.tiles.tokens import TokenTiles

    if config.long_sequences.tiles:
        stack.callback(install(model, config.long_sequences, rank=-1).remove)
    for module in model.modules():
        if isinstance(module, TokenTiles):
            module.checked = True  # the check compares values


def _recompute(model: nn.Module, config: ZeroConfig, run: Callable[[], Tensor], stack: ExitStack) -> None:
    """Recompute modules as the configuration says, until ``stack`` is closed.

    Args:
        run: returns the loss of ``model``. Called if a memory budget chooses which modules are recomputed.

    Raises:
        ConfigError: there is nothing to recompute, or activation checkpointing is not installed.
    """
    require("activation_checkpointing.mode")
    from lt_zero.features.activation_checkpointing.budget import plan_budget
    from lt_zero.features.activation_checkpointing.checkpointing import Checkpointing, open_meter

    block = config.activation_checkpointing
    aside = _Aside() if block.cpu_checkpointing or block.nvme_path is not None else None
    meter = open_meter(model, block, torch.device("cpu"))
    recomputed = Checkpointing(model, block, aside, warns=False, meter=meter)
    stack.callback(recomputed.remove)
    if meter is not None and block.memory_budget is not None:
        run().backward()
        # Without times, bytes stand for them.
        costs = [replace(cost, nanoseconds=cost.inner) for cost in meter.costs()]
        recomputed.follow(plan_budget(costs, block.memory_budget, aside is not None).recomputed)
        model.zero_grad()


# ---- the model -----------------------------------------------------------------------------------------------------


def _empty_like(tensor: Tensor) -> Tensor:
    return torch.empty_like(tensor, device="cpu", requires_grad=False)


def _copy(model: nn.Module, policy: DtypePolicy, fp32: Fp32Modules, stack: ExitStack) -> nn.Module:
    """A copy of ``model`` in training whose tensors have no values, in the dtypes of a run."""
    made: dict[int, Any] = {}
    for parameter in model.parameters():
        dtype = policy.dtype_of(parameter, parameter in fp32.parameters)
        made[id(parameter)] = Parameter(_empty_like(parameter).to(dtype), parameter.requires_grad)
    made |= {id(buffer): _empty_like(buffer) for buffer in model.buffers()}
    inside = {name for name, _ in fp32.modules}
    copied = copy.deepcopy(model, made).train()
    announce_device(copied, torch.device("cpu"))
    if inside and policy.compute is not None:
        modules = tuple((name, copied.get_submodule(name)) for name in inside)
        handles = install_fp32_modules(
            Fp32Modules(modules, frozenset()), policy.compute, "cpu", cast_back=not policy.autocast
        )
        for handle in handles:
            stack.callback(handle.remove)
    return copied


def _watch(model: nn.Module, ledger: Ledger) -> None:
    """Let ``ledger`` leave out gradients of parameters, and know when the blocks of ``model`` end and begin."""

    def take(parameter: Tensor) -> None:
        assert parameter.grad is not None
        ledger.leave_out([parameter.grad])
        parameter.grad = None

    def begins(_: Tensor) -> None:
        if ledger.ends[1] is None:
            ledger.ends[1] = ledger.now

    def ran(_: nn.Module, __: Any, output: Any) -> None:
        if in_running_backward():
            return
        ledger.ends[0] = ledger.now
        for tensor in iter_tensors(output):
            if tensor.requires_grad:
                tensor.register_hook(begins)

    for parameter in model.parameters():
        if parameter.requires_grad:
            parameter.register_post_accumulate_grad_hook(take)
    for _, block in find_repeated(model):
        block.register_forward_hook(ran)


def default_step(model: Any, batch: Any) -> Tensor:
    """The loss of ``model`` for ``batch``: see ``estimate_activations``."""
    if hasattr(model, "training_step"):
        found = model.training_step(batch, 0)
        loss: Tensor = found["loss"] if isinstance(found, dict) else found
        return loss
    if not isinstance(batch, Tensor):
        raise TypeError(f"The batch is a {type(batch).__name__}, not token ids: pass step=..., which returns the loss.")
    if {"input_ids", "labels"} <= inspect.signature(model.forward).parameters.keys():
        labelled: Tensor = model(input_ids=batch, labels=batch).loss
        return labelled
    output = next(tensor for tensor in iter_tensors(model(batch)) if tensor.requires_grad)
    if output.shape[:-1] == batch.shape and not batch.is_floating_point():
        return F.cross_entropy(output.flatten(0, -2).float(), batch.flatten())
    return output.sum()
