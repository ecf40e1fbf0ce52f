"""Exports that merge low-rank adapters: by hand, against peft, and what cannot be merged."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from lt_zero.checkpoint.export import export
from lt_zero.checkpoint.lora import LoraScaling, MergedSource
from lt_zero.cli import app
from lt_zero.common.errors import CheckpointError
from tests.support.export_tools import Memory


def adapted(module: str, weight: Tensor, rank: int = 3, adapter: str = "default", transposed: bool = False) -> Any:
    rows, columns = weight.T.shape if transposed else weight.shape
    return {
        f"{module}.base_layer.weight": weight,
        f"{module}.lora_A.{adapter}.weight": torch.randn(rank, columns),
        f"{module}.lora_B.{adapter}.weight": torch.randn(rows, rank),
    }


def test_weights_are_merged_under_the_names_of_the_model(tmp_path: Path) -> None:
    torch.manual_seed(0)
    prefix = "net.base_model.model."
    square, turned = torch.randn(6, 6), torch.randn(6, 9)
    tensors: dict[str, Tensor] = {
        **adapted(f"{prefix}a", square),
        **adapted(f"{prefix}turned", turned, transposed=True),  # Conv1D of GPT-2
        f"{prefix}a.base_layer.bias": torch.randn(6),
        f"{prefix}table.base_layer.weight": torch.randn(7, 4),
        f"{prefix}table.lora_embedding_A.default": torch.randn(2, 7),
        f"{prefix}table.lora_embedding_B.default": torch.randn(4, 2),
        f"{prefix}head.original_module.weight": torch.zeros(2, 2),
        f"{prefix}head.modules_to_save.default.weight": torch.ones(2, 2),
        f"{prefix}low.weight": torch.randn(3, 5).bfloat16(),  # peft before 0.4 has no base_layer
        f"{prefix}low.lora_A.default.weight": torch.randn(2, 5),
        f"{prefix}low.lora_B.default.weight": torch.randn(3, 2),
    }
    config = {"peft_type": "LORA", "lora_alpha": 12, "alpha_pattern": {"low": 5}, "use_rslora": True}
    (tmp_path / "adapter_config.json").write_text(json.dumps(config))
    out = tmp_path / "merged.pt"
    export(Memory(tensors), out, "fp32", strip_prefix="net.", merge_lora=tmp_path)
    got = torch.load(out)

    def product(module: str, alpha: float, rank: int) -> Tensor:
        a, b = (tensors[f"{prefix}{module}.lora_{side}.default.weight"] for side in "AB")
        return b @ a * (alpha / math.sqrt(rank))

    want = {
        "a.weight": square + product("a", 12, 3),
        "turned.weight": turned + product("turned", 12, 3).T,
        "a.bias": tensors[f"{prefix}a.base_layer.bias"],
        "table.weight": tensors[f"{prefix}table.base_layer.weight"]
        + (tensors[f"{prefix}table.lora_embedding_B.default"] @ tensors[f"{prefix}table.lora_embedding_A.default"]).T
        * (12 / math.sqrt(2)),
        "head.weight": torch.ones(2, 2),
        "low.weight": (tensors[f"{prefix}low.weight"].float() + product("low", 5, 2)).bfloat16().float(),
    }
    assert got.keys() == want.keys()
    for name in want:
        assert torch.equal(got[name], want[name]), name


def test_a_square_weight_is_transposed_if_the_configuration_says_so() -> None:
    tensors = adapted("a", torch.randn(4, 4), 2, "mine")
    product = tensors["a.lora_B.mine.weight"] @ tensors["a.lora_A.mine.weight"] * (3 / 2)
    for turned in (False, True):
        got = MergedSource(Memory(tensors), LoraScaling(3.0, transposed=turned)).read("a.weight")
        assert torch.equal(got, tensors["a.base_layer.weight"] + (product.T if turned else product))


def test_ties_of_weights_without_adapters_stay() -> None:
    tensors = adapted("a", torch.randn(4, 4))
    table = torch.randn(3, 3)
    tensors |= {"embed.weight": table, "head.weight": table, "b.weight": tensors["a.base_layer.weight"]}
    source = Memory(tensors, {"head.weight": "embed.weight", "b.weight": "a.base_layer.weight"})
    merged = MergedSource(source, LoraScaling(1.0))
    assert merged.aliases == {"head.weight": "embed.weight"}
    assert torch.equal(merged.read("b.weight"), tensors["b.weight"]), "its module has no adapter"


def test_without_a_configuration_a_square_weight_is_as_the_others_are() -> None:
    """GPT-2's Conv1D: c_attn is not square, c_proj is."""
    own = {"mine.base_layer.weight": torch.ones(2)}  # no wrapper of peft
    square = adapted("c_proj", torch.randn(4, 4))
    product = square["c_proj.lora_B.default.weight"] @ square["c_proj.lora_A.default.weight"] / 3
    for turned in (False, True):
        other = adapted("c_attn", torch.randn(4, 12), transposed=turned)
        merged = MergedSource(Memory(square | other | own), LoraScaling(1.0))
        want = square["c_proj.base_layer.weight"] + (product.T if turned else product)
        torch.testing.assert_close(merged.read("c_proj.weight"), want)
        assert set(merged.weights) == {"c_proj.weight", "c_attn.weight", "mine.base_layer.weight"}


