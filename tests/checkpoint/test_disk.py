"""Disks that fail, paths that cannot be, and what kills leave: errors on all ranks, and the checkpoint before stays."""

from __future__ import annotations

import errno
import os
import shutil
import socket
from functools import partial
from pathlib import Path
from typing import Any

import fsspec
import pytest
import torch
import torch.distributed as dist

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.import_ import import_checkpoint
from lt_zero.checkpoint.last import last_checkpoint
from lt_zero.checkpoint.native import archive as archive_file
from lt_zero.checkpoint.native import directory, records
from lt_zero.checkpoint.native.archive import Archive
from lt_zero.checkpoint.native.directory import Manifest, PendingDirectory
from lt_zero.checkpoint.native.save import Bundle, DirectoryWriter
from lt_zero.checkpoint.open import checked_file, is_directory, name_latest, open_source, read_latest, verify
from lt_zero.common import host_memory
from lt_zero.common.errors import CheckpointError
from lt_zero.core.stores import direct_file, staging
from tests.support.checkpoint_tools import SHARDED, error_of, raised, train
from tests.support.lightning_tools import FULL, GPT, sharded_trainer
from tests.support.pool import Pool


def _names(folder: str | Path) -> list[str]:
    return sorted(path.name for path in Path(folder).iterdir())


def _broken(folder: str) -> dict[str, str]:
    """The error of each save of one trainer, whose first checkpoint outlives all of them."""
    trainer = train(3, config=SHARDED, max_steps=1)
    trainer.save_checkpoint(f"{folder}/one")
    trainer.fit_loop.epoch_loop.max_steps = 2
    trainer.fit(trainer.lightning_module)
    texts = {}
    for how in FAILURES:
        texts[how] = _failed_save(trainer, folder, how)
        dist.barrier()
        assert _names(folder) == ["one"], how
        archive = Archive(f"{folder}/one")
        archive.verify()
        assert archive.meta["global_step"] == 1, how
        archive.close()
        dist.barrier()
    trainer.save_checkpoint(f"{folder}/one")  # the trainer is still usable
    assert Archive(f"{folder}/one").meta["global_step"] == 2
    return texts


def _failed_save(trainer: Any, folder: str, how: str) -> str:
    rank = dist.get_rank()
    patch = pytest.MonkeyPatch()
    target = f"{folder}/one"
    if how == "space":
        patch.setattr(directory.PendingDirectory, "free_bytes", lambda self: 1000)
    elif how == "unseen" and rank == 1:
        patch.setattr(directory.Path, "is_dir", lambda path: False)
    elif how == "write" and rank == 1:
        patch.setattr(direct_file, "write_some", _full)
    elif how == "unforeseen" and rank == 1:
        patch.setattr(DirectoryWriter, "_write", _unforeseen)
    elif how == "manifest" and rank == 0:
        patch.setattr(directory.PendingDirectory, "seal", _full)
    elif how == "rename" and rank == 0:
        patch.setattr(directory, "_replace", _full)
    elif how == "folder":
        target = f"{folder}/one/meta.pt/inner"
    elif how == "project":
        target = folder
    elif how == "nul":
        target = f"{folder}/a\0b"
    elif how == "protocol":
        target = "nonsense://x/y"
    elif how == "long":
        target = f"{folder}/{'x' * 300}"
    try:
        return error_of(trainer.save_checkpoint, target)
    finally:
        patch.undo()


def _full(*args: Any, **kwargs: Any) -> int:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _unforeseen(*args: Any, **kwargs: Any) -> int:
    raise KeyError("nobody expects this")


FAILURES: dict[str, list[str]] = {  # and words of their errors
    "space": ["one", "free", "save_top_k"],
    "unseen": ["rank 1", "one", "disk of one node", 'format="full"'],
    "write": ["rank 1", "-00001.pt", "ENOSPC", "Free space"],
    "unforeseen": ["rank 1: KeyError: 'nobody expects this' (", "test_disk.py:", ", in _unforeseen)"],
    "manifest": ["rank 0", "No space left"],
    "rename": ["Cannot name", "one", "ENOSPC"],
    "folder": ["meta.pt"],
    "project": ["is a directory with one", "<name>"],
    "nul": ["null"],
    "protocol": ["nonsense"],
    "long": ["xxx"],
}


def test_saves_that_fail(pool: Pool, tmp_path: Path) -> None:
    results = pool.run(2, _broken, str(tmp_path))
    for how, words in FAILURES.items():
        raised([texts[how] for texts in results], *words)
    assert all("FrameSummary" not in texts["unforeseen"] for texts in results)


