"""The buffers of a model in rounds: each micro-batch begins with the same ones, and those of the first are kept."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from lt_zero.common.compat import without_torch_function
from lt_zero.common.module_hooks import buffer_of
from lt_zero.core.comm.ranks import Ranks

_SENT, _OTHER_FORM = 1, 2  # what the first micro-batch did with a buffer; the larger one counts


@dataclass(eq=False)
class _Kept:
    """A buffer when the round began.

    ``tensor``: the object that the module has, with ``values``, a copy; ``result``: what the first micro-batch has
    made of it, None: nothing else.
    """

    module: nn.Module
    key: str
    name: str
    tensor: Tensor
    values: Tensor
    result: tuple[Tensor, Tensor] | None = None

    @property
    def now(self) -> Tensor | None:
        return buffer_of(self.module, self.key)

    @property
    def changed(self) -> bool:
        now = self.now
        return now is None or now is not self.tensor or not _same(now, self.values)

    def put(self, tensor: Tensor, values: Tensor) -> None:
        """Let the module have ``tensor``, with ``values``."""
        if self.now is not tensor:
            self.module._buffers[self.key] = tensor
        if not _same(tensor, values):
            with torch.inference_mode(tensor.is_inference()):
                tensor.copy_(values)


class RoundBuffers:
    """The buffers of ``root``, which ``peers`` have. The first micro-batch of a round is one of the first peer."""

    def __init__(self, root: nn.Module, peers: Ranks) -> None:
        self._root = root
        self._peers = peers
        self._tables: list[dict[str, Tensor | None]] = []
        self._count = -1
        self._kept: list[_Kept] = []

    @torch.no_grad()
    def begin_turn(self, turn: int) -> None:
        """Note the buffers when the round begins; put them back before a later turn."""
        with without_torch_function():
            if turn == 0:
                self._note()
                return
            if turn == 1 and self._peers.rank == 0:
                self._take_results()
            for kept in self._kept:
                kept.put(kept.tensor, kept.values)

    @torch.no_grad()
    def end_round(self, turns: int) -> None:
        """Give all ranks the buffers that the first micro-batch has left; ``turns``: that were run. Collective.

        Raises:
            RuntimeError: on all ranks: one has another shape or dtype than before.
        """
        if not self._kept:
            return
        with without_torch_function():
            first = self._peers.rank == 0
            if first and turns == 1:
                self._take_results()
            flags = torch.zeros(len(self._kept), dtype=torch.uint8)
            if first:
                flags = torch.tensor([_flag(kept) for kept in self._kept], dtype=torch.uint8)
            self._peers.host_max(flags, "buffers of the round").wait()
            told = flags.tolist()
            if _OTHER_FORM in told:
                name = self._kept[told.index(_OTHER_FORM)].name
                raise RuntimeError(
                    f"Buffer {name!r} got another shape or dtype in a training step. With reproducible.virtual_ranks "
                    "buffers keep theirs: fill the one that is registered, or keep it in a plain attribute."
                )
            for kept, flag in zip(self._kept, told, strict=True):
                if first and kept.result is not None:
                    kept.put(*kept.result)
                elif not first:
                    kept.put(kept.tensor, kept.values)
                kept.result = None
                if flag and self._peers.size > 1:
                    self._send(kept)

    def _note(self) -> None:
        """Keep copies of the buffers as they are."""
        if not self._tables or sum(map(len, self._tables)) != self._count:
            self._tables = [module._buffers for module in self._root.modules()]
            self._count = sum(map(len, self._tables))
            self._kept = [
                _Kept(module, key, f"{path}.{key}" if path else key, tensor, tensor.clone())
                for path, module in self._root.named_modules()
                for key in module._buffers.keys()  # noqa: SIM118 - those of compiled modules cannot be iterated over
                if (tensor := buffer_of(module, key)) is not None
            ]
            self._kept.sort(key=lambda kept: kept.name)
            return
        for kept in self._kept:
            now = kept.now
            if now is not None and kept.changed:
                kept.tensor, kept.values = now, now.clone()

    def _take_results(self) -> None:
        """Keep what the first micro-batch of the round has left."""
        for kept in self._kept:
            now = kept.now
            kept.result = (now, now.clone()) if now is not None and kept.changed else None

    def _send(self, kept: _Kept) -> None:
        """Give the other ranks the first one's values."""
        tensor = kept.tensor if self._peers.rank != 0 else kept.now
        assert tensor is not None
        sent = _bytes(tensor).clone().to(self._peers.device)
        self._peers.broadcast(sent, f"buffer {kept.name}")
        if self._peers.rank != 0:
            kept.put(tensor, sent.view(tensor.dtype).view(tensor.shape).to(tensor.device))


def _flag(kept: _Kept) -> int:
    """Tell what the first micro-batch has done with a buffer, in a number."""
    if kept.result is None:
        return 0
    values = kept.result[1]
    same = values.shape == kept.values.shape and values.dtype == kept.values.dtype
    return _SENT if same else _OTHER_FORM


def _same(tensor: Tensor, values: Tensor) -> bool:
    """True if they have the same form and bits, of zeros and NaN, too."""
    same_form = tensor.shape == values.shape and tensor.dtype == values.dtype
    return same_form and torch.equal(_bytes(tensor), _bytes(values))


def _bytes(tensor: Tensor) -> Tensor:
    """The bytes (1D) of a tensor."""
    return tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
