"""Models that no rank ever holds whole: meta device, configure_model, cutting at construction."""

from __future__ import annotations

import gc
import itertools
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.core.comm.shard_group import ShardGroup
from lt_zero.core.comm.transport import SendBuffer
from lt_zero.core.comm.world import World
from lt_zero.core.engine import construction
from lt_zero.core.engine.construction import ConstructionSharder
from lt_zero.core.engine.full_params import restore_whole
from lt_zero.core.engine.guard import guard, is_guarded, own
from lt_zero.core.engine.materialize import Materializer
from lt_zero.training.lightning.model_report import memory_report
from tests.support.features import needs
from tests.support.lightning_tools import GPT, sharded_trainer, weights
from tests.support.matrix import only, only_rows
from tests.support.models import Net, next_token_loss
from tests.support.parity import STAGES, config_of, counted_storages, full_values
from tests.support.pool import Pool


class CustomInit(Net):
    """Initialisation after construction, in the ways that people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.apply(self._init_weights)
        for name, parameter in self.named_parameters():
            if name.endswith("down.weight"):
                nn.init.normal_(parameter, std=0.02 / 6**0.5)
        self.blocks[0].up.weight.data.mul_(0.5)
        with torch.no_grad():
            self.blocks[1].up.bias[2:5] = 3.0
            self.blocks[2].norm.weight.copy_(torch.arange(10.0))

    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            module.weight.data.normal_(mean=0.0, std=0.02)
            if module.bias is not None:
                module.bias.data.zero_()
        elif isinstance(module, nn.Embedding):
            nn.init.normal_(module.weight, std=0.02)


@contextmanager
def large_from(nbytes: int) -> Iterator[None]:
    """Context in which parameters below this size are sharded together."""
    before, construction._LARGE = construction._LARGE, nbytes
    try:
        yield
    finally:
        construction._LARGE = before


def _cut(stage: int, large: int) -> None:
    torch.manual_seed(11)
    reference = CustomInit()
    torch.manual_seed(11)
    if dist.get_rank() > 0:
        torch.manual_seed(99)  # ranks that draw other numbers follow rank 0
    with large_from(large):
        with ConstructionSharder(ShardGroup.of_all(World.join(torch.device("cpu")))):
            model = CustomInit()
        assert is_guarded(model.blocks[0].up.weight)
        engine = lt_zero.shard(model, config_of(stage))
    for name, value in full_values(engine).items():
        assert torch.equal(value, dict(reference.named_parameters())[name]), name
    next_token_loss(model, 0, 0, 0).backward()


@pytest.mark.parametrize("large", only([2000], [1, 2000, 1 << 20]))
@pytest.mark.parametrize("stage", only([3], STAGES))
def test_cutting_at_construction_keeps_the_initialisation(pool: Pool, stage: int, large: int) -> None:
    pool.run(3, _cut, stage, large)


def _mixed() -> nn.Sequential:
    """Small layers of several dtypes and sizes, two of them tied, and a large one."""
    torch.manual_seed(5)
    dtypes = torch.float32, torch.bfloat16
    model = nn.Sequential(*(nn.Linear(n % 5 + 1, 3, dtype=dtypes[n % 2]) for n in range(40)), nn.Linear(512, 520))
    model[3].weight = model[13].weight
    model[5].double()
    with torch.no_grad():
        model[6].bias.fill_(float("-inf"))
    return model


def _small() -> None:
    group = ShardGroup.of_all(World.join(torch.device("cpu")))
    launched = counted(group, "broadcast", "all_gather")
    with ConstructionSharder(group):
        model = _mixed()
    assert all(map(is_guarded, model.parameters()))
    assert len(launched) <= 6, "of 82 parameters; three of them were gathered again, and cut a second time"
    engine = lt_zero.shard(model, config_of(3), group=group)
    assert len(launched) <= 6 + 3 * len(engine.buckets)
    wanted = dict(_mixed().named_parameters())
    values = full_values(engine)
    assert values.keys() == wanted.keys()
    for name, value in values.items():
        assert torch.equal(value.double(), wanted[name].double()), name


def counted(group: ShardGroup, *names: str) -> list[str]:
    """The names of these collectives, as often as they are launched."""
    launched: list[str] = []

    def count(name: str, launch: Callable[..., Any], *args: Any) -> Any:
        launched.append(name)
        return launch(*args)

    for name in names:
        setattr(group, name, partial(count, name, getattr(group, name)))
    return launched


def test_small_parameters_are_cut_together(pool: Pool) -> None:
    pool.run(2, _small)


def _late(stage: int, large: int) -> None:
    with large_from(large), ConstructionSharder(ShardGroup.of_all(World.join(torch.device("cpu")))):
        model = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    model.load_state_dict({name: torch.full(p.shape, 7.0) for name, p in model.named_parameters()})
    engine = lt_zero.shard(model, config_of(stage))
    for name, value in full_values(engine).items():
        assert (value == 7.0).all(), name  # the last one is still whole when the engine takes over


@pytest.mark.parametrize(("stage", "large"), only_rows([(3, 40)], [(1, 1), (3, 40), (3, 1 << 20)]))
def test_what_is_loaded_after_construction_is_kept(pool: Pool, stage: int, large: int) -> None:
    pool.run(2, _late, stage, large)


class Layer(nn.Module):
    """Parameters whose bytes in memory are not their values in order."""

    def __init__(self) -> None:
        super().__init__()
        self.strided = nn.Parameter(torch.arange(14.0)[::2])
        self.column = nn.Parameter(torch.arange(35.0).view(5, 7).t())
        self.conjugate = nn.Parameter(torch.arange(5.0).add(2j).conj())
        self.negated = nn.Parameter(torch.arange(5.0).add(2j).conj().imag)
        self.narrow = nn.Parameter(torch.arange(3.0).half())
        self.empty = nn.Parameter(torch.empty(0, 3))


def _values_of_a_layer() -> None:
    group = ShardGroup.of_all(World.join(torch.device("cpu")))
    with ConstructionSharder(group) as sharder:
        model = nn.Sequential(nn.Linear(1, 1), Layer(), nn.LazyLinear(2))
    parameters, wanted = list(model[1].parameters()), list(Layer().parameters())
    assert all(map(is_guarded, parameters))
    for value, expected in zip(sharder.whole(parameters), wanted, strict=True):
        assert value.dtype == expected.dtype
        assert torch.equal(value, expected)


@pytest.mark.parametrize("ranks", only([2], [1, 2]))
def test_any_layout_and_type_is_cut(pool: Pool, ranks: int) -> None:
    pool.run(ranks, _values_of_a_layer)


def _two_at_once() -> None:
    with large_from(1000), ConstructionSharder(ShardGroup.of_all(World.join(torch.device("cpu")))):
        model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12), nn.Linear(12, 12))
        first, second, third = (layer.weight for layer in model)
        assert is_guarded(first), "each has 576 bytes"
        with torch.no_grad():
            third.fill_(1.0)
            second.fill_(2.0)
            torch.add(first, second, out=third)  # two are open and have to be sharded: not one of these arguments
            assert torch.equal(third, first + 2.0)
            assert torch.equal(torch.cat([first, second, third])[12:24], torch.full((12, 12), 2.0))


def test_an_operation_on_several_large_parameters(pool: Pool) -> None:
    pool.run(2, _two_at_once)


def _on_rank_0() -> None:
    with large_from(600):
        with ConstructionSharder(ShardGroup.of_all(World.join(torch.device("cpu")))):
            model = nn.Sequential(nn.Linear(12, 12), nn.Linear(12, 12))
            with lt_zero.GatheredParameters(model[1].weight, modifier_rank=0):  # not yet sharded
                if dist.get_rank() == 0:
                    model[1].weight.data.fill_(1.0)
        assert is_guarded(model[1].weight)
        with lt_zero.GatheredParameters(model, modifier_rank=0):
            assert (model[1].weight == 1.0).all()
            if dist.get_rank() == 0:
                nn.init.constant_(model[0].weight, 5.0)
                model[1].weight.data.add_(model[0].weight)
        assert is_guarded(model[0].weight)
        with pytest.raises(KeyError), lt_zero.gathered(model[0].bias):
            raise KeyError(0)
        engine = lt_zero.shard(model, config_of(3))
    values = full_values(engine)
    assert (values["0.weight"] == 5.0).all()
    assert (values["1.weight"] == 6.0).all()


def test_rank_0_changes_parameters_before_an_engine_has_them(pool: Pool) -> None:
    """As scripts for DeepSpeed initialise: ``with GatheredParameters(weight, modifier_rank=0): if rank == 0: ...``"""
    pool.run(2, _on_rank_0)


class MetaNet(Net):
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, nn.Linear):
            nn.init.constant_(module.weight, 0.5)

    def reset_parameters(self) -> None:
        nn.init.ones_(self.scale)


def _meta(stage: int) -> None:
    with torch.device("meta"):
        model = MetaNet()
        model.register_module("bn", nn.BatchNorm1d(4))
    identities = {n: id(p) for n, p in model.named_parameters()}
    engine = lt_zero.shard(model, config_of(stage), torch.device("cpu"))
    assert {n: id(p) for n, p in model.named_parameters()} == identities
    values = full_values(engine)
    assert (values["blocks.1.up.weight"] == 0.5).all()
    assert (values["blocks.1.norm.weight"] == 1).all()
    assert (values["scale"] == 1).all()
    assert (model.bn.running_var == 1).all()
    assert "head.weight" not in values, "tied weights stay tied"


@pytest.mark.parametrize("stage", only([3], STAGES))
def test_meta_device(pool: Pool, stage: int) -> None:
    pool.run(2, _meta, stage)


class Unfillable(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))


class Scaled(nn.Parameter):
    """A subclass of a model's own."""


