"""What of a bucket rests in files, or lives in host memory apart from the device."""

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

_pin_failed: list[bool] = []  # that was told once
_apart = False  # tests: host memory counts as apart from the CPU's own


class BucketStore:
    """The homes of one bucket.

    Args:
        optim: keeps master weights and the optimizer's states; None: they stay in memory.
        params: keeps the weights that gathers read; None: they stay in memory.
        record: the bucket's number in the files.
        host_optim: master weights, the optimizer's states and gradients live in host memory, apart from the device.
        host_params: so do the weights that gathers read.
        pin: use page-locked host memory if the device is a GPU.
        traffic: between host memory and the device; needed if something lives in host memory.
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
        self._traffic = host_link
        self.stored: dict[str, StoredTensor] = {}
        self._job: Job | None = None  # of the background, which works on what is here
        self._then: list[Callable[[], None]] = []  # to be done after it

    @property
    def moves_optim(self) -> bool:
        """Whether what the optimizer works on is not where the bucket is: in host memory, or in files."""
        return self.host_optim or self.optim is not None

    def hand_over(self, job: Job) -> None:
        """What is here belongs to the background until ``wait_background_step``."""
        self._job = job

    @property
    def handed_over(self) -> bool:
        """Whether what is here belongs to the background."""
        return self._job is not None

    def wait_background_step(self) -> bool:
        """Wait until what is here is the caller's; returns whether it was not. Nothing happens in the background."""
        if self._job is None or not self._job.wait():
            return False
        self._job, then, self._then = None, self._then, []
        for work in then:
            work()
        return True

    def after_background_step(self, work: Callable[[], None]) -> None:
        """Do something now, or before anybody else touches what is here."""
        if self._job is None:
            work()
        else:
            self._then.append(work)

    @property
    def host_link(self) -> HostLink:
        assert self._traffic is not None
        return self._traffic

    def host_empty(self, numel: int, dtype: torch.dtype, crosses: bool = True) -> Tensor:
        """A 1D tensor in host memory for the life of a run; page-locked if it ``crosses`` to or from the device."""
        return host_empty(numel, dtype, self._pin and crosses)

    def stored_tensor(self, kind: str, dtype: torch.dtype) -> StoredTensor:
        """The home of a kind of state, which is made if there is none: here, and zero."""
        if kind not in self.stored:
            tier = self.params if kind == "weights" else self.optim
            assert tier is not None
            self.stored[kind] = tier.stored_tensor(kind, self._record, dtype)
        return self.stored[kind]

    def step_tensors(self) -> list[StoredTensor]:
        """What a step reads and writes."""
        return [home for kind, home in self.stored.items() if kind not in ("weights", "grad")]

    def tidy(self) -> None:
        """Put everything away."""
        tidy(list(self.stored.values()))

    def state_tensor(self, key: str, dtype: torch.dtype) -> StoredTensor | None:
        """Where an optimizer's element-wise states of the bucket rest, if they rest in files."""
        if self.optim is None:
            return None
        kind = f"state {key}"  # an optimizer may call a state "master"
        if kind in self.stored and self.stored[kind].dtype != dtype:  # loaded from a run with other dtypes
            del self.stored[kind]
        return self.stored_tensor(kind, dtype)


class HostLink:
    """Between host memory and a device that has memory of its own. See offload/copy_streams.py.

    Args:
        device: the device.
        pin: page-locked buffers.
        nbytes: of the largest tensor that changes its dtype on the way to the device.
    """

    def __init__(self, device: torch.device, pin: bool, nbytes: int) -> None:
        late = device.type == "cpu"
        self.to_host, self.to_device = CopyStream(device, late, limit=2), CopyStream(device, late)
        self.slots = StagingBuffers(lambda count: host_empty(count, torch.uint8, pin), nbytes)


def host_empty(numel: int, dtype: torch.dtype, pin: bool) -> Tensor:
    """A 1D tensor in host memory for the life of a run; page-locked if ``pin``, and there is enough of that."""
    if pin and not _pin_failed:
        try:
            return torch.empty(numel, dtype=dtype, pin_memory=True)
        except RuntimeError as error:  # too much locked memory; torch reports it as a CUDA error
            _pin_failed.append(True)
            text = "Page-locked memory is not to be had (%s); pageable memory is used, and copies take longer."
            log.warning(text, str(error).splitlines()[0])
    return flat_empty(numel, dtype, torch.device("cpu"))


def is_apart(device: torch.device) -> bool:
    """Whether ``device`` has memory of its own."""
    return device.type != "cpu" or _apart
