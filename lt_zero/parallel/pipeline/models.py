"""Models of transformers as parts for the stages of a pipeline.

Note [Stages of a model]
    The forward of such a model is more than its layers: masks by the kind of a layer, positions, factors of embeddings
    and logits. So each stage runs the model's own code, with places in place of the modules that its plan for pipelines
    names. A place of this stage calls its module. The place before the first one returns what the stage before has
    sent, and the output of the last one is what this stage sends. All other places return tensors of NaN, which have
    the shape of hidden states and no memory. What the model computes between two modules is so computed once on values
    that count: on the stage of the second. A model that uses outputs in another way, such as those of a layer far
    before, would be computed wrongly; NaN in what a stage sends shows it, when its first batch is probed.

    The model's modules are registered in the pipeline under the names that they have in the model. What runs has no
    parameters: it finds modules by these names, so that they may be replaced.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import Parameter

from lt_zero.common.errors import ConfigError
from lt_zero.parallel.random import seeded

STAGES = "pipeline.stages"
_REMEDY = "Write its layers as a list: lt_zero.parallel.Pipeline([...], loss_fn=...)"


class ModelParts:
    """The modules of a causal language model that stages have, in the order in which they run.

    Args:
        model: a model of transformers with an output layer. It is taken apart by ``keep``.

    Attributes:
        model: its code.
        names: of the modules in the model.
        modules: the modules.
        ties: numbers of the modules that have a tied parameter, by the parameter's first name.

    Raises:
        ConfigError: the model has no plan for pipelines, or one that does not cover its parameters.
    """

    def __init__(self, model: Any) -> None:
        self.model = model
        self.names = _planned(model)
        self.modules = [model.get_submodule(name) for name in self.names]
        self._containers = [model.get_submodule(name) for name in _above(self.names)]  # not registered in the pipeline
        self.state = frozenset(model.state_dict())
        self.ties = self._find_ties()
        self._running, self._expected = range(0), 0
        self._received: Tensor | None = None
        self._sent: Tensor | None = None
        self._filler = float("nan")  # what places of other stages return
        self._checked = set[int]()  # first modules of stages
        self._find: Callable[[str], nn.Module] = model.get_submodule
        self._kept = list[str]()  # modules of this rank

    def _find_ties(self) -> dict[str, list[int]]:
        places: dict[Parameter, tuple[str, list[int]]] = {}
        outside = []
        for name, parameter in self.model.named_parameters(remove_duplicate=False):
            number = next((n for n, own in enumerate(self.names) if name.startswith(f"{own}.")), None)
            if number is None:
                outside.append(name)
            else:
                places.setdefault(parameter, (name, []))[1].append(number)
        for name in _above(self.names):
            module = self.model.get_submodule(name)
            outside += [f"{name}.{own}".lstrip(".") for own, _ in module.named_buffers(recurse=False)]
        kind = type(self.model).__name__
        if outside:
            shown = f"{', '.join(outside[:3])}{', ...' if len(outside) > 3 else ''}"
            text = f"{STAGES}: {shown} of {kind} are not in its plan for pipelines (base_model_pp_plan)"
            raise ConfigError.about(STAGES, f"{text}. {_REMEDY}.")
        ties = {name: numbers for name, numbers in places.values() if len(numbers) > 1}
        tied = {parameter for parameter, (name, _) in places.items() if name in ties}
        for number in {number for numbers in ties.values() for number in numbers}:
            if not set(self.modules[number].parameters()) <= tied:
                text = f"{STAGES}: {self.names[number]} of {kind} has a tied parameter and others"
                raise ConfigError.about(STAGES, f"{text}. {_REMEDY}.")
        return ties

    def key(self, number: int) -> str:
        """Name of the tie that module ``number`` is in; empty without one."""
        return next((name for name, numbers in self.ties.items() if number in numbers), "")

    def keep(self, own: Collection[int], find: Callable[[str], nn.Module]) -> dict[str, nn.Module]:
        """Take the model apart.

        Args:
            own: the modules of this rank.
            find: returns a module of this rank by its name, when it runs.

        Returns:
            This rank's modules by name: those, modules that are tied to them, and all without parameters, which each
            stage uses.
        """
        kept = {*own, *(n for tied in self.ties.values() if not set(tied).isdisjoint(own) for n in tied)}
        found = {self.names[number]: self.modules[number] for number in sorted(kept)}
        for number, (name, module) in enumerate(zip(self.names, self.modules, strict=True)):
            parent, _, leaf = name.rpartition(".")
            setattr(self.model.get_submodule(parent), leaf, _Place(self._visit, number, module))
        found |= _others(self.model, "", _above(self.names), self.names)
        self.modules, self._find, self._kept = [], find, list(found)
        self.model.parameters = self._parameters  # the model's code asks it for its dtype and device
        return found

    def _parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """The parameters of this rank, in place of those of the model, which has none any more."""
        for name in self._kept if recurse else ():
            yield from self._find(name).parameters()

    # ---- running it ------------------------------------------------------------------------------------------------

    def run(self, numbers: range, inputs: Mapping[str, Any], received: Tensor | None, training: bool) -> Tensor:
        """Run some of the modules.

        Args:
            numbers: which.
            inputs: of the model.
            received: the output of the module before them.

        Returns:
            That of the last one of them; after the output layer: the logits.

        Raises:
            ConfigError: modules are not called one after the other, each with the output of the one before.
        """
        for module in self._containers:
            module.training = training
        if received is not None and numbers.start not in self._checked:
            self._check(numbers, inputs, received)
        return self._run(numbers, inputs, received)

    @torch.no_grad()
    def _check(self, numbers: range, inputs: Mapping[str, Any], received: Tensor) -> None:
        """Raise ConfigError if the output depends on more than the received tensor."""
        outputs = []
        try:
            for self._filler in (0.0, 1.0):
                with seeded(0, received.device.type):
                    outputs.append(self._run(numbers, inputs, torch.randn_like(received)))
        finally:
            self._filler = float("nan")
        if not torch.allclose(outputs[0], outputs[1], rtol=1e-2, atol=1e-3, equal_nan=True):
            name = self.names[numbers.stop - 1]
            raise self._unknown(f"computes {name} from more than the output of the module before it")
        self._checked.add(numbers.start)

    def _run(self, numbers: range, inputs: Mapping[str, Any], received: Tensor | None) -> Tensor:
        self._running, self._received, self._sent, self._expected = numbers, received, None, 0
        try:
            logits: Tensor = self.model(**inputs, use_cache=False, return_dict=True).logits
            output = logits if numbers.stop == len(self.names) else self._sent
        finally:
            self._received = self._sent = None
        if self._expected != len(self.names) or output is None:
            raise self._unknown(f"ran {self._expected} of {len(self.names)} modules with these inputs")
        return output

    def _visit(self, number: int, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
        """A place of the model is called."""
        if number != self._expected:
            raise self._unknown(f"calls {self.names[number]} after {self._expected} others")
        self._expected += 1
        running, received = self._running, self._received
        if number < running.start:
            assert received is not None
            return received if number == running.start - 1 else self._nothing_like(received)
        if number >= running.stop:
            return args[0] if args else next(value for value in kwargs.values() if isinstance(value, Tensor))
        output = self._find(self.names[number])(*args, **kwargs)
        if number < running.stop - 1 or running.stop == len(self.names):
            return output
        if not isinstance(output, Tensor):
            raise self._unknown(f"has {self.names[number]}, which returns a {type(output).__name__}, not a tensor")
        self._sent = output
        return self._nothing_like(output)

    def _nothing_like(self, tensor: Tensor) -> Tensor:
        return tensor.new_full((), self._filler).expand(tensor.shape)

    def _unknown(self, what: str) -> ConfigError:
        return ConfigError.about(STAGES, f"{STAGES}: {type(self.model).__name__} {what}. {_REMEDY}.")

    # ---- the loss --------------------------------------------------------------------------------------------------

    def own_loss(self) -> Callable[[Tensor, Any], Tensor]:
        """The model's loss, from the output for a micro-batch and the result of ``targets`` for its labels.

        Raises:
            ConfigError: it is not that of causal language models.
        """
        function = self.model.loss_function
        if (name := getattr(function, "__name__", "")) != "ForCausalLMLoss":
            raise self._unknown(f"has the loss {name!r}, not ForCausalLMLoss. Give loss_fn to Pipeline.of")
        if getattr(self.model.config, "output_router_logits", False):
            raise self._unknown("adds a loss of its routers (output_router_logits), which no stage has: turn it off")
        return self._loss

    def _loss(self, logits: Tensor, targets: tuple[Tensor, Tensor, int]) -> Tensor:
        labels, tokens, rows = targets
        share = tokens * (labels.shape[0] / rows)
        loss: Tensor = self.model.loss_function(
            logits=logits, labels=labels, vocab_size=logits.shape[-1], num_items_in_batch=share
        )
        return loss


def targets_of(labels: Tensor) -> tuple[Tensor, Tensor, int]:
    """Inputs of the loss of a micro-batch: labels, tokens of the whole batch that count (0D), rows of the batch.

    Micro-batches may have different numbers of tokens. The mean of their losses is then still that over all tokens.
    """
    return labels, (labels[..., 1:] != -100).sum(), labels.shape[0]


class _Place(nn.Module):
    """Stand-in at a module's place in the model; it has the module's attributes."""

    def __init__(self, visit: Callable[..., Any], number: int, module: nn.Module) -> None:
        super().__init__()
        self.visit, self.number = visit, number
        for name, value in vars(module).items():
            if not name.startswith("_") and not isinstance(value, Tensor):
                self.__dict__.setdefault(name, value)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.visit(self.number, args, kwargs)


def _above(names: Collection[str]) -> set[str]:
    """The names of all modules that have these inside."""
    parts = [name.split(".") for name in names]
    return {".".join(each[:end]) for each in parts for end in range(len(each))}


def _others(module: nn.Module, prefix: str, above: Collection[str], names: Collection[str]) -> dict[str, nn.Module]:
    """The outermost modules beside those with ``names``, which have those ``above`` around them."""
    found: dict[str, nn.Module] = {}
    for own, child in module.named_children():
        name = f"{prefix}{own}"
        if name in above:
            found |= _others(child, f"{name}.", above, names)
        elif name not in names:
            found[name] = child
    return found


def _planned(model: Any) -> list[str]:
    """The names of the modules in a model's plan for pipelines, in the order in which they run."""
    kind = type(model).__name__
    base, prefix = getattr(model, "base_model", None), getattr(model, "base_model_prefix", "")
    plan = getattr(getattr(base, "config", None), "base_model_pp_plan", None)
    if not plan:
        text = f"{STAGES}: {kind} has no plan for pipelines (base_model_pp_plan of transformers' configurations), and"
        raise ConfigError.about(STAGES, f"{text} none is guessed. {_REMEDY}.")
    head = model.get_output_embeddings() if base is not model else None
    head_name = next((name for name, module in model.named_modules() if module is head), "")
    if head is None or not head_name:
        text = f"{STAGES}: {kind} has no output layer. Use the class for causal language models, such as"
        raise ConfigError.about(STAGES, f"{text} AutoModelForCausalLM. {_REMEDY} otherwise.")
    names = []
    for name in plan:
        module, full = getattr(base, name, None), f"{prefix}.{name}"
        if not isinstance(module, nn.Module):
            raise ConfigError.about(STAGES, f"{STAGES}: {kind} has no {full}, which its plan names. {_REMEDY}.")
        if isinstance(module, nn.ModuleList):
            names += [f"{full}.{number}" for number in range(len(module))]
        else:
            names.append(full)
    return [*names, head_name]


@torch.no_grad()
def fill(module: nn.Module, weights: Mapping[str, Tensor]) -> None:
    """Give all parameters and saved buffers of ``module`` their values.

    Args:
        weights: by name; of tied parameters, one of the names is enough.

    Raises:
        KeyError: there are no values for one.
        ValueError: they have another shape.
    """
    names: dict[Tensor, list[str]] = {}
    for name, value in module.state_dict(keep_vars=True).items():
        names.setdefault(value, []).append(name)
    for tensor, known in names.items():
        name = next((name for name in known if name in weights), "")
        if not name:
            raise KeyError(f"weights have no {' or '.join(known)}, which a layer of this rank needs.")
        values = weights[name]
        if values.shape != tensor.shape:
            text = f"{name} has the shape {tuple(values.shape)} in weights, and {tuple(tensor.shape)} in the model."
            raise ValueError(f"{text} Take the weights of this model.")
        if not tensor.is_meta:
            tensor.copy_(values)
            continue
        made = values.to(tensor.dtype, copy=True)
        made = Parameter(made, tensor.requires_grad) if isinstance(tensor, Parameter) else made
        for name in known:
            owner, _, own = name.rpartition(".")
            setattr(module.get_submodule(owner), own, made)