def _beside_real_modules() -> None:
    """Filling parameters on the meta device does not disturb references to them, weak ones included."""
    hooked = []
    with lt_zero.Init(config=config_of(3)):
        real = nn.Linear(5, 7)  # keeps the context's tables alive
        with torch.device("meta"):
            model = MetaNet()
            model.blocks[0].up.weight = Scaled(torch.empty_like(model.blocks[0].up.weight))
        model.register_module("real", real)
    weight = model.blocks[0].up.weight
    weight.width = 5  # type: ignore[attr-defined]
    known = weakref.WeakKeyDictionary[nn.Module, Any]({model: weakref.ref(weight)})
    weight.register_post_accumulate_grad_hook(lambda parameter: hooked.append(tuple(parameter.shape)))
    engine = lt_zero.shard(model, config_of(3), torch.device("cpu"))
    assert known[model]() is weight is model.blocks[0].up.weight
    assert isinstance(weight, Scaled)
    assert weight.width == 5
    assert (full_values(engine)["blocks.0.up.weight"] == 0.5).all()
    next_token_loss(model, 0, 0, 0).backward()
    assert hooked == [tuple(weight.shape)]


class BuiltLater(GPT):
    """Layers on the meta device beside real ones, as models with a pretrained part have them."""

    def __init__(self, world: int) -> None:
        super().__init__(world)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            with self.trainer.init_module(empty_init=True):
                self.net = MetaNet()
            self.real = nn.Linear(3, 3)


