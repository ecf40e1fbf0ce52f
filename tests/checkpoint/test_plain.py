"""What is saved beside weights is plain: readable without the code that wrote it, and nothing in it can run."""

from __future__ import annotations

import collections
import datetime
import enum
import io
import re
import subprocess
import sys
import warnings
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, NamedTuple

import lightning.pytorch as pl
import numpy as np
import pytest
import torch
from omegaconf import MISSING as NOT_GIVEN
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.described_keys import described, described_keys, unknown
from lt_zero.checkpoint.native.plain import MISSING, Key, restore, to_plain
from lt_zero.common.errors import CheckpointError
from tests.support.checkpoint_tools import error_of
from tests.support.lightning_tools import GPT, sharded_trainer, trust
from tests.support.matrix import only
from tests.support.pool import Pool


class Color(enum.Enum):
    RED = "red"
    PATH = Path("a/b")


class Level(enum.IntEnum):
    HIGH = 3


class Point(NamedTuple):
    x: int
    y: Any


class Text(str):
    pass


@dataclass
class Inner:
    color: Color = Color.RED
    where: Path = Path("data/x")
    raw: bytes = b"\x00"


@dataclass
class Structured:
    inner: Inner = field(default_factory=Inner)
    rate: float = NOT_GIVEN


class Custom:
    """No plain form."""

    def __init__(self, number: int = 0) -> None:
        self.number = number

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Custom) and other.number == self.number

    def __hash__(self) -> int:
        return self.number


def through_torch(value: Any) -> Any:
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return torch.load(stream, weights_only=True)


CASES: dict[str, tuple[Any, Any]] = {
    "atoms": ([None, True, 2, 2.5, 1j, "a", b"b"], [None, True, 2, 2.5, 1j, "a", b"b"]),
    "large": ([2**80, -(2**80), float("inf")], [2**80, -(2**80), float("inf")]),
    "subclasses": ([Text("a"), np.str_("b"), np.bytes_(b"c"), Level.HIGH], ["a", "b", b"c", 3]),
    "enums": ({"a": Color.RED, Color.RED: 1, "p": Color.PATH}, {"a": "red", "red": 1, "p": "a/b"}),
    "numpy": ([np.float32(0.5), np.float64(1.5), np.int8(3), np.bool_(True)], [0.5, 1.5, 3, True]),
    "paths": ([Path("/a/b"), PurePosixPath("c")], ["/a/b", "c"]),
    "tuples": ((1, Point(2, Path("a")), [(3,)]), (1, (2, "a"), [(3,)])),
    "sets": ([{1, 2}, frozenset({"a"}), {Path("p"), "q"}, {Color.RED}], [{1, 2}, {"a"}, {"p", "q"}, {"red"}]),
    "sets of sets": ({frozenset({1}), frozenset({2, 3})}, [{1}, {2, 3}]),
    "defaultdict": (collections.defaultdict(list, a=[1]), {"a": [1]}),
    "counter": (collections.Counter("aab"), {"a": 2, "b": 1}),
    "keys": (
        {1: "a", None: "b", (1, Path("x")): "c", Path("y"): "d", np.int64(4): "e", np.float64(0.5): "f", Text("t"): 2},
        {1: "a", None: "b", (1, "x"): "c", "y": "d", 4: "e", 0.5: "f", "t": 2},
    ),
    "torch": ((torch.float16, torch.Size([2]), torch.device("cpu")),) * 2,
    "timedelta": ([datetime.timedelta(minutes=1)], [60.0]),
    "omegaconf": (
        OmegaConf.create({"a": 1, "b": {"c": "${a}", "d": [1, "${b.c}"]}, "e": None}),
        {"a": 1, "b": {"c": 1, "d": [1, 1]}, "e": None},
    ),
    "omegaconf list": ({"x": OmegaConf.create([1, {"a": 2}])}, {"x": [1, {"a": 2}]}),
    "omegaconf missing": (OmegaConf.create({"a": "???", "b": "${a}"}), {"a": "???", "b": "${a}"}),
    "omegaconf without root": (OmegaConf.create({"a": "${nobody.there}"}), {"a": "${nobody.there}"}),
    "omegaconf values": (
        OmegaConf.create({"p": Path("x"), "e": Color.RED, "b": b"1", "k": {1: 2}}),
        {"p": "x", "e": "red", "b": b"1", "k": {1: 2}},
    ),
    "structured": (
        OmegaConf.structured(Structured(rate=0.5)),
        {"inner": {"color": "red", "where": "data/x", "raw": b"\x00"}, "rate": 0.5},
    ),
    "structured missing": (
        OmegaConf.structured(Structured),
        {"inner": {"color": "red", "where": "data/x", "raw": b"\x00"}, "rate": "???"},
    ),
    "namespace": ({"h": pl.utilities.parsing.AttributeDict(a=1)}, {"h": {"a": 1}}),
}  # fmt: skip


