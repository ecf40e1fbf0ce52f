"""The device on which a model runs, of whatever kind: streams, events, memory, pinning, random states.

All questions about a device are asked here, so that no other file names a kind of accelerator, and so that tests can
answer them: a CPU runs the code for streams then, with each access checked for its order. Kernels are the exception:
they are built for CUDA and loaded by kernels/.

Note [Streams and events of one kind]
    torch has streams and events for any accelerator (torch.Stream, torch.Event), and others for CUDA
    (torch.cuda.Stream, torch.cuda.Event). The two kinds must not be mixed: a torch.Stream does not wait for a
    torch.cuda.Event, and raises no error. So on CUDA this module makes torch.cuda's only, whose events can also let a
    host thread sleep. Elsewhere it makes the general ones only.
"""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any, cast

import torch
from torch import Tensor

_HOST = ("cpu", "meta")  # kinds of devices that are no accelerator
_apart = False  # set by tests: treat the CPU as a device with memory of its own


# ---- which device ------------------------------------------------------------------------------------------------


def is_accelerator(device: torch.device) -> bool:
    """True if ``device`` is not the host."""
    return device.type not in _HOST


def is_apart(device: torch.device) -> bool:
    """True if ``device`` has memory of its own."""
    return device.type != "cpu" or _apart


def holds(tensor: Tensor) -> bool:
    """True if ``tensor`` is in memory of an accelerator."""
    return tensor.device.type not in _HOST


def is_available() -> bool:
    """True if this process can use an accelerator."""
    return torch.accelerator.is_available()


def count() -> int:
    """Number of accelerators that this process sees."""
    return torch.accelerator.device_count() if is_available() else 0


def default_device(index: int | None = None) -> torch.device:
    """The accelerator ``index``, by default the current one; the CPU where there is none."""
    kind = torch.accelerator.current_accelerator() if is_available() else None
    if kind is None:
        return torch.device("cpu")
    return torch.device(kind.type, torch.accelerator.current_device_index() if index is None else index)


def with_index(device: torch.device) -> torch.device:
    """``device`` with an index: "cuda" becomes the calling thread's current device, which is per thread.

    A kind that torch.accelerator does not have stays as it is.
    """
    if is_accelerator(device) and device.index is None and device.type == default_kind().type:
        return torch.device(device.type, torch.accelerator.current_device_index())
    return device


def is_current(device: torch.device) -> bool:
    """True if ``device`` is the calling thread's current device, or the host."""
    return not is_accelerator(device) or device.index in (None, torch.accelerator.current_device_index())


def make_current(device: torch.device | None) -> None:
    """Make ``device`` the calling thread's current device; a no-op for the host and None."""
    if device is not None and is_accelerator(device):
        torch.accelerator.set_device_index(with_index(device))


def on(device: torch.device) -> AbstractContextManager[object]:
    """Context in which ``device`` is the calling thread's current device; a no-op for the host."""
    return torch.accelerator.device_index(with_index(device).index) if is_accelerator(device) else nullcontext()


def name(device: torch.device) -> str:
    """The name that the manufacturer gives to ``device``."""
    module = _module(device)
    return str(module.get_device_name(device)) if hasattr(module, "get_device_name") else str(device)


def properties(index: int) -> Any:
    """The properties of device ``index``: name, total_memory (bytes), major and minor of CUDA's capability, ..."""
    return _module(default_kind()).get_device_properties(index)


def nccl_version() -> str:
    """The version of NCCL, with which torch is built."""
    return ".".join(map(str, torch.cuda.nccl.version()))


# ---- streams and events ------------------------------------------------------------------------------------------


def has_streams(device: torch.device) -> bool:
    """True if work on ``device`` is queued in streams, beside the host."""
    return is_accelerator(device) and device.type != "mps"


def stream(device: torch.device) -> Any:
    """A new stream; ``use`` makes it current. See Note [Streams and events of one kind]."""
    return torch.cuda.Stream(device) if device.type == "cuda" else torch.Stream(device)


def current_stream(device: torch.device) -> Any:
    """The calling thread's current stream on ``device``."""
    return torch.cuda.current_stream(device) if device.type == "cuda" else torch.accelerator.current_stream(device)


def use(stream: Any) -> AbstractContextManager[object]:
    """Context in which ``stream`` is current."""
    made = torch.cuda.stream(stream) if stream.device.type == "cuda" else stream
    return cast("AbstractContextManager[object]", made)


def event(device: torch.device, *, timing: bool = False, blocking: bool = False) -> Any:
    """A new event, which ``record()`` puts at the end of the current stream.

    Args:
        device: its device.
        timing: ``elapsed_time`` between two such events (milliseconds) can be asked.
        blocking: a host thread that waits for it sleeps instead of spinning, where the accelerator can do so.
    """
    if device.type == "cuda":
        return torch.cuda.Event(enable_timing=timing, blocking=blocking)
    return torch.Event(device, enable_timing=timing)  # takes ``blocking`` without effect


def record(tensor: Tensor, stream: Any) -> None:
    """Keep the memory of ``tensor`` from being allocated anew until ``stream`` has done what it was given so far."""
    tensor.record_stream(stream)


def synchronize(device: torch.device | None = None) -> None:
    """Block the host until all work on ``device``, by default the current device, is done; a no-op for the host."""
    if device is None:
        if in_use():
            torch.accelerator.synchronize()
    elif is_accelerator(device):
        torch.accelerator.synchronize(with_index(device))


