"""``lt_zero.inference``: weights only, sharded, in memory or in files, read from a file."""

from __future__ import annotations

import logging
import time
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn

import lt_zero
from lt_zero.checkpoint.open import open_source
from lt_zero.checkpoint.source import CheckpointSource
from lt_zero.common.errors import CheckpointError
from lt_zero.core.engine.compute_copy import State
from lt_zero.core.engine.full_values import full_parameters
from lt_zero.core.engine.guard import owner_of
from lt_zero.core.stores.pinned import rounded
from lt_zero.kernels.codecs import INT8
from lt_zero.planning.check import RESTING, measured
from lt_zero.planning.forecast import GATHERED, OFFLOAD, WEIGHTS
from tests.support.features import needs, skip_without
from tests.support.lightning_tools import GPT, quick, single_trainer
from tests.support.models import Net, tokens
from tests.support.pool import Pool

TRAINS = {"optimizer": {"type": "AdamW", "params": {"lr": 1e-3}}, "gradient_clipping": 1.0, "fused_step": True}


def _config(folder: str | None = None, **keys: Any) -> dict[str, Any]:
    zero: dict[str, Any] = {"stage": 3, "stage3_param_persistence_threshold": 0}
    if folder is not None:
        zero["offload_param"] = {"device": "nvme", "nvme_path": folder}
    return {"zero_optimization": zero, **keys}


def _net() -> Net:
    torch.manual_seed(0)
    return Net()


def _exact(file: str, folder: str | None, dtype: torch.dtype) -> dict[str, int]:
    with torch.no_grad():
        want = _net().to(dtype)(tokens(0, 0, 0))
        with lt_zero.empty_weights():
            model = _net()
        assert all(parameter.is_meta for parameter in model.parameters())
        low = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
        assert lt_zero.inference(model, _config(folder, **TRAINS, **low), weights=file) is model
        engine: Any = owner_of(next(model.parameters()))
        for _ in range(3):
            assert torch.equal(model(tokens(0, 0, 0)), want)
    assert not model.training
    assert not any(bucket.wants_grad or bucket.weights.trains for bucket in engine.buckets)
    found = measured(engine)
    found["model"] = sum(bucket.layout.numel * dtype.itemsize for bucket in engine.buckets)
    return found


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("files", [False, True])
def test_weights_rest_in_their_dtype_and_nothing_else_does(
    pool: Pool, tmp_path: Path, files: bool, dtype: torch.dtype
) -> None:
    if files:
        skip_without("offload")
    torch.save(_net().state_dict(), tmp_path / "net.pt")
    for found in pool.run(2, _exact, str(tmp_path / "net.pt"), str(tmp_path / "rest") if files else None, dtype):
        shard = found.pop("model") // 2
        if files:
            assert set(found) == {OFFLOAD, RESTING}, "buffers, and files of blocks"
            assert found[RESTING] >= shard
        else:
            assert found == {WEIGHTS: shard}
        assert GATHERED not in found


def test_keys_of_training_are_ignored_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lt_zero")
    lt_zero.inference(_net(), _config(**TRAINS))
    told = [line for line in caplog.messages if "ignored" in line]
    assert told == ["Inference has no use for optimizer, gradient_clipping, fused_step: ignored."]


@needs("compression")
def test_a_predict_ignores_them_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "lt_zero")
    config = _config(gradient_clipping=1.0, gradient_compression={"algorithm": "topk"})
    trainer = single_trainer(strategy=lt_zero.ZeroStrategy(config=config))
    trainer.predict(GPT())
    told = [line for line in caplog.messages if "ignored" in line]
    assert told == ["Inference has no use for gradient_clipping, gradient_compression: ignored."]
    assert trainer.optimizers == []


def test_weights_of_another_model(tmp_path: Path) -> None:
    state = _net().state_dict()
    state["blocks.0.up.weight"] = torch.zeros(3, 3)
    del state["scale"]
    torch.save(state, tmp_path / "net.pt")
    model = _net()
    with pytest.raises(CheckpointError, match=r"blocks\.0\.up\.weight has the shape \[3, 3\].*; scale is missing"):
        lt_zero.inference(model, _config(), weights=tmp_path / "net.pt")
    assert owner_of(model.scale) is None, "the module is unchanged"


def test_buffers_of_another_model(tmp_path: Path) -> None:
    norm = nn.BatchNorm1d(4)
    state = {**norm.state_dict(), "running_var": torch.ones(5)}
    del state["running_mean"]
    torch.save(state, tmp_path / "norm.pt")
    with pytest.raises(CheckpointError, match=r"running_mean is missing; running_var has the shape \[5\]"):
        lt_zero.inference(norm, _config(), weights=tmp_path / "norm.pt")
    assert norm.running_var is not None
    assert norm.running_var.shape == (4,), "the module is unchanged"