def _built_later() -> None:
    trainer = sharded_trainer(3, max_epochs=1)
    trainer.validate(BuiltLater(dist.get_world_size()))
    _beside_real_modules()


def test_real_modules_beside_those_on_the_meta_device(pool: Pool) -> None:
    pool.run(2, _built_later)


def filled(model: nn.Module) -> nn.Module:
    """``model``, initialized as the engine does."""
    made = Materializer(model, torch.device("cpu"))
    made.fill(model.parameters())
    made.fill_buffers()
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model.buffers()))
    return model


class OwnReset(nn.Linear):
    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 2.0)
        nn.init.constant_(self.bias, 3.0)


class Parent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.torchs = nn.Linear(3, 2)
        self.own = OwnReset(3, 2)
        self.on_instance = nn.Linear(3, 2)
        self.on_instance.reset_parameters = partial(nn.init.constant_, self.on_instance.weight, 4.0)  # type: ignore[method-assign]
        self.on_instance.register_parameter("bias", None)

    def _init_weights(self, module: nn.Module) -> None:
        for parameter in module.parameters(recurse=False):
            nn.init.constant_(parameter, 1.0)


def test_reset_parameters_of_a_script_win_over_init_weights_of_a_parent() -> None:
    with torch.device("meta"):
        model = Parent()
    values = {name: set(p.flatten().tolist()) for name, p in filled(model).named_parameters()}
    assert values == {
        "torchs.weight": {1.0},
        "torchs.bias": {1.0},
        "own.weight": {2.0},
        "own.bias": {3.0},
        "on_instance.weight": {4.0},
    }


