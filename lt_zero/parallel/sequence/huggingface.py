"""Models of Hugging Face's transformers whose sequences are cut over ranks.

A model's attention becomes ``lt_zero_sequence|sdpa``, or that of another implementation: it gets masks of whole rows,
and exchanges heads or gathers keys (attention.py). Its loss becomes the mean over the tokens of all ranks (loss.py).
Where no run cuts sequences, both do what they did before. transformers is imported when ``switch`` is called.
"""

from __future__ import annotations

import functools
import importlib
import inspect
import sys
from collections.abc import Callable, Iterator, Mapping
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Replicate
from torch.nn import functional as F

from lt_zero.common import accelerator
from lt_zero.common.errors import ConfigError
from lt_zero.common.transformers_models import mixes_whole_rows, models_of
from lt_zero.parallel.sequence.attention import sequence_attention
from lt_zero.parallel.sequence.batches import IGNORED, SIZE, Takes, last_layout, means_are_of_user
from lt_zero.parallel.sequence.loss import token_mean
from lt_zero.parallel.sequence.ranks import SequenceRanks, current

# Our names of implementations, by theirs: one with "flash" in it would be taken for a kernel of transformers.
_NAMES = {
    "sdpa": "lt_zero_sequence|sdpa",
    "eager": "lt_zero_sequence|sdpa",
    "flex_attention": "lt_zero_sequence|flex_attention",
    "flash_attention_2": "lt_zero_sequence|fa2",
    "flash_attention_3": "lt_zero_sequence|fa3",
}
_LAYERS = ("full_attention", "sliding_attention", "chunked_attention")  # that see other tokens by attention only
_REFUSED = ("position_bias", "s_aux", "head_mask", "output_attentions")  # of single heads, or of parts


@functools.cache
def register() -> Any:
    """Let models of transformers use our implementations; returns transformers.

    Raises:
        ImportError: transformers is missing, or too old.
    """
    try:
        transformers: Any = importlib.import_module("transformers")
        attentions, masks = transformers.AttentionInterface, transformers.AttentionMaskInterface
    except (ImportError, AttributeError) as error:
        raise ImportError(f"{SIZE} needs transformers >= 5.0 for its models: {error}.") from error
    for base, name in _NAMES.items():
        if base != "eager" and base in attentions() and base in masks():
            attentions.register(name, functools.partial(attention, base, attentions()[base]))
            masks.register(name, functools.partial(whole_mask, base, masks()[base]))
    return transformers


def mixes_parts_of_rows(inputs: Mapping[str, Any]) -> str:
    """``transformers_models.mixes_whole_rows`` where ranks have parts of rows."""
    ranks = current()
    if ranks is None:
        return mixes_whole_rows(inputs)
    layout = last_layout(ranks)
    if layout is None or layout.sequences is None:
        return ""
    return f"lets the sequences of a row see each other without {SIZE}, which keeps them apart"


def switch(module: nn.Module, ranks: SequenceRanks, tensor: int = 1) -> Takes:
    """Let models of transformers in ``module`` compute attention and loss of sequences that are cut over ``ranks``.

    Args:
        tensor: the tensor ranks that share their heads.

    Returns:
        What they make of a batch; of other modules the default.

    Raises:
        ConfigError: a model would mix tokens in another way; names what.
    """
    found = [_switch(model, ranks, tensor) for model in models_of(module)]
    if len(set(found)) > 1:
        raise _refusal(module, "has several models of transformers, which take batches in different ways")
    return found[0] if found else Takes()


def _switch(model: Any, ranks: SequenceRanks, tensor: int) -> Takes:
    if problem := next(_problems(model, ranks, tensor), None):
        raise _refusal(model, problem)
    register()
    used = model.config._attn_implementation or "sdpa"
    if used not in _NAMES.values():
        if used not in _NAMES:
            raise _refusal(model, f"has attn_implementation={used!r}, which is none of {', '.join(_NAMES)}")
        model.set_attn_implementation(_NAMES[used])
        if model.config._attn_implementation != _NAMES[used]:
            raise _refusal(model, "has an attention of its own, which does not use transformers' AttentionInterface")
    shifts = _switch_loss(model)
    causal = [child.is_causal for child in model.modules() if isinstance(getattr(child, "is_causal", None), bool)]
    padding = getattr(model.config, "pad_token_id", None)
    counts = not any(_makes_positions(child) for child in model.modules())
    return Takes(shifts, True, bool(causal) and all(causal), padding if isinstance(padding, int) else 0, counts)


