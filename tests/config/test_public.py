"""Files as people have them: what becomes of each, and that those which are right train."""

from __future__ import annotations

import warnings
from pathlib import Path
from typing import Any

import lightning.pytorch as pl
import pytest
import torch
from lightning.pytorch.demos.boring_classes import RandomDataset
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lt_zero import ZeroStrategy
from lt_zero.common.errors import ConfigError
from lt_zero.config.load import Loaded, examine
from lt_zero.core.followers import followers
from lt_zero.features import asks
from tests.support.features import needs_all_blocks, skip_without, there
from tests.support.lightning_tools import QUIET
from tests.support.matrix import only
from tests.support.paths import DATA

OWN = DATA / "configs"
PUBLIC = DATA / "ds_configs"
FILES = sorted(path for path in PUBLIC.glob("*") if path.suffix != ".tsv")

# Keys that are wrong in each file, by the beginning of its name; "" is about the whole file. The others are right.
WRONG: dict[str, set[str]] = {
    "120205690": {"int8"},
    "BarryZ001": {"disable_fused_adam"},
    "CZtheHusky": {""},  # a comma is missing
    "Fahad-Touseef": {"tensor_parallel.tp_size"},  # of deepspeed.init_inference
    "KtechB": {""},  # a Markdown fence
    "ND-SAFA": {f"zero_optimization.offload_{what}.nvme_path" for what in ("optimizer", "param")},  # a raw device
    "OptimalScale": {"deepspeed_config"},  # of accelerate
    "bigscience": {"curriculum_learning"},
    "huggingface__transformers": {"zero_optimization.reduce_bucket_size"},  # 0
    "mauryaavinash95": {"veloc_config"},
    "microsoft__DeepSpeedExamples__ds_config_fp16_tune": {"autotuning"},
    "microsoft__DeepSpeedExamples__ds_config_gpt_medium": {"data_efficiency"},
    "microsoft__DeepSpeedExamples__ds_zero_stage_2_config_curriculum": {""},  # placeholders
    "microsoft__DeepSpeedExamples__test": {"quantize_training"},
}
Z, A = "zero_optimization.", "activation_checkpointing."
# Files written here, each with an oddity of real ones: keys that are wrong, and some of those that are told.
ODD: dict[str, tuple[set[str], set[str]]] = {
    "accelerate_stage2_param_offload.json": (set(), {Z + "offload_param.device", Z + "offload_param.pin_memory"}),
    "adam_with_leftovers.json": (set(), {"optimizer.params.freeze_step", "optimizer.params.comm_backend_name"}),
    "batches_that_cannot_be.json": ({"train_batch_size"}, set()),
    "braceless.hjson": ({""}, set()),
    "compiled.json": ({"compile.deepcompile", "aio.use_gds", "gradient_compression.algorithm"}, set()),
    "deepcompile_off.json": (set(), set()),
    "everything_one_level_up.json": (
        {"cuda_visible_devices", "num_train_epochs", "dataloader_num_workers", "seed"}
        | {"optimizer.lr", "optimizer.eps"},
        set(),
    ),
    "hf_names_by_mistake.json": (set(), {"per_device_train_batch_size", "max_grad_norm"}),
    "megatron_activation.json": (
        set(),
        {Z + "contiguous_gradients", *(A + n for n in ("partition_activations", "cpu_checkpointing"))},
    ),
    "monitors_without_a_switch.json": (set(), {"tensorboard.output_path", "flops_profiler.profile_step"}),
    "one_bit_adam.json": (set(), set()),
    "placeholders.json": ({""}, set()),
    "prescaled_lamb.json": (set(), {"gradient_predivide_factor"}),
    "switched_off_blocks.json": (
        set(),
        {Z + "offload_optimizer.pin_memory", Z + "offload_optimizer.fast_init", "bf16.immediate_grad_update"}
        | {Z + "stage3_prefetch_bucket_size"},
    ),
    "tokenizer_block.json": ({"tokenizer"}, set()),
    "trailing_max_grad_norm.json": (set(), {"optimizer.params.max_grad_norm", "fp32_allreduce", Z + "cpu_offload", ""}),
    "zero_infinity_at_stage_2.yaml": (set(), {Z + "offload_param.nvme_path", "aio.block_size"}),
}
# Files with an optimizer of 1 bit, which may not be installed.
ONE_BIT = [f"microsoft__DeepSpeedExamples__{name}" for name in ("deepspeed_bsz4k_01adam", "onebit")]
ONE_BIT += ["THUDM__GLM__ds_onebit"]
if not there("one_bit"):
    WRONG |= dict.fromkeys(ONE_BIT, {"optimizer.type"})
    ODD["one_bit_adam.json"] = {"optimizer.type"}, set()
