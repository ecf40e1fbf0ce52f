"""Merges low-rank adapters (LoRA, arXiv:2106.09685) into the weights of a checkpoint while it is exported.

Names are those of peft: beside ``q_proj.base_layer.weight`` stand ``q_proj.lora_A.default.weight`` (rank r rows) and
``q_proj.lora_B.default.weight`` (rank r columns); an embedding has ``lora_embedding_A`` and ``_B``. The merged weight
``q_proj.weight`` is W + s B A with s = lora_alpha / r, or / sqrt(r) with ``use_rslora``: computed in fp32, and rounded
once to the dtype of W. What ``modules_to_save`` trained replaces the original. Everything else keeps its values.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor

from lt_zero.checkpoint.source import CheckpointSource, SavedOptimizer, Spec
from lt_zero.common.errors import CheckpointError
from lt_zero.common.name_pattern import NamePattern
from lt_zero.core.stores.regular_file import read_json

_FILE = "adapter_config.json"
_MOST = 1 << 20  # bytes of it; real ones have one or two thousand
_FACTOR = re.compile(
    r"^(?P<module>.+)\.lora_(?P<embedding>embedding_)?(?P<side>[AB])(\.(?P<adapter>[^.]+?))??(\.weight)?$"
)
_SAVED = re.compile(
    r"^(?P<module>.+)\.(modules_to_save\.(?P<adapter>[^.]+)|(?P<original>original_module))\.(?P<rest>.+)$"
)
_MODEL = re.compile(r"(^|(?<=\.))base_model\.model\.")  # peft's wrappers around the model
_REFUSED = {
    "lora_magnitude_vector": "DoRA scales each row by a norm, which is not W + s B A",
    "lora_bias": "adapters with a bias",
    "lora_A_bias": "adapters with a bias",
    ".token_adapter.": "trained tokens are no product of two factors",
}
_OTHERS = {  # keys of the configuration, with what they make of an adapter
    "use_dora": "DoRA",
    "alora_invocation_tokens": "activated LoRA",
    "trainable_token_indices": "trained tokens",
    **{key: key for key in ("use_qalora", "use_bdlora", "kasa_config", "monteclora_config", "arrow_config")},
}
_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)  # others are codes, or need scales


_LARGEST = torch.finfo(torch.float32).max  # the product of the factors is computed in fp32


@dataclass(frozen=True)
class LoraScaling:
    """The factor of B A, as in peft's ``adapter_config.json``.

    Attributes:
        alpha, rslora: it is alpha / r, or with ``rslora`` alpha / sqrt(r).
        alpha_pattern: other alphas, by a pattern of the module's name.
        transposed: square weights are stored transposed (``fan_in_fan_out``), None: as all others are. Of these the
            shape tells.
        rank, rank_pattern: r of the configuration, and others by a pattern of the module's name; None: unknown.
    """

    alpha: float
    rslora: bool = False
    alpha_pattern: Mapping[str, float] = field(default_factory=dict)
    transposed: bool | None = None
    rank: int | None = None
    rank_pattern: Mapping[str, int] = field(default_factory=dict)

    @classmethod
    def of(cls, given: float | str | os.PathLike[str]) -> LoraScaling:
        """From ``lora_alpha``, or from the path of ``adapter_config.json`` or of its folder.

        Raises:
            CheckpointError: the file cannot be read, or describes adapters of another kind, or has a number that is
                none, not finite, or as a rank not positive.
            ValueError: ``given`` is a number, and not finite.
        """
        try:
            alpha = float(given)  # type: ignore[arg-type]
        except (TypeError, ValueError):
            path = Path(given)  # type: ignore[arg-type]
        else:
            if not math.isfinite(alpha):
                raise ValueError(f"merge_lora={given}: lora_alpha must be finite.")
            return cls(alpha)
        path = path / _FILE if path.is_dir() else path
        try:
            content = read_json(path, _MOST)
            kind = content.get("peft_type", "LORA")
            alpha = _number(content["lora_alpha"], "lora_alpha")
            alphas = _patterns(content, "alpha_pattern", _number)
            rank = _rank(content["r"], "r") if content.get("r") is not None else None
            ranks = _patterns(content, "rank_pattern", _rank)
        except (OSError, ValueError, KeyError, TypeError, AttributeError, OverflowError) as error:
            text = f"merge_lora={str(given)!r}: {path} is no {_FILE} with lora_alpha ({repr(error):.200})."
            raise CheckpointError(f"{text} Name that file, its folder, or lora_alpha as a number.") from error
        others = [what for key, what in _OTHERS.items() if content.get(key)]
        if kind != "LORA" or others:
            what = others[0] if kind == "LORA" else kind
            raise CheckpointError(f"{path} describes {what}, not LoRA: merge it with peft's merge_and_unload.")
        rslora, transposed = bool(content.get("use_rslora")), bool(content.get("fan_in_fan_out"))
        return cls(alpha, rslora, alphas, transposed, rank, ranks)

    def of_module(self, module: str, rank: int) -> float:
        """The factor of a module (dotted name) whose factors have rank ``rank``.

        Raises:
            CheckpointError: there is none: the rank is 0, or another one than that of the configuration, or the factor
                is beyond fp32.
        """
        configured = _matching(self.rank_pattern, module, self.rank)
        if configured is not None and configured != rank:
            raise CheckpointError(
                f"The factors of {module} have rank {rank}, and {_FILE} says {configured} (r, rank_pattern): it is of "
                "other adapters. Name the file that was saved with these, or lora_alpha as a number."
            )
        if rank < 1:
            raise CheckpointError(f"The factors of {module} have rank {rank}: there is nothing to merge. Remove them.")
        alpha = _matching(self.alpha_pattern, module, self.alpha)
        factor = alpha / (math.sqrt(rank) if self.rslora else rank)
        if not abs(factor) <= _LARGEST:  # NaN is neither larger nor smaller
            raise CheckpointError(
                f"The factor of {module} is {factor:g}, which is no number of fp32: lora_alpha={alpha:g}, rank {rank}. "
                "Correct lora_alpha, or alpha_pattern."
            )
        return factor


Value = TypeVar("Value")


def _matching(patterns: Mapping[str, Value], module: str, default: Value) -> Value:
    """The value of the first pattern that the end of a module's name matches, as in peft."""
    return next((v for pattern, v in patterns.items() if NamePattern.of(pattern).matches_end(module)), default)


