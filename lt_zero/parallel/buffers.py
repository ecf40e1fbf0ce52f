"""Buffers of modules that ``parallelize_module`` was called on: it makes them DTensors, as the parameters.

Note [Plain buffers]
    What sends, saves and loads buffers knows plain tensors, and all ranks have the same. So they are plain, and a
    module sees DTensors, which operations with its parameters need, in its own forward only.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from torch import Tensor, nn
from torch.autograd.graph import increment_version
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate

from lt_zero.common.errors import ConfigError


class _InForward:
    """Hooks of a module that make its buffers ``names`` DTensors while it runs. A copy of the module has them, too."""

    def __init__(self, mesh: DeviceMesh, names: Sequence[str]) -> None:
        self._mesh, self._names = mesh, tuple(names)
        self._shown: dict[str, tuple[Tensor, DTensor, int]] = {}  # plain, distributed, its version

    def enter(self, module: nn.Module, inputs: Any) -> None:
        for name in self._names:
            plain = getattr(module, name)
            if plain is None or isinstance(plain, DTensor):
                continue
            shown = DTensor.from_local(plain, self._mesh, [Replicate()] * self._mesh.ndim, run_check=False)
            self._shown[name] = plain, shown, shown._version
            setattr(module, name, shown)

    def leave(self, module: nn.Module, inputs: Any, output: Any) -> None:
        for name, (plain, shown, version) in self._shown.items():
            now = getattr(module, name)
            if now is shown:
                # A write to a DTensor does not count as one to its local tensor, so the version is raised here.
                if shown._version != version:
                    increment_version(plain)
                setattr(module, name, plain)
            elif isinstance(now, DTensor):
                setattr(module, name, now.full_tensor().detach())
        self._shown.clear()


def make_plain(module: nn.Module) -> None:
    """Make buffers that are DTensors plain outside of their module's forward. See Note [Plain buffers].

    Raises:
        ConfigError: ranks have parts of one.
    """
    for place, sub in module.named_modules():
        found = {n: b for n, b in sub.named_buffers(recurse=False) if isinstance(b, DTensor)}
        for name, buffer in found.items():
            if not all(isinstance(placement, Replicate) for placement in buffer.placements):
                ranks, full = buffer.device_mesh.size(), f"{place}.{name}".lstrip(".")
                raise ConfigError.about(
                    "tensor_parallel.autotp_size",
                    f"tensor_parallel.autotp_size={ranks}: buffer {full!r} of shape {tuple(buffer.shape)} is placed as "
                    f"{buffer.placements}, and buffers are the same on all ranks. Use Replicate(), or make it a "
                    "parameter without requires_grad.",
                )
            setattr(sub, name, buffer.to_local())
        if found:
            hooks = _InForward(next(iter(found.values())).device_mesh, list(found))
            sub.register_forward_pre_hook(hooks.enter, prepend=True)
            sub.register_forward_hook(hooks.leave, always_call=True)