pytestmark = pytest.mark.filterwarnings("ignore")


def expected(path: Path) -> set[str]:
    return next((keys for start, keys in WRONG.items() if path.name.startswith(start)), set())


def problems(path: Path) -> tuple[set[str], Loaded | None]:
    try:
        loaded = examine(path)
    except ConfigError as error:
        return {problem.key for problem in error.problems}, None
    return {problem.key for problem in loaded.problems}, loaded


def test_all_keys_are_classified() -> None:
    assert len(FILES) == 58
    starts = [start for start in WRONG if any(path.name.startswith(start) for path in FILES)]
    assert starts == list(WRONG)


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.name[:40])
def test_status(path: Path) -> None:
    found, loaded = problems(path)
    assert found == expected(path)
    for problem in loaded.problems if loaded is not None else ():
        assert problem.mark is not None
        assert problem.mark.line is not None, "each problem has its place"
        text = path.read_text().splitlines()[problem.mark.line - 1]
        assert problem.key.split(".")[-1] in text
        assert problem.key in problem.message


class Model(pl.LightningModule):
    def __init__(self, batch: int) -> None:
        super().__init__()
        self.lr, self.batch = 1e-3, batch
        blocks = [nn.Sequential(nn.Linear(8, 8), nn.LayerNorm(8)) for _ in range(2)]
        self.net = nn.Sequential(*blocks, nn.Linear(8, 2))

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        batch = batch.to(next(self.net.parameters()).dtype)  # fp16.auto_cast=false leaves it to the module
        return self.net(batch).float().square().mean()

    def train_dataloader(self) -> DataLoader[Tensor]:
        return DataLoader(RandomDataset(8, 64 * self.batch), batch_size=self.batch)


class WithOptimizer(Model):
    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)


