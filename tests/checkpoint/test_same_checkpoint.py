"""Ranks that would open different checkpoints stop instead of mixing their parts: all faces, all formats."""

from __future__ import annotations

import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import lightning as L
import pytest
import torch
import torch.distributed as dist
from safetensors.torch import save_file
from torch import Tensor

import lt_zero
from lt_zero import FabricZeroStrategy
from lt_zero.checkpoint.native.directory import MANIFEST, README
from lt_zero.checkpoint.open import digest_of_parts, digest_of_values, of_source, open_source
from lt_zero.core.stores.block_reader import BlockReader
from tests.support.checkpoint_tools import SHARDED, error_of, everything, flip_a_value, raised, resume, same, train
from tests.support.import_tools import source_of
from tests.support.lightning_tools import FULL, GPT, sharded_trainer, torchrun_env
from tests.support.matrix import only
from tests.support.models import Net, next_token_loss
from tests.support.pool import Pool


def _disks(folder: str, name: str) -> None:
    """``0/last`` and ``1/last``: what the disks of two nodes hold after the second one missed the last save."""
    if dist.get_rank() == 0:
        for rank, step in enumerate((3, 2)):
            os.makedirs(f"{folder}/{rank}", exist_ok=True)
            copy = shutil.copytree if os.path.isdir(f"{folder}/{step}{name}") else shutil.copy
            copy(f"{folder}/{step}{name}", f"{folder}/{rank}/last{name}")
    dist.barrier()


def _of_trainer(folder: str, config: dict[str, Any]) -> dict[str, str]:
    rank, wanted = dist.get_rank(), {}
    for step in (2, 3):
        trainer = train(3, config=config, max_steps=step)
        trainer.save_checkpoint(f"{folder}/{step}.ckpt")
        wanted[step] = everything(trainer)
    _disks(folder, ".ckpt")
    own = f"{folder}/{rank}/last.ckpt"
    found = {"differ": error_of(resume, own, 3, config=config, steps=4)}
    found["none"] = error_of(resume, own if rank == 0 else None, 3, config=config, steps=4)
    found["missing"] = error_of(resume, own if rank == 0 else f"{folder}/nowhere.ckpt", 2, config=config, steps=4)
    module = GPT(2, "adamw")
    found["validate"] = error_of(sharded_trainer(1, config=config).validate, module, ckpt_path=own)
    # Copies of one checkpoint under other names are one.
    if rank == 1:
        path = Path(own)
        shutil.rmtree(path) if path.is_dir() else path.unlink()
        copy = shutil.copytree if os.path.isdir(f"{folder}/0/last.ckpt") else shutil.copy
        copy(f"{folder}/0/last.ckpt", f"{folder}/1/other.ckpt")
    dist.barrier()
    same(resume(own if rank == 0 else f"{folder}/1/other.ckpt", 3, config=config, steps=4)[0], wanted[3])
    return found


@pytest.mark.parametrize("config", only([SHARDED], [SHARDED, FULL]), ids=["sharded", "full"])  # full: Fabric, below
def test_a_trainer_resumes_from_one_checkpoint(pool: Pool, tmp_path: Path, config: dict[str, Any]) -> None:
    results = pool.run(2, _of_trainer, str(tmp_path), config)
    for case, words in {
        "differ": ("rank 0: ", "0/last.ckpt (step 3", "rank 1: ", "1/last.ckpt (step 2", "all nodes"),
        "none": ("rank 0: ", "0/last.ckpt (step 3", "rank 1: no checkpoint"),
        "missing": ("rank 0: ", "0/last.ckpt (step 3", "rank 1: ", "nowhere.ckpt"),
        "validate": ("rank 0: ", "0/last.ckpt (step 3", "rank 1: ", "1/last.ckpt (step 2"),
    }.items():
        raised([found[case] for found in results], *words)


# ---- other faces -----------------------------------------------------------------------------------------------------


def _net(value: float) -> Net:
    net = Net()
    with torch.no_grad():
        for p in net.parameters():
            p.fill_(value)
    return net


ZERO: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
SGD: dict[str, Any] = {"type": "SGD", "params": {"lr": 0.1, "momentum": 0.9}}


def _on_own_disk(folder: str) -> None:
    """The same relative path leads to a folder of each rank from here on."""
    dist.barrier()
    os.makedirs(f"{folder}/{dist.get_rank()}", exist_ok=True)
    os.chdir(f"{folder}/{dist.get_rank()}")


def _moved(folder: str, names: tuple[str, str]) -> None:
    """Rank 0 and rank 1 get one of two checkpoints each, as ``last``."""
    if dist.get_rank() == 0:
        for rank, name in enumerate(names):
            os.renames(f"{folder}/{name}", f"{folder}/{rank}/last")
    _on_own_disk(folder)


