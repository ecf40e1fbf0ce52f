"""Modules that work on each token by itself, computed in tiles of tokens: ``tiled``.

Note [Tiles in backward]
    The whole forward of the module is one node of autograd, which keeps only its input. Backward runs the module tile
    by tile, with the random state of the forward, and differentiates each tile at once, so that one tile's
    intermediates exist at a time. The parameters are inputs of the node: they get one gradient, the sum over the tiles
    in at least fp32, and hooks on them see it once. So a sharded module's weights are gathered once for all tiles, and
    reduced once. This needs the parameters to be one unit (find_units.py, ``one_unit``).
    The module differentiates by detached parameters, which have no hooks.

Note [What is checked]
    Whether a module works on each token by itself is not to be seen, but the last of a few tokens must get the output
    that it gets alone. This is compared once, without dropout: before the first pass without gradients, or in the first
    backward. Not in the first forward: selective recomputation counts its operators.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd.function import once_differentiable
from torch.nn import Parameter

from lt_zero.common import accelerator
from lt_zero.common.arguments import expect, wrong
from lt_zero.common.compat import versions_of
from lt_zero.common.switch import Switched, switch
from lt_zero.common.tensor_tree import iter_tensors
from lt_zero.core.engine.guard import owner_of
from lt_zero.kernels.flat import wide

M = TypeVar("M", bound=nn.Module)
_CHECKED = 8  # tokens that are compared


class TokenTiles(Switched):
    """Forward of a module over tiles of dimension -2 of its input."""

    one_unit = True  # its parameters are gathered together: see find_units.py
    tile_sizes: tuple[int | None, int | None]  # tiles, or tokens of a tile; both None: as many as there are features
    checked: bool  # that it works on each token by itself

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, super().forward, args, kwargs)  # type: ignore[misc]


def tiled(module: M, tiles: int | None = None, *, tokens_per_tile: int | None = None) -> M:
    """Let a module that works on each token by itself, such as an MLP, compute a tile of tokens at a time.

    Of its intermediates one tile's exist at a time, in forward and in backward, which computes each again. Weights are
    gathered once for all tiles, and their gradients reduced once. The module is changed in place, and keeps its names.

    Args:
        module: called with one tensor [..., tokens, features], and maybe other arguments that are no tensors; returns
            one [..., tokens, any]. Called again, this sets other sizes.
        tiles: how many, of equal sizes or one token less.
        tokens_per_tile: instead of ``tiles``. Default: as many as there are features.

    Returns:
        ``module``.

    Raises:
        TypeError: ``module`` is no module; or a size is no whole number.
        ValueError: it mixes tokens (batch norms); or both sizes are given; or it is compiled, or sharded already.
    """
    call = "lt_zero.tiled"
    expect(module, nn.Module, f"The module of {call}", "pass an nn.Module")
    for name, value in (("tiles", tiles), ("tokens_per_tile", tokens_per_tile)):
        if value is not None and (isinstance(value, bool) or not isinstance(value, int)):
            raise wrong(f"{name} of {call}", value, "pass a whole number")
        if value is not None and value < 1:
            raise ValueError(f"{call}({name}={value}): pass a positive number.")
    if tiles is not None and tokens_per_tile is not None:
        raise ValueError(f"{call}(tiles={tiles}, tokens_per_tile={tokens_per_tile}): pass one of them.")
    for name, child in module.named_modules():
        if isinstance(child, nn.modules.batchnorm._BatchNorm):
            of = f" {name!r}" if name else ""
            raise ValueError(f"{call}: {type(child).__name__}{of} takes means over tokens, which tiles would change.")
    owners = [owner_of(parameter) for parameter in module.parameters()]
    if not isinstance(module, TokenTiles) and any(getattr(owner, "attached", False) for owner in owners):
        raise ValueError(f"{call}: the {type(module).__name__} is sharded already. Call {call} before that.")
    switch(module, TokenTiles, call)
    vars(module).update(tile_sizes=(tiles, tokens_per_tile), checked=vars(module).get("checked", False))
    return module


@torch.compiler.disable  # type: ignore[untyped-decorator]
def _forward(module: Any, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    x, run = _taken(module, whole, args, kwargs)
    bounds = _bounds(module.tile_sizes, x)
    if len(bounds) < 2:
        return whole(*args, **kwargs)
    named = [(name, p) for name, p in module.named_parameters() if p.requires_grad]
    call = _TiledCall(module, run, [name for name, _ in named], bounds, x.device.type)
    if torch.is_grad_enabled() and (x.requires_grad or named):
        return _Tiles.apply(call, x, *(p for _, p in named))  # type: ignore[no-untyped-call]
    out = call.forward(x)
    call.check(x)
    return out


def _taken(
    module: nn.Module, whole: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[Tensor, Callable[[Tensor], Any]]:
    """The tensor among the arguments, and the module's forward as a function of it.

    Raises:
        TypeError: there is none, or there are several.
    """
    name = type(module).__name__
    place: Any = 0 if args else next((key for key, value in kwargs.items() if isinstance(value, Tensor)), None)
    x = args[0] if args else kwargs.get(place)
    rest = (args[1:], {key: value for key, value in kwargs.items() if key != place})
    if not isinstance(x, Tensor) or x.dim() < 2:
        shown = tuple(x.shape) if isinstance(x, Tensor) else type(x).__name__
        raise TypeError(f"lt_zero.tiled: {name} got {shown} first. Call it with a tensor [..., tokens, features].")
    if any(True for _ in iter_tensors(rest)):
        raise TypeError(
            f"lt_zero.tiled: {name} got several tensors, and which of them have tokens is not known. Tile a module "
            "inside of it that has one input."
        )

    def run(tile: Tensor) -> Any:
        # Without ``args``: the node would hold the input, also where a recomputation drops it.
        return whole(tile, *rest[0], **rest[1]) if place == 0 else whole(**{place: tile}, **rest[1])

    return x, run


def _bounds(sizes: tuple[int | None, int | None], x: Tensor) -> list[tuple[int, int]]:
    """Begin and end of each tile of ``x`` along dimension -2."""
    tokens, (tiles, each) = x.shape[-2], sizes
    tiles = tiles if tiles is not None else math.ceil(tokens / (each or x.shape[-1]))
    tiles = max(1, min(tiles, tokens))
    ends = [tokens * number // tiles for number in range(tiles + 1)]
    return list(zip(ends, ends[1:], strict=False))


class _TiledCall:
    """One call of a module: what forward has to repeat in backward. It does not hold parameters."""

    def __init__(
        self,
        module: Any,
        run: Callable[[Tensor], Any],
        names: Sequence[str],  # of the parameters that get gradients
        bounds: Sequence[tuple[int, int]],
        device_type: str,
    ) -> None:
        self._module, self._run, self.names, self._bounds, self._device_type = module, run, names, bounds, device_type
        self._random = [generator.get_state() for generator in accelerator.default_generators(device_type)]
        self._autocast = torch.is_autocast_enabled(device_type), torch.get_autocast_dtype(device_type)

    def forward(self, x: Tensor) -> Tensor:
        """The output of all tiles, without a graph."""
        out: Tensor | None = None
        # A cast of a weight that is made without a graph must not stay in autocast's cache.
        with torch.no_grad(), self._cast(cached=False):
            for low, high in self._bounds:
                part = x[..., low:high, :].contiguous()
                before = _versions(part, self._module)
                tile = self._tile(part)
                if before != (after := _versions(part, self._module)):
                    self._refuse_writes("its input" if before[0] != after[0] else "buffers")
                out = tile.new_empty((*x.shape[:-1], tile.shape[-1])) if out is None else out
                out[..., low:high, :] = tile
        assert out is not None
        return out

    def _refuse_writes(self, what: str) -> None:
        raise RuntimeError(
            f"lt_zero.tiled: the forward of {self._name} writes to {what}, and would do so again for each tile and in "
            "backward. Tile a module inside of it that does not."
        )

    def gradients(self, x: Tensor, grad: Tensor, needed: bool) -> list[Tensor | None]:
        """The gradients of ``x`` (None unless ``needed``) and of the parameters."""
        self.check(x)
        inputs, sums = torch.empty_like(x) if needed else None, _TiledGradients(len(self.names))
        with self._again(), _detached(self._module, self.names) as aliases:
            by = list(aliases.values())
            for low, high in self._bounds:
                tile = x[..., low:high, :].detach().contiguous().requires_grad_(needed)
                with torch.enable_grad():
                    out = self._tile(tile)
                if not out.requires_grad:
                    continue
                wanted = [tile, *by] if needed else by
                grads = torch.autograd.grad(out, wanted, grad[..., low:high, :], allow_unused=True)
                if inputs is not None:
                    inputs[..., low:high, :] = grads[0] if grads[0] is not None else 0
                sums.add(grads[1:] if needed else grads)
        return [inputs, *sums.rounded(by)]

    def check(self, x: Tensor) -> None:
        """Raise ValueError, once, if a token's output depends on other tokens. See Note [What is checked]."""
        if self._module.checked or x.shape[-2] < 2 or not x.numel():
            return
        some = x[..., : min(_CHECKED, x.shape[-2]), :].detach().clone()
        modes = [(child, child.training) for child in self._module.modules()]
        try:
            for child, _ in modes:
                child.training = False  # without ``eval``, which some layers override
            with torch.no_grad(), self._again():
                among, alone = self._run(some), self._run(some[..., -1:, :])
        finally:
            for child, mode in modes:
                child.training = mode
        self._shape(among, some), self._shape(alone, some[..., -1:, :])
        error, size = (among[..., -1:, :] - alone).abs().amax(), among.abs().amax()
        if bool(error > 4 * math.sqrt(torch.finfo(among.dtype).eps) * size):
            raise ValueError(
                f"lt_zero.tiled: {self._name} does not work on each token by itself: the last of {some.shape[-2]} "
                f"tokens gets another output alone, by {float(error):.2g} of {float(size):.2g}. Tile a module inside "
                "of it that does, such as an MLP."
            )
        self._module.checked = True

    @property
    def _name(self) -> str:
        return type(self._module).__name__

    def _tile(self, tile: Tensor) -> Tensor:
        return self._shape(self._run(tile), tile)

    def _shape(self, out: Any, tile: Tensor) -> Tensor:
        if not isinstance(out, Tensor):
            raise TypeError(f"lt_zero.tiled: {self._name} returned {type(out).__name__}, and a tensor is needed.")
        if out.shape[:-1] != tile.shape[:-1]:
            text = f"lt_zero.tiled: {self._name} made {tuple(out.shape)} of {tuple(tile.shape)}"
            raise ValueError(f"{text}. Only modules that keep the tokens can be tiled.")
        return out

    def _cast(self, cached: bool) -> Any:
        enabled, dtype = self._autocast
        return torch.autocast(self._device_type, dtype, enabled, cache_enabled=cached)

    @contextmanager
    def _again(self) -> Iterator[None]:
        """Context with the random state and the autocast of the forward."""
        generators = accelerator.default_generators(self._device_type)
        with ExitStack() as undo:
            for generator, state in zip(generators, self._random, strict=True):
                undo.callback(generator.set_state, generator.get_state())
                generator.set_state(state)
            undo.enter_context(self._cast(cached=True))
            yield