@pytest.mark.parametrize("name", list(CASES))
def test_plain_forms(name: str) -> None:
    value, expected = CASES[name]
    got, rest = to_plain(value)
    assert all(isinstance(path[-1], Key) for path in rest)
    assert got == expected
    types = {type(item) for item in _walk(got)}
    assert types <= {
        *(type(None), bool, int, float, complex, str, bytes, list, tuple, dict, set),
        *(torch.dtype, torch.Size, torch.device),
    }, types
    assert through_torch(got) == expected


def _walk(value: Any) -> Any:
    yield value
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _walk(key)
            yield from _walk(inner)
    elif isinstance(value, list | tuple | set) and not isinstance(value, torch.Size):
        for inner in value:
            yield from _walk(inner)


def test_order_arrays_and_tensors() -> None:
    ordered = collections.OrderedDict([("b", 1), ("a", np.arange(6, dtype=np.int16).reshape(2, 3).T)])
    got, rest = to_plain({"o": ordered, "t": (torch.ones(2), nn.Parameter(torch.ones(1)))})
    assert not rest
    assert type(got["o"]) is collections.OrderedDict
    assert list(got["o"]) == ["b", "a"]
    assert torch.equal(got["o"]["a"], torch.arange(6, dtype=torch.int16).view(2, 3).T)
    assert through_torch(got)["o"]["b"] == 1
    seen: list[Any] = []
    odd, rest = to_plain([np.array([1.5, 2.5], dtype=">f8"), np.empty((0, 2)), np.array(3)])
    assert not rest
    assert [item.tolist() for item in odd] == [[1.5, 2.5], [], 3]
    assert to_plain({"x": np.longdouble(1)})[1].keys() == {("x",)}
    assert to_plain({"x": np.zeros(2, dtype=np.longdouble), "y": {Path("a"): 1, "a": 2}})[1].keys() == {
        ("x",),
        ("y", Key("a'")),
    }
    swapped, _ = to_plain({"a": [torch.ones(2)]}, lambda path, tensor: seen.append(path))
    assert swapped == {"a": [None]}
    assert seen == [("a", 0)]


def test_what_readers_would_refuse_as_too_deep_is_put_aside() -> None:
    deep: Any = [torch.ones(1)]
    for _ in range(300):
        deep = {"a": [deep]}
    made, rest = to_plain({"x": [deep]})
    (path,) = rest
    assert len(path) == 150
    restore(made, rest)
    while isinstance(made, dict | list):
        made = made[next(iter(made))] if isinstance(made, dict) else made[0]
    assert torch.equal(made, torch.ones(1))


def test_what_is_not_plain_is_put_aside_and_back() -> None:
    value = {
        "a": Custom(1),
        "b": [1, {"c": Custom(2)}],
        "t": (1, (2, Custom(3))),
        "f": np.array(["x", None], dtype=object),
        "s": {1, Custom(4)},
        "class": Custom,
        "call": len,
        "o": OmegaConf.create({"x": Custom(5), "y": 1}, flags={"allow_objects": True}),
        ("k", 1): Custom(6),
    }
    got, rest = to_plain(value)
    assert got["a"] == got["b"][1]["c"] == got["t"][1][1] == got["call"] == got["o"]["x"] == MISSING
    through_torch(got)
    assert got["s"] == MISSING
    restore(got, rest)
    assert (got["a"], got["b"], got["class"], got["call"]) == (Custom(1), [1, {"c": Custom(2)}], Custom, len)
    assert got["t"] == [1, [2, Custom(3)]], "tuples become lists"
    assert got["s"] == {1, Custom(4)}
    assert got["o"] == {"x": Custom(5), "y": 1}
    assert got["k", 1] == Custom(6)
    assert got["f"][0] == "x"
    assert value["t"] == (1, (2, Custom(3))), "the caller's containers are as they were"


