"""The part of a batch that a sequence rank sees.

Note [What is cut]
    Ranks of one sequence read the same batch, and each keeps its own tokens. What depends on a token's neighbours is
    made before: labels of the next token, and positions, without which rotary embeddings would begin at 0 on each rank.
    Whether a mask hides tokens, and whether positions begin anew, decides what attention is asked for, so that the host
    has to know: it waits for the device once if these are there already. A batch is cut before it is moved where no
    code of the user comes in between.
    The mask of padding stays whole, as attention sees whole sequences. Rows that hold several sequences are known by
    positions that begin anew; their attention needs the whole row, too, so that ``RowLayout`` is remembered until the
    next batch is cut.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.common.transformers_models import sequences_of
from lt_zero.parallel.sequence.ranks import SequenceRanks, current

SIZE = "sequence_parallel_size"
IGNORED = -100  # the label of tokens that do not count, as in torch and transformers
HOOK = "sequence_batch"
# Entries with a value for each token, [batch, length, ...], and what tokens of padding have.
_TOKENS = {
    "input_ids": 0,
    "inputs_embeds": 0.0,
    "labels": IGNORED,
    "shift_labels": IGNORED,
    "token_type_ids": 0,
    "loss_mask": 0,
}
_MASK, _POSITIONS, _LABELS, _SHIFTED = "attention_mask", "position_ids", "labels", "shift_labels"
_OF_WHOLE_ROWS = ("cu_seq_lens_q", "cu_seq_lens_k", "max_length_q", "max_length_k", "seq_idx", "cache_position")


@dataclass(frozen=True)
class Takes:
    """Ways in which the model of a run takes a batch.

    Attributes:
        shifts: it computes the loss of next tokens from ``labels`` and ``shift_labels`` (transformers); False: it has a
            loss of its own, for which there is no ``labels`` that could be shifted once more; None: labels are not
            those of next tokens.
        masks: its attention gets masks of whole sequences from ``attention_mask``, so that one can be added.
        causal: tokens do not see later ones, so that padding at the end needs no mask.
        padding: the token of padding.
        counts: positions are 0, 1, 2, ... where a batch has none; False: the model makes them of its tokens.
    """

    shifts: bool | None = False
    masks: bool = False
    causal: bool = False
    padding: int = 0
    counts: bool = True


@dataclass(frozen=True)
class RowLayout:
    """The whole rows of the last batch that was cut.

    Attributes:
        length: of rows, with padding.
        padded: whether a row has tokens of padding that other tokens could see.
        sequences: the number of the sequence that each token belongs to, [batch, length]; None: a row is one sequence.
    """

    length: int
    padded: bool
    sequences: Tensor | None = None


class _Cuts:
    """State of the cuts for some ranks.

    Attributes:
        layout: of the last batch; None: there was none.
        takes: what the model makes of a batch.
        by_user: the user calls what cuts.
        means_by_user: the user takes the mean over the tokens of all ranks.
        inside: of a hook of the user.
        labelled: the last batch had labels of tokens.
    """

    def __init__(self) -> None:
        self.layout: RowLayout | None = None
        self.takes = Takes()
        self.by_user = self.inside = self.labelled = self.means_by_user = False


_cuts: weakref.WeakKeyDictionary[SequenceRanks, _Cuts] = weakref.WeakKeyDictionary()


def _cuts_for(ranks: SequenceRanks) -> _Cuts:
    return _cuts.setdefault(ranks, _Cuts())


def last_layout(ranks: SequenceRanks) -> RowLayout | None:
    """The rows of the last batch that was cut for ``ranks``; None: there is none."""
    return _cuts_for(ranks).layout


def had_labels(ranks: SequenceRanks) -> bool:
    """True if the last batch that was cut for ``ranks`` had labels of tokens."""
    return _cuts_for(ranks).labelled


def cuts_itself(ranks: SequenceRanks) -> bool:
    """True if the user has called ``cut_batch`` or ``cut_sequence``."""
    return _cuts_for(ranks).by_user


def leave_to_user(ranks: SequenceRanks) -> None:
    """Leave it to the user to cut batches, and to take the mean of losses over the tokens of all ranks.

    The loss of a model of transformers is then that of its part.
    """
    known = _cuts_for(ranks)
    known.by_user = known.means_by_user = True


def means_are_of_user(ranks: SequenceRanks) -> bool:
    """True after ``leave_to_user``."""
    return _cuts_for(ranks).means_by_user


class CutBatch(dict[str, Any]):
    """The entries of a batch of which tokens were cut. Of whole batches it has ``shift_labels`` in place of labels."""

    def __missing__(self, key: str) -> Any:
        if key == _LABELS and _SHIFTED in self:
            raise KeyError(
                f"{_LABELS!r}: sequences are cut over ranks, and labels were shifted before, as the label of a part's "
                f"last token is on the next rank. Compare logits with batch[{_SHIFTED!r}] token by token: "
                f"lt_zero.parallel.token_mean(losses, batch[{_SHIFTED!r}] != {IGNORED})."
            )
        raise KeyError(key)


def cut_sequence(x: Tensor, dim: int = 1) -> Tensor:
    """This rank's part of a tensor that is the same on all ranks of a sequence; ``x`` where sequences are not cut.

    Args:
        x: has a value for each token along ``dim``.

    Raises:
        ConfigError: its length is no multiple of the parts.
    """
    ranks = current()
    if ranks is None:
        return x
    length, known = x.shape[dim], _cuts_for(ranks)
    _check_length(ranks, length, f"a tensor of shape {list(x.shape)}")
    known.by_user |= not known.inside
    if known.layout is None or known.layout.length != length:
        known.layout = RowLayout(length, padded=False)
    return _part(x, dim, ranks)


def cut_batch(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """This rank's part of a batch of tokens; ``batch`` where sequences are not cut. For loaders of one's own.

    Args:
        batch: the same on all ranks of a sequence. ``input_ids``, ``inputs_embeds``, ``labels``, ``token_type_ids``,
            ``loss_mask``, ``position_ids`` of shape [batch, length, ...] are cut; ``attention_mask`` stays whole.

    Returns:
        The parts, with ``position_ids``, and with ``shift_labels`` (those of next tokens) in place of ``labels``.

    Raises:
        ConfigError: it has no known entries, or others with a value for each token, or cannot be padded.
    """
    ranks = current()
    if ranks is None:
        return batch
    known = _cuts_for(ranks)
    known.by_user |= not known.inside
    return cut_entries(batch, ranks, known.takes)


def model_takes(ranks: SequenceRanks, takes: Takes) -> None:
    """Note what the model of the run makes of a batch."""
    _cuts_for(ranks).takes = takes


def cut_for(batch: Any, ranks: SequenceRanks, module: nn.Module | None) -> Any:
    """This rank's part of a batch, by ``module.sequence_batch`` if there is one.

    Raises:
        ConfigError: as ``cut_batch``; or the hook returns dimensions of entries that the batch has not.
    """
    hook: Callable[[Any], Any] | None = getattr(module, HOOK, None)
    known = _cuts_for(ranks)
    if hook is None:
        if not isinstance(batch, Mapping):
            raise _unknown(f"a batch of {type(batch).__name__} has no names by which what is cut can be known", module)
        return cut_entries(batch, ranks, known.takes, module)
    known.inside = True
    try:
        return _hooked(batch, ranks, module, hook)
    finally:
        known.inside = False


def _hooked(batch: Any, ranks: SequenceRanks, module: nn.Module | None, hook: Callable[[Any], Any]) -> Any:
    """Result of ``hook``, or the batch with the entries cut that it names."""
    found = hook(batch)
    if not (isinstance(found, Mapping) and found and all(type(dim) is int for dim in found.values())):
        return found
    if not isinstance(batch, Mapping) or (missing := [key for key in found if not isinstance(batch.get(key), Tensor)]):
        lacks = f"a batch of {type(batch).__name__}" if not isinstance(batch, Mapping) else f"no tensor {missing[0]!r}"
        text = f"{SIZE}={ranks.size}: {type(module).__name__}.{HOOK} returned dimensions, but got {lacks}"
        raise ConfigError.about(SIZE, f"{text}. Return the cut batch, or dimensions of entries that there are.")
    return {**batch, **{key: cut_sequence(batch[key], dim) for key, dim in found.items()}}


def cut_entries(
    batch: Mapping[str, Any], ranks: SequenceRanks, takes: Takes, module: nn.Module | None = None
) -> CutBatch:
    """``cut_batch`` for a model that takes a batch as ``takes`` says. See Note [What is cut]."""
    length = _length_of(batch, ranks, module)
    entries = dict(batch)
    added = -length % ranks.multiple
    sequences = sequences_of(entries.get(_POSITIONS)) if entries.get(_MASK) is None else None
    if sequences is not None and not takes.masks:
        raise ConfigError.about(
            SIZE,
            f"{SIZE}={ranks.size}: rows hold several sequences ({_POSITIONS} begin anew), of which a model of your own "
            f"has to know. Give the batch an {_MASK} of whole rows, [batch, 1, length, length], and pass it to "
            "lt_zero.parallel.sequence_attention() as attn_mask.",
        )
    rows, device = _rows_of(entries)
    if entries.get(_POSITIONS) is None:
        if not takes.counts:
            text = f"{SIZE}={ranks.size}: embeddings of the model make positions of whole rows and their padding"
            raise ConfigError.about(SIZE, f"{text}. Give batches the {_POSITIONS} that they would make.")
        entries[_POSITIONS] = torch.arange(length, device=device).expand(rows, -1)
    if takes.shifts is not None and isinstance(labels := entries.get(_LABELS), Tensor) and labels.dim() > 1:
        entries.setdefault(_SHIFTED, nn.functional.pad(labels[:, 1:], (0, 1), value=IGNORED))
        if not takes.shifts:
            del entries[_LABELS]
    mask = given = entries.pop(_MASK, None)
    if mask is None and takes.masks:
        mask = torch.ones(rows, length, dtype=torch.bool, device=device)
    if added:
        mask = _padded_mask(mask, added, ranks, takes, length)
        if sequences is not None:
            sequences = torch.cat([sequences, sequences[:, -1:].expand(-1, added)], -1)
    cut = CutBatch()
    for key, value in entries.items():
        if isinstance(value, Tensor) and (key == _POSITIONS or (key in _TOKENS and value.dim() > 1)):
            cut[key] = _part(_lengthened(key, value, added, takes), -1 if key == _POSITIONS else 1, ranks)
        else:
            cut[key] = value
    if mask is not None:
        cut[_MASK] = mask
    # In causal attention padding at the end is seen by itself only.
    hidden = given is not None and given.dim() == 2 and not bool(given.all())
    padded = hidden or (added > 0 and not takes.causal)
    known = _cuts_for(ranks)
    known.layout, known.labelled = RowLayout(length + added, padded, sequences), _SHIFTED in cut or _LABELS in cut
    return cut


def _length_of(batch: Mapping[str, Any], ranks: SequenceRanks, module: nn.Module | None) -> int:
    """The tokens of whole rows.

    Raises:
        ConfigError: there are no tokens, or entries that differ in length, or of which it is unknown how to cut them.
    """
    tokens = next((batch[key] for key in ("input_ids", "inputs_embeds") if isinstance(batch.get(key), Tensor)), None)
    if tokens is None or tokens.dim() < 2:
        raise _unknown(f"a batch with {', '.join(map(repr, batch)) or 'no entries'} has no tokens (input_ids)", module)
    length = int(tokens.shape[1])
    for key, value in batch.items():
        if key in _OF_WHOLE_ROWS and value is not None:
            raise _unknown(f"{key!r} describes whole rows. Remove it: rows are known by {_POSITIONS}", module)
        if not isinstance(value, Tensor) or value.dim() < 2:
            continue
        has = value.shape[-1] if key in (_MASK, _POSITIONS) else value.shape[1]
        known = key in _TOKENS or key in (_MASK, _POSITIONS)
        if known and has != length:
            text = f"{SIZE}={ranks.size}: {key!r} of shape {list(value.shape)} is not of the {length} tokens of a row"
            raise ConfigError.about(SIZE, f"{text}. Make entries of a batch equally long.")
        if not known and length in value.shape[1:]:
            raise _unknown(f"{key!r} of shape {list(value.shape)} may have a value for each token", module)
    return length


def _unknown(what: str, module: nn.Module | None) -> ConfigError:
    name = type(module).__name__ if module is not None else "the module"
    return ConfigError.about(
        SIZE,
        f"{SIZE}: sequences are cut over ranks, but {what}. Define {name}.{HOOK}(batch): it returns "
        "{key: dimension} of what is cut, or the cut batch, made with lt_zero.parallel.cut_sequence(tensor, dim).",
    )


def _rows_of(entries: Mapping[str, Any]) -> tuple[int, torch.device]:
    tokens = next(entries[key] for key in ("input_ids", "inputs_embeds") if isinstance(entries.get(key), Tensor))
    return tokens.shape[0], tokens.device


def _padded_mask(mask: Tensor | None, added: int, ranks: SequenceRanks, takes: Takes, length: int) -> Tensor | None:
    """The mask of rows with ``added`` tokens of padding.

    Raises:
        ConfigError: there is no mask by which attention could leave them out.
    """
    if mask is not None and mask.dim() == 2:
        return nn.functional.pad(mask, (0, added), value=0)
    if mask is None and takes.causal:
        return None
    _check_length(ranks, length, "a row", "pad rows in the collate function, with an attention_mask of two dimensions")
    return mask


def _check_length(ranks: SequenceRanks, length: int, what: str, remedy: str = "pad it, or cut it off") -> None:
    if length % ranks.multiple:
        halves = ", in two parts each" if ranks.multiple != ranks.size else ""
        raise ConfigError.about(
            SIZE,
            f"{SIZE}={ranks.size}: {what} has {length} tokens, which {ranks.size} ranks{halves} cannot share equally. "
            f"Use a multiple of {ranks.multiple}: {remedy}.",
        )


def _lengthened(key: str, value: Tensor, added: int, takes: Takes) -> Tensor:
    """``value`` with so many tokens of padding at the end."""
    if not added:
        return value
    if key == _POSITIONS:
        more = torch.arange(1, added + 1, device=value.device, dtype=value.dtype)
        return torch.cat([value, value[..., -1:] + more], -1)
    filling = takes.padding if key == "input_ids" else _TOKENS[key]
    return torch.cat([value, value.new_full((value.shape[0], added, *value.shape[2:]), filling)], 1)


def _part(x: Tensor, dim: int, ranks: SequenceRanks) -> Tensor:
    """A copy of this rank's tokens, so that those of other ranks can be freed."""
    return x.index_select(dim, accelerator.send(ranks.positions(x.shape[dim]), x.device))