def train(path: Path, root: Path, *overrides: str) -> ZeroStrategy:
    """Eight steps in one process: DeepSpeed's warm-up has the rate 0 in the first two, fp16 skips some.

    The size of a step of more ranks becomes "auto".
    """
    loaded = examine(path, overrides=overrides)
    assert loaded.config is not None, loaded.problems
    if asks(loaded.config, "zero_optimization.offload_optimizer"):
        skip_without("offload")
    micro, total = loaded.config.train_micro_batch_size_per_gpu, loaded.config.train_batch_size
    steps = loaded.config.gradient_accumulation_steps or 1
    fits = total is None or micro is None or total == micro * steps
    if not fits and loaded.config.gradient_accumulation_steps is None:
        fits = total <= 8 * micro  # it is derived for one rank
    batch = micro or (total // steps if total else 4)
    auto = [] if fits else ["train_batch_size=auto"]
    strategy = ZeroStrategy(config=path, overrides=[*overrides, *auto])
    trainer = pl.Trainer(
        **{**QUIET, "devices": 1, "max_steps": 8, "strategy": strategy, "default_root_dir": root, "logger": None}
    )
    model = Model(batch) if strategy.config.optimizer is not None else WithOptimizer(batch)
    before = [p.detach().clone() for p in model.parameters()]
    trainer.fit(model)
    assert trainer.global_step == 8
    assert strategy.config.autos == frozenset()
    after = strategy.full_state_dict()
    skipped = trainer.precision_plugin.skipped_steps
    moved = any(not torch.equal(b, a) for b, a in zip(before, after.values(), strict=True))
    assert moved or skipped > 5, "weights moved unless fp16 overflowed all the time"
    assert all(torch.isfinite(value).all() for value in after.values())
    return strategy


@pytest.mark.parametrize("name", ODD)
def test_odd_files(name: str) -> None:
    wrong, told = ODD[name]
    found, loaded = problems(OWN / name)
    assert found == wrong
    if loaded is not None:
        assert told <= {notice.key for notice in loaded.notices}
        exact = name in ("switched_off_blocks.json", "prescaled_lamb.json", "deepcompile_off.json")
        assert not exact or told == {notice.key for notice in loaded.notices}, "what is switched off is no news"


@pytest.mark.parametrize(
    "name",
    [
        name
        if name in ("megatron_activation.json", "prescaled_lamb.json", "deepcompile_off.json")
        else pytest.param(name, marks=pytest.mark.slow)
        for name, (wrong, _) in ODD.items()
        if not wrong
    ],
)
def test_odd_files_train(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    strategy = train(OWN / name, tmp_path)
    kinds = [type(follower.feature).__module__ for follower in followers(strategy.engine)]
    recomputes = any("activation_checkpointing" in kind for kind in kinds)
    assert not recomputes, "no key but the mode switches recomputation on"
    if name in ("megatron_activation.json", "prescaled_lamb.json"):
        assert strategy.config.gradient_accumulation_steps == 4
    if name == "deepcompile_off.json":
        assert all(len(bucket.params) == 1 for bucket in strategy.engine.buckets)


RIGHT = [path for path in FILES if not expected(path)]


@pytest.mark.parametrize("path", only(RIGHT[::4], RIGHT), ids=lambda path: path.name[:40])
def test_right_ones_train(path: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)  # some name files to write
    monitors = ["tensorboard.enabled=false", "wandb.enabled=false"]
    strategy = train(path, tmp_path, *(monitors if "tensorboard" in path.read_text() else []))
    assert strategy.lightning_module.trainer.global_step > 0


@pytest.mark.parametrize("name", ["hf_stage2", "hf_stage3", "hf_stage2_bfloat16", "hf_stage3_bfloat16"])
def test_files_of_transformers_run_unchanged(name: str, tmp_path: Path) -> None:
    strategy = train(OWN / f"{name}.json", tmp_path)
    config = strategy.config
    assert config.zero_optimization.stage == int(name[8])
    assert config.optimizer is not None
    assert config.optimizer.params == {"lr": 1e-3, "betas": [0.9, 0.999], "eps": 1e-8, "weight_decay": 0.0}
    assert (config.train_batch_size, config.gradient_clipping) == (4, 0.0)
    if "stage3" in name:
        assert config.zero_optimization.reduce_bucket_size == 64
        assert config.zero_optimization.stage3_gather_16bit_weights_on_model_save


@needs_all_blocks()
def test_old_spellings(tmp_path: Path) -> None:
    loaded = examine(OWN / "old_spellings.json")
    assert loaded.problems == []
    told = {notice.key for notice in loaded.notices}
    z = "zero_optimization."
    for key in ("min_num_size", "prefetch_bucket_size", "offload_param", "cpu_offload", "pin_memory", "fast_init"):
        assert z + key in told
    assert {"gradient_accumulation", "gradient_clipping", "fp16.scale_window"} <= told
    config = train(OWN / "old_spellings.json", tmp_path).config
    zero = config.zero_optimization
    assert (config.gradient_accumulation_steps, config.gradient_clipping, config.fp16.loss_scale_window) == (
        2,
        1.0,
        1000,
    )
    assert (zero.offload_param.device, zero.offload_optimizer.device, zero.offload_param.pin_memory) == (
        "cpu",
        "cpu",
        True,
    )
    assert (zero.stage3_param_persistence_threshold, zero.offload_optimizer.fast_init) == (500_000_000, True)


def test_keys_that_do_nothing_are_told_together() -> None:
    zero: dict[str, Any] = {"stage": 2, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9}
    zero["offload_param"] = {"device": "none", "buffer_count": 3}
    with pytest.warns(UserWarning, match="These keys have no effect here") as seen:
        ZeroStrategy(config={"zero_optimization": zero, "aio": {"queue_depth": 4}})
    (text,) = {str(entry.message) for entry in seen}
    for key in ("stage3_max_live_parameters", "sub_group_size", "offload_param.buffer_count", "aio.queue_depth"):
        assert key in text
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        nvme = {"device": "nvme", "nvme_path": "/x", "buffer_count": 3}
        quiet = {"stage": 3, "stage3_max_live_parameters": 1e9, "sub_group_size": 1e9, "offload_optimizer": nvme}
        ZeroStrategy(config={"zero_optimization": quiet, "aio": {"queue_depth": 4}})


def test_keys_without_effect_for_one_reason_are_told_in_one_sentence() -> None:
    """Many DeepSpeed files have the keys of fp16 under bf16."""
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ZeroStrategy(stage=2, config={"bf16": {"enabled": True, "loss_scale": 0, "hysteresis": 2}})
    (text,) = {str(entry.message) for entry in seen}
    assert text.startswith("bf16.loss_scale, bf16.hysteresis have no effect here: bf16 has the range of fp32")


def test_a_notice_is_one_warning() -> None:
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        ZeroStrategy(config={"zero_optimization": {"stage": 2, "cpu_offload": True, "allgather_partitions": True}})
    texts = [str(entry.message) for entry in seen]
    assert len([text for text in texts if "cpu_offload" in text]) == 1
    assert any("allgather_partitions has no effect here: " in text for text in texts)
    assert all(entry.filename == __file__ for entry in seen), "warnings point at the user's line"