KEYS: list[Any] = [
    *("a", 1, 0.5, None, b"b", ("a", None), torch.float16),  # plain ones
    *(
        Color.RED,
        Text,
        Custom,
        Inner,
        Path("a"),
        (1, Color.PATH),
        frozenset({1, "a"}),
        (frozenset({Color.RED}), ("b",)),
    ),
]


def test_keys_are_kept_exactly() -> None:
    """Also beside one that looks alike, and in what has such a key itself; without the modules that are not loaded."""
    value = {key: {"inner": {key: number}, "red": 0} for number, key in enumerate(KEYS)} | {"red": 1, "a'": 2}
    got, rest = to_plain([value])
    assert all(isinstance(path[-1], Key) for path in rest)
    records = [described(path, key) for path, key in rest.items()]
    got, records = through_torch((got, records))
    assert not unknown(records)
    restore(got, described_keys(records))
    assert got == [value]
    assert [*got[0]] == [*value]
    records[0][2][1] = "tests.not_imported"
    assert unknown(records) == ["0.Color.RED"]
    assert not described_keys(records[:1])
    assert described((Key("x"),), Custom(1)) is None
    assert described((Key("x"),), type("Local", (), {})) is None


def test_containers_that_contain_themselves() -> None:
    loop: dict[str, Any] = {"a": 1}
    loop["self"] = [loop]
    got, rest = to_plain({"x": loop})
    assert got["x"]["a"] == 1
    assert rest
    through_torch(got)


# ---- whole checkpoints -----------------------------------------------------------------------------------------------

READER = """
import sys
class Block:
    def find_spec(self, name, *args):
        if name.split(".")[0] in ("lt_zero", "omegaconf", "lightning", "tests"):
            raise ImportError(name)
sys.meta_path.insert(0, Block())
import torch
for path in sys.argv[1:]:
    torch.load(path, weights_only=True)
print("read", len(sys.argv) - 1)
"""


class Configured(GPT):
    def __init__(self, cfg: DictConfig, **more: Any) -> None:
        super().__init__(cfg.world, "adamw")
        self.save_hyperparameters(ignore=["note"])

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"custom": Custom(7), "array": np.arange(3), "pair": (Color.RED, Path("p"))}


def _config(world: int) -> DictConfig:
    return OmegaConf.create({"world": world, "lr": "${base}", "base": 0.5, "sizes": [1, 2], "unset": "???"})


def _whole(folder: str, forms: tuple[str, ...]) -> None:
    for form in forms:
        trainer = sharded_trainer(2, config={"checkpoint": {"format": form}}, max_steps=1)
        trainer.fit(Configured(_config(2), stage=Color.RED, root=Path("r")))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            trainer.save_checkpoint(f"{folder}/{form}.ckpt")
        texts = [str(w.message) for w in caught if "mine.custom" in str(w.message)]
        assert len(texts) == (trainer.is_global_zero and form == "sharded"), texts
        for trusted in (None, False) if form == "sharded" else (False,):
            module = Configured(_config(2))
            seen: list[Any] = []
            module.on_load_checkpoint = seen.append  # type: ignore[assignment, method-assign]
            again = sharded_trainer(1, max_steps=2)
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                again.fit(module, ckpt_path=f"{folder}/{form}.ckpt", **trust(trusted))
            left = [str(w.message) for w in caught if "left out" in str(w.message)]
            mine, names = seen[0]["mine"], seen[0]["hyper_parameters"]
            if trusted is False:
                assert mine["custom"] == Custom(7)
                assert not left
            else:
                assert mine["custom"] == MISSING
                assert len(left) == 1
                assert "mine.custom" in left[0]
            assert torch.equal(mine["array"], torch.arange(3))
            assert list(mine["pair"]) == ["red", "p"]
            assert names["cfg"]["sizes"] == [1, 2]
            assert again.global_step == 2