def in_use() -> bool:
    """True if this process has used an accelerator; asking does not initialize it."""
    if not is_available():
        return False
    module = _module(default_kind())
    return bool(module.is_initialized()) if hasattr(module, "is_initialized") else True


def default_kind() -> torch.device:
    """The kind of accelerator, without an index; the CPU where there is none. The device is not initialized."""
    kind = torch.accelerator.current_accelerator() if is_available() else None
    return torch.device("cpu") if kind is None else torch.device(kind.type)


# ---- memory ------------------------------------------------------------------------------------------------------


def allocated(device: torch.device) -> int:
    """Bytes of live tensors on ``device``."""
    return torch.accelerator.memory_allocated(with_index(device))


def peak_allocated(device: torch.device) -> int:
    """The most bytes of live tensors on ``device`` since ``reset_peak``."""
    return torch.accelerator.max_memory_allocated(with_index(device))


def reserved(device: torch.device) -> int:
    """Bytes that the caching allocator holds on ``device``."""
    return torch.accelerator.memory_reserved(with_index(device))


def peak_reserved(device: torch.device) -> int:
    """The most bytes that the caching allocator has held on ``device`` since ``reset_peak``."""
    return torch.accelerator.max_memory_reserved(with_index(device))


def reset_peak(device: torch.device) -> None:
    """Start the peaks anew."""
    torch.accelerator.reset_peak_memory_stats(with_index(device))


def free_and_total(device: torch.device) -> tuple[int, int]:
    """Bytes that are free on ``device``, for all processes, and all bytes that it has."""
    free, total = _module(device).mem_get_info(with_index(device))
    return int(free), int(total)


def tells_memory(device: torch.device) -> bool:
    """True if ``free_and_total`` can be asked."""
    return hasattr(_module(device), "mem_get_info")


def taken_beside(device: torch.device) -> int | None:
    """Bytes of the device that others than torch's allocator have taken, in all processes; None: it cannot be asked."""
    if not is_accelerator(device) or not is_available() or not tells_memory(device):
        return None
    free, total = free_and_total(device)
    return total - free - reserved(device)


def limit_memory(device: torch.device, nbytes: int) -> bool:
    """Limit the bytes of ``device`` that this process takes; False: the accelerator has no such limit."""
    module = _module(device)
    if not hasattr(module, "set_per_process_memory_fraction") or not tells_memory(device):
        return False
    module.set_per_process_memory_fraction(min(1.0, nbytes / free_and_total(device)[1]), with_index(device))
    return True


# ---- host memory that the device reads ---------------------------------------------------------------------------


def send(tensor: Tensor, device: torch.device) -> Tensor:
    """Copy ``tensor``, which is small and on the host, to ``device`` without making the host wait."""
    return (_pinned(tensor) if is_accelerator(device) else tensor).to(device, non_blocking=True)


def fetch(tensor: Tensor) -> tuple[Tensor, Any]:
    """Start to copy ``tensor``, which is small and on an accelerator, to the host.

    Returns the copy, and the event after which it may be read.
    """
    copy = _pinned(torch.empty(tensor.shape, dtype=tensor.dtype)).copy_(tensor, non_blocking=True)
    copied = event(tensor.device)
    copied.record()
    return copy, copied


def _pinned(tensor: Tensor) -> Tensor:
    # The copy of pageable memory would make the host wait. torch reuses pinned memory after the copies that use it.
    return tensor.pin_memory()


def register(buffer: Tensor) -> int:
    """Pin the memory of ``buffer`` (1D uint8, on the host) in place.

    Returns the driver's error code, 0 if it is pinned. Only CUDA and ROCm can do this; elsewhere the code is -1, and
    copies go through pageable memory.
    """
    if default_kind().type != "cuda":
        return -1
    runtime = torch.cuda.cudart()
    code = int(runtime.cudaHostRegister(buffer.data_ptr(), buffer.numel(), 0))
    if code != 0:
        _fetch_error()
    return code


def _fetch_error() -> None:
    """Fetch the error that the runtime keeps, which torch would raise at its next kernel."""
    try:
        torch.zeros(1, device=default_kind())
    except RuntimeError:
        return


def unregister(address: int) -> None:
    """End ``register``; ``address``: of the buffer."""
    if default_kind().type == "cuda":
        torch.cuda.cudart().cudaHostUnregister(address)


# ---- random states -----------------------------------------------------------------------------------------------


def random_state() -> Tensor | None:
    """The state of the current device's random numbers (1D uint8); None if no accelerator is in use."""
    return cast(Tensor, _module(default_kind()).get_rng_state()) if in_use() else None


def set_random_state(state: Tensor) -> None:
    """Set the state of the current device's random numbers; a no-op if no accelerator is in use."""
    if in_use():
        _module(default_kind()).set_rng_state(state)


def new_generator() -> torch.Generator:
    """A new generator of random numbers of the kind that the accelerator has."""
    return torch.Generator(default_kind())


def generators(device: torch.device) -> list[torch.Generator]:
    """The default generator of ``device``: none for the host."""
    if not is_accelerator(device):
        return []
    made = getattr(_module(device), "default_generators", ())
    return [made[with_index(device).index]] if made else []


def default_generators(device_type: str) -> list[torch.Generator]:
    """The generators that modules on a device of that type draw from: the host's, and the device's."""
    return [torch.default_generator, *generators(torch.device(device_type))]


def _module(device: torch.device) -> Any:
    return torch.get_device_module(device)
