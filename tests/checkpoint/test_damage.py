"""Damaged and hostile checkpoints: an error that names the file on every rank, and nothing runs."""

from __future__ import annotations

import io
import json
import math
import os
import pickle
import random
import re
import shutil
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
import torch.distributed as dist

from lt_zero import ZeroStrategy
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import README, Manifest
from lt_zero.checkpoint.native.load import as_lightning
from lt_zero.checkpoint.native.manifest_reader import parsed
from lt_zero.checkpoint.open import verify
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores.checked_file import STEP, FileRecord
from lt_zero.core.stores.pinned import aligned_buffer, checksum, rounded
from tests.support.checkpoint_tools import SHARDED, error_of, raised, resume, same, train
from tests.support.damage import BELIEVED, DAMAGES, STRANGE, flip, reseal
from tests.support.lightning_tools import FULL, GPT, QUIET, sharded_trainer
from tests.support.matrix import only
from tests.support.pool import Pool

FILES = ["manifest.json", "meta.pt"] + [f"{kind}-{rank:05d}.pt" for kind in ("weights", "moments") for rank in range(2)]
OTHERS = [".metadata", "extras.pt"]  # only other programs read these: their lengths are checked


def _save(folder: str) -> None:
    train(3, config=SHARDED).save_checkpoint(f"{folder}/good")


def _save_another(folder: str) -> None:
    """A run of as many steps from other weights."""
    module = GPT(dist.get_world_size(), "adamw")
    with torch.no_grad():
        module.temperature.add_(1.0)
    train(3, module, config=SHARDED).save_checkpoint(f"{folder}/good")


def _error_of_resume(path: str) -> str:
    return error_of(resume, Path(path), 3)


def _load_damaged(folder: str, damage: str) -> dict[str, str]:
    """The message for each file, loaded by ranks that each read their own part."""
    good, bad = Path(folder, "good"), Path(folder, "bad")
    texts = {}
    for name in FILES + ([] if damage in ("flip", "overwrite") else OTHERS):
        if dist.get_rank() == 0:
            shutil.rmtree(bad, ignore_errors=True)
            shutil.copytree(good, bad)
            DAMAGES[damage](bad / name)
        dist.barrier()
        texts[name] = error_of(resume, bad, 3)
        dist.barrier()
    return texts