WHOLE = adapted("a", torch.zeros(4, 5))


@pytest.mark.parametrize(
    ("tensors", "text"),
    [
        ({"a.weight": torch.zeros(2, 2)}, "has no adapters"),
        (WHOLE | adapted("b", torch.zeros(2, 2), adapter="other"), "several adapters: default, other"),
        ({k: v for k, v in WHOLE.items() if "base" not in k}, "lacks the weight .*save_frozen=false"),
        ({k: v for k, v in WHOLE.items() if "lora_B" not in k}, "has lora_A and not the other"),
        (WHOLE | {"a.base_layer.weight": torch.zeros(4, 6)}, r"\[4, 3\] and \[3, 5\], which do not fit"),
        (WHOLE | {"a.lora_magnitude_vector.default.weight": torch.zeros(4)}, "DoRA"),
        (WHOLE | {"a.lora_B.default.bias": torch.zeros(4)}, "neither of its two factors"),
        (WHOLE | {"a.weight": torch.zeros(4, 5)}, "a.base_layer.weight and a.weight would both be a.weight"),
        (WHOLE | {"a.base_layer.weight": torch.zeros(4, 5, dtype=torch.int8)}, "is of torch.int8"),
        (WHOLE | {"e.token_adapter.trainable_tokens_delta.default": torch.zeros(1, 5)}, "trained tokens"),
        (
            WHOLE | adapted("b", torch.zeros(5, 4), transposed=True) | adapted("c", torch.zeros(4, 4)),
            r"c\.base_layer\.weight is square.*adapter_config\.json",
        ),
    ],
)
def test_what_cannot_be_merged_is_told(tensors: dict[str, Tensor], text: str) -> None:
    with pytest.raises(CheckpointError, match=text):
        MergedSource(Memory(tensors), LoraScaling(1.0))


@pytest.mark.parametrize(
    ("content", "text"),
    [
        ({"lora_alpha": math.nan}, "lora_alpha is nan, which is no finite number"),
        ({"lora_alpha": math.inf}, "lora_alpha is inf"),
        ({"lora_alpha": "-Infinity"}, "no finite number"),
        ({"lora_alpha": True}, "lora_alpha is True"),
        ({"lora_alpha": 1e308}, r"The factor of a is 3\.33333e\+307, which is no number of fp32: lora_alpha=1e\+308"),
        ({"lora_alpha": 1e308, "use_rslora": True}, "no number of fp32"),
        ({"lora_alpha": 2, "alpha_pattern": {"a": math.nan}}, r"alpha_pattern\['a'\] is nan"),
        ({"lora_alpha": 2, "alpha_pattern": {"a": -1e308}}, r"The factor of a is -3\.3"),
        ({"lora_alpha": 2, "alpha_pattern": {"(": 1}}, r"alpha_pattern: the pattern '\(' cannot be used"),
        ({"lora_alpha": 2, "r": 0}, "r is 0, which is no positive integer"),
        ({"lora_alpha": 2, "r": -3}, "r is -3"),
        ({"lora_alpha": 2, "rank_pattern": {"a": math.inf}}, r"rank_pattern\['a'\] is inf"),
        ({"lora_alpha": 2, "r": 4}, "The factors of a have rank 3, and adapter_config.json says 4"),
        ({"lora_alpha": 2, "r": 3, "rank_pattern": {"a": 8}}, "rank 3, and adapter_config.json says 8"),
        ({"lora_alpha": 3e38}, r"a.weight is not finite after merging: a.base_layer.weight is at most 0, a.lora_A"),
    ],
    ids=str,
)
def test_numbers_that_make_no_weights_are_refused(tmp_path: Path, content: dict[str, Any], text: str) -> None:
    """They came out as NaN and infinity, with exit status 0; nothing is written now."""
    factors = {name: torch.full_like(value, 2.0) if "lora" in name else value for name, value in WHOLE.items()}
    (tmp_path / "adapter_config.json").write_text(json.dumps(content))
    with pytest.raises(CheckpointError, match=text):
        export(Memory(factors), tmp_path / "out.pt", "fp32", merge_lora=tmp_path)
    assert not (tmp_path / "out.pt").exists()