def _versions(x: Tensor, module: nn.Module) -> list[int]:
    """The version counters of an input and of a module's buffers; those of inference mode have none."""
    return versions_of(tensor for tensor in (x, *module.buffers()) if not tensor.is_inference())


@contextmanager
def _detached(module: nn.Module, names: Sequence[str]) -> Iterator[dict[str, Parameter]]:
    """Context in which the module has other parameters with the same memory; returns those of ``names``."""
    parameters = dict(module.named_parameters())
    # Not the method, which sharded DTensors have for state dicts.
    aliases = {name: Parameter(torch.detach(parameters[name])) for name in names}
    by_parameter = {parameters[name]: alias for name, alias in aliases.items()}
    places = [
        (child, name, parameter)
        for child in module.modules()
        for name, parameter in child.named_parameters(recurse=False, remove_duplicate=False)
        if parameter in by_parameter
    ]
    try:
        for child, name, parameter in places:
            setattr(child, name, by_parameter[parameter])
        yield aliases
    finally:
        for child, name, parameter in places:
            setattr(child, name, parameter)


class _TiledGradients:
    """Sums of gradients over tiles, in at least fp32."""

    def __init__(self, count: int) -> None:
        self._sums: list[Tensor | None] = [None] * count

    def add(self, grads: Sequence[Tensor | None]) -> None:
        for index, grad in enumerate(grads):
            have = self._sums[index]
            if grad is None:
                continue
            if have is None:
                # A copy: autograd may have returned one tensor for several parameters.
                self._sums[index] = grad.to(wide(grad.dtype), copy=True)
            else:
                have += grad

    def rounded(self, parameters: Sequence[Parameter]) -> list[Tensor | None]:
        """The sums in the dtypes of the parameters."""
        pairs = zip(self._sums, parameters, strict=True)
        return [total.to(parameter.dtype) if total is not None else None for total, parameter in pairs]


class _Tiles(torch.autograd.Function):
    """See Note [Tiles in backward]."""

    @staticmethod
    def forward(context: Any, call: _TiledCall, x: Tensor, *parameters: Tensor) -> Tensor:
        context.call = call
        context.save_for_backward(x)
        return call.forward(x)

    @staticmethod
    @once_differentiable
    def backward(context: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        (x,) = context.saved_tensors
        return (None, *context.call.gradients(x, grad, context.needs_input_grad[1]))
