"""``lt_zero.as_deepspeed()``: imports of scripts are answered, by objects, or by errors that say the remedy."""

from __future__ import annotations

import importlib
import json
import pickle
import sys
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
import torch
from packaging.version import Version
from torch import Tensor, nn

import lt_zero
from lt_zero.common.errors import CheckpointError, ConfigError
from lt_zero.deepspeed.__main__ import main
from lt_zero.deepspeed.install import DeepSpeedModule
from lt_zero.deepspeed.missing import is_missing
from lt_zero.deepspeed.names import Answer, table
from lt_zero.deepspeed.sharding import ZeroParamStatus, mark_parameters
from tests.support.docs_tools import BLOCKS, execute
from tests.support.features import there

ROWS = [(module, name, answer) for module, names in table().items() for name, answer in names.items() if name != "*"]


@pytest.fixture(autouse=True)
def deepspeed() -> Iterator[Any]:
    """The module for the length of a test."""
    finders = list(sys.meta_path)
    yield lt_zero.as_deepspeed()
    sys.meta_path[:] = finders
    for name in [name for name in sys.modules if name.split(".")[0] == "deepspeed"]:
        del sys.modules[name]


def test_each_name_of_the_table_is_found() -> None:
    for module, name, answer in ROWS:
        if module == "deepspeed.ops.sparse_attention" and not answer.remedy and not there("sparse_attention"):
            with pytest.raises(ModuleNotFoundError, match=r"lt_zero\.attention is not installed"):
                getattr(importlib.import_module(module), name)
            continue
        found = getattr(importlib.import_module(module), name)
        assert is_missing(found) == bool(answer.remedy) or not answer.target.startswith("lt_zero"), (module, name)


def test_each_name_without_a_counterpart_tells_a_remedy() -> None:
    every: list[tuple[str, str, Answer]] = [(m, n, a) for m, names in table().items() for n, a in names.items()]
    absent = [(module, name.replace("*", "Anything"), a) for module, name, a in every if a.remedy]
    assert len(absent) > 50
    for module, name, answer in absent:
        used = getattr(importlib.import_module(module), name)
        with pytest.raises(NotImplementedError, match=f"^{module}.{name} is not in lt_zero. ") as error:
            used(1, hidden=2)
        assert str(error.value).endswith(answer.remedy + ".")
        assert not isinstance(3, used)
        with pytest.raises(NotImplementedError, match=name):
            type("Derived", (used,), {})


def test_imports_of_scripts() -> None:
    import deepspeed
    import deepspeed.comm as dist
    from deepspeed import get_accelerator, zero
    from deepspeed.accelerator import get_accelerator as same
    from deepspeed.moe.layer import MoE
    from deepspeed.ops.adam import DeepSpeedCPUAdam, FusedAdam
    from deepspeed.pipe import LayerSpec
    from deepspeed.runtime.zero.partition_parameters import ZeroParamStatus
    from deepspeed.utils import groups, logger, safe_get_full_grad

    assert Version(deepspeed.__version__) >= Version("0.19")
    assert get_accelerator is same
    assert deepspeed.zero.Init is zero.Init is lt_zero.Init
    assert deepspeed.checkpointing.is_configured() is False
    assert deepspeed.DeepSpeedEngine.step is lt_zero.TrainingEngine.step
    assert dist.all_reduce is torch.distributed.all_reduce
    assert dist.ReduceOp is torch.distributed.ReduceOp
    assert (groups.get_data_parallel_world_size(), groups.get_tensor_model_parallel_rank()) == (1, 0)
    assert safe_get_full_grad is lt_zero.safe_get_full_grad
    assert ZeroParamStatus.NOT_AVAILABLE.name == "NOT_AVAILABLE"
    assert is_missing(MoE)
    assert logger.name == "DeepSpeed"
    assert LayerSpec.__module__.startswith("lt_zero.parallel")
    layer = nn.Linear(2, 2)
    for made in (FusedAdam(layer.parameters(), lr=0.1), DeepSpeedCPUAdam(layer.parameters(), 0.1, adamw_mode=True)):
        assert type(made) is torch.optim.AdamW
        assert made.param_groups[0]["lr"] == 0.1
        assert isinstance(made, FusedAdam)
    assert type(FusedAdam(layer.parameters(), adam_w_mode=False)) is torch.optim.Adam
    assert not isinstance(torch.optim.SGD(layer.parameters(), 0.1), FusedAdam)


