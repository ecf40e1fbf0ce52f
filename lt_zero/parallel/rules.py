"""Assigns a style to each module: by rules of the configuration, or by plans of transformers' models."""

from __future__ import annotations

import difflib
import importlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from torch import nn
from torch.nn import Parameter

from lt_zero.common.compat import clean_name
from lt_zero.common.errors import ConfigError, Problem
from lt_zero.config.blocks import LayerRule, PartitionConfig, TensorParallel
from lt_zero.parallel import styles
from lt_zero.parallel.experts import Experts

SPECS, PRESET, SIZE = (
    "tensor_parallel.partition_config.layer_specs",
    "tensor_parallel.preset_model",
    "tensor_parallel.autotp_size",
)


@dataclass(frozen=True)
class Assignment:
    """A module and the way in which it is cut.

    Attributes:
        place: its full name; ``name`` is that without wrappers.
        kind: one of the words in styles.py.
        pattern: of the rule, as the table shows it.
        parameters: names of its parameters that the rule is about.
        sizes: of outputs that are fused.
    """

    place: str
    module: nn.Module
    kind: str
    pattern: str
    parameters: tuple[str, ...]
    sizes: tuple[int, ...] = ()

    @property
    def name(self) -> str:
        return clean_name(self.place)


@dataclass
class ParallelPlan:
    """Assignments, the patterns they come from, and their problems.

    Attributes:
        sets_heads: whether modules are to get the number of heads of their rank.
        unused: problems by pattern that are none if another stage of a pipeline has not got them.
        idle: the problem that nothing is cut, unless another stage cuts something.
    """

    sets_heads: bool
    assigned: list[Assignment] = field(default_factory=list)
    patterns: list[str] = field(default_factory=list)
    problems: list[Problem] = field(default_factory=list)
    unused: dict[tuple[int, str], Problem] = field(default_factory=dict)
    idle: Problem | None = None

    def add(self, assigned: Assignment, key: str) -> None:
        """Add an assignment; a module to which it cannot be made is a problem of ``key``."""
        self.assigned.append(assigned)
        if why := _unfit(assigned):
            self.problems.append(Problem(key, f"{key}: {assigned.pattern!r} is for {assigned.kind}, but {why}"))

    @property
    def cuts(self) -> bool:
        return any(styles.cut_axis(each.kind) is not None for each in self.assigned)


def generic(name: str) -> str:
    """``layers.3.mlp`` -> ``layers.*.mlp``."""
    return ".".join("*" if part.isdecimal() else part for part in name.split("."))


def _unfit(each: Assignment) -> str:
    """Reason why the module cannot be cut in this way; empty if it can."""
    module, name = each.module, each.name
    if styles.cut_axis(each.kind) is None:
        return ""
    wanted = nn.Linear if each.kind in styles.LINEAR else nn.Embedding
    if not isinstance(module, wanted):
        return (
            f"{name} is a {type(module).__name__}, not nn.{wanted.__name__}. Exclude it by a skip rule of "
            f"{SPECS}, write rules for the layers inside it, or use parallelize_module."
        )
    if others := [n for n, _ in module.named_parameters() if n not in ("weight", "bias")]:
        return f"{name} has other parameters than weight and bias: {', '.join(others)}. Use parallelize_module."
    if isinstance(module, nn.Embedding) and (module.max_norm is not None or module.sparse):
        return f"{name} has max_norm or sparse gradients. Leave these out, or exclude it by a skip rule of {SPECS}."
    return ""


# ---- rules of the configuration --------------------------------------------------------------------------------------