def _reads_nothing(folder: str) -> str:
    if dist.get_rank() == 0:
        torch.save(_net().state_dict(), f"{folder}/0.pt")
    with pytest.raises(CheckpointError) as caught:
        lt_zero.inference(_net(), _config(), weights=f"{folder}/{dist.get_rank()}.pt")
    return str(caught.value)


def test_weights_that_one_rank_does_not_find(pool: Pool, tmp_path: Path) -> None:
    for told in pool.run(2, _reads_nothing, str(tmp_path)):
        assert f"There is no checkpoint at {tmp_path}/1.pt" in told


def _cannot_read(folder: str, file: str) -> str:
    """The disk of the last rank fails while the others read on."""

    def read(source: CheckpointSource, name: str) -> Tensor:
        if name.startswith("blocks.1") and dist.get_rank() == dist.get_world_size() - 1:
            raise OSError(5, "Input/output error", file)
        return plain(source, name)

    kind: Any = type(open_source(file))
    plain = kind.read
    with quick(), mock.patch.object(kind, "read", read), pytest.raises((OSError, RuntimeError)) as caught:
        lt_zero.inference(_net(), _config(), weights=file)
    (Path(folder) / f"left.{dist.get_rank()}").touch()
    until = time.monotonic() + 60
    while len(list(Path(folder).glob("left.*"))) < dist.get_world_size() and time.monotonic() < until:
        time.sleep(0.05)
    return str(caught.value)


@pytest.mark.parametrize("env", [{}, {"LT_ZERO_SHARED_MEMORY": "0"}], ids=["fence", "sockets"])
def test_weights_that_one_rank_cannot_read(pool: Pool, tmp_path: Path, env: dict[str, str]) -> None:
    torch.save(_net().state_dict(), tmp_path / "net.pt")
    first, second = pool.run(2, _cannot_read, str(tmp_path), str(tmp_path / "net.pt"), env=env)
    assert "Rank 1 ended with OSError: [Errno 5] Input/output error: " in first
    assert second.startswith("[Errno 5]")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_buffers_are_where_it_computes() -> None:
    norm, batch = nn.BatchNorm1d(4), torch.ones(2, 4)
    want = norm.eval()(batch)
    found = lt_zero.inference(norm, _config(), device=torch.device("cuda", 0))(batch.cuda())
    torch.testing.assert_close(found.cpu(), want.detach())


def test_a_model_is_sharded_once() -> None:
    model = lt_zero.inference(_net(), _config())
    with pytest.raises(ValueError, match=r"Parameter '.*' of Net is sharded already, over 1 ranks. Use the module"):
        lt_zero.inference(model, _config())


@needs("offload")
def test_a_model_larger_than_the_allowed_memory_rests_in_files(tmp_path: Path) -> None:
    wide = [nn.Linear(256, 256, bias=False) for _ in range(16)]
    x = torch.randn(2, 256)
    with torch.no_grad():
        want = nn.Sequential(*wide)(x)
        torch.save(nn.Sequential(*wide).state_dict(), tmp_path / "net.pt")
        allowed = {"max_cpu_gb": 16 * 256 * 256 * 4 / 2 / 1e9}  # half of the weights
        with lt_zero.empty_weights():
            model = nn.Sequential(*(nn.Linear(256, 256, bias=False) for _ in range(16)))
        with pytest.raises(lt_zero.NotEnoughMemory, match="max_cpu_gb"):
            lt_zero.inference(model, _config(**allowed), weights=tmp_path / "net.pt")
        lt_zero.inference(model, _config(str(tmp_path / "rest"), **allowed), weights=tmp_path / "net.pt")
        assert torch.equal(model(x), want)
        assert torch.equal(model(x), want)


def _quantized(file: str, folder: str | None, dtype: torch.dtype) -> tuple[list[float], dict[str, int], int]:
    """How far weights and outputs are from the exact ones, bytes of what is kept, elements."""
    low = {"bf16": {"enabled": True}} if dtype == torch.bfloat16 else {}
    with torch.no_grad(), lt_zero.empty_weights():
        model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    lt_zero.inference(model, _config(folder, quantize=8, **low), weights=file)
    exact: dict[str, Any] = torch.load(file)
    engine: Any = owner_of(next(model.parameters()))
    seen, x = list[float](), torch.randn(8, 64, generator=torch.Generator().manual_seed(1)).to(dtype)
    with torch.no_grad():
        want = x
        for value in exact.values():
            want = want @ value.to(dtype).T
        for _ in range(3):  # the second time units are prefetched
            got = model(x)
        seen.append(float((got - want).norm() / want.norm()))
        kept = measured(engine)
        full = {name: value.clone() for name, _, value in full_parameters(engine)}
        for name, parameter in model.named_parameters():
            with lt_zero.gathered(parameter):
                assert torch.equal(parameter, full[name].to(dtype)), "what is gathered is what is exported"
        steps = [(full[name].float() - exact[name]).abs().max() / exact[name].abs().max() * 127 for name in exact]
        seen.append(float(max(steps)))
        with lt_zero.gathered(model, write=True):
            for parameter in model.parameters():
                parameter.fill_(0.5)
        assert torch.equal(model(torch.ones(1, 64, dtype=dtype)), torch.full((1, 64), 32.0**4, dtype=dtype))
        assert measured(engine) == kept
    return seen, kept, sum(bucket.layout.numel for bucket in engine.buckets)