def _refusal(module: nn.Module, what: str) -> ConfigError:
    text = f"{SIZE}: sequences are cut over ranks, but {type(module).__name__} {what}"
    return ConfigError.about(SIZE, f"{text}. Choose another model, or remove the key.")


def _problems(model: Any, ranks: SequenceRanks, tensor: int) -> Iterator[str]:
    """Properties of a model that are wrong for parts of sequences."""
    config = model.config
    if any(getattr(config, name, False) for name in ("is_encoder_decoder", "add_cross_attention")):
        yield "has cross-attention, whose two sequences would have to be cut in different ways"
    configs = {id(child.config): type(child.config).__name__ for child in model.modules() if hasattr(child, "config")}
    if len(set(configs.values())) > 1:
        yield f"has parts with other tokens ({', '.join(sorted(set(configs.values())))})"
    other = [kind for kind in getattr(config, "layer_types", None) or () if kind not in _LAYERS]
    conv = [type(child).__name__ for child in model.modules() if _convolves(child)]
    if other or conv:
        yield f"mixes tokens in other ways than by attention ({(other or conv)[0]})"
    for name in ("layerdrop", "encoder_layerdrop", "decoder_layerdrop"):
        if getattr(config, name, 0):
            yield f"skips layers at random ({name}={getattr(config, name)}), others on each rank"
    if getattr(config, "output_router_logits", False):
        yield "has a loss of routers over whole sequences (output_router_logits=True)"
    if "position_ids" not in inspect.signature(model.forward).parameters:
        yield "takes no position_ids, so that positions would begin at 0 on each rank"
    softcap = getattr(config, "attn_logit_softcapping", None)
    if softcap is not None and config._attn_implementation in ("eager", "sdpa", None):
        yield 'caps scores of attention, which needs attn_implementation="flex_attention" or "flash_attention_2"'
    heads, near = getattr(config, "num_attention_heads", None), ranks.size // ranks.parts
    if isinstance(heads, int) and heads // tensor % near:
        own = f"{heads} heads" if tensor == 1 else f"{heads} heads, {heads // tensor} on each tensor rank,"
        yield f'has {own} that cannot be shared by {near} sequence ranks (sequence_parallel.method="gather" can)'
    if (kind := _loss_of(model)) is not None and kind not in _SHIFTS:
        yield f"has a loss of whole sequences ({kind})"


def _convolves(module: nn.Module) -> bool:
    return isinstance(module, (nn.Conv1d, nn.Conv2d, nn.Conv3d)) and any(size > 1 for size in module.kernel_size)


def _makes_positions(module: nn.Module) -> bool:
    """True if an embedding makes positions of whole rows, in which tokens of padding do not count."""
    if hasattr(module, "create_position_ids_from_input_ids"):
        return True
    return isinstance(module, nn.Embedding) and "attention_mask" in inspect.signature(module.forward).parameters


# ---- attention, and its mask: what transformers calls ----------------------------------------------------------------


class _Stand:
    """A module of attention as the implementation ``base`` knows it."""

    def __init__(self, module: nn.Module, base: str) -> None:
        self._module, self._base = module, base

    def __getattr__(self, name: str) -> Any:
        if name == "config":
            return _Stand(self._module.config, self._base)  # type: ignore[arg-type]
        return self._base if name == "_attn_implementation" else getattr(self._module, name)


