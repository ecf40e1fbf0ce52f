"""The folders of the package are floors: a file imports from its own folder, from ``common``, and from lower floors."""

from __future__ import annotations

import ast
import functools
import re
from collections.abc import Iterable, Iterator

from tests.support.house.imports import COMPUTED, this_package
from tests.support.paths import ROOT

EXCHANGES = {  # features that exchange gradients, or gather weights, in another way
    *("features/compression", "features/late_nodes", "features/one_bit", "features/quantize"),
    "features/zero_plus_plus",
}
FLOORS = (
    {"common", "conf", "core", "core/stores", "kernels"},
    {"core/comm", "offload"},
    {"core/engine"},
    {"optim", "features"},
    {"core/step", "exchange"},
    {"config"},
    {"parallel"},
    {
        "checkpoint",
        "features/activation_checkpointing",
        "features/low_bit_states",
        "features/offload",
        "features/sparse_attention",
        "features/tiles",
        "features/virtual_ranks",
        *EXCHANGES,
    },
    {"optim/__init__"},  # public names, also of a feature
    {"planning"},
    {"zero"},
    {"training"},
    {"training/lightning", "training/loop", "training/inference"},
    {
        *("__init__", "attention", "cli", "deepspeed", "features/ema", "ops", "ray", "sweep", "tools"),
        "utils",
    },
)
# Folders that are on the floor of another one, and import from it as it does from them.
WITH = {
    "core/ask": "features",
    "core/data_part": "features",
    "core/division": "features",
    "core/feature": "features",
    "core/followers": "features",
    "core/health": "core/comm",
    "core/rounds": "features",
    "optim/__init__": "optim/__init__",
    "tools/compare": "training",
    "tools/gradient_noise": "training",
}
SPLIT = ("core", "features", "tools", "training")  # their folders are rooms of their own
KNOW_LIGHTNING = {
    "training/lightning",
    "features/ema",
    "__init__",
    "cli",
    "ray",
    "common/compat/of_lightning",
    "common/compat/of_lightning_loops",
    "common/compat/of_lightning_results",
    "common/compat/of_loggers",
}
COLLECTIVES = (
    *("core/comm/", "core/health/", "common/compat", "exchange/compression"),
    *("features/late_nodes/tolerance", "features/virtual_ranks/fold"),
    "deepspeed/",  # passes torch.distributed on to scripts
)
SAVES = "torch.distributed.checkpoint"  # plans over a process group that comm/ makes
CUT = ("torch.distributed.tensor", "torch.distributed.device_mesh", "torch.distributed.pipelining")
# Folders of objects that assign their own attributes, and the names by which others have such objects.
CORE = ("core/comm", "core/stores", "offload", "core/engine", "exchange", "core/step")
HELD = {
    "core/engine": {
        *("engine", "bucket", "weights", "grads", "reducer", "grad_views", "unused_parameters", "gatherer", "edits"),
        *("offload_manager", "same_on_ranks", "buffers", "unit", "replaced"),
    },
    "core/step": {"sharded", "fragments", "fused", "overlap", "scaler", "loss_scale_controller"},
    "core/comm": {"world", "peers", "watch", "agreement", "detector"},
    "exchange": {"exchange", "gathers"},
}
# Attributes of torch's objects, and assignments to other objects whose attributes have names of core objects'.
OF_TORCH = {"data", "training", "state", "tensor"}
OTHERS = {
    ("checkpoint/upload", "self._stream.closed"),
    ("common/compat/of_lightning", "child._dtype"),
    ("common/compat/of_lightning_results", "meta.sync"),
    ("deepspeed/huggingface", "optimizer.optimizer"),
    ("kernels/moments", "made.rows"),
    ("training/loop/engine", "self.session.loss_scale"),
    ("core/step/sharded_optimizer", "on_fragments.narrows"),
}
# Imports that stand in a function, or that only a type checker sees, and close a circle. None may be added.
CIRCLES = set[tuple[str, str]]()
FILES = tuple(this_package().files)


def tree_of(file: str) -> ast.Module:
    return this_package().trees[file]


@functools.cache
def nodes_of(file: str) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(tree_of(file)))


@functools.cache
def all_imports() -> dict[str, set[str]]:
    """File -> every dotted name it imports, wherever the statement stands."""
    return {file: this_package().names[file] for file in FILES}