@pytest.mark.parametrize("forms", only([("sharded",)], [("sharded",), ("sharded", "full")]), ids="-".join)
def test_every_file_of_a_checkpoint_loads_anywhere(pool: Pool, tmp_path: Path, forms: tuple[str, ...]) -> None:
    pool.run(2, _whole, str(tmp_path), forms)
    files = sorted((tmp_path / "sharded.ckpt").glob("*.pt"))
    names = [re.sub(r"\d+", "#", f.name) for f in files]
    assert names == ["extras.pt", "meta.pt", *["moments-#.pt"] * 2, *["weights-#.pt"] * 2]
    done = subprocess.run([sys.executable, "-c", READER, *map(str, files)], capture_output=True, text=True, check=False)
    assert done.stdout.strip() == f"read {len(files)}", done.stderr
    meta = torch.load(tmp_path / "sharded.ckpt" / "meta.pt", weights_only=True)
    assert meta["hyper_parameters"]["cfg"]["world"] == 2
    assert meta["hyper_parameters"]["stage"] == "red"


class Counting(pl.Callback):
    """Its state is under a key of any kind, and has the key inside."""

    def __init__(self, key: Any) -> None:
        self.key, self.count = key, 0

    @property
    def state_key(self) -> Any:
        return self.key

    def on_train_batch_end(self, *args: Any) -> None:
        self.count += 1

    def state_dict(self) -> dict[str, Any]:
        return {"counts": {self.key: self.count, "w": torch.ones(2)}}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.count = state["counts"][self.key]


def _counted(folder: str, form: str) -> list[str]:
    keys = [*KEYS, Custom(1)]
    path = f"{folder}/{form}.ckpt"
    config = {"checkpoint": {"format": form}}
    trainer = sharded_trainer(2, config=config, max_steps=2, callbacks=[Counting(key) for key in keys])
    trainer.fit(GPT(1, "adamw"))
    trainer.save_checkpoint(path)
    callbacks = [Counting(key) for key in keys]
    again = sharded_trainer(2, config=config, max_steps=3, callbacks=callbacks)
    again.fit(GPT(1, "adamw"), ckpt_path=path, **trust(False))
    assert [callback.count for callback in callbacks] == [3] * len(keys)
    if form == "full":
        return []
    moved = Archive(import_checkpoint(path, f"{folder}/imported")).meta["callbacks"]
    (exported,) = export(path, f"{folder}/exported.ckpt", "fp32", training_state=True)
    for found in (moved, torch.load(exported, weights_only=False)["callbacks"]):
        assert [found[key]["counts"][key] for key in KEYS] == [2] * len(KEYS)
    callbacks = [Counting(key) for key in keys]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        again = sharded_trainer(2, config=config, max_steps=3, callbacks=callbacks)
        warnings.simplefilter("always")
        again.fit(GPT(1, "adamw"), ckpt_path=path)
    assert [callback.count for callback in callbacks] == [3] * len(KEYS) + [1], "an object is only unpickled on request"
    trainer.callbacks.append(Counting(type("Local", (), {})))  # type: ignore[attr-defined]
    return [str(w.message) for w in caught] + [error_of(trainer.save_checkpoint, path)]


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_states_of_callbacks_are_found_under_any_key(pool: Pool, tmp_path: Path, form: str) -> None:
    *warned, error = pool.run(1, _counted, str(tmp_path), form)[0] or ["", ""]
    if form == "sharded":
        assert any("callbacks.<tests.checkpoint.test_plain.Custom object" in text for text in warned)
        assert "callbacks.<class" in error
        assert "cannot be saved" in error


class Optioned(GPT):
    """Its optimizer has an option without a plain form, and may have a state under a number."""

    def __init__(self, key: Any = "s") -> None:
        super().__init__(1, "adamw")
        self.key = key

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD([{"params": list(self.parameters()), "made": Custom(1), Color.RED: 2}], lr=0.1)
        for p in self.parameters():
            optimizer.state[p][self.key] = torch.zeros_like(p)
        return optimizer


def _options(folder: str) -> str:
    def trainer(steps: int) -> pl.Trainer:
        return sharded_trainer(2, config={"checkpoint": {"format": "sharded"}}, max_steps=steps)

    first = trainer(1)
    first.fit(Optioned())
    first.save_checkpoint(f"{folder}/a.ckpt")
    again = trainer(2)
    again.fit(Optioned(), ckpt_path=f"{folder}/a.ckpt")
    (group,) = again.optimizers[0].param_groups
    assert (group["made"], group[Color.RED]) == (Custom(1), 2), "what was left out is the running optimizer's"
    first = trainer(1)
    first.fit(Optioned(key=5))
    return error_of(first.save_checkpoint, f"{folder}/b.ckpt")