def plan_of_rules(module: nn.Module, block: TensorParallel) -> ParallelPlan | None:
    """The plan that ``layer_specs`` and ``preset_model`` make; None without any."""
    rules = block.partition_config or PartitionConfig()
    if not rules.layer_specs and block.preset_model is None:
        return None
    plan = ParallelPlan(sets_heads=True)
    matched = _add_rules(plan, module, rules)
    if block.preset_model is not None and (rules.use_default_specs or not rules.layer_specs):
        _add_plan(plan, module, _preset(block.preset_model), PRESET, anywhere=True, skip=matched)
    taken = {id(each.module) for each in plan.assigned}
    linear = [clean_name(n) for n, m in module.named_modules() if isinstance(m, nn.Linear) and id(m) not in taken]
    if rules.strict_mode and linear:
        key = "tensor_parallel.partition_config.strict_mode"
        text = f"{key}: no rule matches {', '.join(linear[:5])}{' and others' if len(linear) > 5 else ''}"
        plan.problems.append(Problem(key, f"{text}. Write rules, of partition_type: skip to leave them whole."))
    order = {id(sub): number for number, sub in enumerate(module.modules())}
    plan.assigned.sort(key=lambda each: order[id(each.module)])
    plan.problems += [*_fused(plan), *_unpaired(plan), *_unsaid(plan, module)]
    if not plan.cuts:
        key = SPECS if rules.layer_specs else PRESET
        text = f"{key} cuts no layer of {type(module).__name__}. Write rules for its layers"
        plan.idle = Problem(key, f"{text}: {', '.join(linear[:3])}.")
    return plan


def _add_rules(plan: ParallelPlan, module: nn.Module, rules: PartitionConfig) -> set[int]:
    """Add the assignments of ``layer_specs``; returns the ids of the modules that they match."""
    unused = {(n, pattern): True for n, spec in enumerate(rules.layer_specs) for pattern in spec.patterns}
    plan.patterns += [_shown(spec) for spec in rules.layer_specs]
    matched: set[int] = set()
    names = []
    for place, sub in module.named_modules():
        types = _model_types(module, place)
        found: dict[str, int] = {}
        for own, _ in sub.named_parameters(recurse=False):
            full = clean_name(f"{place}.{own}".lstrip("."))
            names.append(full)
            for number, spec in enumerate(rules.layer_specs):
                if spec.model_types is not None and types.isdisjoint(t.lower() for t in spec.model_types):
                    continue
                hits = [pattern for pattern in spec.patterns if re.match(pattern, full)]
                unused |= {(number, pattern): False for pattern in hits}
                if hits:
                    found.setdefault(own, number)
        if found:
            matched.add(id(sub))
            _add_module(plan, place, sub, found, rules)
    present = {t for place, _ in module.named_modules() for t in _model_types(module, place)}
    for (number, pattern), is_unused in unused.items():
        of = rules.layer_specs[number].model_types
        if is_unused and (of is None or not present.isdisjoint(t.lower() for t in of)):
            key = f"{SPECS}.{number}.patterns"
            near = difflib.get_close_matches(re.sub(r"[\\^$]|\.\*", "", pattern), names, 1, 0.3) or names[:1]
            text = f"{key}: {pattern!r} matches no parameter from its beginning, such as {', '.join(near)}"
            plan.unused[number, pattern] = Problem(key, f"{text}. Correct or remove it.")
    return matched


def _shown(spec: LayerRule) -> str:
    return " | ".join(spec.patterns)


def _model_types(module: nn.Module, place: str) -> set[str]:
    """``model_type`` of the module and of those around it."""
    parts, found = place.split(".") if place else [], set()
    for end in range(len(parts) + 1):
        config = getattr(module.get_submodule(".".join(parts[:end])), "config", None)
        if isinstance(kind := getattr(config, "model_type", None), str):
            found.add(kind.lower())
    return found