@pytest.mark.parametrize(
    ("statement", "name"),
    [
        ("from deepspeed.utils import no_such", "deepspeed.utils.no_such"),
        ("from deepspeed.comm import no_such", "deepspeed.comm.no_such"),
        ("import deepspeed.nothing", "deepspeed.nothing"),
    ],
)
def test_unknown_names_and_modules(statement: str, name: str) -> None:
    with pytest.raises(ImportError, match=f"^{name}: lt_zero stands for deepspeed here, and has no such name"):
        exec(statement)
    assert not hasattr(importlib.import_module("deepspeed.utils"), "no_such")
    assert "initialize" in dir(importlib.import_module("deepspeed"))


def test_imports_as_optional_packages_make_them() -> None:
    names: dict[str, Any] = {}
    exec("from deepspeed import *", names)
    assert names["initialize"] is importlib.import_module("deepspeed").initialize
    assert names["zero"].Init is lt_zero.Init
    exec("from deepspeed.comm import *", names)
    assert names["all_reduce"] is torch.distributed.all_reduce
    with pytest.raises(ModuleNotFoundError):
        importlib.import_module("deepspeed.nothing")
    assert metadata.version("DeepSpeed") == metadata.version("deepspeed")


def test_marked_parameters_are_pickled() -> None:
    one, other = nn.Linear(2, 2), nn.Linear(2, 2)
    mark_parameters(one)
    mark_parameters(other)
    assert len({p.ds_id for model in (one, other) for p in model.parameters()}) == 4
    assert pickle.loads(pickle.dumps(one.weight)).ds_status is ZeroParamStatus.AVAILABLE


def test_deepspeed_itself_is_not_replaced(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(lt_zero.as_deepspeed(), DeepSpeedModule)  # twice is fine
    monkeypatch.setitem(sys.modules, "deepspeed", ModuleType("deepspeed"))
    with pytest.raises(RuntimeError, match="imported already, .* Call lt_zero.as_deepspeed"):
        lt_zero.as_deepspeed()


ASKS = "import importlib.util\nif importlib.util.find_spec('deepspeed'): DeepSpeedEngineWrapper = object"


@pytest.mark.parametrize(
    ("text", "utils", "imports", "kept", "knows"),
    [
        ("import transformers.utils", ASKS, ["torchmetrics"], False, True),
        # What the program itself has imported stays, as it may hold names of it.
        ("import transformers.utils", ASKS, ["transformers.utils", "torchmetrics"], True, False),
        ("", ASKS, ["torchmetrics", "transformers.utils"], True, False),
        ("", ASKS, ["transformers.utils"], True, False),
        ("import transformers.utils", "DeepSpeedEngineWrapper = object", ["torchmetrics"], True, True),
    ],
)
def test_what_torchmetrics_imports_decides_nothing(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, text: str, utils: str, imports: list[str], kept: bool, knows: bool
) -> None:
    """Lightning imports it, it imports transformers, and that Accelerate, which asks on import for DeepSpeed."""
    packages = {
        "torchmetrics": {
            "__init__": "import torchmetrics.text",
            "first": "",
            "text": f"import torchmetrics.first\n{text}",
        },
        "transformers": {"__init__": "", "utils": "import accelerate.utils"},
        "accelerate": {"__init__": "", "utils": utils},
    }
    for package, modules in packages.items():
        (tmp_path / package).mkdir()
        for module, source in modules.items():
            (tmp_path / package / f"{module}.py").write_text(source)
    monkeypatch.syspath_prepend(tmp_path)
    finders = [f for f in sys.meta_path if type(f).__module__ != "lt_zero.deepspeed.install"]
    monkeypatch.setattr(sys, "meta_path", finders)
    monkeypatch.delitem(sys.modules, "deepspeed")
    real = {name: module for name, module in sys.modules.items() if name.partition(".")[0] in packages}
    for name in real:
        del sys.modules[name]
    try:
        for name in imports:
            importlib.import_module(name)
        before = sys.modules["accelerate.utils"]
        lt_zero.as_deepspeed()
        after = importlib.import_module("accelerate.utils")
        same, found = after is before, hasattr(after, "DeepSpeedEngineWrapper")
    finally:
        for name in [name for name in sys.modules if name.partition(".")[0] in packages]:
            del sys.modules[name]
        sys.modules.update(real)
    assert (same, found) == (kept, knows)


def test_leaf_modules_are_gathered_as_one_unit(deepspeed: Any) -> None:
    model = nn.Sequential(nn.Sequential(nn.Linear(4, 4), nn.ReLU()), nn.Sequential(nn.Linear(4, 4)), nn.Linear(4, 2))
    from deepspeed.utils import (
        get_z3_leaf_modules,
        set_z3_leaf_modules,
        set_z3_leaf_modules_by_name,
        set_z3_leaf_modules_by_suffix,
    )

    with pytest.raises(ValueError, match="No module of Sequential is one of .*LSTM"):
        set_z3_leaf_modules(model, [nn.LSTM])
    assert set_z3_leaf_modules_by_name(model, ["1"]) == ([model[1]], [])
    assert get_z3_leaf_modules(model) == [model[1]]
    with pytest.raises(ValueError, match=r"no modules named \['7'\]: it has .*0.1, "):
        set_z3_leaf_modules_by_name(model, ["1", "7"])
    assert set_z3_leaf_modules_by_suffix(model, ["7"], raise_if_not_found=False) == ([], ["7"])
    zero = {"stage": 3, "stage3_param_persistence_threshold": 0}
    config = {"zero_optimization": zero, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(SimpleNamespace(deepspeed_config=config), model)
    try:
        assert any(unit.module is model[1] for unit in engine.engine.units)
        assert torch.distributed.is_initialized()
        engine.backward(engine(torch.ones(2, 4)).sum())
        engine.step()
        assert engine.get_global_grad_norm() > 0  # without clipping
        assert (engine.monitor.enabled, engine.optimizer_name(), engine.dp_world_size) == (False, "SGD", 1)
        assert deepspeed.comm.get_world_size(engine.data_parallel_group) == 1
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()


def test_muon_needs_no_key_of_its_own(deepspeed: Any) -> None:
    zero = {"stage": 2}
    config = {"optimizer": {"type": "Muon", "params": {"lr": 0.1}}, "zero_optimization": zero}
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 2))
    with pytest.raises(ConfigError, match="shard_along='element'"):
        deepspeed.initialize(model=model, config={**config, "zero_optimization": {**zero, "shard_along": "element"}})
    engine, *_ = deepspeed.initialize(model=model, config=config)
    try:
        before = model[1].weight.detach().clone()
        engine.backward(engine(torch.randn(2, 4)).sum())
        engine.step()
        assert not torch.equal(model[1].weight, before)
        assert engine.config["zero_optimization"]["shard_along"] == "parameter"
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()


