"""The plan by which modules are cut over tensor ranks: the user's cuts, rules of the configuration, the model's plan.

Note [Plans]
    Nothing is guessed. A model that its user has parallelized is left as it is. Otherwise the rules of
    ``tensor_parallel.partition_config`` count, with those of ``preset_model`` after them; without rules the plan that
    transformers' models bring with them; without one it is an error. Sizes are checked before anything is cut.

    Rules are the user's, so that what torch would not notice is refused: an output that stays cut although nothing
    takes parts, several outputs in one weight whose parts would be mixed up, and tied weights that are cut in
    different ways. Modules that reshape by a number of heads get that of their rank. Plans of transformers' models are
    written for their code, which infers the number of heads.

    Stages of a pipeline have different modules, and one plan with names of the whole model. A pattern that has no
    effect on one stage has to have one on another, and problems of one stage are raised on all.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from itertools import product
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.parallel import parallelize_module
from torch.nn import Parameter

from lt_zero.common.boxes import Box, ParamSpec
from lt_zero.common.compat import clean_name
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.common.users_code import warn
from lt_zero.config import ZeroConfig
from lt_zero.core.engine.guard import is_guarded
from lt_zero.parallel import styles
from lt_zero.parallel.experts import is_of_experts
from lt_zero.parallel.local import is_cut, mark_partial, spec_of
from lt_zero.parallel.rules import (
    SIZE,
    Assignment,
    ParallelPlan,
    generic,
    head_size_of,
    heads_of,
    plan_of_model,
    plan_of_rules,
)

if TYPE_CHECKING:
    from rich.table import Table

RULES = "tensor_parallel.partition_config"
REST = "(all others)"  # row of modules that no pattern matches


@dataclass(frozen=True)
class PlanRow:
    """Treatment of the modules of one pattern."""

    pattern: str
    style: str
    modules: int
    parameters: int
    elements: int  # on a rank; of stages that with the most

    def plus(self, other: PlanRow) -> PlanRow:
        """Row of the same pattern for the modules of two stages."""
        return replace(
            self,
            modules=self.modules + other.modules,
            parameters=self.parameters + other.parameters,
            elements=max(self.elements, other.elements),
        )


OfStages = Callable[[Any], list[Any]]  # returns what all stages of a pipeline give. Collective


def _one_stage(value: Any) -> list[Any]:
    return [value]


def parallelize(
    module: nn.Module, mesh: DeviceMesh, config: ZeroConfig, of_stages: OfStages = _one_stage
) -> list[PlanRow]:
    """Cut ``module`` over the ranks of ``mesh``, which has one axis; see Note [Plans]. Collective.

    Values of rank 0 are kept. Weights that were tied are tied. Returns the plan of all stages.

    Raises:
        ConfigError: there is no plan for the module, or it does not fit.
    """
    if mesh.size() == 1:
        return []
    block = config.tensor_parallel
    distributed = (p for p in module.parameters() if isinstance(p, DTensor) and not is_of_experts(p))
    if any(of_stages(any(True for _ in distributed))):
        if block.partition_config is not None or block.preset_model is not None:
            key = RULES if block.partition_config is not None else "tensor_parallel.preset_model"
            raise ConfigError.about(key, f"{key}: the model is parallelized already. Remove the key, or do not do it.")
        _warn_of_lost_ties(module)
        return _merged(of_stages(_rows_of_user(module)))
    plan, ties, heads = _fitting_plan(module, mesh.size(), config, _CUT, of_stages)
    _apply(plan, mesh)
    _tie_again(ties)
    for name, owner, value in heads if plan.sets_heads else ():
        if owner is not None:
            setattr(owner, name.rpartition(".")[2], value // mesh.size())
    return _merged(of_stages(_rows(module, plan)))


def _problems(stages: list[tuple[list[Problem], dict[tuple[int, str], Problem], Problem | None]]) -> list[Problem]:
    """The problems of a plan, of those that each stage has."""
    found = [problem for own, _, _ in stages for problem in own]
    _, first, idle = stages[0]
    found += [problem for key, problem in first.items() if all(key in unused for _, unused, _ in stages)]
    if not found and idle is not None and all(each is not None for _, _, each in stages):
        found.append(idle)
    return found


def planned_parts(module: nn.Module, ranks: int, config: ZeroConfig) -> list[ParamSpec]:
    """Parts that the first of ``ranks`` tensor ranks has of parameters that are cut, or that ``parallelize`` would cut.

    Nothing is changed, and no process group is needed.

    Raises:
        ConfigError: as ``parallelize``; or the module is parallelized over another number of ranks.
    """
    named = {id(parameter): (name, parameter) for name, parameter in module.named_parameters()}
    distributed = [(name, p) for name, p in named.values() if isinstance(p, DTensor) and not is_of_experts(p)]
    for name, parameter in distributed:
        if (size := parameter.device_mesh.size()) != ranks:
            text = f"{SIZE}={ranks}, and parameter {name!r} is distributed over {size} ranks. Write {SIZE}: {size}."
            raise ConfigError.about(SIZE, text)
    if distributed or ranks == 1:
        return [spec_of(name, parameter) for name, parameter in distributed if is_cut(parameter)]
    specs: dict[str, ParamSpec] = {}
    for each in _fitting_plan(module, ranks, config, _COUNT, _one_stage)[0].assigned:
        for own, whole in each.module.named_parameters(recurse=False):
            if (axis := styles.cut_axis(each.kind, own)) is not None:
                name, shape = named[id(whole)][0], tuple(whole.shape)
                sizes = tuple(size // ranks if n == axis else size for n, size in enumerate(shape))
                specs[name] = ParamSpec(name, shape, Box((0,) * len(shape), sizes))
    return list(specs.values())


_CUT = "call parallelize_module(model, self.device_mesh['tensor_parallel'], plan) in configure_model"
_COUNT = "give the number of parameters instead, which are all taken to be cut (configure_model is not called)"


def _fitting_plan(
    module: nn.Module, ranks: int, config: ZeroConfig, otherwise: str, of_stages: OfStages
) -> tuple[ParallelPlan, Ties, Heads]:
    """The plan for a module that is not parallelized yet, with the ties and heads that ``parallelize`` needs.

    ``otherwise``: what to do where no rules can be written.

    Raises:
        ConfigError: there is none, or it does not fit.
    """
    plan = plan_of_rules(module, config.tensor_parallel) or plan_of_model(module)
    if not any(of_stages(plan is not None)):
        raise ConfigError.about(
            SIZE,
            f"{SIZE}={ranks}, but there is no plan for {type(module).__name__}, and none is guessed. Write "
            f"tensor_parallel.partition_config.layer_specs with a rule for each kind of layer, or {otherwise}.",
        )
    plan = plan or ParallelPlan(sets_heads=False)
    ties, heads = _ties(module), _heads(module, plan)
    plan.problems += [*_wrong_sizes(plan, ranks), *_wrong_ties(plan, ties), *_wrong_heads(heads, ranks)]
    if problems := _problems(of_stages((plan.problems, plan.unused, plan.idle))):
        raise ConfigError(dict.fromkeys(problems))
    return plan, ties, heads


def _apply(plan: ParallelPlan, mesh: DeviceMesh) -> None:
    for each in plan.assigned:
        if each.kind == styles.PARTIAL:
            parameters = dict(each.module.named_parameters())
            for name in each.parameters:
                mark_partial(parameters[name], mesh.size())
        elif (style := styles.style_of(each.kind, each.sizes)) is not None:
            buffers = list(each.module.named_buffers())
            frozen = [name for name, p in each.module.named_parameters() if not p.requires_grad]
            parallelize_module(each.module, mesh, style)
            # torch has replaced the parameters by new ones that require gradients.
            for name in frozen:
                each.module.get_parameter(name).requires_grad_(False)
            # torch makes them DTensors, which the engine cannot send. Numbers may be plain in operations on DTensors.
            for name, buffer in buffers:
                owner, _, own = name.rpartition(".")
                setattr(each.module.get_submodule(owner), own, buffer)


# ---- checks ----------------------------------------------------------------------------------------------------------


def _wrong_sizes(plan: ParallelPlan, ranks: int) -> Iterator[Problem]:
    for each in plan.assigned:
        axis = styles.cut_axis(each.kind)
        weight = getattr(each.module, "weight", None)
        if axis is None or weight is None:
            continue
        if isinstance(each.module, nn.Embedding):
            what = ("num_embeddings", "embedding_dim")[axis]
        else:
            what = ("out_features", "in_features")[axis]
        sizes = each.sizes or (weight.shape[axis],)
        if each.sizes and sum(sizes) != weight.shape[axis]:
            text = f"shape has outputs of {list(sizes)}, together {sum(sizes)}, and out_features={weight.shape[0]}"
            yield Problem(RULES, f"{RULES}: {each.name}: {text}. Write the sizes of its outputs.")
        for size in sizes:
            if size % ranks:
                yield Problem(SIZE, f"{SIZE}={ranks} does not divide {what}={size} of {each.name}. {_remedy(each)}")


def _remedy(each: Assignment) -> str:
    others = "use another number of ranks"
    if isinstance(each.module, nn.Embedding) or each.kind == styles.GATHERED:
        return (
            f"Pad the size (resize_token_embeddings, for a vocabulary), exclude the layer by a skip rule, or {others}."
        )
    return f"Change the model's size, exclude its layers by skip rules, or {others}."


Heads = list[tuple[str, Any, int]]  # name of the attribute, the object that has it, value


def _heads(module: nn.Module, plan: ParallelPlan) -> Heads:
    """Numbers of heads of modules that go on with parts: their attributes, and those of their configuration."""
    modules, found = dict(module.named_modules()), dict[str, tuple[Any, int]]()
    for each in plan.assigned:
        if each.kind not in styles.LOCAL_OUTPUT:
            continue
        parent_name = each.name.rpartition(".")[0]
        parent = modules[each.place.rpartition(".")[0]]
        for name, number in heads_of(parent).items():
            found[f"{parent_name}.{name}".lstrip(".")] = (parent, number)
        dim = head_size_of(parent)
        config = getattr(parent, "config", None)
        if not dim or not isinstance(each.module, nn.Linear):
            continue
        for part, size in enumerate(each.sizes or (each.module.out_features,)):
            if size % dim == 0:
                found[f"{each.name}[{part}]" if each.sizes else each.name] = (None, size // dim)
        for name in ("num_attention_heads", "num_key_value_heads"):
            if type(value := getattr(config, name, None)) is int:
                found[f"{parent_name}.config.{name}".lstrip(".")] = (None, value)
    return [(name, owner, value) for name, (owner, value) in found.items()]


def _wrong_heads(heads: Heads, ranks: int) -> Iterator[Problem]:
    for name, _, value in heads:
        if value % ranks:
            text = (
                f"{SIZE}={ranks} does not divide the number of heads {name}={value}. Use a divisor of it, or exclude "
            )
            yield Problem(SIZE, f"{text}the attention's layers by skip rules.")


# ---- tied weights ----------------------------------------------------------------------------------------------------

Ties = list[list[tuple[nn.Module, str, str]]]  # of each parameter: modules, its name there, its full name


def _ties(module: nn.Module) -> Ties:
    found: dict[int, list[tuple[nn.Module, str, str]]] = defaultdict(list)
    for place, sub in module.named_modules():
        for name, parameter in sub.named_parameters(recurse=False, remove_duplicate=False):
            found[id(parameter)].append((sub, name, clean_name(f"{place}.{name}".lstrip("."))))
    return [places for places in found.values() if len(places) > 1]


def _wrong_ties(plan: ParallelPlan, ties: Ties) -> Iterator[Problem]:
    kinds = {id(each.module): each.kind for each in plan.assigned}
    for places in ties:
        how = {name: _placement(kinds.get(id(module), styles.WHOLE), own) for module, own, name in places}
        if len(set(how.values())) > 1:
            shown = ", ".join(f"{name} ({placement})" for name, placement in how.items())
            yield Problem(
                RULES,
                f"{RULES}: one tied weight would be placed in different ways: {shown}. Cut an embedding and its head "
                "over the vocabulary (embedding_partition_dim: 0, and a column rule for the head), or exclude both.",
            )


_REPLICATED = (styles.SEQUENCE, styles.ROW, styles.SPLIT)  # what is whole of these is a DTensor


def _placement(kind: str, parameter: str) -> str:
    axis = styles.cut_axis(kind, parameter)
    if axis is not None:
        return f"cut along axis {axis}"
    how = {styles.PARTIAL: "whole, partial gradient", **dict.fromkeys(_REPLICATED, "replicated")}
    return how.get(kind, "whole")


def _tie_again(ties: Ties) -> None:
    """Undo that ``parallelize_module`` makes a parameter for each module."""
    for (first, own, _), *rest in ties:
        parameter = getattr(first, own)
        for module, name, _ in rest:
            module.register_parameter(name, parameter)


@contextmanager
def keeping_ties(module: nn.Module) -> Iterator[None]:
    """Context in which a user parallelizes ``module``: weights that were tied before it are tied after it.

    Raises:
        ConfigError: a tied weight was placed in different ways.
    """
    before = _ties(module)
    yield
    for places in before:
        now: dict[str, Any] = {name: getattr(sub, own, None) for sub, own, name in places}
        first, *rest = now.values()
        if all(other is first for other in rest) or not any(isinstance(p, DTensor) for p in now.values()):
            continue
        how = {name: getattr(parameter, "placements", "whole") for name, parameter in now.items()}
        if len(set(how.values())) > 1:
            shown = ", ".join(f"{name} ({placement})" for name, placement in how.items())
            raise ConfigError(
                f"parallelize_module has placed one tied weight in different ways: {shown}. Cut all of its modules "
                "along the same axis, or none of them; or untie them before."
            )
        if first.is_meta or is_guarded(first) or all(torch.equal(first.to_local(), other.to_local()) for other in rest):
            # With different values the user has changed one of them, and the tie is not made again.
            _tie_again([places])


def _warn_of_lost_ties(module: nn.Module) -> None:
    """Warn of an embedding and a layer with the same values, which were one before ``parallelize_module``."""
    kinds: dict[type, list[tuple[str, DTensor]]] = {nn.Embedding: [], nn.Linear: []}
    for place, sub in module.named_modules():
        for kind, found in kinds.items():
            if isinstance(sub, kind) and isinstance(weight := getattr(sub, "weight", None), DTensor):
                found.append((f"{clean_name(place)}.weight".lstrip("."), weight))
    for (one, first), (other, second) in product(*kinds.values()):
        if first is second or first.shape != second.shape or first.placements != second.placements or first.is_meta:
            continue
        values = first.to_local().detach()
        if values.unique().numel() > 1 and torch.equal(values, second.to_local()):
            warn(
                f"{one} and {other} have the same values, but are two parameters. If they were tied: "
                "parallelize_module makes two of them, which are trained apart. Tie them again after it: "
                "head.weight = embedding.weight, or tie_weights()."
            )


def check_shared(stages: list[dict[str, str]]) -> None:
    """Raise ConfigError if stages cut a shared parameter differently. ``stages``: ``placements`` of each."""
    found: dict[str, dict[str, list[str]]] = {}
    for number, placed in enumerate(stages):
        for name, placement in placed.items():
            found.setdefault(name, {}).setdefault(placement, []).append(str(number))
    for name, places in found.items():
        if len(places) > 1:
            shown = " and ".join(f"{placement} on stage {', '.join(where)}" for placement, where in places.items())
            raise ConfigError.about(
                SIZE,
                f"{SIZE}: {name} is shared by stages of the pipeline, and is {shown}. Parallelize it in the same way "
                "wherever it is.",
            )


def placements(module: nn.Module, parameters: Collection[Parameter]) -> dict[str, str]:
    """Placement of each of ``parameters`` of ``module``, by its name."""
    named = ((name, p) for name, p in module.named_parameters() if p in parameters)
    return {name: str(p.placements[0]) if isinstance(p, DTensor) else styles.WHOLE for name, p in named}


# ---- the table -------------------------------------------------------------------------------------------------------


def _rows(module: nn.Module, plan: ParallelPlan) -> list[PlanRow]:
    kinds: dict[str, dict[str, list[Assignment]]] = {pattern: {} for pattern in plan.patterns}
    for each in plan.assigned:
        kinds[each.pattern].setdefault(each.kind, []).append(each)
    seen: set[int] = set()
    rows = []
    for pattern, by_kind in kinds.items():
        for kind, found in (by_kind or {"-": []}).items():
            parameters = [p for each in found for n, p in each.module.named_parameters() if n in each.parameters]
            rows.append(_row(pattern, kind, len(found), parameters, seen))
    rest = {place: own for place, own in _owners(module) if any(id(p) not in seen for p in own)}
    if rest:
        rows.append(_row(REST, styles.WHOLE, len(rest), [p for own in rest.values() for p in own], seen))
    return rows


def _merged(stages: list[list[PlanRow]]) -> list[PlanRow]:
    """The rows of all stages, without those of patterns that have an effect on another."""
    found: dict[tuple[str, str], PlanRow] = {}
    for row in (row for rows in stages for row in rows):
        known = found.get((row.pattern, row.style))
        found[row.pattern, row.style] = row if known is None else known.plus(row)
    used = {row.pattern for row in found.values() if row.modules}
    rows = [row for row in found.values() if row.modules or row.pattern not in used]
    return sorted(rows, key=lambda row: row.pattern == REST)


def _row(pattern: str, kind: str, modules: int, parameters: Iterable[Parameter], seen: set[int]) -> PlanRow:
    """A row of the parameters that are not in ``seen``, to which they are added: tied ones count once."""
    own = {id(p): p for p in parameters if id(p) not in seen}
    seen.update(own)
    return PlanRow(pattern, kind, modules, len(own), sum(map(_local_numel, own.values())))


def _local_numel(parameter: Parameter) -> int:
    return (parameter.to_local() if isinstance(parameter, DTensor) else parameter).numel()


def _owners(module: nn.Module) -> Iterator[tuple[str, list[Parameter]]]:
    for place, sub in module.named_modules():
        if own := list(sub.parameters(recurse=False)):
            yield clean_name(place), own


def _rows_of_user(module: nn.Module) -> list[PlanRow]:
    found: dict[tuple[str, str], list[list[Parameter]]] = defaultdict(list)
    for place, own in _owners(module):
        placed = [str(p.placements[0]) for p in own if isinstance(p, DTensor)]
        pattern = generic(place) if placed else REST
        found[pattern, ", ".join(dict.fromkeys(placed)) or styles.WHOLE].append(own)
    seen: set[int] = set()
    return [
        _row(pattern, kind, len(owners), [p for own in owners for p in own], seen)
        for (pattern, kind), owners in sorted(found.items(), key=lambda item: item[0][1] == styles.WHOLE)
    ]


def table(rows: Iterable[PlanRow]) -> Table:
    """The plan as a table, for rank 0 to print."""
    from rich.table import Table

    made = Table(title="Tensor parallelism")
    made.add_column("modules", overflow="fold")
    made.add_column("style")
    for column in ("number", "parameters", "elements per rank"):
        made.add_column(column, justify="right")
    for row in rows:
        made.add_row(row.pattern, row.style, str(row.modules), str(row.parameters), f"{row.elements:,}")
    return made