@functools.cache
def graph() -> dict[str, set[str]]:
    found: dict[str, set[str]] = {file: set() for file in FILES}
    for file, other in this_package().imports():
        if other != COMPUTED:
            found[file].add(other)
    return found


def visible(file: str) -> set[str]:
    """What the file imports at its top level, for everybody."""
    package = this_package()
    found = (package.file_of(name) for node in tree_of(file).body for name in package.names_in(node, file))
    return {other for other in found if other is not None}


def room(file: str) -> str:
    folders = file.split("/")[:-1]
    name = "/".join(folders[: 2 if folders and folders[0] in SPLIT else 1]) or file
    return WITH.get(file) or WITH.get(name, name)


def floor(file: str) -> int:
    return next(number for number, rooms in enumerate(FLOORS) if room(file) in rooms)


def reachable(start: str, edges: dict[str, set[str]]) -> set[str]:
    seen, todo = set[str](), [start]
    while todo:
        for other in edges[todo.pop()] - seen:
            seen.add(other)
            todo.append(other)
    return seen


def test_nobody_imports_from_above_or_beside() -> None:
    wrong = set()
    for file, others in graph().items():
        for other in others:
            above = floor(other) > floor(file) or room(file) == "common" != room(other)
            beside = floor(other) == floor(file) and room(other) not in (room(file), "common")
            if (above or beside) and room(file) not in FLOORS[-1]:
                wrong.add((file, other))
    assert not wrong


def test_no_hidden_import_closes_a_circle() -> None:
    """Python forbids most circles by itself; the others are hidden in functions or behind TYPE_CHECKING."""
    edges = {file: others for file, others in graph().items() if room(file) != "__init__"}
    edges = {file: {other for other in others if other in edges} for file, others in edges.items()}
    after = {file: reachable(file, edges) for file in edges}
    circles = {
        (file, other) for file, others in edges.items() for other in others - visible(file) if file in after[other]
    }
    assert circles == CIRCLES, "an import that was resolved leaves the list, a new one must not be made"


def test_only_the_strategy_knows_lightning() -> None:
    for file, imported in all_imports().items():
        if room(file) not in KNOW_LIGHTNING and file not in KNOW_LIGHTNING:
            assert not [name for name in imported if name.split(".")[0] in ("lightning", "torchmetrics")], file


def test_collectives_are_in_one_place() -> None:
    for file, imported in all_imports().items():
        if not file.startswith(COLLECTIVES):
            found = [name for name in imported if name.startswith("torch.distributed")]
            if room(file) == "checkpoint":
                found = [name for name in found if not name.startswith(SAVES)]
            if room(file) in ("parallel", "features/tiles"):
                found = [name for name in found if not name.startswith(CUT)]
            assert not found, file


def _kinds_of_devices(node: ast.AST) -> bool:
    """True for ``torch.cuda``, ``tensor.is_cuda`` and comparisons of ``device.type`` with "cuda"."""
    if isinstance(node, ast.Attribute):
        return node.attr == "is_cuda" or (node.attr == "cuda" and ast.unparse(node.value) == "torch")
    if isinstance(node, ast.Compare):
        return ast.unparse(node.left).endswith(".type") and "'cuda'" in ast.unparse(node)
    return False


def test_devices_are_asked_about_in_one_place() -> None:
    """Kernels are loaded for one kind of device, which ``kernels/`` names."""
    for file in FILES:
        if room(file) != "kernels" and file != "common/accelerator":
            found = [node.lineno for node in nodes_of(file) if _kinds_of_devices(node)]  # type: ignore[attr-defined]
            assert not found, f"{file}: {found}"


def test_docstrings_begin_with_a_verb_or_a_noun() -> None:
    relative = {"What", "Whether", "Which", "How", "Of", "Where", "Whose", "Whom", "Who"}
    kinds = ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef
    for file in FILES:
        nodes = (node for node in nodes_of(file) if isinstance(node, kinds))
        firsts = {text.split()[0] for node in nodes if (text := ast.get_docstring(node))}
        assert not firsts & relative, file


