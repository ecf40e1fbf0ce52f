"""Rounding of a step's weights to master weights in fewer bits: to the nearest, or up or down at random.

To the nearest, an update of less than half a unit in the last place is lost, and bf16 has 8 bits: training stalls once
updates are below 1/256 of the weights. Stochastic rounding adds 16 random bits below the last place and truncates, so
that a number is rounded up with a probability equal to its distance from the lower neighbour, and sums of small updates
are right in the mean (arXiv:1502.02551, section 3.1).

Note [Random bits of an element]
    They are a function of the run's seed, the parameter's name, its step, and the element's index in the whole
    parameter. So they do not depend on which rank steps an element, nor on buckets, places, or the beginning of a
    process. The seed is that of a parameter's first step: its state keeps it, so that a run goes on with the same bits
    when it is resumed by a process with another seed. The function is Philox4x32 (Salmon, Moraes, Dror, Shaw: Parallel
    random numbers, SC 2011) with 7 rounds, the fewest that pass BigCrush. Its key is a hash of seed and name; its
    counter is the step and a number of which 16 make the bits of a group of 128 elements: element ``e`` of a group has
    half-word ``e // 16`` of number ``e % 16``. Neighbours have the same half-word of neighbouring numbers then, as
    lanes of a vector have.
"""

from __future__ import annotations

import ctypes
import functools
import hashlib
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.common import accelerator
from lt_zero.common.boxes import Box, ParamSpec, cut_range, flat_index
from lt_zero.kernels.dispatch import CHUNK, GPU_CHUNK, address, call, native
from lt_zero.kernels.header import STRUCTS
from lt_zero.kernels.places import ElementPlace, SteppedFragment

GROUP, NUMBERS = 128, 16  # elements of a group, and Philox's numbers for them
_ROUNDS = 7
_FACTORS, _STEPS = (0xD2511F53, 0xCD9E8D57), (0x9E3779B9, 0xBB67AE85)  # of Philox4x32
_WORD = 0xFFFFFFFF
_LARGEST = 0x7F7F0000  # bits of bf16's largest finite number
COUNT = "rounding_step"  # state of optimizers that have no counter
SEED = "rounding_seed"  # state: a Python int, as 64 bits fit into no floating-point number


# ---- where elements are in a parameter -------------------------------------------------------------------------------


class ElementRows(NamedTuple):
    """Consecutive elements of a part, as rows of the whole parameter.

    Attributes:
        numel: of all rows.
        first: index of the first element in the whole parameter.
        row: elements of a row, which follow each other there.
        stride: from the first element of a row to that of the next.
    """

    numel: int
    first: int
    row: int
    stride: int = 0


@functools.lru_cache(maxsize=1 << 16)
def rows_of(spec: ParamSpec, lo: int, hi: int) -> tuple[ElementRows, ...]:
    """Elements [lo, hi) of a part, row-major, as rows of the whole parameter, in order."""
    if spec.is_whole:
        return (ElementRows(hi - lo, lo, hi - lo),)
    boxes = (box.shifted(spec.local_box.offsets) for box in cut_range(spec.shape, lo, hi))
    return tuple(rows for box in boxes for rows in _rows_in(box, spec.global_shape))


def _rows_in(box: Box, shape: tuple[int, ...]) -> Iterator[ElementRows]:
    first, numel = flat_index(shape, box.offsets), box.numel
    if box.is_contiguous_in(shape):
        yield ElementRows(numel, first, numel)
        return
    cut = max(axis for axis, size in enumerate(box.sizes) if size < shape[axis])
    outer = Box(box.offsets[:cut], box.sizes[:cut])
    if outer.is_contiguous_in(shape[:cut]):
        yield ElementRows(numel, first, prod(box.sizes[cut:]), prod(shape[cut:]))
        return
    for part in box.split(1):
        yield from _rows_in(part, shape)


# ---- random bits -----------------------------------------------------------------------------------------------------