LONG = "ckpt_" + "ä" * 125  # 255 bytes, as many as a name may have


@pytest.mark.parametrize("name", ["complete", "x[1]*.ckpt", "a-b-c.tmp-d", "ä b"])
def test_a_kill_between_two_renames(tmp_path: Path, name: str) -> None:
    made = directory.PendingDirectory.make(str(tmp_path / name))
    Path(made.folder, "manifest.json").write_text(Manifest({}, {}).dump())
    assert directory.find(tmp_path / name) == made.folder
    made.unlock()
    directory.remove_leftovers(tmp_path)
    assert _names(tmp_path) == [name]
    assert directory.find(tmp_path / name / "meta.pt") == str(tmp_path / name)


def test_leftovers_of_processes_that_are_gone(tmp_path: Path) -> None:
    mine = directory.PendingDirectory.make(str(tmp_path / "running"))
    gone = directory.PendingDirectory.make(str(tmp_path / "gone"))
    Path(gone.folder, "weights-00000.pt").touch()
    gone.unlock()  # as the kernel does when a process ends
    foreign = tmp_path / ".x.tmp-another-host-77-0123abcd"
    young = tmp_path / ".y.tmp-another-host-77-0123abcd"
    for path in (foreign, young, tmp_path / ".x.tmp-note", tmp_path / ".hidden-a-b"):
        path.mkdir()
    os.utime(foreign, (0, 0))
    os.utime(tmp_path / ".hidden-a-b", (0, 0))
    complete = directory.PendingDirectory.make(str(tmp_path / "complete"))
    Path(complete.folder, "manifest.json").write_text("{}")
    assert directory.find(tmp_path / "complete") == complete.folder, "a kill between two renames"
    complete.unlock()
    directory.remove_leftovers(tmp_path)
    names = _names(tmp_path)
    assert names == sorted([Path(mine.folder).name, young.name, ".x.tmp-note", ".hidden-a-b", "complete"])
    mine.discard()


def test_processes_that_save_to_one_folder_do_not_disturb_each_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    unlocked = tmp_path / f".x.tmp-{socket.gethostname()}-77-0123abcd"
    unlocked.mkdir()
    directory.remove_leftovers(tmp_path)
    assert unlocked.is_dir(), "its process locks it next"
    os.utime(unlocked, (0, 0))
    directory.remove_leftovers(tmp_path)
    assert not unlocked.exists()

    def publish(path: Path) -> int:
        shutil.move(path, tmp_path / "y")
        return os.open(path, os.O_RDONLY)

    other = tmp_path / f".y.tmp-{socket.gethostname()}-77-0123abcd"
    other.mkdir()
    Path(other, "manifest.json").touch()
    monkeypatch.setattr(staging, "_may_be_in_use", lambda path, host: publish(path) < 0)
    directory.remove_leftovers(tmp_path)
    assert _names(tmp_path) == ["y"]


def test_names_without_room_for_more(tmp_path: Path) -> None:
    """Temporary names of long ones are cut; a killed save is found by the whole one, and kept until it is replaced."""
    path = tmp_path / LONG
    made = directory.PendingDirectory.make(str(path))
    made.seal(Manifest({}, {}))
    made.unlock()  # as the kernel does when a process is killed
    directory.remove_leftovers(tmp_path)
    assert directory.find(path) == made.folder
    assert directory.find(tmp_path / LONG[:-1]) != made.folder
    assert last_checkpoint(tmp_path) is None  # it has no training state; and nothing fails
    new = directory.PendingDirectory.make(str(path))
    new.seal(Manifest({}, {}))
    new.commit()
    directory.remove_leftovers(tmp_path)
    assert _names(tmp_path) == [LONG]
    directory.remove(path)
    _whole(path)
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    export(tmp_path / "a.pt", tmp_path / LONG, format="pt")
    assert _names(tmp_path) == ["a.pt", LONG]
    for write in (_whole, directory.PendingDirectory.make, partial(export, tmp_path / "a.pt", format="pt")):
        with pytest.raises(CheckpointError, match="too long"):
            write(f"{path}x")


def test_two_runs_that_save_under_one_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "last.ckpt"
    with directory.whole_file(str(path)) as first:
        Path(first).write_text("first")
        with directory.whole_file(str(path)) as second:
            Path(second).write_text("second")
        assert path.read_text() == "second"
    assert path.read_text() == "first"
    path.unlink()
    made = [directory.PendingDirectory.make(str(path)) for _ in range(3)]
    seen = iter([False, False, False])  # of the path, by those that look before another run publishes
    monkeypatch.setattr(directory.os.path, "lexists", lambda path: next(seen, True))
    for number, place in enumerate(made):
        place.seal(Manifest({}, {}, run={"number": number}))
        place.commit()
    monkeypatch.undo()
    assert Archive(str(path)).manifest.run["number"] == 2
    assert _names(tmp_path) == [path.name]
    with pytest.raises(CheckpointError, match="save to a folder that no other one uses"):  # noqa: SIM117
        with directory.whole_file(str(path)) as temporary:
            shutil.rmtree(Path(temporary).parent)


