"""The cuts of parameters by the tensor ranks of a DeepSpeed run, and the whole tensors that their slices make.

Note [Pieces]
    Whatever the cut, a rank has some rectangular pieces of a parameter, and each piece lies at strided places in the
    whole tensor and in the rank's. DeepSpeed 0.19 writes such pieces for every parameter (``affine_map``), and beside
    them lists of patterns for names, as older versions and Megatron-DeepSpeed do: replicated, cut by columns (row
    parallelism), cut in several sub-parameters, averaged; all others are cut by rows. Lists are turned into pieces.

Note [Scaled pieces]
    Layers with row parallelism may keep a bias divided by the number of ranks. The gradient of a weight that is kept
    times ``scale`` is the whole one's divided by it, so the first moment is divided once and the second twice.

Note [Patterns of strangers]
    A regular expression can take forever. Only plain ones are tried: no group that repeats, few repetitions.
"""

from __future__ import annotations

import contextlib
import math
import re
from collections.abc import Iterable, Mapping, Sequence
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lt_zero.checkpoint.formats.foreign import Saved, mapping
from lt_zero.checkpoint.source import Spec
from lt_zero.common.errors import CheckpointError

_REPLICATED, _AVERAGED = "tp_replicated_parameter_patterns", "parameter_to_average_patterns"
_ROW, _TWO = "parameter_with_row_parallelism_patterns", "parameter_with_2_sub_params_cat_dim_0"
_SEVERAL, _WIDTHS = "parameter_with_sub_params", "sub_param_shard_widths"
_VOCABULARY, _UNSUPPORTED = "vocabulary_parameter_patterns", "autotp_unsupported_parameter_patterns"
_BY_ROWS = "cut by rows"
_MEGATRON: dict[str, Any] = {  # for checkpoints without patterns: the names of Megatron's layers
    _REPLICATED: [
        r".*(layernorm|layer_norm)\.(weight|bias)",
        r".*attention\.dense\.bias",
        r".*dense_4h_to_h\.bias",
        r".*position_embeddings\.weight",
        r".*tokentype_embeddings\.weight",
    ],
    _ROW: [r".*attention\.dense\.weight", r".*dense_4h_to_h\.weight"],
    _BY_ROWS: [r".*query_key_value\.(weight|bias)", r".*dense_h_to_4h\.(weight|bias)", r".*word_embeddings\.weight"],
}
_POWERS = {"fp32": 1, "exp_avg": -1, "momentum_buffer": -1, "exp_avg_sq": -2, "max_exp_avg_sq": -2}
_AFFINE_VERSION = 1  # the newest that is known
_PATTERN, _NAME, _REPEATED = 1000, 500, 3  # characters of a pattern and of a name; repetitions in a pattern
_REMEDY = "`lt-zero import SRC OUT --cut {name}=DIM` (0: by rows, 1: by columns, -1: all ranks have it whole)."

Shape = tuple[int, ...]


class RankPiece(NamedTuple):
    """Elements of a tensor that a rank has; see Note [Pieces].

    ``whole`` and ``local``: where they begin, and their strides, in the whole tensor and in the rank's. ``scale``: the
    factor by which the rank has them.
    """

    rank: int
    shape: Shape
    whole: tuple[int, Shape]
    local: tuple[int, Shape]
    scale: float = 1.0

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


