"""``get_accelerator()``: the device of this process, asked by the names of DeepSpeed's methods."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lt_zero.common import accelerator


class Accelerator:
    """The kind of accelerator that torch finds, or the CPU. Memory is in bytes, and 0 on the CPU, as in torch.

    A method that is not here is that of torch's module for the device (``torch.cuda``).
    """

    def __init__(self) -> None:
        self._kind = accelerator.default_kind()
        self._name = self._kind.type
        self._module = torch.get_device_module(self._kind)

    def __getattr__(self, name: str) -> Any:
        module = self.__dict__.get("_module")
        if module is None or not hasattr(module, name):
            raise AttributeError(
                f"get_accelerator().{name}: torch's module for {self.__dict__.get('_name')} has no such name, nor has "
                "lt_zero. Use torch.accelerator, or torch itself."
            )
        return getattr(module, name)

    def _device(self, index: int | None) -> torch.device:
        return accelerator.default_device(index)

    @property
    def _is_host(self) -> bool:
        return not accelerator.is_accelerator(self._kind)

    # ---- which device ----------------------------------------------------------------------------------------------

    def is_available(self) -> bool:
        return True

    def device_name(self, device_index: int | None = None) -> str:
        """Name of the kind, or of the device ``device_index``, as torch writes it."""
        return self._name if device_index is None or self._is_host else f"{self._name}:{device_index}"

    def device(self, device_index: int | None = None) -> AbstractContextManager[object]:
        """Context in which a device is current."""
        return accelerator.on(self._device(device_index))

    def set_device(self, device_index: int) -> None:
        accelerator.make_current(self._device(device_index))

    def current_device(self) -> int:
        return self._device(None).index or 0

    def current_device_name(self) -> str:
        return str(self._device(None))

    def device_count(self) -> int:
        """The devices that this process sees; on the CPU the ranks of this host, which share it."""
        if self._is_host:
            return int(os.environ.get("LOCAL_SIZE") or os.environ.get("LOCAL_WORLD_SIZE") or 1)
        return accelerator.count()

    def synchronize(self, device_index: int | None = None) -> None:
        accelerator.synchronize(self._device(device_index))

    def communication_backend_name(self) -> str:
        """The backend of process groups: "nccl" for GPUs of NVIDIA, "gloo" for CPUs."""
        return dist.get_default_backend_for_device(self._kind)

    def is_synchronized_device(self) -> bool:
        return self._is_host

    use_host_timers = resolves_data_dependency = handles_memory_backpressure = is_synchronized_device

    def on_accelerator(self, tensor: Tensor) -> bool:
        return tensor.device.type == self._name

    # ---- random numbers --------------------------------------------------------------------------------------------

    def random(self) -> Any:
        return torch.random

    def manual_seed(self, seed: int) -> Any:
        return torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def initial_seed(self) -> int:
        return torch.initial_seed()

    def get_rng_state(self, device_index: int | None = None) -> Tensor:
        state = accelerator.random_state()
        return torch.get_rng_state() if state is None else state

    def set_rng_state(self, new_state: Tensor, device_index: int | None = None) -> None:
        torch.set_rng_state(new_state) if self._is_host else accelerator.set_random_state(new_state)

    def default_generator(self, device_index: int = 0) -> torch.Generator:
        return next(iter(accelerator.generators(self._device(device_index))), torch.default_generator)

    # ---- streams ---------------------------------------------------------------------------------------------------

    @property
    def Stream(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return None if self._is_host else torch.Stream

    @property
    def Event(self) -> Any:  # noqa: N802 - DeepSpeed's name
        return None if self._is_host else self._module.Event

    def stream(self, stream: Any) -> AbstractContextManager[object]:
        return nullcontext() if stream is None else accelerator.use(stream)

    def current_stream(self, device_index: int | None = None) -> Any:
        return None if self._is_host else accelerator.current_stream(self._device(device_index))

    # ---- memory ----------------------------------------------------------------------------------------------------

    def _bytes(self, ask: Callable[[torch.device], int], index: int | None) -> int:
        return 0 if self._is_host else ask(self._device(index))

    def empty_cache(self) -> None:
        if not self._is_host:
            torch.accelerator.empty_cache()

    def memory_allocated(self, device_index: int | None = None) -> int:
        return self._bytes(accelerator.allocated, device_index)

    def max_memory_allocated(self, device_index: int | None = None) -> int:
        return self._bytes(accelerator.peak_allocated, device_index)

    def memory_reserved(self, device_index: int | None = None) -> int:
        return self._bytes(accelerator.reserved, device_index)

    def max_memory_reserved(self, device_index: int | None = None) -> int:
        return self._bytes(accelerator.peak_reserved, device_index)

    memory_cached, max_memory_cached = memory_reserved, max_memory_reserved

    def reset_peak_memory_stats(self, device_index: int | None = None) -> None:
        if not self._is_host:
            accelerator.reset_peak(self._device(device_index))

    reset_max_memory_allocated = reset_max_memory_cached = reset_peak_memory_stats

    def memory_stats(self, device_index: int | None = None) -> dict[str, Any]:
        return {} if self._is_host else dict(torch.accelerator.memory_stats(self._device(device_index)))

    def total_memory(self, device_index: int | None = None) -> int:
        """Bytes of the device; of the host's memory on the CPU."""
        if self._is_host:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
        return accelerator.free_and_total(self._device(device_index))[1]

    def available_memory(self, device_index: int | None = None) -> int:
        """Free bytes of the device; of the host's memory on the CPU."""
        if self._is_host:
            return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
        return accelerator.free_and_total(self._device(device_index))[0]

    def pin_memory(self, tensor: Tensor, align_bytes: int = 1, make_copy: bool = True) -> Tensor:
        return tensor if self._is_host else tensor.pin_memory()

    def is_pinned(self, tensor: Tensor) -> bool:
        return not self._is_host and tensor.is_pinned()

    # ---- what it can -----------------------------------------------------------------------------------------------

    def is_bf16_supported(self) -> bool:
        return self._is_host or bool(getattr(self._module, "is_bf16_supported", lambda: True)())

    def is_fp16_supported(self) -> bool:
        """True: tensors in fp16 can be computed with; CPUs are slow at it."""
        return True

    def supported_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.float16, *([torch.bfloat16] if self.is_bf16_supported() else [])]

    def is_triton_supported(self) -> bool:
        return self._name == "cuda"

    def range_push(self, msg: str, *args: Any, **kwargs: Any) -> None:
        """Begin a range in profiles, where the device has them."""
        if (nvtx := getattr(self._module, "nvtx", None)) is not None:
            nvtx.range_push(msg)

    def range_pop(self, *args: Any, **kwargs: Any) -> None:
        if (nvtx := getattr(self._module, "nvtx", None)) is not None:
            nvtx.range_pop()

    def lazy_call(self, callback: Callable[[], Any]) -> Any:
        return callback()

    def get_compile_backend(self) -> str:
        return "inductor"

    # ---- classes of tensors ----------------------------------------------------------------------------------------

    def _tensors(self, dtype: torch.dtype) -> Callable[..., Tensor]:
        return functools.partial(torch.tensor, dtype=dtype, device=self._device(None))

    @property
    def FloatTensor(self) -> Callable[..., Tensor]:  # noqa: N802 - DeepSpeed's name
        return self._tensors(torch.float32)

    @property
    def HalfTensor(self) -> Callable[..., Tensor]:  # noqa: N802
        return self._tensors(torch.float16)

    @property
    def BFloat16Tensor(self) -> Callable[..., Tensor]:  # noqa: N802
        return self._tensors(torch.bfloat16)

    @property
    def LongTensor(self) -> Callable[..., Tensor]:  # noqa: N802
        return self._tensors(torch.int64)

    @property
    def IntTensor(self) -> Callable[..., Tensor]:  # noqa: N802
        return self._tensors(torch.int32)

    @property
    def ByteTensor(self) -> Callable[..., Tensor]:  # noqa: N802
        return self._tensors(torch.uint8)


@functools.cache
def get_accelerator() -> Accelerator:
    """The accelerator of this process."""
    return Accelerator()


def is_current_accelerator_supported() -> bool:
    """True: whatever torch supports can be used."""
    return True