def _add_module(
    plan: ParallelPlan, place: str, sub: nn.Module, found: Mapping[str, int], rules: PartitionConfig
) -> None:
    """Add the assignment of one module. ``found``: the number of the rule for each of its parameters."""
    if isinstance(sub, (nn.Linear, nn.Embedding)) and "weight" in found:
        number = found["weight"]
        spec, own = rules.layer_specs[number], tuple(n for n, _ in sub.named_parameters(recurse=False))
        kind, sizes, problem = _kind(spec, sub, place, rules)
        key = f"{SPECS}.{number}"
        plan.add(Assignment(place, sub, kind, _shown(spec), own, sizes), key)
        if problem:
            plan.problems.append(Problem(key, f"{key}: {clean_name(place)}: {problem}"))
        return
    for number in dict.fromkeys(found.values()):
        spec, own = rules.layer_specs[number], tuple(n for n, rule in found.items() if rule == number)
        kind = styles.PARTIAL if spec.grad_allreduce else styles.WHOLE
        key = f"{SPECS}.{number}"
        if spec.partition_type != "skip":
            text = f"{key}: {_shown(spec)!r} ({spec.partition_type}) matches {', '.join(own)} of {clean_name(place)}, a"
            text = f"{text} {type(sub).__name__}. Only weights of nn.Linear and nn.Embedding can be cut: use skip."
            plan.problems.append(Problem(key, text))
            continue
        plan.add(Assignment(place, sub, kind, _shown(spec), own), key)