def _number(value: Any, key: str) -> float:
    """``value`` as a finite number; raises ValueError."""
    number = float(value)
    if isinstance(value, bool) or not math.isfinite(number):
        raise ValueError(f"{key} is {value!r}, which is no finite number")
    return number


def _rank(value: Any, key: str) -> int:
    """``value`` as a rank; raises ValueError."""
    if type(value) is not int or value < 1:
        raise ValueError(f"{key} is {value!r}, which is no positive integer")
    return value


def _patterns(content: Mapping[str, Any], key: str, read: Callable[[Any, str], Value]) -> dict[str, Value]:
    """A mapping of the configuration, from patterns of names to values; raises ValueError."""
    found: dict[str, Value] = {}
    for pattern, value in (content.get(key) or {}).items():
        try:
            NamePattern.of(pattern)
        except ValueError as error:
            raise ValueError(f"{key}: {error}") from None
        found[pattern] = read(value, f"{key}[{pattern!r}]")
    return found


class _Merge(NamedTuple):
    """Saved names of a weight and of its two factors; and whether these are an embedding's."""

    weight: str
    a: str
    b: str
    embedding: bool


class MergedSource:
    """A checkpoint without adapters: they are merged into the weights that they belong to.

    Args:
        source: the checkpoint.
        scaling: of the adapters.

    Raises:
        CheckpointError: there are no adapters, or several; or their weights are missing, or do not fit; or the scaling
            of one is no number.
    """

    def __init__(self, source: CheckpointSource, scaling: LoraScaling) -> None:
        self._source, self._scaling = source, scaling
        self.precision = str(getattr(source, "precision", ""))
        self.meta: Mapping[str, Any] = source.meta
        self.optimizers: Sequence[SavedOptimizer] = ()  # their states are those of the factors
        factors, self._saved = self._sorted()
        merges = [self._merge(module, sides) for module, sides in factors.items()]
        self._merges = {merge.weight: (module, merge) for module, merge in zip(factors, merges, strict=True)}
        # Computed here, so that nothing is written before all of them are known to be numbers.
        self._factors = {module: self._factor(module, merge) for module, merge in self._merges.values()}
        self._square = self._squares_are_transposed()
        self.weights: Mapping[str, Spec] = {new: source.weights[old] for new, old in self._saved.items()}
        self.aliases: Mapping[str, str] = self._ties()

    def _sorted(self) -> tuple[dict[str, dict[str, tuple[str, bool]]], dict[str, str]]:
        """The factors by module and side (A, B), and the exported names of all other weights."""
        factors: dict[str, dict[str, tuple[str, bool]]] = {}
        others: dict[str, str] = {}
        adapters = set[str]()
        for name in self._source.weights:
            for word, why in _REFUSED.items():
                if word in name:
                    raise CheckpointError(f"{name} cannot be merged: {why}. Merge with peft's merge_and_unload.")
            if (factor := _FACTOR.match(name)) is not None:
                adapters.add(factor["adapter"] or "")
                factors.setdefault(factor["module"], {})[factor["side"]] = name, factor["embedding"] is not None
                continue
            if ".lora_" in name:
                text = f"{name} belongs to an adapter, and is neither of its two factors"
                raise CheckpointError(f"{text}. Merge with peft's merge_and_unload.")
            if (kept := _SAVED.match(name)) is not None:
                adapters |= {kept["adapter"]} - {None}
                if kept["original"]:
                    continue
            others[name] = f"{kept['module']}.{kept['rest']}" if kept is not None else name
        saved: dict[str, str] = {}
        for name, new in others.items():
            module, layer, rest = new.rpartition(".base_layer.")
            exported = _plain(f"{module}.{rest}" if layer and module in factors else new)
            if exported in saved:
                raise CheckpointError(
                    f"{saved[exported]} and {name} would both be {exported} without adapters. Merge with peft's "
                    "merge_and_unload."
                )
            saved[exported] = name
        if not factors:
            raise CheckpointError(
                "The checkpoint has no adapters (names with lora_A and lora_B): leave out merge_lora."
            )
        if len(adapters) > 1:
            names = ", ".join(sorted(adapters))
            raise CheckpointError(f"The checkpoint has several adapters: {names}. Save one (peft's delete_adapter).")
        return factors, saved

    def _merge(self, module: str, sides: Mapping[str, tuple[str, bool]]) -> _Merge:
        if len(sides) != 2:
            raise CheckpointError(f"{module} has lora_{next(iter(sides))} and not the other factor: nothing to merge.")
        (a, embedding), (b, _) = sides["A"], sides["B"]
        names = (f"{module}.base_layer.weight", f"{module}.weight")
        weight = next((name for name in names if name in self._source.weights), None)
        if weight is None:
            raise CheckpointError(
                f"{module} has adapters, and the checkpoint lacks the weight that they belong to: it was saved without "
                "frozen weights (checkpoint.save_frozen=false). Load it into the model, and save it with them."
            )
        first, second = self._source.weights[a].shape, self._source.weights[b].shape
        if (dtype := self._source.weights[weight].dtype) not in _DTYPES:
            text = f"{weight} is of {dtype}, whose values are not those of the weight"
            raise CheckpointError(f"{text}. Decode it before (peft's merge_and_unload).")
        if _transposed(first, second, self._source.weights[weight].shape, embedding, False) is None:
            shapes = f"{list(second)} and {list(first)}"
            raise CheckpointError(
                f"The factors of {module} have the shapes {shapes}, which do not fit {weight} with "
                f"{list(self._source.weights[weight].shape)}. Merge with peft's merge_and_unload."
            )
        return _Merge(weight, a, b, embedding)

    def _factor(self, module: str, merge: _Merge) -> float:
        return self._scaling.of_module(_plain(module), self._source.weights[merge.a].shape[0])

    def _squares_are_transposed(self) -> bool:
        """True if square weights are stored transposed; raises CheckpointError if only some of the others are."""
        if self._scaling.transposed is not None:
            return self._scaling.transposed
        square, found = None, set[bool | None]()
        for _, merge in self._merges.values():
            a, b, shape = (self._source.weights[name].shape for name in (merge.a, merge.b, merge.weight))
            ways = {_transposed(a, b, shape, merge.embedding, turned) for turned in (False, True)}
            if len(ways) > 1:
                square = merge.weight
            elif not merge.embedding and len(shape) == 2:
                found |= ways
        if square is not None and len(found) > 1:
            raise CheckpointError(
                f"{square} is square, and of other weights with adapters some are stored transposed: merge_lora has to "
                "be peft's adapter_config.json, which tells (fan_in_fan_out)."
            )
        return True in found

    def _ties(self) -> dict[str, str]:
        exported = {old: new for new, old in self._saved.items()}
        ties: dict[str, str] = {}
        for name, owner in self._source.aliases.items():
            if name in exported and owner in exported:
                # A name with an adapter gets values of its own.
                if name not in self._merges and owner not in self._merges:
                    ties[exported[name]] = exported[owner]
            elif name in exported:
                raise CheckpointError(f"{name} is tied to {owner}, which merging removes: export without merge_lora.")
        return ties

    def read(self, name: str) -> Tensor:
        """The tensor of an exported name, merged.

        Raises:
            CheckpointError: the file is damaged, or the merged tensor is not finite.
        """
        saved = self._saved[name]
        weight = self._source.read(saved)
        if saved not in self._merges:
            return weight
        module, merge = self._merges[saved]
        a, b = self._source.read(merge.a), self._source.read(merge.b)
        turned = _transposed(tuple(a.shape), tuple(b.shape), tuple(weight.shape), merge.embedding, self._square)
        delta = b.flatten(1).float() @ a.flatten(1).float()
        delta = (delta.T if turned else delta) * self._factors[module]
        merged = (weight.float() + delta.reshape(weight.shape)).to(weight.dtype).contiguous()
        if not bool(merged.isfinite().all()):
            raise CheckpointError(
                f"{name} is not finite after merging: {_largest(merge.weight, weight)}, {_largest(merge.a, a)}, "
                f"{_largest(merge.b, b)}, factor {self._factors[module]:g}, dtype {weight.dtype}. Correct lora_alpha, "
                "or export without merge_lora."
            )
        return merged

    def read_state(self, optimizer: int, name: str, key: str) -> Tensor:
        """Raise KeyError: there are no states."""
        raise KeyError((optimizer, name, key))


def _largest(name: str, tensor: Tensor) -> str:
    """A sentence's part that tells how large the values of a tensor are."""
    finite = bool(tensor.isfinite().all())
    return f"{name} {f'is at most {float(tensor.abs().max()):g}' if finite else 'is not finite itself'}"


def _plain(name: str) -> str:
    """The name of a parameter, or module, without peft's wrapper around the model."""
    return _MODEL.sub("", name, count=1)


def _transposed(
    a: tuple[int, ...], b: tuple[int, ...], weight: tuple[int, ...], embedding: bool, square: bool
) -> bool | None:
    """True if B A has to be transposed for a weight; ``square``: the answer if both fit. None: it does not fit."""
    if len(a) < 2 or len(b) < 2 or a[0] != b[1] or math.prod(b[2:]) != 1:
        return None
    product = (b[0], *a[1:])
    if embedding:
        return True if product[::-1] == weight else None
    if product == weight:
        return square and len(set(product)) == 1
    return True if product[::-1] == weight and len(weight) == 2 else None