def test_a_merged_tensor_has_to_be_finite_in_its_dtype() -> None:
    for base, factor, text in (
        (torch.full((4, 5), 6e4, dtype=torch.float16), 100.0, "a.base_layer.weight is at most 60000"),
        (torch.full((4, 5), math.nan), 1.0, "a.base_layer.weight is not finite itself"),
    ):
        tensors = {**adapted("a", base), "a.lora_A.default.weight": torch.full((3, 5), factor)}
        tensors["a.lora_B.default.weight"] = torch.full((4, 3), 100.0)
        with pytest.raises(CheckpointError, match=f"a.weight is not finite after merging: {text}"):
            MergedSource(Memory(tensors), LoraScaling(3.0, rank=3)).read("a.weight")
    empty = {**adapted("a", torch.zeros(4, 5), rank=0)}
    with pytest.raises(CheckpointError, match="rank 0: there is nothing to merge"):
        MergedSource(Memory(empty), LoraScaling(3.0))


def test_the_command_and_its_errors(tmp_path: Path) -> None:
    torch.save(WHOLE, tmp_path / "saved.pt")
    (tmp_path / "dora.json").write_text(json.dumps({"lora_alpha": 2, "use_dora": True}))
    runner, out = CliRunner(), tmp_path / "out.safetensors"
    for value, code, text in (
        ("16", 0, "out.safetensors"),
        ("missing.json", 1, "merge_lora='missing.json'"),
        (str(tmp_path / "dora.json"), 1, "describes DoRA"),
        ("inf", 1, "lora_alpha must be finite"),
    ):
        found = runner.invoke(app, ["export", str(tmp_path / "saved.pt"), str(out), "--merge-lora", value])
        assert (found.exit_code, text in found.output) == (code, True), found.output
    with pytest.raises(ValueError, match="merge_lora cannot be combined with training_state"):
        export(Memory(WHOLE), tmp_path / "x.ckpt", "fp32", training_state=True, merge_lora=1)


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(11, 6), nn.Linear(6, 9), nn.Linear(9, 6)
        self.head = nn.Linear(6, 11)

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.down(self.up(self.table(ids))))


@pytest.mark.parametrize("rslora", [False, True])
def test_it_is_what_peft_merges(tmp_path: Path, rslora: bool) -> None:
    peft = pytest.importorskip("peft")
    torch.manual_seed(0)
    config = peft.LoraConfig(
        r=4,
        lora_alpha=10,
        target_modules=["table", "up", "down"],
        modules_to_save=["head"],
        alpha_pattern={"up": 3},
        rank_pattern={"down": 2},
        use_rslora=rslora,
        init_lora_weights=False,
    )
    model = peft.get_peft_model(Small(), config)
    torch.save(model.state_dict(), tmp_path / "saved.pt")
    model.save_pretrained(tmp_path / "adapter")
    export(tmp_path / "saved.pt", tmp_path / "out.pt", "fp32", merge_lora=tmp_path / "adapter")
    got, want = torch.load(tmp_path / "out.pt"), model.merge_and_unload().state_dict()
    assert got.keys() == want.keys()
    for name, value in want.items():
        assert torch.equal(got[name], value), name