def _kind(
    spec: LayerRule, sub: nn.Linear | nn.Embedding, place: str, rules: PartitionConfig
) -> tuple[str, tuple[int, ...], str]:
    """Style that a rule gives a module, the sizes of fused outputs, and the text of the problem ("": none)."""
    if spec.partition_type == "skip":
        return styles.PARTIAL if spec.grad_allreduce else styles.WHOLE, (), ""
    if isinstance(sub, nn.Embedding):
        axis = rules.embedding_partition_dim if spec.partition_dim is None else spec.partition_dim
        return (styles.VOCABULARY, styles.EMBEDDING)[axis], (), "shape is for linear layers." if spec.shape else ""
    if spec.partition_dim not in (None, 0 if spec.partition_type == "column" else 1):
        text = (
            f"partition_dim={spec.partition_dim} of partition_type={spec.partition_type} is not supported. Remove it."
        )
        return styles.WHOLE, (), text
    is_head = place.rpartition(".")[2] in rules.lm_head_patterns
    if spec.partition_type == "row":
        return styles.SPLIT if is_head else styles.ROW, (), ""
    if is_head or spec.gather_output:
        return styles.GATHERED, (), ""
    if spec.shape is None:
        return styles.COLUMN, (), ""
    parts, inputs = spec.shape
    if inputs not in (-1, sub.in_features):
        return styles.FUSED, (), f"shape says {inputs} inputs, and in_features={sub.in_features}. Write -1."
    if isinstance(parts, int) and sub.out_features % parts:
        return styles.FUSED, (), f"shape says {parts} equal outputs, and out_features={sub.out_features}."
    sizes = (sub.out_features // parts,) * parts if isinstance(parts, int) else tuple(parts)
    return (styles.FUSED, sizes, "") if len(sizes) > 1 else (styles.COLUMN, sizes, "")


_FUSED = re.compile(
    r"qkv|query_key_value|c_attn|gate_?up|up_?gate|w_?pack|(^|_)kv(_|$)|in_proj|w1_?[23]", re.IGNORECASE
)


def _fused(plan: ParallelPlan) -> Iterator[Problem]:
    """Problems of layers that seem to have several outputs in one weight, but are cut in one piece."""
    taken: dict[str, int] = {}
    for each in plan.assigned:
        if each.kind == styles.ROW and isinstance(each.module, nn.Linear):
            parent = each.place.rpartition(".")[0]
            taken[parent] = max(taken.get(parent, 0), each.module.in_features)
    for each in plan.assigned:
        if each.kind != styles.COLUMN or each.sizes or not isinstance(each.module, nn.Linear):
            continue
        parent, _, own = each.place.rpartition(".")
        outputs, inputs = each.module.out_features, taken.get(parent, 0)
        if _FUSED.search(own) or 0 < inputs < outputs:
            why = f"has {outputs} outputs, of which {inputs} go on" if 0 < inputs < outputs else "is named like that"
            text = f"{SPECS}: {each.pattern!r} cuts {each.name}, which seems to have several outputs in one weight: it"
            remedy = "Write their sizes as shape: [[sizes], -1], or shape: [1, -1] if whole heads follow each other"
            yield Problem(SPECS, f"{text} {why}. {remedy}.")


def _unpaired(plan: ParallelPlan) -> Iterator[Problem]:
    """Problems of layers whose output stays cut, with no layer near after them that takes parts."""
    for number, each in enumerate(plan.assigned):
        parent = each.place.rpartition(".")[0]
        above = {parent, parent.rpartition(".")[0]}
        after = [other.place for other in plan.assigned[number + 1 :] if other.kind == styles.ROW]
        if each.kind in styles.LOCAL_OUTPUT and not any(_is_near(place, top) for place in after for top in above):
            text = f"{SPECS}: {each.pattern!r} cuts the output of {each.name}, and no layer after it in "
            text = f"{text}{clean_name(parent) or 'the model'} takes parts. Write gather_output: true"
            yield Problem(SPECS, f"{text}, or a rule of partition_type: row for the layer that gets its output.")


def _is_near(place: str, top: str) -> bool:
    """True if ``place`` is one or two levels below ``top``."""
    inside = place.removeprefix(f"{top}.") if top else place
    return (not top or inside != place) and inside.count(".") < 2


_OF_HEADS = re.compile(
    r"w?[qkv]|[qkv]_?(proj|lin|linear)|query|key|value|.*qkv.*|query_key_value|c_attn", re.IGNORECASE
)


def _unsaid(plan: ParallelPlan, module: nn.Module) -> Iterator[Problem]:
    """Problems of modules that go on with parts: facts that must be known and cannot be found out."""
    modules, taken = dict(module.named_modules()), {id(each.module) for each in plan.assigned}
    parents: dict[str, list[Assignment]] = {}
    for each in plan.assigned:
        if each.kind in styles.LOCAL_OUTPUT:
            parents.setdefault(each.place.rpartition(".")[0], []).append(each)
    for place, cut in parents.items():
        parent, name = modules[place], clean_name(place) or type(modules[place]).__name__
        of_heads = [each.name for each in cut if _OF_HEADS.fullmatch(each.place.rpartition(".")[2])]
        if of_heads and not heads_of(parent) and not head_size_of(parent):
            yield Problem(
                SPECS,
                f"{SPECS}: {of_heads[0]} is cut, but {name} has no attribute for the number of its heads (num_heads) "
                "or their size (head_dim). Give it the one that its forward uses: each rank has a part of the heads.",
            )
        widths = {each.module.in_features for each in cut if isinstance(each.module, nn.Linear)}
        for child, sub in [("", parent), *parent.named_children()]:
            if id(sub) in taken or isinstance(sub, (nn.Linear, nn.Embedding)):
                continue
            for own, parameter in sub.named_parameters(recurse=False):
                if parameter.dim() and parameter.shape[-1] not in widths:
                    full = clean_name(".".join(part for part in (place, child, own) if part))
                    yield _whole_beside(full, parameter, cut[0].name)


def _whole_beside(name: str, parameter: Parameter, cut: str) -> Problem:
    return Problem(
        SPECS,
        f"{SPECS}: {name} of shape {tuple(parameter.shape)} stays whole beside {cut}, whose output is cut, and no rule "
        "says how it is used. Write one of partition_type: skip, with grad_allreduce: true if each rank uses it on its "
        "part (a norm of single heads), without if all ranks use it alike.",
    )


# Attributes that count heads: num_heads, n_head, num_key_value_heads, num_kv, heads; no sizes: dim_head, d_head.
_COUNTS_HEADS = re.compile(r"(?!.*(dim|size|per_|group))(?!d_)(.*heads?|n(um)?_kv)")


def heads_of(module: nn.Module) -> dict[str, int]:
    """Attributes of ``module`` that are numbers of heads."""
    found = {name: value for name, value in vars(module).items() if type(value) is int and value > 0}
    return {name: value for name, value in found.items() if _COUNTS_HEADS.fullmatch(name.lower())}


def head_size_of(module: nn.Module) -> int:
    """The size of a head, if ``module`` has it as an attribute, else 0."""
    sizes = (getattr(module, name, None) for name in ("head_dim", "head_size", "d_head", "dim_head"))
    return next((size for size in sizes if type(size) is int and size > 0), 0)


# ---- plans of transformers -------------------------------------------------------------------------------------------


def plan_of_model(module: nn.Module) -> ParallelPlan | None:
    """The plan that models of transformers in ``module`` bring with them; None without one."""
    plan, inside = ParallelPlan(sets_heads=False), ""
    for place, sub in module.named_modules():
        own = getattr(sub, "tp_plan", None) if not inside or not place.startswith(inside) else None
        if not isinstance(own, Mapping) or not own:
            continue
        inside = f"{place}." if place else ""
        names = {f"{inside}{pattern}": kind for pattern, kind in own.items()}
        _add_plan(plan, module, names, SIZE)
        if not inside:
            break
    return plan if plan.patterns else None


def _preset(model_type: str) -> Mapping[str, str]:
    """The plan of a model type of transformers."""
    try:
        mapping: Any = importlib.import_module("transformers").CONFIG_MAPPING
    except ImportError:
        raise ConfigError.about(
            PRESET, f"{PRESET}={model_type!r} is a plan of transformers, which is not installed. Write {SPECS}."
        ) from None
    if model_type not in mapping:
        near = difflib.get_close_matches(model_type, list(mapping.keys()), 3)
        hint = f" Did you mean {', '.join(near)}?" if near else ""
        raise ConfigError.about(PRESET, f"{PRESET}={model_type!r} is no model type of transformers.{hint}")
    plan: Mapping[str, str] | None = getattr(mapping[model_type], "base_model_tp_plan", None)
    if not plan:
        raise ConfigError.about(PRESET, f"{PRESET}={model_type!r}: transformers has no plan for it. Write {SPECS}.")
    return plan


def _add_plan(
    plan: ParallelPlan,
    module: nn.Module,
    names: Mapping[str, str],
    key: str,
    anywhere: bool = False,
    skip: frozenset[int] | set[int] = frozenset(),
) -> None:
    """Add the assignments of a plan of transformers.

    Args:
        names: styles by names of modules, with * for numbers. Those of ``Experts`` are left out.
        anywhere: names may have anything before them.
        skip: ids of modules of which it says nothing.
    """
    targets: dict[str, nn.Module | None] = dict(module.named_modules())
    targets |= dict.fromkeys(name for name, _ in module.named_parameters(remove_duplicate=False))
    spread = [name for name, sub in module.named_modules() if isinstance(sub, Experts)]
    # Expert ranks have them already, and tensor ranks have them whole.
    theirs = [name for name in targets if any(name == own or name.startswith(f"{own}.") for own in spread)]
    for name in theirs:
        del targets[name]
    idle = {_pattern_of(clean_name(name), names, anywhere) for name in theirs}
    plan.patterns += [pattern for pattern in names if pattern not in {*plan.patterns, *idle}]
    for place, sub in targets.items():
        pattern = _pattern_of(clean_name(place), names, anywhere)
        if pattern is None or (sub is not None and id(sub) in skip):
            continue
        style, name = names[pattern], clean_name(place)
        kind = styles.OF_TRANSFORMERS.get(style)
        if kind is None or sub is None:
            why = "is not supported" if kind is None else "is supported for modules only, and this is a parameter"
            text = f"{key}: the model's plan has {style!r} for {name}, which {why}. Supported: "
            text = f"{text}{', '.join(styles.OF_TRANSFORMERS)}. Write {SPECS}, or use parallelize_module."
            plan.problems.append(Problem(key, text))
            continue
        own = tuple(n for n, _ in sub.named_parameters())
        plan.add(Assignment(place, sub, kind, pattern, own), key)


def _pattern_of(name: str, patterns: Mapping[str, Any], anywhere: bool) -> str | None:
    if not name:
        return None
    whole = generic(name)
    if not anywhere:
        return whole if whole in patterns else None
    return next((p for p in patterns if whole == p or whole.endswith(f".{p}")), None)