class Tables(nn.Module):
    """Buffers of several dtypes, filled in the ways that people write it."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.ones(3, 3, dtype=torch.bool).tril())
        self.register_buffer("none", torch.zeros(2, dtype=torch.bool))
        self.register_buffer("counts", torch.zeros(4, dtype=torch.uint8))
        self.register_buffer("least", torch.zeros(2, dtype=torch.int16))
        self.register_buffer("cos", torch.ones(4), persistent=False)
        self.register_buffer("late", None)
        self.weight = nn.Parameter(torch.empty(3, 2))
        self.bias = nn.Parameter(torch.empty(2), requires_grad=False)

    def reset_parameters(self) -> None:
        self.mask.copy_(torch.ones(3, 3, dtype=torch.bool).tril())
        self.none.data.fill_(False)
        self.counts.zero_()
        self.least.fill_(-(2**15))
        self.cos = torch.arange(6.0, device=self.cos.device)
        self.late = torch.ones(1)
        self.weight = nn.Parameter(torch.full((3, 2), 5.0, dtype=torch.float64))
        self.bias.data = torch.ones(2)


def test_values_are_seen_in_any_dtype_and_if_they_are_assigned() -> None:
    with torch.device("meta"):
        model = Tables()
    weight = model.weight
    filled(model)
    assert torch.equal(model.mask, torch.ones(3, 3, dtype=torch.bool).tril())
    assert not model.none.any()
    assert not model.counts.any()
    assert (model.least == -(2**15)).all()
    assert torch.equal(model.cos, torch.arange(6.0))
    assert model.late.tolist() == [1.0]
    assert "cos" not in model.state_dict()
    assert model.weight is weight, "optimizers may have the parameter"
    assert weight.dtype == torch.float32
    assert (weight == 5.0).all()
    assert model.bias.tolist() == [1.0, 1.0]
    assert not model.bias.requires_grad


class Causal(nn.Module):
    """Assigns a mask, which another module shares as it was before."""

    def __init__(self, mask: Tensor) -> None:
        super().__init__()
        self.register_buffer("mask", mask)

    def reset_parameters(self) -> None:
        self.mask = torch.ones(3, 3, dtype=torch.bool).tril()


def test_a_shared_buffer_that_one_module_replaces_is_left_to_the_others() -> None:
    with torch.device("meta"):
        mask = torch.ones(3, 3, dtype=torch.bool).tril()
        model = nn.ModuleList([Causal(mask), Causal(mask)])
        lost = nn.ModuleList([Causal(mask), nn.Module()])
        lost[1].register_buffer("mask", mask)
    for module in filled(model):
        assert torch.equal(module.mask, torch.ones(3, 3, dtype=torch.bool).tril())
    with pytest.raises(RuntimeError, match=r"1 \(Module\) was built on the meta device and 'mask' got no values"):
        filled(lost)


@pytest.mark.parametrize(
    ("then", "told"),
    [
        (lambda model: setattr(model, "mask", torch.empty(2, device="meta")), "'mask' got no values"),
        (lambda model: setattr(model, "bias", None), "'bias' got no values"),
        (lambda model: model.register_parameter("extra", nn.Parameter(torch.ones(2))), "registers 'extra'"),
        (lambda model: model.add_module("head", nn.Linear(2, 2)), r"registers 'head\.weight'"),
        (lambda model: setattr(model, "weight", nn.Parameter(torch.ones(4))), r"'weight' the shape \(4,\)"),
    ],
)
def test_initialization_that_changes_what_was_planned_is_an_error(
    then: Callable[[nn.Module], object], told: str
) -> None:
    with torch.device("meta"):
        model = Tables()

    def reset_parameters() -> None:
        Tables.reset_parameters(model)
        then(model)

    model.reset_parameters = reset_parameters  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match=told):
        filled(model)


def test_values_that_were_only_multiplied_are_none() -> None:
    with torch.device("meta"):
        model = nn.Linear(2, 2)
    model.reset_parameters = lambda: model.weight.mul_(0.1).add_(model.bias.fill_(1.0)[0])  # type: ignore[method-assign]
    with pytest.raises(RuntimeError, match="'weight' got no values"):
        filled(model)


@pytest.mark.parametrize("dtype", [torch.bool, torch.uint8, torch.int64, torch.bfloat16, torch.complex64])
def test_buffers_that_nobody_fills_are_an_error_in_any_dtype(dtype: torch.dtype) -> None:
    with torch.device("meta"):
        model = nn.BatchNorm1d(3)
        model.register_buffer("mask", torch.zeros(2, dtype=dtype))
    with pytest.raises(RuntimeError, match=r"'mask' got no values"):
        filled(model)


class Holder(nn.Module):
    """Fills what is inside of it, too, as its constructor does."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = nn.Linear(3, 2)
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("table", torch.zeros(2), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.inner.weight, 9.0)
        nn.init.constant_(self.weight, 9.0)
        self.table.fill_(1.0)


