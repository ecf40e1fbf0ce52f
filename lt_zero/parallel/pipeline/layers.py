"""A model as a list of layers, of which each rank of a pipeline has some."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import Parameter
from torch.utils.checkpoint import checkpoint
from torch.utils.weak import WeakIdKeyDictionary

from lt_zero.common.errors import ConfigError, add_note
from lt_zero.common.names import merged
from lt_zero.config import ZeroConfig
from lt_zero.config.pipelines import divide, weights_of
from lt_zero.core.division import PartOfRun
from lt_zero.core.engine.same_on_ranks import model_facts
from lt_zero.parallel.pipeline.models import ModelParts, fill, targets_of
from lt_zero.parallel.pipeline.partition import forward_seconds, own_numels
from lt_zero.parallel.pipeline.position import Position, current, of_first_rank
from lt_zero.parallel.pipeline.specs import Layer, LayerSpec, TiedLayerSpec, as_arguments, class_of
from lt_zero.parallel.random import seeded

Loss = Callable[[Any, Any], Tensor]
_LAZY_NORMS = (nn.LazyBatchNorm1d, nn.LazyBatchNorm2d, nn.LazyBatchNorm3d)
_BATCH_NORMS = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, *_LAZY_NORMS)


class Manner(NamedTuple):
    """Options for making and calling layers.

    Attributes:
        seed: called with the number of a layer before it is made with ``seed_layers``; None: ``torch.manual_seed``.
        recomputes: classes of layers that are recomputed; None: all that have parameters.
        interval: layers that are recomputed together if the configuration says nothing of it.
        packs: a layer gets what the one before returned as one argument, also if it is a tuple.
    """

    seed: Callable[[int], object] | None = None
    recomputes: frozenset[str] | None = None
    interval: int = 0
    packs: bool = False


class Pipeline(PartOfRun):
    """Layers that run one after the other, each on one rank of a pipeline.

    Make it in ``configure_model`` of a LightningModule, and call it in ``training_step`` with the whole batch: it cuts
    it into micro-batches, and runs their forwards and backwards. Without pipelines it has all layers.

    Args:
        layers: ``LayerSpec``, ``TiedLayerSpec``, modules, and functions without parameters. Each is called with what
            the one before returns: a tensor, or a tuple of tensors, which are its arguments.
        loss_fn: called with the output of the last layer and the targets, both of one micro-batch; returns their mean
            loss (0D). None: there is no training.
        num_stages: ranks; default: ``pipeline.stages`` of the configuration.
        partition_method: as ``pipeline.partition_method``; default: that of the configuration.
        example: the inputs of a micro-batch, with which ``time`` measures layers, on their device.
        position: of this rank; default: that of the run. ``manner``: how layers are made and called.

    Attributes:
        loss_weight: what the loss will be multiplied with before its backward, other than by Lightning: 1 / batches
            where a loop accumulates the gradients of several.
        layers: the layers of this rank by number.
        tied: layers that are at several places, by key.
        names: the classes of all layers.
        shared: the ranks of the pipeline that have a tied layer, by key; on all ranks.
        facts: what the code of this rank says of all layers, and how it divides them; compared over the ranks of a run.

    Raises:
        ConfigError: there are more stages than layers; ``num_stages`` is not what the configuration says; a layer
            depends on the whole batch, or shares parameters with one of another stage; ``time`` has no example; or
            layers of several ranks would be made on the meta device without ``seed_layers``.
    """

    _lacks_example = "Pass those of a micro-batch: Pipeline(..., example=inputs), or write parameters."
    of_model = False  # True: ``of`` made it of a model of transformers

    def __init__(
        self,
        layers: Sequence[Layer],
        loss_fn: Loss | None = None,
        num_stages: int | None = None,
        partition_method: str | None = None,
        example: Any = None,
        *,
        position: Position | None = None,
        manner: Manner | None = None,
    ) -> None:
        super().__init__()
        self.loss_fn, self.position, self._manner = loss_fn, position or current(), manner or Manner()
        self.loss_weight = 1.0
        self._check_stages(num_stages)
        self._specs = list(layers)
        self.names = [class_of(spec) for spec in self._specs]
        self._drafts: dict[int, Layer] = {}  # layers that were made on the meta device, until ``_build`` is over
        self.parts = self._divided(partition_method or self.position.block.partition_method, example)
        self.shared = self._find_shared()
        self.facts = self._facts_of_stages() if self._compares else {}
        self.layers, self.tied = nn.ModuleDict(), nn.ModuleDict()
        self._functions: dict[int, Callable[..., Any]] = {}  # layers that are no modules of their own, by number
        self._build()
        self.register_load_state_dict_pre_hook(_leave_to_others)  # type: ignore[no-untyped-call]
        self.runner: Any = None  # runs it in stages, once it is part of a run

    @classmethod
    def of(
        cls,
        model: nn.Module,
        loss_fn: Loss | None = None,
        num_stages: int | None = None,
        partition_method: str | None = None,
        weights: Mapping[str, Tensor] | None = None,
    ) -> Pipeline:
        """Make a pipeline of a causal language model of transformers that has a plan for it (``base_model_pp_plan``).

        Each rank keeps its layers, under the names that they have in the model, and the model is taken apart. Call the
        pipeline with the model's inputs (``input_ids``, or a dict) and labels, which it shifts.

        Args:
            model: made by ``from_config`` or ``from_pretrained``, or on the meta device.
            loss_fn: called with logits and labels of a micro-batch; default: the model's own loss, as the mean over all
                tokens of the batch whose label is not -100.
            num_stages, partition_method: as above.
            weights: by the model's names, of which this rank takes its own, for a model on the meta device:
                ``safetensors.torch.load_file(path)``, which reads what is used.

        Raises:
            ConfigError: the model has no such plan, or it does not cover its parameters.
            KeyError: ``weights`` lack one of this rank's.
        """
        parts = ModelParts(model)
        return _OfModel(parts, loss_fn, num_stages, partition_method, weights)

    @property
    def layers_on_ranks(self) -> int:  # type: ignore[override]
        return self.parts[-1].stop if self.position.ranks > 1 else 0

    def _check_stages(self, num_stages: int | None) -> None:
        known = self.position.ranks
        if num_stages is not None and num_stages != known:
            key = "pipeline.stages"
            raise ConfigError.about(
                key,
                f"Pipeline(num_stages={num_stages}), but {key} is {known} in this run. Write {key}={num_stages} in the "
                "configuration, or pipeline_parallel_size of the strategy, or remove num_stages.",
            )

    def follow(self, config: ZeroConfig) -> None:
        """Follow the configuration of a run, which may not have been known when layers were made.

        Raises:
            ConfigError: it contradicts how they were made.
        """
        block = config.pipeline
        made, name = self.position.block, type(self).__name__
        asked: dict[str, tuple[Any, Any]] = {"seed_layers": (block.seed_layers or made.seed_layers, made.seed_layers)}
        if self.position.ranks > 1:
            default = block.partition_method == "parameters"  # what an argument says is stronger
            method = made.partition_method if default else block.partition_method
            asked |= {
                "partition_method": (method, made.partition_method),
                "stages_per_rank": (block.chunks, made.chunks),
            }
        for argument, (wanted, known) in asked.items():
            if wanted != known:
                key = f"pipeline.{argument}"
                raise ConfigError.about(
                    key,
                    f"{key} is {wanted} (pipeline.schedule={block.schedule}), and the layers of the {name} were made "
                    f"with {known}. Make it in configure_model, or write {name}({argument}={wanted!r}) where that is "
                    "an argument, or change the key.",
                )
        interval = block.activation_checkpoint_interval or self._manner.interval
        both = block.model_copy(update={"activation_checkpoint_interval": interval})
        self.position = replace(self.position, block=both)

    # ---- making layers ---------------------------------------------------------------------------------------------

    def _divided(self, method: str, example: Any) -> list[range]:
        """The layers of each stage."""
        if self.position.stages == 1:
            return [range(len(self._specs))]
        weights: list[float] = []
        count = len(self._specs)
        if method == "parameters":
            weights = own_numels([self._draft(n) for n in range(count)], [self._key(n) for n in range(count)])
        elif method == "time":
            if example is None:
                key = "pipeline.partition_method"
                raise ConfigError.about(
                    key,
                    f"{key}='time' measures the forward of each layer, and has no inputs for it. {self._lacks_example}",
                )
            weights = of_first_rank(partial(forward_seconds, self._specs, example, self._call))
            if len(weights) != count:
                raise RuntimeError(
                    f"The ranks differ: the number of a pipeline's layers is {len(weights)} on rank 0 and {count} on "
                    "this rank. Every rank has to run the same code."
                )
        return divide(weights_of(method, self.names, weights), self.position.stages)

    def _draft(self, number: int) -> Layer:
        """Layer ``number`` with parameters on the meta device if a spec makes it, else as it was given."""
        spec = self._specs[number]
        if not isinstance(spec, LayerSpec):
            return spec
        if number not in self._drafts:
            with torch.device("meta"):
                self._drafts[number] = spec.build()
        return self._drafts[number]

    @property
    def _compares(self) -> bool:
        """True if other ranks make layers of this pipeline, whose code may be another."""
        return self.position.ranks > 1 and not self.position.plans

    def _facts_of_stages(self) -> dict[str, Any]:
        """Facts of the pipeline as a whole."""
        block = self.position.block
        facts: dict[str, Any] = {
            "the number of layers": len(self.names),
            "the number of ranks": self.position.ranks,
            "the number of stages on a rank": block.chunks,
            "seed_layers": block.seed_layers,
        }
        for number, name in enumerate(self.names):
            key = self._key(number)
            facts[f"layer {number}"] = f"{name}, tied as {key!r}" if key else name
        for stage, part in enumerate(self.parts):
            facts[f"stage {stage}"] = f"layers {part.start} to {part.stop - 1}"
        return facts

    def _note_layer(self, number: int, layer: nn.Module | None) -> None:
        """Note what this rank says of a layer; None: of one that it does not make."""
        if not self._compares:
            return
        if self.position.block.seed_layers:
            # Only some ranks make the layer, but all of them can make a draft, unless its class needs values.
            layer = None
            with suppress(Exception):
                draft = self._draft(number)
                layer = draft if isinstance(draft, nn.Module) else None
        if layer is not None:
            self.facts |= model_facts(layer, prefix=self._prefix(number))

    def _prefix(self, number: int) -> str:
        """The first part of the names of a layer's parameters in this module."""
        key = self._key(number)
        return f"tied.{key}." if key else f"layers.{number}."

    def _key(self, number: int) -> str:
        """The key of the tie that a layer is in; empty without one."""
        spec = self._specs[number]
        return spec.key if isinstance(spec, TiedLayerSpec) else ""

    def _find_shared(self) -> dict[str, frozenset[int]]:
        found: dict[str, set[int]] = {}
        for number in range(len(self._specs)):
            if key := self._key(number):
                found.setdefault(key, set()).add(self.position.rank_of(self.stage_of(number)))
        return {key: frozenset(ranks) for key, ranks in found.items()}

    def stage_of(self, number: int) -> int:
        """The stage of layer ``number``."""
        return next(stage for stage, part in enumerate(self.parts) if number in part)

    def last_of(self, stage: int) -> str:
        """The last layer of a stage, for messages."""
        number = self.parts[stage][-1]
        return f"Layer {number} ({self.names[number]}), the last of stage {stage},"

    def _build(self) -> None:
        """Make the layers of this rank, with the values that a single process would draw.

        Layers of other ranks are made as well, and dropped, as they draw random numbers; not with ``seed_layers``.
        """
        own = {number for stage in self.position.own for number in self.parts[stage]}
        made, checks = set[str](), _Checks(self)
        checks.check_order()
        for number, spec in enumerate(self._specs):
            key = spec.key if isinstance(spec, TiedLayerSpec) else ""
            here = self.position.rank in self.shared[key] if key else number in own
            if isinstance(spec, nn.Module) and any(p.is_meta for p in spec.parameters()):
                self._refuse_meta()
            if isinstance(spec, LayerSpec) and not (key and key in made):
                made.add(key)
                module = self._make(number, spec, here)
                if module is not None:
                    checks.check(number, module)
                self._note_layer(number, module)
                if here and module is not None:
                    (self.tied if key else self.layers)[key or str(number)] = module
            elif isinstance(spec, nn.Module):
                checks.check(number, spec)
                self._note_layer(number, spec)
                if here:
                    self.layers[str(number)] = spec
            if number in own and isinstance(spec, TiedLayerSpec):
                self._functions[number] = self._tied(spec)
            elif number in own and not isinstance(spec, (LayerSpec, nn.Module)):
                self._functions[number] = spec
        # Specs may hold modules of other stages, whose memory would stay allocated.
        self._specs = []
        self._drafts.clear()

    def _make(self, number: int, spec: LayerSpec, here: bool) -> nn.Module | None:
        """Layer ``number``; None if this rank neither has it nor draws its values."""
        device = torch.get_default_device()
        if self.position.plans and not here:
            return None
        if self.position.plans or not self.position.block.seed_layers:
            if device.type == "meta":
                self._refuse_meta()
            return spec.build()
        if not here:
            return None
        # With values also on the meta device: later, these would be drawn from numbers that depend on the stages.
        device = torch.device("cpu") if device.type == "meta" else device
        with device, seeded(None, device.type):
            (self._manner.seed or _seed_layer)(number)
            return spec.build()

    def _refuse_meta(self) -> None:
        """Raise ConfigError if values that are drawn later would be those of this rank's layers only."""
        if self.position.ranks > 1 and not self.position.plans:
            key = "pipeline.seed_layers"
            raise ConfigError.about(
                key,
                "Layers of a pipeline were made on the meta device (empty_init=True), where a rank would draw values "
                f"of its own layers only, and not those of a single process. Write {key}=true, and LayerSpec(...) for "
                "each layer; or make the pipeline without it.",
            )

    def _tied(self, spec: TiedLayerSpec) -> Callable[..., Any]:
        module = self.tied[spec.key]
        return module if spec.forward_fn is None else _Tied(module, spec.forward_fn)

    def is_elsewhere(self, name: str) -> bool:
        """True if the entry ``name`` of a whole pipeline's state dict is of a layer that only other ranks have."""
        kind, key, *_ = [*name.split("."), "", ""]
        if kind == "tied":
            return key in self.shared and self.position.rank not in self.shared[key]
        number = int(key) if kind == "layers" and key.isdecimal() else -1
        return 0 <= number < self.parts[-1].stop and self.position.rank_of(self.stage_of(number)) != self.position.rank

    def stages_of_parameters(self) -> dict[Parameter, frozenset[int]]:
        """The ranks of the pipeline that have each parameter of this rank."""
        mine = frozenset({self.position.rank})
        found = dict.fromkeys(self.layers.parameters(), mine)
        for key, module in self.tied.items():
            found |= dict.fromkeys(module.parameters(), self.shared[key])
        return found

    def parameters_of(self, stage: int) -> Iterator[Parameter]:
        """The parameters of a stage of this rank, with those of tied layers that this rank has at all."""
        for number in self.parts[stage]:
            if str(number) in self.layers:
                yield from self.layers[str(number)].parameters()
        yield from self.tied.parameters()

    # ---- running them ----------------------------------------------------------------------------------------------

    def run_stage(self, stage: int, *inputs: Any, batch: Any = None) -> Any:
        """The output of a stage of this rank.

        Args:
            inputs: what the stage before has returned; of the first one, those of the pipeline.
            batch: the inputs of the pipeline for the same micro-batch.
        """
        part, interval = self.parts[stage], self.position.block.activation_checkpoint_interval
        for start in range(part.start, part.stop, interval or len(part)):
            group = range(start, min(start + (interval or len(part)), part.stop))
            if interval and torch.is_grad_enabled() and self._recomputes(group):
                output = checkpoint(partial(self._run, group), *inputs, use_reentrant=False)
            else:
                output = self._run(group, *inputs)
            inputs = as_arguments(output)
        return inputs[0] if len(inputs) == 1 else inputs

    def _run(self, numbers: range, *inputs: Any) -> Any:
        """The output of some layers, one after the other."""
        for number in numbers:
            try:
                inputs = as_arguments(self._call(self._layer(number), *inputs))
            except Exception as error:
                add_note(error, f"In layer {number} ({self.names[number]}), stage {self.stage_of(number)}.")
                raise
        return inputs[0] if len(inputs) == 1 else inputs

    def _call(self, layer: Callable[..., Any], *inputs: Any) -> Any:
        return layer(inputs) if self._manner.packs and len(inputs) > 1 else layer(*inputs)

    def _layer(self, number: int) -> Callable[..., Any]:
        name = str(number)
        return self.layers[name] if name in self.layers else self._functions[number]

    def _recomputes(self, numbers: range) -> bool:
        modules = [layer.module if isinstance(layer, _Tied) else layer for layer in map(self._layer, numbers)]
        if self._manner.recomputes is not None:
            return all(type(module).__name__ in self._manner.recomputes for module in modules)
        return any(isinstance(module, nn.Module) and any(True for _ in module.parameters()) for module in modules)

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        """The mean loss (0D) over micro-batches, on every rank; without ``targets`` the output of the last layer.

        Args:
            inputs: of the first layer, and ``targets`` of the loss function: tensors, or tuples, lists and dicts with
                tensors, whose first dimension is the batch.

        Raises:
            ValueError: there are targets, and no loss function.
        """
        if targets is not None and self.loss_fn is None:
            raise ValueError("The pipeline has no loss_fn: give one to Pipeline, or call it without targets.")
        if self.runner is not None:
            return self.runner.run(inputs, targets)
        if self.position.ranks > 1:
            raise RuntimeError(
                "This pipeline has some of its layers on other ranks, and is not a part of a run yet: "
                "Trainer.fit, fabric.setup or lt_zero.initialize prepares it."
            )
        output = self.run_stage(0, *as_arguments(inputs), batch=inputs)
        return output if targets is None or self.loss_fn is None else self.loss_fn(output, targets)