def philox(counter: tuple[Tensor, Tensor, Tensor, Tensor], key: tuple[int, int]) -> tuple[Tensor, ...]:
    """Four random words of Philox4x32 with 7 rounds; words are int64 of 32 bits, of one shape."""
    a, b, c, d = counter
    for number in range(_ROUNDS):
        low, high = ((k + number * step) & _WORD for k, step in zip(key, _STEPS, strict=True))
        # Products of 32 bits wrap in int64, and their upper halves are right after the mask.
        first, second = a * _FACTORS[0], c * _FACTORS[1]
        a, b = (second >> 32 & _WORD) ^ b ^ low, second & _WORD
        c, d = (first >> 32 & _WORD) ^ d ^ high, first & _WORD
    return a, b, c, d


def random_bits(rows: ElementRows, seed: int, step: int | Tensor, device: torch.device) -> Tensor:
    """16 random bits (1D int32, below 65536) for each element. See Note [Random bits of an element].

    ``seed``: of the parameter, 64 bits. ``step``: a number, or one on ``device``.
    """
    count = rows.numel // rows.row
    starts = rows.first + torch.arange(count, device=device) * rows.stride
    groups = rows.first % GROUP + rows.row if count == 1 else GROUP - 1 + rows.row
    groups = -(-groups // GROUP)  # that a row touches, at most
    numbers = (starts // GROUP).view(-1, 1, 1) + torch.arange(groups, device=device).view(1, -1, 1)
    numbers = numbers * NUMBERS + torch.arange(NUMBERS, device=device)
    # Work of the device: a counter that is there is not waited for.
    counter = step.long().view(()) if isinstance(step, Tensor) else torch.full((), step, device=device)
    of_step = [counter & _WORD, counter >> 32]
    words = philox((numbers & _WORD, numbers >> 32, of_step[0], of_step[1]), (seed & _WORD, seed >> 32))
    halves = [half for word in words for half in (word & 0xFFFF, word >> 16)]
    bits = torch.stack([half.int() for half in halves], dim=2).view(count, groups * GROUP)
    if count == 1:
        begin = rows.first % GROUP
        return bits[0, begin : begin + rows.row]
    places = (starts % GROUP).view(-1, 1) + torch.arange(rows.row, device=device)
    return bits.gather(1, places).view(-1)


def _chunks(rows: ElementRows, size: int) -> Iterator[tuple[int, ElementRows]]:
    """Cut rows into some of about ``size`` elements; yields where each begins."""
    count, at_once = rows.numel // rows.row, size // (rows.row + 2 * GROUP)
    if count > 1 and at_once > 0:
        for lo in range(0, count, at_once):
            numel = min(at_once, count - lo) * rows.row
            yield lo * rows.row, ElementRows(numel, rows.first + lo * rows.stride, rows.row, rows.stride)
        return
    for number in range(count):
        for lo in range(0, rows.row, size):
            numel = min(size, rows.row - lo)
            yield number * rows.row + lo, ElementRows(numel, rows.first + number * rows.stride + lo, numel)


def round_stochastic_reference(
    values: Tensor, out: Tensor, rows: ElementRows, *, seed: int, step: int | Tensor
) -> None:
    """Round ``values`` up or down to bf16 at random, in proportion to the distances.

    What is exact in bf16 stays; so do infinities, and NaN is NaN. Beyond bf16's largest finite number the nearest is
    taken, so that nothing becomes infinite that would not otherwise.

    Args:
        values: 1D fp32, contiguous.
        out: 1D bf16, contiguous; written.
        rows: where the elements are in their parameter.
        seed: of the parameter, 64 bits.
        step: of the parameter; a tensor of one number on the device of the values is not waited for.

    Raises:
        ValueError: sizes, dtypes or devices do not fit.
    """
    _check(values, out, rows, step)
    size = CHUNK if values.device.type == "cpu" else GPU_CHUNK
    for lo, some in _chunks(rows, size) if rows.numel > 0 else ():
        part = slice(lo, lo + some.numel)
        _round(values[part], random_bits(some, seed, step, values.device), out[part])


def round_by_places(values: Tensor, out: Tensor, places: Tensor, tensor: int, lo: int) -> None:
    """Round as the kernels of steps do, element by element; waits for the device.

    Args:
        values: fp32 (1D), elements of a tensor of a list.
        out: bf16 (1D), of the same size; written.
        places: of the list, from ``place_table``.
        tensor: number of the tensor.
        lo: number of the first element in it.
    """
    hi = lo + values.numel()
    rows = [ElementPlace(*row) for row in places.tolist() if row[0] == tensor]
    for place, end in zip(rows, [*(place.begin for place in rows[1:]), hi], strict=True):
        first = max(lo, place.begin)
        last = min(hi, end)
        at = torch.arange(first - place.begin, max(first, last) - place.begin, device=values.device)
        index = place.first + at // place.row * place.stride + at % place.row
        number = index // GROUP * NUMBERS + index % NUMBERS
        half = index % GROUP // NUMBERS
        of_step = [torch.full_like(index, word) for word in (place.step & _WORD, place.step >> 32)]
        words = philox((number & _WORD, number >> 32, of_step[0], of_step[1]), (place.seed & _WORD, place.seed >> 32))
        word = torch.stack(words).gather(0, (half // 2).unsqueeze(0))[0]
        rows_of_chunk = slice(first - lo, max(first, last) - lo)
        _round(values[rows_of_chunk], (word >> half % 2 * 16 & 0xFFFF).int(), out[rows_of_chunk])


def _round(values: Tensor, bits: Tensor, out: Tensor) -> None:
    """Round fp32 ``values`` to ``out`` (bf16) by 16 random ``bits`` each (int32); all are 1D and contiguous."""
    integers = values.view(torch.int32)
    rounded = integers.add(bits).bitwise_and_(-0x10000).view(torch.float32)
    # What is selected from ``rounded`` is exact in bf16, and the copy rounds the rest to the nearest.
    out.copy_(torch.where((integers & 0x7FFFFFFF) > _LARGEST, values, rounded))


def round_stochastic(values: Tensor, out: Tensor, rows: ElementRows, *, seed: int, step: int | Tensor) -> None:
    """``round_stochastic_reference`` by a kernel, with the same bits."""
    lib = native(values.device)
    if lib is None:
        round_stochastic_reference(values, out, rows, seed=seed, step=step)
        return
    _check(values, out, rows, step)
    counter = step.detach().float() if isinstance(step, Tensor) else None
    place = ElementPlace(0, 0, rows.first, rows.row, rows.stride, seed, 0 if isinstance(step, Tensor) else step)
    given = STRUCTS["lt_rounding"](
        numel=rows.numel,
        place=STRUCTS["lt_place"](*place),
        counter=address(counter),
        src=address(values.detach()),
        dst=address(out.detach()),
    )
    call(lib, "round_stochastic", values.device, ctypes.byref(given))


def _check(values: Tensor, out: Tensor, rows: ElementRows, step: int | Tensor) -> None:
    for name, tensor, dtype in (("values", values, torch.float32), ("out", out, torch.bfloat16)):
        fits = tensor.dtype == dtype and tuple(tensor.shape) == (rows.numel,) and tensor.is_contiguous()
        if not fits or tensor.device != values.device:
            raise ValueError(
                f"{name} has shape {tuple(tensor.shape)}, dtype {tensor.dtype}, on {tensor.device}; {rows.numel} "
                f"contiguous elements of {dtype} on {values.device} are needed."
            )
    if rows.numel > 0 and (rows.row < 1 or rows.numel % rows.row or rows.first < 0 or rows.stride < 0):
        raise ValueError(f"{rows} are not rows of a parameter.")
    if isinstance(step, Tensor) and (step.numel() != 1 or step.device != values.device):
        raise ValueError(
            f"step has shape {tuple(step.shape)}, on {step.device}; one number on {values.device} is needed."
        )


# ---- for steps -------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RoundStochastic:
    """Round weights (``WeightRounding``) to bf16 up or down at random; to another dtype as torch does.

    Args:
        seed: of the run, the same on all ranks; for parameters whose state has none yet.
    """

    seed: int

    def store(self, values: Tensor, master: Tensor, spec: ParamSpec, lo: int, state: dict[str, Any]) -> None:
        if master.dtype != torch.bfloat16:
            master.copy_(values)
            return
        step = _count(state, values.device)
        seed = seed_of(state.setdefault(SEED, self.seed), spec.name)
        flat = values.detach().float().reshape(-1)
        out = master.view(-1)
        done = 0
        for rows in rows_of(spec, lo, lo + flat.numel()):
            part = slice(done, done + rows.numel)
            round_stochastic(flat[part], out[part], rows, seed=seed, step=step)
            done += rows.numel

    def bits(self, master: torch.dtype, fragments: Iterable[SteppedFragment]) -> PhiloxBits | None:
        return PhiloxBits(fragments, self.seed) if master == torch.bfloat16 else None


class PhiloxBits:
    """The random bits of fragments that one kernel steps: Note [Random bits of an element].

    Args:
        fragments: of parameters.
        seed: of this run of training, for fragments whose state has none.
    """

    count_key = COUNT
    seed_key = SEED

    def __init__(self, fragments: Iterable[SteppedFragment], seed: int) -> None:
        self._seed = seed
        self._names: list[str] = []
        self._rows: list[list[tuple[int, ElementRows]]] = []  # of each fragment, with their first element in the row
        for fragment in fragments:
            begin = fragment.begin
            rows = list[tuple[int, ElementRows]]()
            for some in rows_of(fragment.spec, fragment.lo, fragment.lo + fragment.numel):
                if some.numel > 0:
                    rows.append((begin, some))
                begin += some.numel
            self._names.append(fragment.spec.name)
            self._rows.append(rows)
        self._seeds = [seed] * len(self._names)  # as the states have them

    def holds(self, states: Sequence[dict[str, Any]]) -> bool:
        """True if these are the seeds in the fragments' states."""
        return all(state.get(SEED) == seed for state, seed in zip(states, self._seeds, strict=True))

    def adopt(self, number: int, state: dict[str, Any]) -> None:
        """Take the seed of one fragment from its state, which gets one if it has none."""
        self._seeds[number] = state.setdefault(SEED, self._seed)

    def places(self, first: int, last: int, steps: Sequence[float]) -> list[ElementPlace]:
        """The places of the fragments from ``first`` to ``last``, with the number of each one's step."""
        found = []
        for number in range(first, last + 1):
            seed = seed_of(self._seeds[number], self._names[number])
            found += [
                ElementPlace(0, begin, rows.first, rows.row, rows.stride, seed, int(steps[number]))
                for begin, rows in self._rows[number]
            ]
        return found


@functools.lru_cache(maxsize=1 << 16)
def seed_of(seed: int, name: str) -> int:
    """The seed (64 bits) of the parameter ``name`` in a run with ``seed``."""
    digest = hashlib.blake2b(f"{seed} {name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "little")


def _count(state: dict[str, Any], device: torch.device) -> int | Tensor:
    """The number of the step that ``state`` is after; counted here if the optimizer (SGD, Lion) does not.

    A counter on ``device``, an accelerator, where torch's fused and capturable optimizers have it, is returned as it
    is: to read it would be to wait for the device.
    """
    known = state.get("step")
    if isinstance(known, Tensor) and known.numel() == 1 and known.device == device and accelerator.holds(known):
        return known
    if isinstance(known, int | float) or (isinstance(known, Tensor) and known.numel() == 1):
        return int(known)
    count = int(state.get(COUNT, 0)) + 1
    # A tensor as torch's counters, which checkpoints keep in its dtype.
    state[COUNT] = torch.tensor(float(count), dtype=torch.float32, device="cpu")
    return count