def _values_there(stage: int) -> None:
    """Loaded weights beside a buffer on the meta device, which ``load_state_dict(assign=True)`` does not fill."""
    with torch.device("meta"):
        model = nn.Sequential(Holder())
    saved = {name: torch.full(value.shape, 7.0) for name, value in model.state_dict().items()}
    model.load_state_dict(saved, assign=True)
    values = full_values(lt_zero.shard(model, config_of(stage), torch.device("cpu")))
    assert {name: set(value.flatten().tolist()) for name, value in values.items()} == dict.fromkeys(saved, {7.0})
    assert model[0].table.tolist() == [1.0, 1.0]


def _values_there_at_stages(path: str, *stages: int) -> None:
    for stage in stages:
        _values_there(stage)
    with torch.device("meta"):
        model = nn.Sequential(Holder())
    if dist.get_rank() == 0:
        torch.save({name: torch.full(value.shape, 7.0) for name, value in model.state_dict().items()}, path)
    dist.barrier()
    lt_zero.inference(model, config_of(3), weights=path, device=torch.device("cpu"))
    with lt_zero.gathered(model):
        assert {value for p in model.parameters() for value in p.flatten().tolist()} == {7.0}
    assert model[0].table.tolist() == [1.0, 1.0]


def test_initialization_of_a_buffer_keeps_the_weights_that_are_there(pool: Pool, tmp_path: Path) -> None:
    pool.run(2, _values_there_at_stages, str(tmp_path / "weights.pt"), 2, 3)


def _unfillable() -> None:
    with torch.device("meta"):
        model = nn.Sequential(nn.Linear(3, 3), Unfillable())
    with pytest.raises(RuntimeError, match=r"1 \(Unfillable\).*'weight'.*reset_parameters"):
        lt_zero.shard(model, config_of(3), torch.device("cpu"))


def test_meta_parameters_that_nobody_fills_are_an_error(pool: Pool) -> None:
    pool.run(2, _unfillable)


class Configured(GPT):
    def __init__(self, world: int) -> None:
        super().__init__(world)
        del self.net

    def configure_model(self) -> None:
        if not hasattr(self, "net"):
            torch.manual_seed(21)
            self.net = Net()
            (large,) = nn.Sequential(nn.Linear(512, 512))  # small ones wait for others
            self.guarded_at_construction = is_guarded(large.weight)


def _configured(stage: int) -> Any:
    module = Configured(dist.get_world_size())
    trainer = sharded_trainer(stage, max_epochs=1)
    trainer.fit(module)
    assert module.guarded_at_construction == (stage == 3)
    return weights(trainer)


def test_configure_model(pool: Pool) -> None:
    results = [pool.run(2, _configured, stage)[0] for stage in (0, 3)]
    for name in results[0]:
        assert (results[0][name] == results[1][name]).all(), name


def _empty_init(path: str) -> Any:
    from tests.support.lightning_tools import assert_same

    whole = GPT(2)
    trainer = sharded_trainer(3, max_epochs=1)
    with trainer.init_module(empty_init=True):
        module = MetaGPT(2)
    assert module.net.scale.is_meta
    if dist.get_rank() == 0:
        torch.save({"state_dict": whole.state_dict(), "pytorch-lightning_version": "2.6.0"}, path)
    dist.barrier()
    trainer.validate(module, ckpt_path=path)
    got = weights(trainer)
    if got:
        assert_same(got, {n: v.numpy() for n, v in whole.state_dict().items()})