@pytest.mark.parametrize(
    ("given", "limit"),
    [({}, 1.0), ({"gradient_clipping": 0}, 0.0), ({"max_grad_norm": 0.5}, 0.5)],
)
def test_gradients_are_clipped_as_deepspeed_does(
    deepspeed: Any, tmp_path: Path, given: dict[str, Any], limit: float
) -> None:
    model, rate = nn.Linear(3, 1), {"type": "SGD", "params": {"lr": 0.1}}
    path = tmp_path / "ds_config.json"
    path.write_text(json.dumps({"train_batch_size": 2, "optimizer": rate, **given}))
    engine, *_ = deepspeed.initialize(model=model, config=path)
    try:
        assert engine.gradient_clipping() == limit
        before = model.weight.detach().clone()
        engine.backward(engine(torch.ones(2, 3)).mean())  # each of the 4 derivatives is 1, their norm 2
        engine.step()
        torch.testing.assert_close(before - model.weight, torch.full((1, 3), 0.1 * (limit or 2) / 2))
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()


def test_the_class_of_engines(deepspeed: Any) -> None:
    from deepspeed import DeepSpeedEngine, Hparams

    with pytest.raises(NotImplementedError, match=r"Hparams .*deepspeed.initialize\(model=\.\.\., config=\.\.\.\)"):
        Hparams(train_batch_size=4)
    model = nn.Linear(3, 1)
    config = {"train_batch_size": 2, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}, "gradient_clipping": 0}
    with pytest.raises(TypeError, match=r"DeepSpeedEngine\(dataloader=.*deepspeed.initialize\(model="):
        DeepSpeedEngine(model=model, dataloader=[], config=config)
    with pytest.raises(TypeError, match="Own derives from DeepSpeedEngine"):
        type("Own", (DeepSpeedEngine,), {})
    engine = DeepSpeedEngine(None, model, config=config)
    try:
        assert isinstance(engine, DeepSpeedEngine)
        assert issubclass(type(engine), DeepSpeedEngine)
        assert not isinstance(model, DeepSpeedEngine)
        before = model.weight.detach().clone()
        engine.backward(engine(torch.ones(2, 3)).sum())
        deepspeed.utils.safe_update_full_grad_vectorized(model.parameters(), lambda grad, p: grad * 3)
        engine.step()
        torch.testing.assert_close(before - model.weight, torch.full((1, 3), 0.6))
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()