class _OfModel(Pipeline):
    """A pipeline of a model of transformers. See models.py.

    Args:
        parts: of the model; the rest as for ``Pipeline.of``.
    """

    _lacks_example = "The layers of a model cannot be called by themselves: write parameters or uniform."
    of_model = True

    def __init__(
        self,
        parts: ModelParts,
        loss_fn: Loss | None,
        num_stages: int | None,
        partition_method: str | None,
        weights: Mapping[str, Tensor] | None,
    ) -> None:
        self._parts, self._has_own_loss = parts, loss_fn is None
        if current().block.activation_checkpoint_interval:
            key = "pipeline.activation_checkpoint_interval"
            text = f"{key} counts the layers of a list, and Pipeline.of runs a model. Write activation_checkpointing"
            raise ConfigError.about(key, f"{text}.mode: full, which recomputes each of its blocks.")
        super().__init__(parts.modules, loss_fn or parts.own_loss(), num_stages, partition_method)
        if weights is not None:
            fill(self, weights)

    def _key(self, number: int) -> str:
        return self._parts.key(number)

    def _prefix(self, number: int) -> str:
        return f"{self._parts.names[number]}."

    def _build(self) -> None:
        own = {n for stage in self.position.own for n in self.parts[stage]}
        for number, layer in enumerate(self._parts.modules):
            self._note_layer(number, layer)
        for name, module in self._parts.keep(own, self.get_submodule).items():
            _put(self, name, module)
        self._elsewhere = self._parts.state.difference(self.state_dict())
        self._specs = []

    def is_elsewhere(self, name: str) -> bool:
        return name in self._elsewhere

    @property
    def config(self) -> Any:
        """Config of the model."""
        return self._parts.model.config

    @property
    def tp_plan(self) -> Any:
        """The model's plan for tensor parallelism."""
        return getattr(self._parts.model, "tp_plan", None)

    def _init_weights(self, module: nn.Module) -> None:  # for modules on the meta device, as in the model
        self._parts.model._init_weights(module)

    def stages_of_parameters(self) -> dict[Parameter, frozenset[int]]:
        mine = frozenset({self.position.rank})
        found = dict.fromkeys(self.parameters(), mine)
        return found | {self.get_parameter(name): ranks for name, ranks in self.shared.items() if mine & ranks}

    def parameters_of(self, stage: int) -> Iterator[Parameter]:
        yield from self.parameters()  # of all stages of this rank: a part of a model may be used by several layers

    def run_stage(self, stage: int, *inputs: Any, batch: Any = None) -> Any:
        received = inputs[0] if stage else None
        return self._parts.run(self.parts[stage], batch, received, self.training)

    def forward(self, inputs: Any, targets: Any = None) -> Any:
        if isinstance(inputs, Tensor):
            inputs = {"input_ids": inputs}
        first = {name: inputs[name] for name in ("input_ids",) if name in inputs}  # its rows are those of the batch
        inputs = first | {name: value for name, value in inputs.items() if name != "labels" and value is not None}
        if targets is not None and self._has_own_loss:
            targets = targets_of(targets)
        return super().forward(inputs, targets)