class MetaGPT(GPT):
    def __init__(self, world: int) -> None:
        super().__init__(world)
        self.net = MetaNet()

    def reset_parameters(self) -> None:
        nn.init.ones_(self.temperature)


def test_empty_init_and_a_checkpoint(pool: Pool, tmp_path: Any) -> None:
    pool.run(2, _empty_init, str(tmp_path / "w.ckpt"))


class Wide(nn.Module):
    """Eight layers of 1 MB."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(512, 512, bias=False), nn.ReLU()) for _ in range(8))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x


def _live_bytes() -> int:
    """The bytes of parameters that are alive, of those that were made since ``gc.freeze``."""
    gc.collect()
    tensors = [o for o in gc.get_objects() if isinstance(o, Tensor) and not o.is_meta and o.numel() > 10_000]
    storages = {t.untyped_storage().data_ptr(): t.untyped_storage().nbytes() for t in map(_plain, tensors)}
    return sum(storages.values())


def _plain(tensor: Tensor) -> Tensor:
    with torch._C.DisableTorchFunctionSubclass():
        return tensor.detach()


def _peak() -> None:
    group, peaks = ShardGroup.of_all(World.join(torch.device("cpu"))), []
    register = nn.Module.__init__
    gc.freeze()  # else each look goes through all that is imported

    def counting(self: nn.Module, *args: Any, **kwargs: Any) -> None:
        register(self, *args, **kwargs)
        peaks.append(_live_bytes())

    nn.Module.__init__ = counting  # type: ignore[method-assign]
    try:
        with ConstructionSharder(group):
            model = Wide()
    finally:
        nn.Module.__init__ = register  # type: ignore[method-assign]
    one = 4 * 512 * 512
    assert max(peaks) <= 8 * one / 2 + 2 * one, "half of the model and about one layer"
    engine = lt_zero.shard(model, config_of(3))
    assert all(b.released for b in engine.buckets)
    assert memory_report(engine, [])["weights"] == (8 * one // 2, 8 * one)


def test_no_rank_holds_the_whole_model(pool: Pool) -> None:
    pool.run(2, _peak)


def _resident() -> int:
    """Bytes of memory that belong to this process alone."""
    lines = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return next(int(line[1]) * 1024 for line in lines if line[0] == "RssAnon:")


def _blocks_on_the_heap() -> None:
    for _ in range(2):  # the first block that is freed tells malloc to keep all later ones of its size
        torch.empty(1024, 1024).zero_()


def _gaps() -> int:
    """Bytes that construction leaves behind, beyond the slices."""
    _blocks_on_the_heap()
    before = _resident()
    with ConstructionSharder(ShardGroup.of_all(World.join(torch.device("cpu")))):
        model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(8)))
    numel = sum(parameter.numel() for parameter in model.parameters())
    return _resident() - before - 4 * numel // 2


def test_parameters_that_were_cut_leave_no_gaps_in_the_heap(pool: Pool) -> None:
    assert max(pool.run(2, _gaps)) < 16e6, "of 67 MB"


def _gaps_of_sharding() -> int:
    """Bytes that a model leaves behind when its parameters have moved into shared memory."""
    _blocks_on_the_heap()
    before = _resident()
    model = nn.Sequential(*(nn.Sequential(nn.Linear(1024, 1024), nn.Linear(1024, 1024)) for _ in range(8)))
    lt_zero.shard(model, config_of(1))
    return _resident() - before


def test_parameters_that_moved_in_leave_no_gaps_in_the_heap(pool: Pool) -> None:
    found = pool.run(2, _gaps_of_sharding, env={"LT_ZERO_SHARED_MEMORY": "1"})
    assert max(found) < 16e6, "of 67 MB"


class Elsewhere(ShardGroup):
    """Of a device that is not the CPU; ends with the first collective, and says where its tensor is."""

    def broadcast(self, tensor: Tensor, name: str, src: int = 0) -> None:
        raise RuntimeError(f"broadcast on {tensor.device}")

    def all_gather(self, flat: Tensor, name: str, own: Tensor | None = None) -> Any:
        raise RuntimeError(f"all-gather on {flat.device}")


def test_cutting_on_the_cpu_for_another_device() -> None:
    """Modules are built on the CPU; NCCL takes tensors of a GPU only."""
    layer, sharder = nn.Linear(3, 5), ConstructionSharder(Elsewhere.of_all(World(None, torch.device("meta"))))
    with pytest.raises(RuntimeError, match="broadcast on meta"), sharder:
        nn.Sequential(layer)
    sharder._slices[layer.weight] = torch.zeros(16)
    own(layer.weight, sharder._owner)
    guard(layer.weight)
    with pytest.raises(RuntimeError, match="all-gather on meta"):
        list(sharder.whole([layer.weight]))


def test_a_collective_refuses_tensors_of_another_device() -> None:
    group, row = ShardGroup.of_all(World(None, torch.device("cpu"))), torch.zeros(4, device="meta")
    acts: list[Callable[[], object]] = [
        lambda: group.broadcast(row, "w"),
        lambda: group.all_gather(row, "w"),
        lambda: group.all_reduce(row, SendBuffer(row, 1.0, row), False, "w"),
        lambda: group.reduce_scatter(row, SendBuffer(row, 1.0, row), False, "w"),
        lambda: group.sum_scalar(row, "w"),
    ]
    for act in acts:
        with pytest.raises(RuntimeError, match="'w' got a tensor on meta"):
            act()


def _bucket_by_bucket() -> None:
    with counted_storages() as counted:
        engine = lt_zero.shard(Net(depth=8), config_of(3, dtype=torch.bfloat16))
    assert counted.live == 0
    assert 0 < counted.most <= max(b.layout.numel * 2 for b in engine.buckets)


def test_one_bucket_at_a_time_is_whole_while_a_model_is_sharded(pool: Pool) -> None:
    """On a GPU all compute copies at once would be the whole model."""
    pool.run(2, _bucket_by_bucket)


def test_many_modules_take_no_time() -> None:
    with torch.device("meta"):
        model = nn.Sequential(*(nn.Linear(1, 1) for _ in range(6000)))
    start = time.process_time()
    Materializer(model, torch.device("cpu")).fill(model.parameters())
    assert time.process_time() - start < 4, "looking for an initializer among all modules takes ten seconds"
    assert not any(p.isnan().any() for p in model.parameters())


class Outermost(nn.Module):
    """Has parameters of its own, made before, between and after its children, and replaced."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Parameter(torch.randn(13, 5))
        self.layer = nn.Linear(5, 7)
        self.table = nn.Parameter(torch.empty(11, 3))
        nn.init.normal_(self.table)
        self.first = nn.Parameter(torch.randn(13, 5) * 2)


