"""Compares gradients between tensor ranks once: who has parts of a sum without saying so would train wrongly.

A parameter that is not cut has the same gradient on all tensor ranks, which the engine's mean leaves as it is; or each
rank has a part of the sum, as of a norm over its own heads, and nothing in the tensor tells. So a few numbers of each
gradient of the first backward are compared.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor
from torch.nn import Parameter

from lt_zero.core.comm.ranks import Ranks

_ROUNDING = 0.02  # per norm: operations whose order differs from run to run, in 16 bits
_SHOWN = 4  # names in an error


class FirstGradients:
    """The gradients of the first backward, as two numbers each.

    Args:
        peers: the ranks that have the same module.
        tensor: how many neighbouring ranks have parts of the same tensors.
        names: of parameters, by id.
    """

    def __init__(self, peers: Ranks, tensor: int, names: Mapping[int, str]) -> None:
        self._peers, self._tensor, self._names = peers, tensor, dict(names)
        self._seen: dict[str, Tensor] = {}
        self.over = False

    @torch.no_grad()
    def see(self, parameter: Parameter, grad: Tensor) -> None:
        """Note a gradient that is the same on all tensor ranks, or should be."""
        name = self._names.get(id(parameter))
        if name is None or name in self._seen or grad.layout is not torch.strided:
            return
        flat = grad.detach().double().reshape(-1)
        pattern = torch.arange(flat.numel(), dtype=torch.float64, device=flat.device).cos_()
        self._seen[name] = torch.stack([flat @ pattern, flat.norm()])

    def compare(self) -> None:
        """Compare the recorded gradients at the end of the first backward. Collective then.

        Raises:
            RuntimeError: on all ranks: the gradients of a parameter differ; names it.
        """
        if self.over:
            return
        self.over, seen = True, self._seen
        self._seen = {}
        numbers = torch.stack(list(seen.values())).tolist() if seen else []
        of_ranks = self._peers.host_gather(dict(zip(seen, numbers, strict=True)), "first gradients")
        found: dict[str, tuple[int, int]] = {}
        for rank, mine in enumerate(of_ranks):
            first = rank // self._tensor * self._tensor
            for name in mine.keys() & of_ranks[first].keys():
                (one, norm), (other, its_norm) = of_ranks[first][name], mine[name]
                # False for NaN, which comes from an overflow: that step is skipped, and is no error here.
                if abs(one - other) > _ROUNDING * max(norm, its_norm):
                    found.setdefault(name, (first, rank))
        if found:
            names = sorted(found)
            first, rank = (self._peers.ranks[number] for number in found[names[0]])
            more = f" and {len(names) - _SHOWN} more" if len(names) > _SHOWN else ""
            raise RuntimeError(
                f"Ranks {first} and {rank} have parts of the same tensors, and different gradients of "
                f"{', '.join(map(repr, names[:_SHOWN]))}{more}, which are not cut: they would be averaged. If each "
                "is a part of a sum (a norm over the heads of a rank), say so: lt_zero.parallel.PartialGradient() in a "
                "plan, grad_allreduce: true in a rule. Else what the ranks compute differs, as by dropout between "
                "layers, or data."
            )