class Cut(NamedTuple):
    """The way in which slices of ranks make a tensor of ``shape``: by pieces, or as their mean. See Note [Pieces].

    ``rows``: of a vocabulary, without those that pad it; None: all.
    """

    shape: Shape
    pieces: tuple[RankPiece, ...] = ()
    averaged: bool = False
    rows: int | None = None

    @property
    def is_scaled(self) -> bool:
        return any(piece.scale != 1.0 for piece in self.pieces)

    def joined(self, what: str, slices: Sequence[Saved], key: str = "fp32") -> Saved:
        """The whole tensor, from the slice of each rank. ``key``: of the state that it is, "fp32" for weights.

        Raises:
            CheckpointError: a slice has another size or dtype than the others and the cut say; or, when the tensor is
                read, ranks that have the same elements have different values.
        """
        dtype = slices[0].spec.dtype
        for rank, saved in enumerate(slices):
            own = sum(piece.numel for piece in self.pieces if piece.rank == rank)
            needed = math.prod(self.shape) if self.averaged else own
            if saved.spec.numel != needed or saved.spec.dtype != dtype:
                raise CheckpointError(
                    f"{what} has {saved.spec.numel} elements of {saved.spec.dtype} in the files of tensor rank {rank}, "
                    f"and should have {needed} of {dtype}: the files do not belong together. Take another checkpoint."
                )
        if self.averaged and not dtype.is_floating_point:
            raise CheckpointError(f"{what} is of {dtype}, which has no mean of tensor ranks. Take another checkpoint.")
        shape = self.shape if self.rows is None else (self.rows, *self.shape[1:])

        def read() -> Tensor:
            values = [saved.read().detach() for saved in slices]
            whole = torch.stack(values).mean(0, dtype=dtype) if self.averaged else self._assembled(what, values, key)
            return whole if self.rows is None else whole[: self.rows].clone()

        return Saved(Spec(shape, dtype), read)

    def _assembled(self, what: str, slices: Sequence[Tensor], key: str) -> Tensor:
        numel = math.prod(self.shape)
        whole = torch.empty(numel, dtype=slices[0].dtype)
        filled = torch.zeros(numel, dtype=torch.bool)
        flat = [values.reshape(-1) for values in slices]
        for piece in self.pieces:
            values = flat[piece.rank].as_strided(piece.shape, piece.local[1], piece.local[0] + _start(flat[piece.rank]))
            if piece.scale != 1.0:
                values = values / piece.scale ** _POWERS.get(key, 1)
            target, known = (side.as_strided(piece.shape, piece.whole[1], piece.whole[0]) for side in (whole, filled))
            if known.any() and not (~known | (target == values) | (target != target)).all():
                raise CheckpointError(
                    f"{what} should have the same values on all tensor ranks, but has others on rank {piece.rank}: the "
                    "files do not belong together, or their patterns are wrong. Take another checkpoint."
                )
            target.copy_(values)
            known.fill_(True)
        if not filled.all():
            raise CheckpointError(f"{what}: no tensor rank has all of its elements. Take another checkpoint.")
        return whole.view(self.shape)