def _own_parameters() -> None:
    torch.manual_seed(1)
    whole = Outermost()
    torch.manual_seed(1 + dist.get_rank())  # rank 0's are kept
    with lt_zero.Init(config=config_of(3)):
        model = Outermost()
        gone = Outermost()
        del gone
        assert not is_guarded(model.first)
    assert [name for name, p in model.named_parameters() if not is_guarded(p)] == []
    values = full_values(lt_zero.shard(model, config_of(3)))
    for name, value in whole.named_parameters():
        assert torch.equal(values[name], value), name


def test_parameters_of_the_outermost_module_are_sharded(pool: Pool) -> None:
    pool.run(2, _own_parameters)
    pool.run(3, _own_parameters)


def _only_read() -> None:
    rank = dist.get_rank()
    with lt_zero.Init(config=config_of(3)):
        model = nn.Linear(5, 7)
    with lt_zero.gathered(model):
        wanted = model.weight.detach().clone()

    def add(on: int) -> None:
        if rank == on:
            with torch.no_grad():
                model.weight.add_(1)

    def write_data(on: int) -> None:
        if rank == on:
            model.weight.data.fill_(3.0)

    def assign(on: int) -> None:
        if rank == on:
            model.weight.data = torch.ones(7, 5)

    for change, on in itertools.product((add, write_data, assign), (0, 1)):
        with pytest.raises(RuntimeError, match=r"modifier_rank=0"), lt_zero.GatheredParameters(model.parameters()):
            change(on)
        assert is_guarded(model.weight)
    with lt_zero.GatheredParameters(model.weight):
        assert torch.equal(model.weight, wanted)
    assert torch.equal(full_values(lt_zero.shard(model, config_of(3)))["weight"], wanted)


