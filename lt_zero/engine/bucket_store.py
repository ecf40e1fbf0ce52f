"""Where the tensors of one bucket are kept: on the device, in host memory, or in files."""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from lt_zero.common.flat_storage import flat_empty
from lt_zero.offload.background import Job
from lt_zero.offload.copy_streams import CopyStream, StagingBuffers
from lt_zero.offload.nvme_files import NvmeFiles
from lt_zero.offload.nvme_store import StoredTensor, tidy

log = logging.getLogger("lt_zero")

_pin_failed: list[bool] = []  # not empty once pinning failed and the user was told
_apart = False  # set by tests: treat the CPU as a device with memory of its own


class BucketStore:
    """The stored tensors of one bucket, and its allocations in host memory.

    Args:
        optim: files of master weights and optimizer states; None: they stay in memory.
        params: files of the weights that gathers read; None: they stay in memory.
        record: the bucket's number in the files.
        host_optim: keep master weights, optimizer states and gradients in host memory, off the device.
        host_params: keep the weights that gathers read in host memory, off the device.
        pin: pin host memory that is copied to or from the device.
        host_link: copy streams and staging buffers; needed if ``host_optim`` or ``host_params``.
    """

    def __init__(
        self,
        optim: NvmeFiles | None = None,
        params: NvmeFiles | None = None,
        record: int = 0,
        *,
        host_optim: bool = False,
        host_params: bool = False,
        pin: bool = False,
        host_link: HostLink | None = None,
    ) -> None:
        self.optim, self.params, self._record = optim, params, record
        self.host_optim, self.host_params, self._pin = host_optim, host_params, pin
        self._host_link = host_link
        self.stored: dict[str, StoredTensor] = {}
        self._job: Job | None = None  # the background step of this bucket
        self._then: list[Callable[[], None]] = []  # callbacks for after it

    @property
    def moves_optim(self) -> bool:
        """Whether master weights and optimizer states are offloaded to host memory or files."""
        return self.host_optim or self.optim is not None

    def hand_over(self, job: Job) -> None:
        """Give the bucket to the background step ``job`` until ``wait_background_step``."""
        self._job = job

    @property
    def handed_over(self) -> bool:
        """Whether a background step has the bucket."""
        return self._job is not None

    def wait_background_step(self) -> bool:
        """Wait for this bucket's background step; returns whether one was running. No-op in the background thread."""
        if self._job is None or not self._job.wait():
            return False
        self._job, then, self._then = None, self._then, []
        for work in then:
            work()
        return True

    def after_background_step(self, work: Callable[[], None]) -> None:
        """Call ``work`` now, or when the background step is waited for."""
        if self._job is None:
            work()
        else:
            self._then.append(work)

    @property
    def host_link(self) -> HostLink:
        assert self._host_link is not None
        return self._host_link

    def host_empty(self, numel: int, dtype: torch.dtype, crosses: bool = True) -> Tensor:
        """A 1D tensor in host memory for the life of a run; ``crosses``: it is copied to or from the device."""
        return host_empty(numel, dtype, self._pin and crosses)

    def stored_tensor(self, kind: str, dtype: torch.dtype) -> StoredTensor:
        """The stored tensor of a kind of state; a new one is in memory and zero."""
        if kind not in self.stored:
            tier = self.params if kind == "weights" else self.optim
            assert tier is not None
            self.stored[kind] = tier.stored_tensor(kind, self._record, dtype)
        return self.stored[kind]

    def step_tensors(self) -> list[StoredTensor]:
        """The stored tensors that a step reads and writes: master weights and optimizer states."""
        return [tensor for kind, tensor in self.stored.items() if kind not in ("weights", "grad")]

    def tidy(self) -> None:
        """Write all stored tensors and free their buffers."""
        tidy(list(self.stored.values()))

    def state_tensor(self, key: str, dtype: torch.dtype) -> StoredTensor | None:
        """The stored tensor of the optimizer's element-wise state ``key``; None if states are in memory."""
        if self.optim is None:
            return None
        kind = f"state {key}"  # an optimizer may call a state "master"
        if kind in self.stored and self.stored[kind].dtype != dtype:  # loaded from a run with other dtypes
            del self.stored[kind]
        return self.stored_tensor(kind, dtype)


class HostLink:
    """Copy streams and staging buffers between host memory and a device. See offload/copy_streams.py.

    Args:
        device: the device.
        pin: pin the staging buffers.
        nbytes: size of the largest tensor that is cast on its way to the device.
    """

    def __init__(self, device: torch.device, pin: bool, nbytes: int) -> None:
        late = device.type == "cpu"
        self.to_host, self.to_device = CopyStream(device, late, limit=2), CopyStream(device, late)
        self.slots = StagingBuffers(lambda count: host_empty(count, torch.uint8, pin), nbytes)


def host_empty(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """A 1D tensor in host memory for the life of a run; pinned if ``pin``, and pageable where that fails."""
    if pin and not _pin_failed:
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError as error:  # over the limit on locked memory; torch reports a CUDA error
            _pin_failed.append(True)
            text = "Cannot allocate pinned memory (%s); using pageable memory, copies will be slower."
            log.warning(text, str(error).splitlines()[0])
    return flat_empty(numel, dtype, torch.device("cpu"))


def is_apart(device: torch.device) -> bool:
    """Whether ``device`` has memory of its own."""
    return device.type != "cpu" or _apart