class TensorRanks:
    """The cuts by the tensor ranks of a checkpoint of its parameters, by ``universal_checkpoint_info``.

    Args:
        info: that entry; None: it has none, and names are those of Megatron's layers.
        where: the file that it comes from.
        size: number of tensor ranks.
        rules: the dimension that is cut, -1 for none, by patterns (``*``, ``?``) of names; they come first.

    Raises:
        CheckpointError: patterns are malformed, or DeepSpeed says that it cannot join a parameter.
    """

    def __init__(self, info: Any, where: Path, size: int, rules: Mapping[str, int] | None = None) -> None:
        self._where, self._size, self._rules = where, size, dict(rules or {})
        self._known = isinstance(info, dict)
        self._info: dict[str, Any] = info if isinstance(info, dict) else _MEGATRON
        affine = self._info.get("affine_map") or {}
        if affine.get("version", _AFFINE_VERSION) > _AFFINE_VERSION:
            raise CheckpointError(
                f"{where} describes its cuts in version {affine['version']} of affine_map; {_AFFINE_VERSION} is the "
                "newest that is known. Convert it with the DeepSpeed that wrote it (ds_to_universal.py)."
            )
        self._affine = mapping(affine.get("params", {}), "affine_map", where)
        self._several = {p: entry for entry in self._info.get(_SEVERAL) or () for p in entry["patterns"]}
        self._patterns = {
            key: list(self._info.get(key) or ())
            for key in (_REPLICATED, _AVERAGED, _TWO, _ROW, _VOCABULARY, _UNSUPPORTED, _BY_ROWS)
        }
        self._patterns[_SEVERAL] = list(self._several)
        self._compiled = {
            pattern: _compiled(pattern, where)
            for found in (self._affine, *self._patterns.values())
            for pattern in found
        }

    def cut_of(self, name: str, shapes: Sequence[Shape], is_buffer: bool = False) -> Cut:
        """The cut of a tensor with these ``shapes`` on the ranks. ``is_buffer``: no pattern applies, all have it whole.

        Raises:
            CheckpointError: no pattern, or several, tell how it is cut, or the shapes do not fit.
        """
        ruled = {dim for pattern, dim in self._rules.items() if fnmatchcase(name, pattern)}
        if len(ruled) > 1:
            raise CheckpointError(f"{name} matches patterns of --cut for several dimensions: {sorted(ruled)}.")
        if ruled:
            return _whole(shapes, self._size) if (dim := ruled.pop()) < 0 else self._along(name, shapes, dim)
        if is_buffer or not any(shapes):
            self._same_shapes(name, shapes)
            return _whole(shapes, self._size)
        if pattern := self._match(self._patterns[_UNSUPPORTED], name):
            reason = self._info[_UNSUPPORTED]
            raise CheckpointError(f"{self._where}: DeepSpeed cannot join {name} ({dict(reason)[pattern]}).")
        if pattern := self._match(self._affine, name):
            return self._by_affine_map(name, self._affine[pattern], shapes)
        kinds = {
            key: found
            for key in (_REPLICATED, _AVERAGED, _TWO, _SEVERAL, _ROW, _BY_ROWS)
            if (found := self._match(self._patterns[key], name))
        }
        if len(kinds) > 1 and set(kinds) != {_SEVERAL, _ROW}:
            raise CheckpointError(
                f"{name} matches patterns of two kinds in {self._where}: "
                f"{', '.join(f'{pattern!r} ({key})' for key, pattern in kinds.items())}. Say how it is cut: "
                f"{_REMEDY.format(name=name)}"
            )
        cut = self._by_patterns(name, kinds, shapes)
        if not self._match(self._patterns[_VOCABULARY], name):
            return cut
        rows = self._info.get("original_vocab_size")
        if type(rows) is not int or not 0 < rows <= cut.shape[0]:
            raise CheckpointError(
                f"{self._where}: original_vocab_size is {rows!r}, but {name} has the shape {cut.shape}."
            )
        return cut._replace(rows=rows)

    def _by_patterns(self, name: str, kinds: Mapping[str, str], shapes: Sequence[Shape]) -> Cut:
        if _REPLICATED in kinds or _AVERAGED in kinds:
            self._same_shapes(name, shapes)
            return Cut(shapes[0], averaged=True) if _AVERAGED in kinds else _whole(shapes, self._size)
        if _TWO in kinds:
            halves = [[shape[0] // 2 for shape in shapes]] * 2
            return self._along(name, shapes, 0, halves)
        if _SEVERAL in kinds:
            return self._in_several(name, kinds[_SEVERAL], shapes)
        if not kinds and not self._known:
            raise CheckpointError(
                f"{self._where} does not tell how tensor ranks cut {name} (no universal_checkpoint_info, and no name "
                f"of Megatron's layers): slices have the shapes {[list(shape) for shape in shapes]}. Say it: "
                f"{_REMEDY.format(name=name)}"
            )
        return self._along(name, shapes, 1 if _ROW in kinds and len(shapes[0]) > 1 else 0)

    def _along(
        self, name: str, shapes: Sequence[Shape], dim: int, widths: Sequence[Sequence[int]] | None = None
    ) -> Cut:
        """Return slices along ``dim``. ``widths``: of each sub-parameter on each rank; default: of one."""
        others = {(*shape[:dim], *shape[dim + 1 :]) for shape in shapes}
        sizes = [shape[dim] for shape in shapes if len(shape) > dim]
        widths = widths or [sizes]
        sums = [sum(each) for each in zip(*widths, strict=True)]
        if len(others) != 1 or len(sizes) < len(shapes) or sums != sizes:
            raise CheckpointError(
                f"{self._where}: {name} is cut along dimension {dim}, but its slices have the shapes "
                f"{[list(shape) for shape in shapes]}: the files do not belong together. Take another checkpoint."
            )
        shape = (*shapes[0][:dim], sum(sums), *shapes[0][dim + 1 :])
        return Cut(shape, _pieces(shape, dim, widths))

    def _in_several(self, name: str, pattern: str, shapes: Sequence[Shape]) -> Cut:
        """Return the cut of several sub-parameters, each cut by itself, in a view of the parameter."""
        entry = self._several[pattern]
        view, dim = list(entry["shape"]), int(entry["partition_dim"])
        sizes, numel = view[dim], sum(math.prod(shape) for shape in shapes)
        widths = (self._info.get(_WIDTHS) or {}).get(pattern)
        if isinstance(sizes, int):  # their number, before version 0.4
            view[dim] = 1
            along = (
                numel // math.prod(n for n in view if n > 0) if -1 not in view else sum(shape[dim] for shape in shapes)
            )
            sizes = [along // sizes] * sizes
        if widths is None:
            widths = [[size // self._size] * self._size for size in sizes]
        view[dim] = sum(sizes)
        known = math.prod(n for n in view if n >= 0)
        view = [n if n >= 0 else numel // max(known, 1) for n in view]
        if math.prod(view) != numel or any(
            sum(row) != size or len(row) != self._size or min(row) < 0 for row, size in zip(widths, sizes, strict=True)
        ):
            raise CheckpointError(
                f"{self._where}: {name} has {numel} elements on all tensor ranks, which do not fit its sub-parameters "
                f"({list(sizes)} along dimension {dim} of {entry['shape']}, widths {widths}). Take another checkpoint."
            )
        shape = tuple(view)
        if len(shapes[0]) != len(shape):  # a view: the parameter has its first dimension cut
            shape = (sum(each[0] for each in shapes), *shapes[0][1:])
        return Cut(shape, _pieces(tuple(view), dim, widths))

    def _by_affine_map(self, name: str, entry: Any, shapes: Sequence[Shape]) -> Cut:
        shape = tuple(int(n) for n in entry["logical_shape"])
        pieces = []
        for rank, own in entry["ranks"].items():
            for piece in own["pieces"]:
                whole, local = (
                    (int(start), tuple(map(int, strides))) for start, strides in (piece["source"], piece["dest"])
                )
                sizes, scale = tuple(map(int, piece["shape"])), float(piece.get("scale", 1.0))
                pieces.append(RankPiece(int(rank), sizes, whole, local, scale))
        for piece in pieces:
            numels = math.prod(shape), math.prod(shapes[piece.rank]) if 0 <= piece.rank < len(shapes) else 0
            inside = all(
                _is_inside(piece.shape, side, n) for side, n in zip((piece.whole, piece.local), numels, strict=True)
            )
            # Elements of the whole must not lie on each other.
            inside &= all(stride > 0 for n, stride in zip(piece.shape, piece.whole[1], strict=False) if n > 1)
            if not inside or piece.scale == 0 or not math.isfinite(piece.scale):
                raise CheckpointError(
                    f"{self._where}: the affine_map of {name} of shape {shape} has {piece}, which lies outside "
                    f"of it or of the slices {[list(shape) for shape in shapes]}. Take another checkpoint."
                )
        if min(shape, default=0) < 0 or sum(piece.numel for piece in pieces) < math.prod(shape):
            raise CheckpointError(
                f"{self._where}: the affine_map says that {name} has the shape {shape}, of which the slices "
                f"{[list(shape) for shape in shapes]} are only a part. Take another checkpoint."
            )
        return Cut(shape, tuple(pieces))

    def _match(self, patterns: Iterable[str], name: str) -> str | None:
        """The pattern that matches a name, as DeepSpeed matches (from the beginning); None if none does."""
        if len(name) > _NAME and (patterns := list(patterns)):
            raise CheckpointError(
                f"{name[:_NAME]}... is too long a name to be compared with the patterns in {self._where}. Say how it "
                f"is cut: {_REMEDY.format(name=f'{name[:20]}*')}"
            )
        found = [pattern for pattern in patterns if self._compiled[pattern].match(name)]
        if len(found) > 1:
            raise CheckpointError(
                f"{name} matches two patterns in {self._where}: {found[0]!r} and {found[1]!r}. Say how it is cut: "
                f"{_REMEDY.format(name=name)}"
            )
        return found[0] if found else None

    def _same_shapes(self, name: str, shapes: Sequence[Shape]) -> None:
        if len(set(shapes)) > 1:
            raise CheckpointError(
                f"{self._where}: {name} should be whole on all tensor ranks, but has the shapes "
                f"{[list(shape) for shape in shapes]}: the files do not belong together. Take another checkpoint."
            )


def _whole(shapes: Sequence[Shape], size: int) -> Cut:
    """The cut of what all ranks have whole."""
    place = (0, _strides(shapes[0]))
    return Cut(shapes[0], tuple(RankPiece(rank, shapes[0], place, place) for rank in range(size)))


def _pieces(shape: Shape, dim: int, widths: Sequence[Sequence[int]]) -> tuple[RankPiece, ...]:
    """The pieces of ranks that have ``widths`` (by sub-parameter and rank) of a tensor along ``dim``."""
    outer, inner = math.prod(shape[:dim]), math.prod(shape[dim + 1 :])
    totals = [sum(each) for each in zip(*widths, strict=True)]
    pieces, begun, start = [], [0] * len(totals), 0
    for row in widths:
        for rank, width in enumerate(row):
            whole = start * inner, (shape[dim] * inner, inner, 1)
            local = begun[rank] * inner, (totals[rank] * inner, inner, 1)
            pieces.append(RankPiece(rank, (outer, width, inner), whole, local))
            start, begun[rank] = start + width, begun[rank] + width
    return tuple(pieces)


def _strides(shape: Shape) -> Shape:
    return tuple(math.prod(shape[dim + 1 :]) for dim in range(len(shape)))


def _start(tensor: Tensor) -> int:
    return int(tensor.storage_offset())


def _is_inside(shape: Shape, side: tuple[int, Shape], numel: int) -> bool:
    """True if strided elements lie in a flat tensor of ``numel``."""
    start, strides = side
    if len(shape) != len(strides) or min((start, *shape, *strides)) < 0:
        return False
    return 0 in shape or start + sum((n - 1) * stride for n, stride in zip(shape, strides, strict=True)) < numel


def _compiled(pattern: Any, where: Path) -> re.Pattern[str]:
    """A pattern, unless it is none or could take long. See Note [Patterns of strangers]."""
    if isinstance(pattern, str) and len(pattern) <= _PATTERN:
        repeats = len(re.findall(r"(?<!\\)[*+{]", pattern))
        if repeats <= _REPEATED and not re.search(r"\)[*+?{]|\\[1-9]|\(\?", pattern):
            with contextlib.suppress(re.error):
                return re.compile(pattern)
    raise CheckpointError(
        f"{where} has the pattern {str(pattern)[:100]!r}, which is not read. Take another checkpoint."
    )
