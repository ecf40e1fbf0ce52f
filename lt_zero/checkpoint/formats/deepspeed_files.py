"""Which files a DeepSpeed checkpoint consists of."""

from __future__ import annotations

import re
from pathlib import Path

from lt_zero.common.errors import CheckpointError

MODEL = re.compile(r"(?:zero_pp_rank_(?P<rank>\d+)_)?mp_rank_(?P<mp>\d+)_model_states\.pt")
_OPTIMIZER = re.compile(r"(?P<bf16>bf16_)?zero_pp_rank_(?P<rank>\d+)_mp_rank_(?P<mp>\d+)_optim_states\.pt")
_EXPERTS = re.compile(r"(?:expp_rank_|layer_\d+_expert_|expert_\d+_)")
OWN_KEYS = frozenset(  # of a model file; the rest is what the caller of save_checkpoint gave
    [
        "module",
        "buffer_names",
        "optimizer",
        "param_shapes",
        "frozen_param_shapes",
        "shared_params",
        "frozen_param_fragments",
        "lr_scheduler",
        "data_sampler",
        "random_ltd",
        "skipped_steps",
        "global_steps",
        "global_samples",
        "dp_world_size",
        "mp_world_size",
        "ds_config",
        "ds_version",
        "checkpoint_parallel_dimensions",
        "universal_checkpoint_info",
        "sparse_tensor_module_names",
        "folding",
        "ds_autoep_layers",
        "autoep_layers",
        "num_experts",
    ]
)


def tag_folder(path: Path, tag: str | None) -> Path:
    """The folder with the files."""
    latest = path / "latest"
    if tag is None and latest.is_file():
        tag = latest.read_bytes()[:4096].decode("utf-8", "replace").strip()
    if tag is not None:
        if not tag or Path(tag).name != tag or not (path / tag).is_dir():
            raise CheckpointError(f"{latest} names the tag {tag!r}, but there is no such folder in {path}.")
        return path / tag
    if not path.is_dir():
        raise CheckpointError(f"{path} is not a folder.")
    if any(MODEL.fullmatch(file.name) for file in path.iterdir()):
        return path
    tags = [d.name for d in sorted(path.iterdir()) if d.is_dir() and any(MODEL.fullmatch(f.name) for f in d.iterdir())]
    if len(tags) != 1:
        raise CheckpointError(f"{path} has no file `latest`, and {len(tags)} tags: {tags}. Name one of them.")
    return path / tags[0]


def _matching(folder: Path, pattern: re.Pattern[str]) -> dict[int, Path]:
    """rank -> file, of all ranks from 0 on."""
    found: dict[int, Path] = {}
    for file in sorted(folder.iterdir()):
        if _EXPERTS.match(file.name):
            raise CheckpointError(f"{file} belongs to a mixture of experts, whose checkpoints cannot be read.")
        match = pattern.fullmatch(file.name)
        if match is None:
            continue
        rank = int(match["rank"] or 0)
        if int(match["mp"]) != 0 or rank in found:
            raise CheckpointError(
                f"{file} is one of several for the same rank: checkpoints of tensor-parallel runs cannot be read, and "
                "files of different runs must not be in one folder."
            )
        found[rank] = file
    if sorted(found) != list(range(len(found))) or not found:
        raise CheckpointError(
            f"{folder} has files of ranks {sorted(found)} only ({pattern.pattern}): some are missing."
        )
    return dict(sorted(found.items()))


def model_files(folder: Path) -> list[Path]:
    return list(_matching(folder, MODEL).values())


def optimizer_files(folder: Path) -> list[Path]:
    return list(_matching(folder, _OPTIMIZER).values())