def _put(root: nn.Module, name: str, module: nn.Module) -> None:
    """Register ``module`` under a dotted name."""
    parts = name.split(".")
    for part, inner in pairwise(parts):
        if part not in dict(root.named_children()):
            # Numbers are the names of repeated blocks, for which the engine looks in such containers.
            root.add_module(part, nn.ModuleDict() if inner.isdecimal() else nn.Module())
        root = root.get_submodule(part)
    root.add_module(parts[-1], module)


def _leave_to_others(pipeline: nn.Module, state: dict[str, Any], prefix: str, *_: Any) -> None:
    """Take the entries of other ranks' layers out of a state dict, which is loaded next: none is unexpected."""
    assert isinstance(pipeline, Pipeline)
    for name in [name for name in state if name.startswith(prefix)]:
        if pipeline.is_elsewhere(name.removeprefix(prefix)):
            del state[name]


class _Checks:
    """Refuses layers of a pipeline that would not train as in one process."""

    def __init__(self, pipeline: Pipeline) -> None:
        self._pipeline = pipeline
        self._known = WeakIdKeyDictionary()  # parameter -> layer

    def check_order(self) -> None:
        """Check that the order of ties in the whole model follows from that on each rank.

        Raises:
            ConfigError: it does not, and checkpoints would number parameters otherwise than on one process.
        """
        position, shared = self._pipeline.position, self._pipeline.shared
        of_ranks = [[f"tied.{key}" for key, has in shared.items() if rank in has] for rank in range(position.ranks)]
        found, expected = merged(of_ranks) if shared else [], [f"tied.{key}" for key in shared]
        first = next((one for one, other in zip(found, expected, strict=True) if one != other), None)
        if first is not None:
            key, method = "pipeline.schedule", position.block.partition_method
            raise ConfigError.about(
                key,
                f"{key}={position.block.schedule} has {position.block.chunks} stages on each rank, and of the layers "
                f"with TiedLayerSpec({first.partition('.')[2]!r}) some ranks have none, so that the order of the tied "
                f"layers cannot be told. Use 1F1B, or another pipeline.partition_method than {method}.",
            )

    def check(self, number: int, layer: nn.Module) -> None:
        """Check layer ``number``. No-op without pipelines.

        Raises:
            ConfigError: its values depend on the whole batch, or it has parameters of a layer of another stage.
        """
        if self._pipeline.position.ranks == 1:
            return
        key = "pipeline.stages"
        told, name = f"{key}={self._pipeline.position.ranks}", f"layer {number} ({self._pipeline.names[number]})"
        for path, module in layer.named_modules():
            if isinstance(module, _BATCH_NORMS):
                where = f"{path!r} of {name}" if path else name
                raise ConfigError.about(
                    key,
                    f"{told}, and {where} is a {type(module).__name__}: a pipeline normalizes each micro-batch by "
                    "itself, so that it would train another model. Use GroupNorm or LayerNorm, or one with fixed "
                    "statistics (torchvision.ops.FrozenBatchNorm2d).",
                )
        for path, parameter in layer.named_parameters():
            other = self._known.setdefault(parameter, number)
            if self._pipeline.stage_of(other) != self._pipeline.stage_of(number):
                raise ConfigError.about(
                    key,
                    f"{told}, and {path!r} of {name} is a parameter of layer {other}, too, which is on another stage: "
                    "they would train apart. Make both by TiedLayerSpec with one key.",
                )


class _Tied:
    """Calls a function with a module that is registered elsewhere."""

    def __init__(self, module: nn.Module, forward: Callable[..., Any]) -> None:
        self.module, self._forward = module, forward

    def __call__(self, *inputs: Any) -> Any:
        return self._forward(self.module, *inputs)


def _seed_layer(number: int) -> None:
    torch.manual_seed(torch.initial_seed() + number)


def pipelines_in(module: nn.Module) -> Iterator[tuple[str, Pipeline]]:
    """The pipelines in ``module``, by name."""
    yield from ((name, child) for name, child in module.named_modules() if isinstance(child, Pipeline))