def test_weights_of_checkpoints_in_fp32(deepspeed: Any, tmp_path: Path) -> None:
    from deepspeed.utils import zero_to_fp32

    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(3, 3)
            self.last = nn.Linear(3, 3)
            self.last.weight = self.first.weight
            self.register_buffer("count", torch.tensor(3))

        def forward(self, x: Tensor) -> Tensor:
            return self.last(self.first(x))  # type: ignore[no-any-return]

    model, config = Tied(), {"bf16": {"enabled": True}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    engine, *_ = deepspeed.initialize(model=model, config={**config, "zero_optimization": {"stage": 3}})
    try:
        engine.backward(engine(torch.ones(2, 3)).sum())
        engine.step()
        wanted = {name: deepspeed.utils.safe_get_full_fp32_param(p) for name, p in model.named_parameters()}
        wanted |= {"last.weight": wanted["first.weight"], "count": torch.tensor(3)}
        engine.save_checkpoint(tmp_path, tag="one")
    finally:
        engine.destroy()
        torch.distributed.destroy_process_group()
    found = zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path)
    torch.testing.assert_close(found, wanted, rtol=0, atol=0, check_dtype=True)
    assert found["last.weight"] is found["first.weight"]
    for safe, file in ((False, "pytorch_model.bin"), (True, "model.safetensors")):
        zero_to_fp32.convert_zero_checkpoint_to_fp32_state_dict(tmp_path, tmp_path / str(safe), safe_serialization=safe)
        assert (tmp_path / str(safe) / file).exists()
    other = zero_to_fp32.load_state_dict_from_zero_checkpoint(Tied(), tmp_path, tag="one")
    torch.testing.assert_close(dict(other.state_dict()), wanted, rtol=0, atol=0)
    with pytest.raises(CheckpointError, match="has weights that Linear lacks: .*first.bias"):
        zero_to_fp32.load_state_dict_from_zero_checkpoint(nn.Linear(3, 3), tmp_path)
    with pytest.raises(ValueError, match="exclude_frozen_parameters=True"):
        zero_to_fp32.get_fp32_state_dict_from_zero_checkpoint(tmp_path, exclude_frozen_parameters=True)


def test_a_script_is_run_as_it_is(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    (tmp_path / "beside.py").write_text("WORD = 'beside'")
    text = "import sys, deepspeed, beside\nopen(sys.argv[1], 'w').write(beside.WORD + deepspeed.__name__ + __name__)"
    (tmp_path / "train.py").write_text(text)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    monkeypatch.setattr(sys, "argv", ["-m", str(tmp_path / "train.py"), str(tmp_path / "out")])
    main()
    assert (tmp_path / "out").read_text() == "besidedeepspeed__main__"
    (tmp_path / "package").mkdir()
    (tmp_path / "package" / "train.py").write_text(text.replace("import sys", "import sys, package"))
    monkeypatch.chdir(tmp_path)
    module = ["-m", "-m", "package.train", str(tmp_path / "of_module")]  # Python leaves its own -m there
    monkeypatch.setattr(sys, "argv", module)
    main()
    assert (tmp_path / "of_module").read_text() == "besidedeepspeed__main__"
    monkeypatch.setattr(sys, "argv", ["-m"])
    with pytest.raises(SystemExit, match="Name the script"):
        main()


def test_the_page_runs(capsys: pytest.CaptureFixture[str]) -> None:
    (block,) = [b for b in BLOCKS if b.page == "docs/from-deepspeed.md" and "run by" in b.marks]
    try:
        execute(block)
    finally:
        torch.distributed.destroy_process_group()
    loss, norm = map(float, capsys.readouterr().out.split()[-2:])
    assert loss > 0 < norm


def test_marks_of_tensor_parallelism(deepspeed: Any) -> None:
    model = deepspeed.tp_model_init(nn.Linear(4, 4), tp_size=2, dtype=torch.bfloat16)
    assert model.weight.dtype == torch.bfloat16
    config = {"tensor_parallel": {"autotp_size": 4}, "optimizer": {"type": "SGD", "params": {"lr": 0.1}}}
    with pytest.raises(ValueError, match=r"tp_model_init\(tp_size=2\), but .*autotp_size=4 is configured"):
        deepspeed.initialize(model=model, config=config)
    with pytest.raises(ValueError, match=r"tp_model_init\(tp_group='x'\) is not supported. .* block tensor_parallel"):
        deepspeed.tp_model_init(model, 2, tp_group="x")