def test_options_and_states_of_optimizers(pool: Pool, tmp_path: Path) -> None:
    error = pool.run(1, _options, str(tmp_path))[0]
    assert "under the key 5 (int)" in error
    assert not (tmp_path / "b.ckpt").exists()


class Plain(pl.LightningModule):
    """Nothing but hyper-parameters of OmegaConf."""

    def __init__(self, cfg: Any) -> None:
        super().__init__()
        self.save_hyperparameters(cfg)
        self.layer = nn.Linear(2, 2)

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.layer(batch).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=self.hparams.lr)

    def train_dataloader(self) -> Any:
        return torch.utils.data.DataLoader(torch.ones(4, 2), batch_size=1)


def _hparams(folder: str) -> None:
    for form in ("sharded", "full"):
        trainer = sharded_trainer(1, config={"checkpoint": {"format": form}}, max_steps=1)
        trainer.fit(Plain(OmegaConf.create({"base": 0.5, "lr": "${base}"})))
        trainer.save_checkpoint(f"{folder}/{form}.ckpt")


def test_hyperparameters_of_omegaconf_through_both_formats(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _hparams, str(tmp_path))
    paths = [tmp_path / "full.ckpt", *sorted((tmp_path / "sharded.ckpt").glob("*.pt"))]
    assert len(paths) == 4
    for path in paths:
        torch.load(path, weights_only=True)
    for path in (tmp_path / "full.ckpt", tmp_path / "sharded.ckpt" / "meta.pt"):
        found = torch.load(path, weights_only=True)
        assert found["hyper_parameters"] == {"base": 0.5, "lr": 0.5}
        assert found["lt_zero"]["hparams"] == "omegaconf"
    for name in ("full.ckpt", "sharded.ckpt"):
        assert Plain.load_from_checkpoint(tmp_path / name, weights_only=True, cfg={}).layer.weight.shape == (2, 2)


class Act:
    """An object of the user's, without a plain form."""

    def __call__(self, x: Tensor) -> Tensor:
        return x + 1


class WithObjects(pl.LightningModule):
    def __init__(self, width: int = 2, act: Any = None, options: Any = None) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.layer = nn.Linear(2, width)
        self.act = act
        self.options = options

    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return self.act(self.layer(batch)).sum()

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)

    train_dataloader = Plain.train_dataloader


class Fewer(WithObjects):
    """Takes no objects."""

    def __init__(self, width: int = 2) -> None:
        super().__init__(width)


def _objects(folder: str) -> None:
    trainer = sharded_trainer(1, config={"checkpoint": {"format": "sharded"}}, max_steps=1)
    trainer.fit(WithObjects(3, Act(), {"inner": [Act()]}))
    trainer.save_checkpoint(f"{folder}/one")


def test_a_module_gets_no_text_in_place_of_an_object(pool: Pool, tmp_path: Path) -> None:
    pool.run(1, _objects, str(tmp_path))
    path = tmp_path / "one"
    with pytest.raises(
        CheckpointError, match="with objects in act, options, .* weights_only=False .* or act="
    ) as caught:
        lt_zero.load_from_checkpoint(WithObjects, path)
    assert "WithObjects" in str(caught.value)
    with pytest.raises(CheckpointError, match=r"with objects in act, options, .* weights_only=False .*, act=\.\.\.\)"):
        WithObjects.load_from_checkpoint(path)  # Lightning's own
    assert type(WithObjects.load_from_checkpoint(path, weights_only=False).options["inner"][0]) is Act
    with pytest.raises(CheckpointError, match="with objects in options"):
        lt_zero.load_from_checkpoint(WithObjects, path, act=Act())
    given = lt_zero.load_from_checkpoint(WithObjects, path, act=Act(), options={})
    assert type(given.act) is Act
    assert given.layer.weight.shape == (3, 2)
    trusted = lt_zero.load_from_checkpoint(WithObjects, path, weights_only=False)
    assert type(trusted.act) is Act
    assert type(trusted.options["inner"][0]) is Act
    assert lt_zero.load_from_checkpoint(Fewer, path).layer.weight.shape == (3, 2)