def test_a_planted_link_is_not_written_to(tmp_path: Path) -> None:
    """Whoever may write to a checkpoint's folder cannot make a save write elsewhere."""
    (tmp_path / "mine").write_text("mine")
    for name in ("latest", "last.ckpt"):
        for planted in (f".{name}.partial", f".{name}.tmp", name):
            os.symlink(tmp_path / "mine", tmp_path / planted)
    name_latest(tmp_path, "tag", "")
    _whole(tmp_path / "last.ckpt")
    assert (tmp_path / "mine").read_text() == "mine"
    assert read_latest(tmp_path) == "tag"
    assert (tmp_path / "last.ckpt").read_text() == "x"


def test_folders_of_other_users_are_left_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    other = tmp_path / f".x.tmp-{socket.gethostname()}-77-0123abcd"
    other.mkdir()
    monkeypatch.setattr(staging.Path, "iterdir", _denied)
    directory.remove_leftovers(tmp_path)
    assert other.is_dir()


def _denied(*_: Any) -> None:
    raise PermissionError(errno.EACCES, "denied")


def test_the_memory_of_one_process_is_no_place_for_several() -> None:
    """Each rank would write its part into a memory of its own, and nobody could read the checkpoint."""
    rank_0 = PendingDirectory.make("memory://several/one")
    with pytest.raises(CheckpointError, match="several/one is in the memory of one process"):
        PendingDirectory(rank_0.name, rank_0.folder).check_visible()
    rank_0.discard()