def test_changes_without_a_modifier_are_errors_on_all_ranks(pool: Pool) -> None:
    pool.run(2, _only_read)


def _state_dict_of_built_modules() -> None:
    with lt_zero.Init(config=config_of(3)):
        model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with lt_zero.gathered(model):
        wanted = {name: p.detach().clone() for name, p in model.named_parameters()}
    state = model.state_dict()
    assert {name: (v.shape, v.dtype) for name, v in state.items()} == {n: (v.shape, v.dtype) for n, v in wanted.items()}
    assert all(is_guarded(p) for p in model.parameters())  # nothing was gathered
    for name, value in wanted.items():
        assert torch.equal(state[name], value), name
    assert all(is_guarded(p) for p in model.parameters())  # nor is what was read
    state["1.weight"].mul_(state["0.weight"].sum())
    torch.nn.init.zeros_(state["0.bias"])
    wanted["1.weight"] *= wanted["0.weight"].sum()
    wanted["0.bias"].zero_()
    values = full_values(lt_zero.shard(model, config_of(3)))
    for name, value in wanted.items():
        assert torch.equal(values[name], value), name


def test_state_dict_of_built_modules_gathers_what_is_read_and_takes_writes(pool: Pool) -> None:
    pool.run(2, _state_dict_of_built_modules)


class _Mpu:
    def get_model_parallel_world_size(self) -> int:
        return 2


def _arguments_of_init() -> None:
    torch.manual_seed(dist.get_rank())
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    every = dist.new_group([0, 1])
    taken = lt_zero.zero.Init(
        module=model,
        data_parallel_group=every,
        mem_efficient_linear=False,
        remote_device="cpu",
        pin_memory=True,
        config=config_of(3),
    )
    assert taken is model
    assert all(is_guarded(p) for p in model.parameters())
    torch.manual_seed(0)
    wanted = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    values = full_values(lt_zero.shard(model, config_of(3)))
    for name, value in wanted.named_parameters():
        assert torch.equal(values[name], value), name
    with pytest.raises(ValueError, match=r"'0.weight' of Sequential is sharded already"):
        lt_zero.zero.Init(model, config=config_of(3))
    alone = [dist.new_group([rank]) for rank in range(2)][dist.get_rank()]
    refused: dict[str, Any] = {
        "data_parallel_group": alone,
        "sequence_data_parallel_group": alone,
        "remote_device": "nvme",
        "mpu": _Mpu(),
        "zero_param_parallel_group": every,
        "zero_quantized_weights": True,
        "zero_quantized_nontrainable_weights": True,
        "param_swapper": object(),
        "tensor_overrides": object(),
    }
    for name, value in refused.items():
        with pytest.raises(ValueError, match=rf"zero\.Init\({name}="):
            lt_zero.zero.Init(**{name: value})
    lt_zero.zero.Init(
        zero_quantized_weights=True, config={"zero_optimization": {"stage": 3, "zero_quantized_weights": True}}
    )


@needs("zero_plus_plus")
def test_deepspeeds_arguments_of_init_work_or_are_named(pool: Pool) -> None:
    pool.run(2, _arguments_of_init)


def _moved(stage: int, torch_can: bool) -> dict[str, Tensor]:
    """A step of a model whose parameters move to their device and back; its weights."""
    answer = mock.patch.object(torch, "_has_compatible_shallow_copy_type", return_value=torch_can)
    torch.manual_seed(0)
    model = Net()
    model.scale.mark, before = "kept", list(model.parameters())
    with answer as asked:
        engine = lt_zero.shard(model, config_of(stage))
        assert asked.called
    assert all(one is other for one, other in zip(before, model.parameters(), strict=True))
    assert model.scale.mark == "kept"
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    lt_zero.ShardedOptimizer(engine, optimizer)
    next_token_loss(model, 0, 0, 0).backward()
    optimizer.step()
    with answer:
        restore_whole(engine)
    return dict(model.named_parameters())


@pytest.mark.parametrize("stage", [1, 3])
def test_devices_onto_which_torch_cannot_assign(stage: int) -> None:
    """Those of PrivateUse1. The question is answered as there."""
    wanted = _moved(stage, torch_can=True)
    for name, value in _moved(stage, torch_can=False).items():
        assert torch.equal(value, wanted[name]), name