def attention(
    base: str,
    function: Callable[..., Any],
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    is_causal: bool | None = None,
    **options: Any,
) -> tuple[Tensor, Any]:
    """Attention in the form of transformers' ``AttentionInterface``: the output is [batch, length, heads, dim].

    ``function``: of the implementation ``base``. Collective.

    Raises:
        ValueError: an argument would be wrong for parts of sequences.
    """
    ranks = current()
    if ranks is None:
        options |= {"dropout": dropout, "scaling": scaling, **({} if is_causal is None else {"is_causal": is_causal})}
        found: tuple[Tensor, Any] = function(_Stand(module, base), query, key, value, attention_mask, **options)
        return found
    wrong = [name for name in _REFUSED if options.get(name) is not None and options[name] is not False]
    if base == "sdpa" and options.get("softcap") is not None:
        wrong.append("softcap")
    if wrong or (base != "sdpa" and ranks.parts > 1):
        what = ", ".join(wrong) or f'attn_implementation="{base}" with gathered keys (sequence_parallel)'
        raise ValueError(f"{type(module).__name__} asks for {what}, which sequences that are cut over ranks have not.")
    causal = is_causal if is_causal is not None else bool(getattr(module, "is_causal", False))
    if base == "sdpa":
        alone = attention_mask is None
        attend = sequence_attention(F.scaled_dot_product_attention if alone else _masked)
        grouped = {"enable_gqa": key.shape[1] != query.shape[1]} if alone else {}
        how = {"attn_mask": attention_mask, "dropout_p": dropout, "is_causal": causal and alone, "scale": scaling}
        return attend(query, key, value, **how, **grouped).transpose(1, 2).contiguous(), None
    kept = {name: options[name] for name in ("sliding_window", "softcap") if options.get(name) is not None}
    if base != "flex_attention":
        kept["is_causal"] = causal

    def whole(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        given = query, key, value, attention_mask
        out: Tensor = function(_Stand(module, base), *given, dropout=dropout, scaling=scaling, **kept)[0]
        return out.transpose(1, 2)

    return sequence_attention(whole)(query, key, value).transpose(1, 2).contiguous(), None


def _masked(query: Tensor, key: Tensor, value: Tensor, **options: Any) -> Tensor:
    """``scaled_dot_product_attention`` with a mask, which torch's fast kernels take for as many keys as queries."""
    repeats = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(repeats, 1) if repeats > 1 else x for x in (key, value))
    return F.scaled_dot_product_attention(query, key, value, **options)


def whole_mask(
    base: str,
    function: Callable[..., Any],
    *,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: Any = 0,
    mask_function: Callable[..., Any] | None = None,
    attention_mask: Tensor | None = None,
    **place: Any,
) -> Any:
    """The mask of whole rows, in the form of transformers' ``AttentionMaskInterface``.

    ``function``: of the implementation ``base``.

    Raises:
        ValueError: the model got other tokens than this rank's part of the last batch.
    """
    given = {} if mask_function is None else {"mask_function": mask_function}
    ranks = current()
    if ranks is None:
        offsets = {"q_offset": q_offset, "kv_offset": kv_offset, "attention_mask": attention_mask}
        return function(q_length=q_length, kv_length=kv_length, **offsets, **given, **place)
    if not torch.compiler.is_compiling() and _generates():
        raise ValueError(
            f"{SIZE}={ranks.size}: generate() was called inside of a run whose sequences are cut: a rank has a part of "
            "each row, and no keys of earlier calls. Generate outside of the run, with the exported weights or "
            f"lt_zero.inference, or validate without {SIZE}."
        )
    layout, length = last_layout(ranks), q_length * ranks.size
    if layout is None or layout.length != length:
        part = "no batch was cut" if layout is None else f"a part of the last batch has {layout.length // ranks.size}"
        raise ValueError(
            f"{SIZE}={ranks.size}: the model got {q_length} tokens, but {part}. A Trainer cuts its batches, and Fabric "
            "those of loaders that it has set up; otherwise call lt_zero.parallel.cut_batch(batch)."
        )
    wrong = attention_mask is not None and attention_mask.shape[-1] != length
    if wrong or int(q_offset) or int(kv_offset) or kv_length not in (q_length, length):
        what = f"attention_mask {list(attention_mask.shape)}" if attention_mask is not None and wrong else "a cache"
        raise ValueError(
            f"{SIZE}={ranks.size}: the model got {what}, not a mask of whole rows, [batch, {length}]. Leave it as "
            "cut_batch returns it, and generate outside of the run."
        )
    if (sequences := layout.sequences) is not None:
        device = ranks.group.device
        if accelerator.is_accelerator(device) and not accelerator.holds(sequences):
            sequences = accelerator.send(sequences, device)  # of a batch that was cut on the host
        given["mask_function"] = _inside_of_sequences(base, mask_function, sequences, place.get("config"))
        place |= {name: False for name in place if name in ("allow_is_causal_skip", "allow_is_bidirectional_skip")}
    mask = attention_mask if layout.padded else None
    return function(q_length=length, kv_length=length, attention_mask=mask, **given, **place)


def _generates() -> bool:
    """True if a model of transformers is called to generate."""
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        if frame.f_globals.get("__name__", "").startswith("transformers.generation"):
            return True
        frame = frame.f_back
    return False