def _in_a_loop(folder: str) -> list[str]:
    engine, *_ = lt_zero.initialize(model=_net(1.0), config={"zero_optimization": ZERO, "optimizer": SGD})
    for name in "ab":
        engine.save_checkpoint(folder, name)
        engine.global_steps += 1
    _moved(folder, ("a", "b"))
    differ = error_of(engine.load_checkpoint, ".", "last")
    if dist.get_rank() == 1:
        shutil.rmtree("last")
    dist.barrier()
    return [differ, error_of(engine.load_checkpoint, ".", "last")]


def test_a_loop_loads_one_checkpoint(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, _in_a_loop, str(tmp_path))
    raised([differ for differ, _ in results], "rank 0: last (step 0, ", "rank 1: last (step 1, ")
    raised([missing for _, missing in results], "rank 0: last (step 0, ", "rank 1: last cannot be opened (")


def _in_fabric(folder: str, form: str) -> str:
    os.environ.update(torchrun_env())
    strategy = FabricZeroStrategy(config={"zero_optimization": ZERO, "checkpoint": {"format": form}})
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
    fabric.launch()
    model = fabric.setup_module(_net(1.0))
    for name in "ab":
        fabric.save(f"{folder}/{name}", {"model": model, "name": name})
    _moved(folder, ("a", "b"))
    return error_of(fabric.load, "last", {"model": model})


@pytest.mark.parametrize("form", ["sharded", "full"])
def test_fabric_loads_one_checkpoint(pool: Pool, tmp_path: Path, form: str) -> None:
    raised(pool.run(2, _in_fabric, str(tmp_path), form), "rank 0: last (step ", "rank 1: last (step ")


def _for_inference(folder: str) -> list[Tensor | str]:
    _on_own_disk(folder)
    rank = dist.get_rank()
    torch.save(_net(1.0).state_dict(), "copy.pt")
    torch.save(_net(float(rank)).state_dict(), "own.pt")
    error = error_of(lt_zero.inference, _net(0.0), {"zero_optimization": ZERO}, weights="own.pt")
    model = lt_zero.inference(_net(0.0), {"zero_optimization": ZERO}, weights=f"{folder}/{rank}/copy.pt")
    return [error, lt_zero.full_master(next(model.parameters()))]


def test_inference_reads_one_checkpoint(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, _for_inference, str(tmp_path))
    raised([str(error) for error, _ in results], "rank 0: own.pt (step None, ", "rank 1: own.pt (step None, ")
    for _, weights in results:
        assert isinstance(weights, Tensor)
        assert weights.eq(1.0).all()


def _of_a_damaged_file(folder: str) -> dict[str, str]:
    """A bit that is flipped in the values of a file, seen by each reader on both ranks."""
    os.environ.update(torchrun_env())
    train(3, config=FULL).save_checkpoint(f"{folder}/x.ckpt")
    strategy = FabricZeroStrategy(config={"zero_optimization": ZERO, "checkpoint": {"format": "full"}})
    fabric = L.Fabric(accelerator="cpu", strategy=strategy, devices=dist.get_world_size())
    fabric.launch()
    model = fabric.setup_module(_net(1.0))
    fabric.save(f"{folder}/fabric.ckpt", {"model": model})
    if dist.get_rank() == 0:
        torch.save(_net(1.0).state_dict(), f"{folder}/net.pt")
        for name in ("x.ckpt", "fabric.ckpt", "net.pt"):
            flip_a_value(Path(folder, name))
    dist.barrier()
    net, zero = _net(0.0), {"zero_optimization": ZERO}
    return {
        "x.ckpt": error_of(resume, f"{folder}/x.ckpt", 3),
        "fabric.ckpt": error_of(fabric.load, f"{folder}/fabric.ckpt", {"model": model}),
        "net.pt": error_of(lt_zero.inference, net, zero, weights=f"{folder}/net.pt"),
    }


def test_a_flipped_bit_of_a_file_is_seen_by_all_faces(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, _of_a_damaged_file, str(tmp_path))
    for name in results[0]:
        raised([found[name] for found in results], f"{name} is damaged: the checksum of its record")


# ---- the files of a directory ----------------------------------------------------------------------------------------


def _of_lost_files(folder: str) -> dict[str, Any]:
    """The files that this rank looks at to load a directory, and the errors of copies that lack some of one."""
    rank = dist.get_rank()
    engine, *_ = lt_zero.initialize(model=_net(1.0), config={"zero_optimization": ZERO, "optimizer": SGD})
    engine.backward(next_token_loss(engine, 0, 0, rank))
    engine.step()
    engine.save_checkpoint(folder, "whole")
    looked = list[str]()
    check_length = BlockReader.check_length

    def counted(self: BlockReader, file: str) -> None:
        looked.append(file)
        check_length(self, file)

    with mock.patch.object(BlockReader, "check_length", counted):
        engine.load_checkpoint(folder, "whole")
    shared = list(looked)
    found = dict[str, Any]()
    own = f"{folder}/{rank}"
    for name, lose in (("missing", os.remove), ("torn", partial(os.truncate, length=100))):
        copies = {"shared": f"{folder}/{name}", "own": f"{own}/{name}"}
        dist.barrier()
        shutil.copytree(f"{folder}/whole", copies["own"])
        if rank == 0:
            shutil.copytree(f"{folder}/whole", copies["shared"])
            lose(f"{copies['shared']}/weights-00002.pt")
        if rank == 1:  # its own copy only
            lose(f"{copies['own']}/weights-00002.pt")
        dist.barrier()
        for kind, path in copies.items():
            found[f"{name} {kind}"] = error_of(engine.load_checkpoint, os.path.dirname(path), name)
    with mock.patch.object(BlockReader, "check_length", counted):
        looked.clear()
        engine.load_checkpoint(os.path.dirname(f"{folder}/whole"), "whole")
    return {**found, "shared": shared, "again": list(looked), "files": sorted(os.listdir(f"{folder}/whole"))}