def test_no_test_imports_a_test() -> None:
    statement = re.compile(r"^\s*(?:from\s+tests[\w.]*\s+import\s*(?:\([^)]*\)|.*)|import\s+tests.*)$", re.MULTILINE)
    for path in sorted((ROOT / "tests").rglob("*.py")):
        text = path.read_text(encoding="utf-8")
        if any(re.search(r"\btest_", found) for found in statement.findall(text)):  # or in a script that it writes
            imported = {name for node in ast.walk(ast.parse(text)) for name in this_package().names_in(node, path.stem)}
            assert not [name for name in imported if name.startswith("tests.") and ".test_" in name], path


def targets(nodes: Iterable[ast.AST]) -> Iterator[ast.expr]:
    """What these nodes assign to, delete, or bind; each element of a tuple by itself."""
    for node in nodes:
        if isinstance(node, (ast.Assign, ast.Delete)):
            todo: list[ast.expr | None] = [*node.targets]
        elif isinstance(node, ast.withitem):
            todo = [node.optional_vars]
        else:
            todo = [getattr(node, "target", None)]
        while todo:
            target = todo.pop()
            if isinstance(target, (ast.Tuple, ast.List)):
                todo += target.elts
            elif isinstance(target, ast.Starred):
                todo.append(target.value)
            elif target is not None:
                yield target


def assigned(file: str) -> Iterator[str]:
    """The attributes that a file assigns to, as they are written."""
    yield from (ast.unparse(target) for target in targets(nodes_of(file)) if isinstance(target, ast.Attribute))


@functools.cache
def folders_of_attributes() -> dict[str, set[str]]:
    """Attribute -> the folders with a class that declares it, or whose methods assign it."""
    found: dict[str, set[str]] = {}
    for file in FILES:
        for node in nodes_of(file):
            if isinstance(node, ast.ClassDef):
                declared = {target.id for target in targets(node.body) if isinstance(target, ast.Name)}
                own = {
                    target.attr
                    for target in targets(ast.walk(node))
                    if isinstance(target, ast.Attribute) and ast.unparse(target.value) == "self"
                }
                for name in declared | own:
                    found.setdefault(name, set()).add(room(file))
    return found


def test_the_core_does_not_know_which_exchange_it_has() -> None:
    """``engine/`` and ``step/`` ask the protocols (``GradientExchange``, ``GatherStrategy``), and never for a kind."""
    exchanges = [file for file in FILES if room(file) in {"exchange", *EXCHANGES}]
    kinds = {"GradientExchange", "PlainExchange", "GatherStrategy"}
    for file in exchanges:
        kinds |= {node.name for node in tree_of(file).body if isinstance(node, ast.ClassDef)}
    for file in (file for file in FILES if room(file) in ("core/engine", "core/step")):
        assert graph()[file].isdisjoint(exchanges), file
        for node in nodes_of(file):
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("isinstance", "issubclass", "type"):
                asked = set(re.findall(r"\w+", ast.unparse(node)))
                assert not asked & {*kinds, "exchange", "gathers"}, (file, ast.unparse(node))


def test_nothing_is_attached_to_the_core_from_above() -> None:
    """An engine gets its exchange, and a bucket its strategy, in the constructor; neither is reached into."""
    for file in FILES:
        for target in assigned(file):
            owner, _, name = target.rpartition(".")
            if (room(file) in {"exchange", *EXCHANGES} and not file.startswith(COLLECTIVES)) or name in (
                "exchange",
                "gathers",
            ):
                assert owner == "self", (file, target)
            assert not re.search(r"\.(exchange|gathers)$", owner), (file, target)


def _is_of_another_folder(file: str, target: str) -> bool:
    """True if the attribute that a file assigns to is one of an object of another folder of the core."""
    owner, _, name = target.rpartition(".")
    if owner == "self" or owner == "context":  # of a torch.autograd.Function
        return False
    if any(owner.rpartition(".")[2] in names for folder, names in HELD.items() if folder != room(file)):
        return True
    folders = folders_of_attributes().get(name, set())
    return name not in OF_TORCH and room(file) not in folders and not folders.isdisjoint(CORE)


def test_objects_of_the_core_change_in_their_own_folder() -> None:
    """Others pass values to constructors, call methods that say what they mean, and enter contexts."""
    found = {(file, target) for file in FILES for target in assigned(file) if _is_of_another_folder(file, target)}
    assert found == OTHERS