def _inside_of_sequences(base: str, function: Any, sequences: Tensor, config: Any) -> Callable[..., Any]:
    """The mask ``function``, for rows that hold several sequences.

    Raises:
        ValueError: the implementation has no such masks.
    """
    chunks = getattr(config, "attention_chunk_size", None)
    if function is None or chunks is not None or base not in ("sdpa", "flex_attention"):
        what = "attention in chunks" if chunks is not None else f'attn_implementation="{base}"'
        raise ValueError(f"{SIZE}: rows hold several sequences, which {what} has no mask for. Give each a row.")

    def inside(batch: Any, head: Any, query: Any, key: Any) -> Any:
        row = batch if sequences.shape[0] > 1 else torch.zeros_like(batch)
        return function(batch, head, query, key) & (sequences[row, query] == sequences[row, key])

    return inside


# ---- the loss --------------------------------------------------------------------------------------------------------

_SHIFTS = {"ForCausalLM": True, "ForMaskedLM": False, "ForTokenClassification": False}  # losses: of next tokens


def _loss_of(model: Any) -> str | None:
    """The kind of a model's loss; None: it has none."""
    if "labels" not in inspect.signature(model.forward).parameters:
        return None
    kind = getattr(model, "loss_type", None)
    return "ForCausalLM" if kind is None else str(kind)  # what transformers takes for an unknown one


def _switch_loss(model: Any) -> bool | None:
    """Let a model compute its loss over the tokens of all ranks; returns ``Takes.shifts``."""
    kind = _loss_of(model)
    if kind is None:
        return False
    known = model.loss_function
    if not isinstance(known, SequenceLoss):
        losses = importlib.import_module("transformers.loss.loss_utils").LOSS_MAPPING
        if known is not losses[kind]:
            raise _refusal(model, f"has a loss function of its own ({known}); compute it with token_mean")
        model.loss_function = SequenceLoss(known, _SHIFTS[kind])
    return True if _SHIFTS[kind] else None


class SequenceLoss:
    """The loss function of a model of transformers, over the tokens of all ranks of a sequence.

    Args:
        function: that of the model, for whole sequences.
        shifts: labels are those of next tokens.
    """

    def __init__(self, function: Callable[..., Tensor], shifts: bool) -> None:
        self.function, self.shifts = function, shifts

    def __call__(
        self,
        logits: Tensor,
        labels: Tensor | None = None,
        *args: Any,
        num_items_in_batch: Any = None,
        ignore_index: int = IGNORED,
        shift_labels: Tensor | None = None,
        **kwargs: Any,
    ) -> Tensor:
        """The loss of whole sequences on each rank; its gradients are exact after the engine's mean. Collective."""
        ranks = current()
        if ranks is None or means_are_of_user(ranks):
            given = {"num_items_in_batch": num_items_in_batch, "ignore_index": ignore_index, **kwargs}
            given |= {"shift_labels": shift_labels} if self.shifts else {}
            return self.function(logits, labels, *args, **given)
        targets = shift_labels if self.shifts else labels
        if targets is None or targets.shape != logits.shape[:-1]:
            what = f"labels {list(targets.shape)} for logits {list(logits.shape)}" if targets is not None else ""
            raise _other_labels(ranks, what or "no shift_labels")
        flat = logits.float().flatten(0, -2), targets.to(logits.device).flatten()
        losses = F.cross_entropy(*flat, ignore_index=ignore_index, reduction="none")
        if num_items_in_batch is None:
            return token_mean(losses, flat[1] != ignore_index)
        total: Tensor = token_mean(losses) * (losses.numel() * ranks.size / num_items_in_batch)
        return total

    def of_sum(self, total: Tensor, counted: Tensor, items: Any, given: bool) -> Tensor:
        """The loss of whole sequences, of the sum over this rank's tokens: where no losses of single tokens exist.

        Args:
            total: the sum.
            counted: how many tokens are in it.
            items: what sums of whole sequences are divided by; None: by the tokens that count.
            given: labels came shifted.
        """
        ranks = current()
        if ranks is None or means_are_of_user(ranks):
            return total / (counted if items is None else items)
        if self.shifts and not given:
            raise _other_labels(ranks, "no shift_labels")
        if isinstance(total, DTensor):  # where tensor ranks have parts of the vocabulary
            whole = self.of_sum(total.full_tensor(), counted, items, given)
            return DTensor.from_local(whole, total.device_mesh, [Replicate()] * total.device_mesh.ndim, run_check=False)
        if items is None:
            return token_mean(total / counted.clamp(min=1), counted)
        mean: Tensor = token_mean(total) * (ranks.size / items)
        return mean


def _other_labels(ranks: SequenceRanks, what: str) -> ValueError:
    return ValueError(
        f"{SIZE}={ranks.size}: the loss of the model got {what}. Pass all entries of the cut batch, of which labels "
        "were shifted before sequences were cut (lt_zero.parallel.cut_batch)."
    )