def test_ranks_that_see_the_same_files_look_at_a_share_each(pool: Pool, tmp_path: Path) -> None:
    """The error of what is missing is the same on all of them, whoever reads it; a copy of a rank is its own matter."""
    results = pool.run(3, _of_lost_files, str(tmp_path))
    written = [name for name in results[0]["files"] if name not in (MANIFEST, README)]
    looked = [name for found in results for name in found["shared"]]
    assert sorted(looked) == written
    assert max(len(found["shared"]) for found in results) <= -(-len(written) // 3)
    assert [found["again"] for found in results] == [found["shared"] for found in results]
    for name, words in {"missing": "weights-00002.pt is missing. Restore it", "torn": "has 100 bytes, and "}.items():
        texts = [found[f"{name} shared"] for found in results]
        assert texts[0].startswith(f"{tmp_path}/{name}/weights-00002.pt ")
        assert words in texts[0]
        assert texts == texts[:1] * 3
        raised([found[f"{name} own"] for found in results], "rank 0: ", "rank 1: ", "cannot be opened (", words)


# ---- what tells checkpoints apart ------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", ["deepspeed/stage3", "fsdp/fsdp", "deepspeed/stage1"])
def test_copies_are_the_same_and_other_content_is_not(tmp_path: Path, case: str) -> None:
    source = source_of(case)
    copy = Path(shutil.copytree(source, tmp_path / "copy"))
    identity = of_source(open_source(source, tell=False))
    opened: Any = open_source(copy, tell=False)
    assert identity == of_source(opened)
    changed = set()
    for file in sorted(path for path in copy.rglob("*") if path.name.endswith(("states.pt", ".distcp"))):
        data = file.read_bytes()
        end = data.index(b"PK\x01\x02")  # the first record in the directory of the (first) zip; its checksum is at 16
        file.write_bytes(data[: end + 16] + bytes([data[end + 16] ^ 1]) + data[end + 17 :])
        changed.add(digest_of_parts(opened.parts))
        file.write_bytes(data)
    assert changed
    assert identity.digest not in changed


def _digest(file: Path) -> str:
    return digest_of_parts([(file, 0, None)])


@pytest.mark.parametrize("suffix", ["pt", "unchecked.pt", "old.pt", "safetensors"])
def test_one_value_of_a_file_tells(tmp_path: Path, suffix: str) -> None:
    """Of any tensor, at its end, whether or not the file has checksums."""
    digests = []
    for number in range(3):
        tensors = {"a": torch.zeros(300_001), "b": torch.zeros(3)}
        if number:
            tensors["ab"[number - 1]][-1] = 1
        file = tmp_path / str(number) / f"x.{suffix}"
        file.parent.mkdir()
        if suffix == "safetensors":
            save_file(tensors, file)
        else:
            torch.serialization.set_crc32_options("unchecked" not in suffix)
            torch.save(tensors, file, _use_new_zipfile_serialization="old" not in suffix)
            torch.serialization.set_crc32_options(True)
        digests.append(_digest(file))
    assert len(set(digests)) == 3
    assert _digest(Path(shutil.copy(file, tmp_path / f"copy.{suffix}"))) == digests[-1]


def test_values_in_memory_tell() -> None:
    loop: list[Any] = [1]
    loop.append(loop)
    values: list[Any] = [
        *(0, 1, 1.0, "1", b"1", None, [1], (1,), {1: 2}, {2: 1}, [[1], 2], [1, [2]], {"a": {"b": 1}}),
        *(torch.zeros(2), torch.zeros(1, 2), torch.zeros(2, dtype=torch.bfloat16), torch.tensor(0.0), torch.zeros(0)),
        *(torch.zeros(2, dtype=torch.complex64), torch.eye(2).to_sparse(), torch.tensor([True]), object(), loop),
        *(torch.empty(2, device="meta"), torch.quantize_per_tensor(torch.ones(2), 0.1, 0, torch.quint8)),
    ]
    digests = [digest_of_values(value) for value in values]
    assert len(set(digests)) == len(values)
    assert digests == [digest_of_values(value) for value in values]