def test_what_a_save_replaced_never_comes_back(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill while the old checkpoint is being removed leaves a part of it, which must not get a name again."""
    old, path = tmp_path / "last", tmp_path / "new"
    for folder in (old, path):
        folder.mkdir()
        (folder / "manifest.json").write_text(folder.name)
    made = directory.PendingDirectory(str(old), str(staging.staging_path(old)))
    os.rename(path, made.folder)
    monkeypatch.setattr(directory.shutil, "rmtree", lambda *args, **kwargs: None)  # killed here
    made.commit()
    monkeypatch.undo()
    assert (old / "manifest.json").read_text() == "new"
    directory.remove(old)
    directory.remove_leftovers(tmp_path)
    assert _names(tmp_path) == []


def test_a_manifest_of_somebody_else(tmp_path: Path) -> None:
    """Many programs have a file of that name: a checkpoint beside it is itself, and its folder is never replaced."""
    (tmp_path / "manifest.json").write_text('{"name": "web app"}')
    (tmp_path / "model.ckpt").write_text("x")
    assert directory.find(tmp_path / "model.ckpt") == str(tmp_path / "model.ckpt")
    with pytest.raises(CheckpointError, match="model.ckpt, which saving a checkpoint there would remove"):
        directory.PendingDirectory.make(str(tmp_path))
    assert (tmp_path / "model.ckpt").read_text() == "x"


def test_a_url_with_something_else_is_not_replaced() -> None:
    files = fsspec.filesystem("memory")
    files.pipe("/review/thesis.tex", b"important")
    with pytest.raises(CheckpointError, match="would remove"):
        PendingDirectory.make("memory://review")
    assert files.cat_file("/review/thesis.tex") == b"important"
    files.pipe("/broken/weights-00000.pt", b"of a save that was broken off")
    PendingDirectory.make("memory://broken")
    assert not files.exists("/broken/weights-00000.pt")


def _onto_a_directory(path: str) -> str:
    trainer = sharded_trainer(2, config=FULL, max_steps=1, limit_val_batches=0)
    trainer.fit(GPT(dist.get_world_size()))
    with pytest.raises(IsADirectoryError) as caught:
        trainer.save_checkpoint(path)
    return str(caught.value)


def test_a_file_onto_a_directory_fails_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    assert all("is a directory" in text for text in pool.run(2, _onto_a_directory, str(tmp_path)))


def _file_on_a_full_disk(path: str) -> str:
    trainer = train(1, config=FULL)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(trainer.strategy.checkpoint_io, "save_checkpoint", _full)
        text = error_of(trainer.save_checkpoint, path)
    trainer.save_checkpoint(path)
    return text


def test_a_file_on_a_full_disk_fails_on_all_ranks(pool: Pool, tmp_path: Path) -> None:
    raised(pool.run(2, _file_on_a_full_disk, str(tmp_path / "saved")), "No space left")


def test_a_url_without_its_package_says_what_to_install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def missing(url: str, **options: Any) -> Any:
        raise ImportError("Install s3fs to access S3")

    monkeypatch.setattr(directory.fsspec.core, "url_to_fs", missing)
    torch.save({"a": torch.ones(1)}, tmp_path / "a.pt")
    for use in (is_directory, open_source, verify, PendingDirectory.make, Archive):
        with pytest.raises(CheckpointError, match=r"s3://b/x\.ckpt.* pip install s3fs"):
            use("s3://b/x.ckpt")
    with pytest.raises(CheckpointError, match=r"s3://b/out.* pip install s3fs"):
        import_checkpoint(tmp_path / "a.pt", "s3://b/out")
    with pytest.raises(CheckpointError, match=r"s3://b/out\.pt.* pip install s3fs"):
        export(tmp_path / "a.pt", "s3://b/out.pt")
    monkeypatch.undo()
    with pytest.raises(CheckpointError, match="nonsense://x cannot be opened"):
        open_source("nonsense://x")


def _eio(*_: Any) -> None:
    raise OSError(errno.EIO, os.strerror(errno.EIO))


def _whole(path: Path) -> None:
    with directory.whole_file(str(path)) as temporary:
        Path(temporary).write_text("x")


def test_a_disk_that_fails_names_the_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    place = PendingDirectory.make(str(tmp_path / "two"))
    monkeypatch.setattr(os, "fsync", _eio)
    with pytest.raises(CheckpointError, match=r"one\.ckpt.*EIO"):
        _whole(tmp_path / "one.ckpt")
    with pytest.raises(CheckpointError, match="two.*EIO"):
        place.seal(Manifest({}, {}))
    monkeypatch.undo()
    for written in Path(place.folder).iterdir():
        written.unlink()
    place.seal(Manifest({}, {}))
    place.commit()
    assert _names(tmp_path) == ["two"]
    torch.save({"a": torch.ones(9)}, tmp_path / "a.pt")
    monkeypatch.setattr(archive_file, "read_bytes", _eio)
    monkeypatch.setattr(records, "_crc", _eio)
    with pytest.raises(CheckpointError, match=r"two/manifest\.json: .*EIO"):
        Archive(str(tmp_path / "two"))
    with pytest.raises(CheckpointError, match=r"a\.pt.*EIO"):
        checked_file(tmp_path / "a.pt", None)


def test_files_have_the_rights_that_the_user_wants(tmp_path: Path) -> None:
    before = os.umask(0o002)
    try:
        place = PendingDirectory.make(str(tmp_path / "one"))
        place.sink("a").close()
    finally:
        os.umask(before)
    assert os.stat(Path(place.folder, "a")).st_mode & 0o777 == 0o664
    place.discard()


def test_a_folder_that_cannot_be_opened_is_removed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fails(folder: str) -> int:
        raise OSError(errno.EROFS, "Read-only file system", folder)

    monkeypatch.setattr(staging, "open_folder", fails)
    with pytest.raises(CheckpointError, match=f"Cannot make a folder beside {tmp_path}/one.*read-only"):
        PendingDirectory.make(str(tmp_path / "one"))
    assert not _names(tmp_path)


@pytest.mark.parametrize(("kind", "size", "told"), [("tmpfs", 5000, 1000), ("tmpfs", 500, 500), ("ramfs", 0, 1000)])
def test_a_folder_in_memory_ends_at_the_limit_of_the_container(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str, size: int, told: int
) -> None:
    """The kernel kills ranks that write more than that. A ramfs tells no size."""
    place = PendingDirectory.make(str(tmp_path / "one"))
    monkeypatch.setattr(directory, "free_bytes", lambda path: size)
    monkeypatch.setattr(host_memory, "host_memory", lambda: host_memory.Available(1000, "the limit of a container"))
    monkeypatch.setattr(directory, "filesystem_of", lambda path: "ext4")
    assert place.free_bytes() == size
    monkeypatch.setattr(directory, "filesystem_of", lambda path: kind)
    writer = DirectoryWriter(place, Bundle({"model.weight": torch.zeros(2000)}), 0)
    with pytest.raises(CheckpointError, match=rf"but {told} bytes are free\..*This is {kind}, .*--shm-size"):
        writer.divided([writer.own_parts()])
    place.discard()