@needs("quantize")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("world", "files"), [(1, False), (2, False), (2, True)])
def test_weights_rest_in_8_bits(pool: Pool, tmp_path: Path, world: int, files: bool, dtype: torch.dtype) -> None:
    if files:
        skip_without("offload")
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(64, 64, bias=False) for _ in range(4)))
    torch.save(model.state_dict(), tmp_path / "net.pt")
    folder = str(tmp_path / "rest") if files else None
    for (outputs, steps), kept, numel in pool.run(world, _quantized, str(tmp_path / "net.pt"), folder, dtype):
        assert 1e-4 < outputs < 0.03
        assert 0.1 < steps < 0.51, "half a step: weights are encoded as they were given, in fp32"
        if not files:
            assert kept == {WEIGHTS: INT8.nbytes(numel // world // 4) * 4}, "a byte and a 64th of an element"
        else:
            assert kept[RESTING] == rounded(INT8.nbytes(numel // world // 4)) * 4


@needs("quantize")
def test_weights_that_rest_in_8_bits_are_not_trained() -> None:
    model = _net()
    lt_zero.inference(model, _config(quantize=8))
    model.requires_grad_(True)
    with pytest.raises(lt_zero.ConfigError, match="rests in codes of few bits"):
        lt_zero.ShardedOptimizer(owner_of(model.scale), torch.optim.SGD(model.parameters(), lr=1.0))  # type: ignore[arg-type]


class Turns(nn.Module):
    """An encoder and a decoder that share an embedding, and are called one by one."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(16, 8)
        self.encoder = nn.Sequential(self.embedding, *(nn.Linear(8, 8) for _ in range(2)))
        self.decoder = nn.Sequential(*(nn.Linear(8, 8) for _ in range(3)), nn.Linear(8, 16, bias=False))
        self.decoder[-1].weight = self.embedding.weight

    def generate(self, tokens: Tensor, length: int) -> Tensor:
        x = self.encoder(tokens)
        for _ in range(length):
            x = self.embedding(self.decoder(x).argmax(-1))
        return x


def _in_turns() -> list[list[str]]:
    torch.manual_seed(0)
    model = Turns()
    tokens = torch.arange(4)
    with torch.no_grad():
        want = [model.generate(tokens, length) for length in range(4)]
    lt_zero.inference(model, _config())
    engine: Any = owner_of(model.embedding.weight)
    ahead: list[list[str]] = []
    model.decoder[0].register_forward_hook(
        lambda *_: ahead.append([b.name for b in engine.buckets if b.state is State.GATHERING])
    )
    with torch.no_grad():
        for lengths in ((3, 1), (0, 2), (2, 3)):
            with lt_zero.synced(model):
                length = lengths[dist.get_rank()]
                assert torch.equal(model.generate(tokens, length), want[length])
        ahead.clear()
        with engine.forward_scope():  # as in a ``predict_step``
            assert torch.equal(model.generate(tokens, 3), want[3])
    return ahead


def test_parts_that_are_called_by_themselves(pool: Pool) -> None:
    """Shared weights are there, and each part has an order of its own, in which weights are prefetched."""
    for ahead in pool.run(2, _in_turns, env={"LT_ZERO_SHARED_MEMORY": "0"}):
        assert ahead == [[], ["decoder.1"], ["decoder.1"]]


def _transformer(folder: str, rest: str | None) -> None:
    transformers = pytest.importorskip("transformers")
    shape = {"vocab_size": 64, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 3}
    heads = {"num_attention_heads": 2, "num_key_value_heads": 1, "bos_token_id": 1, "eos_token_id": 2}
    config = transformers.LlamaConfig(**shape, **heads)
    torch.manual_seed(0)
    plain = transformers.LlamaForCausalLM(config).eval()
    if dist.get_rank() == 0:
        plain.save_pretrained(folder)
    dist.barrier()
    with lt_zero.empty_weights():
        model = transformers.LlamaForCausalLM(config)
    lt_zero.inference(model, _config(rest), weights=folder)
    prompt = torch.arange(3, 8)[None]
    with lt_zero.synced(model):
        for length in ((6, 2), (3,), ())[dist.get_rank()]:
            options = {"max_new_tokens": length, "do_sample": False, "eos_token_id": None}
            assert torch.equal(model.generate(prompt, **options), plain.generate(prompt, **options))


@pytest.mark.parametrize("files", [False, True])
def test_generation_with_transformers(pool: Pool, tmp_path: Path, files: bool) -> None:
    pytest.importorskip("transformers")
    pool.run(3, _transformer, str(tmp_path / "llama"), str(tmp_path / "rest") if files else None)