@pytest.fixture(scope="module")
def saved(pool: Pool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("saved")
    pool.run(2, _save, str(folder))
    return folder / "good"


@pytest.fixture
def good(saved: Path, tmp_path: Path) -> Path:
    """A copy that the test may damage."""
    return Path(shutil.copytree(saved, tmp_path / "good"))


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_found(good: Path, damage: str) -> None:
    for name in FILES + ([] if damage in ("flip", "overwrite") else OTHERS):
        bad = good.parent / damage / name
        shutil.copytree(good, bad)
        DAMAGES[damage](bad / name)
        with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
            Archive(str(bad)).verify()


@pytest.mark.parametrize(("damage", "words"), [("delete", "is missing. Restore it"), ("truncate", "were written")])
def test_a_file_that_is_read_is_checked_by_its_reader(good: Path, damage: str, words: str) -> None:
    """Even if the checks of all files are left to other ranks."""
    DAMAGES[damage](good / "weights-00001.pt")
    archive = Archive(str(good), checks_files=False)
    name, entry = next(
        (name, entry)
        for name, entry in archive.manifest.tensors.items()
        if any(chunk.file == "weights-00001.pt" for chunk in entry.chunks)
    )
    with pytest.raises(CheckpointError, match=f"weights-00001.pt .*{words}"):
        archive.elements(name, 0, math.prod(entry.shape))


@pytest.mark.parametrize("damage", only(["truncate"], DAMAGES))
def test_damage_is_an_error_on_every_rank(pool: Pool, good: Path, damage: str) -> None:
    for texts in pool.run(2, _load_damaged, str(good.parent), damage):
        for name, text in texts.items():
            assert name in text, (name, text)
            assert any(word in text for word in ("damaged", "missing", "changed", "not a complete", "written last"))


def test_a_file_of_another_run_with_the_same_step_is_refused(pool: Pool, good: Path) -> None:
    """It has the same tensors and length; the manifest knows the checksums of its own."""
    folder = good.parent / "other"
    pool.run(2, _save_another, str(folder))
    for name in ("weights-00001.pt", "moments-00001.pt"):
        bad, other = good.parent / name, folder / "good" / name
        assert other.stat().st_size == (good / name).stat().st_size
        shutil.copytree(good, bad)
        shutil.copy(other, bad)
        for text in pool.run(2, _error_of_resume, str(bad)):
            assert f"{name} is damaged, or a file of another save" in text


def test_any_bit_of_any_file_is_seen(good: Path) -> None:
    names = sorted(p.name for p in good.iterdir() if p.name != README)
    assert set(names) == {*FILES, *OTHERS}
    Archive(str(good)).verify()
    for name in names:
        whole = (good / name).read_bytes()
        for seed in range(10):
            flip(good / name, seed)
            with pytest.raises(CheckpointError, match=name.replace(".", r"\.")):
                Archive(str(good)).verify()
            (good / name).write_bytes(whole)
    Archive(str(good)).verify()


# ---- what is no checkpoint -----------------------------------------------------------------------------------------


def _errors(paths: list[str]) -> list[str]:
    found = []
    for path in paths:
        found.append(error_of(resume, path, 2))
        trainer = sharded_trainer(3, limit_val_batches=1)
        found.append(error_of(trainer.validate, GPT(2), ckpt_path=path))
    return found


def test_what_is_no_checkpoint(pool: Pool, good: Path) -> None:
    folder = good.parent
    for name in ("future", "bare", "binary"):
        shutil.copytree(good, folder / name)
    reseal(folder / "future", lambda body: body.update(version=99))
    (folder / "bare" / "manifest.json").unlink()
    (folder / "binary" / "manifest.json").write_bytes(b"\xff\xfe\x00" * 50)
    (folder / "nothing").mkdir()
    words = {"future": "99", "bare": "manifest.json", "binary": "damaged", "nothing": "nothing", "nowhere": "nowhere"}
    for texts in pool.run(2, _errors, [str(folder / name) for name in words]):
        for number, (name, word) in enumerate(words.items()):
            for text in texts[2 * number : 2 * number + 2]:
                assert word in text, (name, text)
                assert name in text, (name, text)


@pytest.mark.parametrize("change", list(STRANGE))
def test_manifests_that_make_no_sense(good: Path, change: str) -> None:
    reseal(good, STRANGE[change])
    with pytest.raises(CheckpointError, match="manifest.json"):
        Archive(str(good))


def test_what_a_manifest_with_a_right_checksum_says_is_not_believed(good: Path) -> None:
    text = (good / "manifest.json").read_text()
    for case, change in BELIEVED.items():
        (good / "manifest.json").write_text(text)
        reseal(good, change)
        with pytest.raises(CheckpointError) as caught:  # the words: test_wording.py
            verify(good)
        assert str(good) in str(caught.value), case


def test_a_compressed_meta_is_refused(good: Path) -> None:
    """587 KB that would take a GB."""
    with zipfile.ZipFile(good / "x", "w", zipfile.ZIP_DEFLATED) as file:
        file.writestr("archive/data.pkl", bytes(1 << 20))
        file.writestr("archive/version", "3\n")
    plant(good, "meta.pt", (good / "x").read_bytes())
    with pytest.raises(CheckpointError, match=r"meta\.pt .*compressed"):
        verify(good)


def _mutated(value: Any, chance: random.Random) -> Any:
    """A copy of nested containers in which one value is another, or gone, or stands twice."""
    others: list[Any] = [None, True, -1, 1 << 70, 0.5, "", "x", [], {}, [[]], {"a": 1}, [1, 2, 3], "float32"]
    if isinstance(value, dict) and value and ("sha256" in value or chance.random() < 0.9):
        key = chance.choice(list(value))
        made = dict(value)
        if chance.random() < 0.1:
            del made[key]
        elif chance.random() < 0.1:
            made[chance.choice(["x", 1, "model.x"])] = made.pop(key)
        else:
            made[key] = _mutated(value[key], chance)
        return made
    if isinstance(value, (list, tuple)) and value and chance.random() < 0.9:
        items, at = list(value), chance.randrange(len(value))
        items[at : at + 1] = chance.choice([[], [items[at]] * 2, [_mutated(items[at], chance)] * 1])
        return items if isinstance(value, list) else tuple(items)
    if type(value) is int and chance.random() < 0.5:
        return value + chance.choice([-1, 1, 4, 1 << 20, 1 << 40])
    return chance.choice(others)


def _read_all(folder: Path) -> None:
    found = as_lightning(Archive(str(folder)))
    for value in found["state_dict"].values():
        if isinstance(value, torch.Tensor):
            assert value.numel() < 1 << 24
            value.clone()
    verify(folder)


@pytest.mark.parametrize("cases", [40, pytest.param(1000, marks=pytest.mark.slow)])
@pytest.mark.filterwarnings("ignore")
def test_mutated_manifests_and_metas(good: Path, cases: int) -> None:
    """With right checksums: values, or an error of ours that names the folder."""
    body = json.loads((good / "manifest.json").read_text())
    content = torch.load(good / "meta.pt", weights_only=True)
    text = (good / "manifest.json").read_text()
    data = (good / "meta.pt").read_bytes()
    refused = []
    for seed in range(cases):
        chance = random.Random(seed)
        (good / "manifest.json").write_text(text)
        (good / "meta.pt").write_bytes(data)
        if seed % 2:
            buffer = io.BytesIO()
            torch.save(_mutated(content, chance), buffer)
            plant(good, "meta.pt", buffer.getvalue())
        else:
            made = dict(_mutated(body, chance) or {})
            reseal(good, lambda old, made=made: (old.clear(), old.update(made)))  # type: ignore[misc]
        try:
            _read_all(good)
        except CheckpointError as error:
            refused.append(str(error))
    assert len(refused) > cases // 4
    assert not [message for message in refused if str(good) not in message]


def test_numbers_in_the_manifest_that_lead_nowhere(good: Path) -> None:
    """Chunks beyond their file or tensor: an error, never other values."""
    first = next(name for name, entry in Archive(str(good)).manifest.tensors.items() if len(entry.chunks) == 1)
    changes: list[Callable[[list[Any]], Any]] = [
        lambda chunk: chunk.__setitem__(3, 1 << 40),
        lambda chunk: chunk.__setitem__(3, -8),
        lambda chunk: chunk.__setitem__(3, chunk[3] + (4 << 20)),
        lambda chunk: chunk.__setitem__(1, [-1] * len(chunk[1])),
        lambda chunk: chunk.__setitem__(1, [1 << 20] * len(chunk[1])),
        lambda chunk: chunk.__setitem__(1, [*chunk[1], 1]),
        lambda chunk: chunk.__setitem__(0, [-1] * len(chunk[0])),
    ]
    text = (good / "manifest.json").read_text()
    for change in changes:
        (good / "manifest.json").write_text(text)
        reseal(good, lambda body, change=change: change(body["tensors"][first]["chunks"][0]))  # type: ignore[misc]
        with pytest.raises(CheckpointError, match="is malformed"):
            Archive(str(good))


# ---- what would run ------------------------------------------------------------------------------------------------


class Touches:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.system, (f"touch {self.path}",)


def plant(folder: Path, name: str, data: bytes) -> None:
    """Put a file into a checkpoint and make the manifest vouch for it."""
    (folder / name).write_bytes(data)
    manifest = parsed((folder / "manifest.json").read_bytes(), "")
    sums = []
    for start in range(0, len(data), STEP):
        part = data[start : start + STEP]
        block = aligned_buffer(rounded(len(part)))
        block[: len(part)] = torch.frombuffer(bytearray(part), dtype=torch.uint8)
        sums.append(checksum(block))
    files = {**manifest.files, name: FileRecord(len(data), tuple(sums))}
    sealed = Manifest(manifest.tensors, files, manifest.order, manifest.aliases, manifest.left_out, manifest.run)
    (folder / "manifest.json").write_text(sealed.dump())


def _hostile(folder: str) -> None:
    for name in ("objects.pkl", ".metadata", "extras.pt"):
        got, _ = resume(f"{folder}/{name}", 3)
        same(got["step"], 2)
    sharded_trainer(1, limit_val_batches=1).validate(GPT(2), ckpt_path=f"{folder}/objects.pkl")
    text = error_of(resume, f"{folder}/meta.pt", 3)
    assert "meta.pt holds" in text
    assert "could run code" in text


def test_nothing_in_a_checkpoint_runs(pool: Pool, good: Path) -> None:
    folder, touched = good.parent, good.parent / "touched"
    for name in ("objects.pkl", ".metadata", "extras.pt", "meta.pt"):
        shutil.copytree(good, folder / name)
        data = pickle.dumps({("x",): Touches(touched)})
        if name.endswith(".pt"):
            torch.save({"x": Touches(touched)}, folder / name / name)
            data = (folder / name / name).read_bytes()
        plant(folder / name, name, data)
        Archive(str(folder / name)).verify()
    pool.run(2, _hostile, str(folder))
    assert not touched.exists()
    Archive(str(folder / "objects.pkl")).objects()  # on request only
    assert touched.exists(), "the trap works"


def _raised_together(folder: str) -> list[str]:
    """A part that only rank 1 reads, damaged, at every moment of a Trainer's life."""
    if dist.get_rank() == 0:
        flip(Path(folder, "good", "weights-00001.pt"))
    dist.barrier()
    texts = [error_of(resume, f"{folder}/good", 3)]
    for entry in ("validate", "test", "predict"):
        trainer = sharded_trainer(3, limit_val_batches=1)
        texts.append(error_of(getattr(trainer, entry), GPT(2), ckpt_path=f"{folder}/good"))
    used = sharded_trainer(3, limit_val_batches=1)
    module = GPT(2)
    used.validate(module)
    texts.append(error_of(used.validate, module, ckpt_path=f"{folder}/good"))  # the module is sharded already
    return texts


def test_what_one_rank_reads_fails_on_all(pool: Pool, good: Path) -> None:
    results = pool.run(2, _raised_together, str(good.parent))
    for texts in zip(*results, strict=True):
        raised(list(texts), "weights-00001.pt", "damaged")


def test_a_tensor_with_a_hole(good: Path) -> None:
    archive = Archive(str(good))
    name, entry = next((n, e) for n, e in archive.manifest.tensors.items() if len(e.chunks) > 1)
    for _ in entry.chunks:
        reseal(good, lambda body: body["tensors"][name]["chunks"].pop())
        with pytest.raises(CheckpointError, match="lacks"):
            Archive(str(good)).elements(name, 0, int(torch.Size(entry.shape).numel()))


def test_numbers_that_would_make_weights_nan_are_refused(tmp_path: Path) -> None:
    """Rates, decays and counters of somebody's file go into every weight at the first step."""
    options: dict[str, Any] = {**QUIET, "devices": 1, "limit_val_batches": 0, "max_epochs": 9}

    def trainer(steps: int) -> pl.Trainer:
        return pl.Trainer(**options, max_steps=steps, strategy=ZeroStrategy(config={**FULL, **stage}))

    stage = {"zero_optimization": {"stage": 2}}
    first = trainer(1)
    first.fit(GPT(1, "adamw"))
    path = tmp_path / "one.ckpt"
    first.save_checkpoint(path)

    def group(saved: Any) -> Any:
        return saved["optimizer_states"][0]["param_groups"][0]

    edits: list[tuple[Callable[[Any], object], str]] = [
        (lambda saved: group(saved).update(lr=math.nan), "lr=nan in group 0 of optimizer 0"),
        (lambda saved: group(saved).update(lr=torch.tensor(math.inf)), r"lr=tensor\(inf\) in group 0"),
        (lambda saved: group(saved).update(betas=(0.9, math.nan)), r"betas=\(0.9, nan\) in group 0"),
        (lambda saved: group(saved).update(mine=math.nan), "mine=nan"),
        (lambda saved: saved["optimizer_states"][0]["state"][1].update(step=torch.tensor(math.nan)), "step=tensor"),
        (
            lambda saved: saved["lr_schedulers"][0].update(base_lrs=[math.nan]),
            r"^The checkpoint has base_lrs=\[nan\] in a schedule, ",
        ),
    ]
    for edit, text in edits:
        saved = torch.load(path, weights_only=True)
        edit(saved)
        torch.save(saved, tmp_path / "edited.ckpt")
        with pytest.raises(CheckpointError, match=text):
            trainer(2).fit(GPT(1, "adamw"), ckpt_path=tmp_path / "edited.ckpt")
    saved = torch.load(path, weights_only=True)
    group(saved).update(limit=math.inf)  # "no limit" of some optimizer
    torch.save(saved, tmp_path / "edited.ckpt")
    trainer(2).fit(GPT(1, "adamw"), ckpt_path=tmp_path / "edited.ckpt")


def test_a_file_of_another_strategy_without_schedules_is_refused(tmp_path: Path) -> None:
    options: Any = {"accelerator": "cpu", "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    first = pl.Trainer(**options, max_steps=1, enable_checkpointing=False)
    first.fit(GPT(1, "adamw"))
    saved = first._checkpoint_connector.dump_checkpoint()
    del saved["lr_schedulers"]
    torch.save(saved, tmp_path / "one.ckpt")
    again = pl.Trainer(**options, max_steps=2, enable_checkpointing=False, strategy=ZeroStrategy(stage=2))
    with pytest.raises(KeyError, match="scheduler state"):
        again.fit(GPT(1, "adamw"), ckpt_path=tmp_path / "one.ckpt")


def _errors_of_others(folder: str) -> list[str]:
    return [error_of(resume, path, 3) for path in sorted(Path(folder).iterdir())]


def test_files_of_other_kinds(pool: Pool, tmp_path: Path) -> None:
    """``ckpt_path`` may name anything: the error has its name on all ranks."""
    (tmp_path / "empty.ckpt").touch()
    (tmp_path / "garbage.ckpt").write_bytes(b"e" * 1000)
    (tmp_path / "list.ckpt").write_bytes(pickle.dumps([1, 2]))
    (tmp_path / "text.ckpt").write_text("epoch: 3\n")
    torch.save(torch.ones(3), tmp_path / "tensor.ckpt")
    torch.save([torch.ones(3)], tmp_path / "old.ckpt", _use_new_zipfile_serialization=False)
    names = sorted(path.name for path in tmp_path.iterdir())
    for texts in pool.run(2, _errors_of_others, str(tmp_path)):
        for name, text in zip(names, texts, strict=True):
            assert name in text
            assert re.search("is empty|is damaged|is no checkpoint: it holds", text), text
