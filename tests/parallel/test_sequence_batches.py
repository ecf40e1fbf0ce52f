"""What a rank gets of a batch whose sequences are cut: joined, the parts are what one process has."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from lt_zero.common.errors import ConfigError
from lt_zero.parallel import cut_batch, cut_sequence, from_zigzag
from lt_zero.parallel.sequence.batches import Takes, cut_entries, last_layout
from lt_zero.parallel.sequence.huggingface import whole_mask
from tests.support.happens_before import places
from tests.support.sequences import LENGTH, as_rank, batch_of, parts, whole
from tests.support.simulated_device import machine

MODEL = Takes(shifts=True, masks=True, causal=True, padding=7)
BIDIRECTIONAL = Takes(shifts=None, masks=True, causal=False)


def joined(found: list[Any], key: str) -> Tensor:
    return torch.cat([batch[key] for batch, _ in found], 1)


@pytest.mark.parametrize("size", [2, 3])
def test_labels_are_shifted_and_positions_made_before_the_cut(size: int) -> None:
    batch = {**batch_of(0), "ids_of_samples": torch.arange(2), "weights": None, "name": "a"}
    found = parts(batch, size)
    for key, value in whole(batch_of(0)).items():
        assert torch.equal(joined(found, key), value), key
    for part, _ in found:
        assert torch.equal(part["ids_of_samples"], torch.arange(2))
        assert part["name"] == "a"
        assert "labels" not in part, "they would be shifted twice"
        with pytest.raises(KeyError, match=r"labels were shifted before.*batch\['shift_labels'\]"):
            part["labels"]
    assert set(batch) == {"input_ids", "labels", "ids_of_samples", "weights", "name"}, "the batch itself is unchanged"


def test_zigzag_order() -> None:
    found = parts(batch_of(0, 8), 2, method="gather", zigzag=True)
    for key, value in whole(batch_of(0, 8)).items():
        assert torch.equal(from_zigzag(joined(found, key), 1, 2), value), key
    assert found[0][0]["position_ids"][0].tolist() == [0, 1, 6, 7]


def test_rows_are_padded_where_padding_is_not_seen() -> None:
    batch = batch_of(0, 11)
    found = parts(batch, 2, takes=MODEL)
    assert joined(found, "input_ids")[:, 11].tolist() == [7, 7]
    assert joined(found, "shift_labels")[:, 10:].eq(-100).all()
    assert joined(found, "labels")[:, 11].tolist() == [-100, -100], "transformers computes a loss if there are labels"
    assert joined(found, "position_ids")[0].tolist() == list(range(12))
    assert [layout.padded for _, layout in found] == [False, False], "later tokens are not seen"
    mask = torch.ones(2, 11, dtype=torch.int64)
    mask[0, :3] = 0
    for part, layout in parts({**batch, "attention_mask": mask}, 2, takes=MODEL):
        assert part["attention_mask"].shape == (2, 12), "it stays whole"
        assert part["attention_mask"][:, 11].tolist() == [0, 0]
        assert layout.padded
    for part, layout in parts(batch, 2, takes=BIDIRECTIONAL):
        assert part["attention_mask"].sum(1).tolist() == [11, 11]
        assert layout.padded
        assert layout.length == 12


def test_sequences_in_a_row_are_told_apart() -> None:
    batch = {**batch_of(0), "position_ids": torch.cat([torch.arange(5), torch.arange(7)]).expand(2, -1)}
    for part, layout in parts(batch, 2, takes=MODEL):
        assert layout.sequences[0].tolist() == [0] * 5 + [1] * 7
        assert part["position_ids"].shape == (2, 6)
    with pytest.raises(ConfigError, match=r"rows hold several sequences.*attention_mask of whole rows"):
        parts(batch, 2)
    square = torch.ones(2, 1, LENGTH, LENGTH, dtype=torch.bool)
    for part, _ in parts({**batch, "attention_mask": square}, 2):
        assert part["attention_mask"] is square


def test_masks_know_sequences_on_the_device_where_a_batch_was_cut_on_the_host() -> None:
    """As loaders of Fabric give it."""
    found: list[Tensor] = []

    def mask(**given: Any) -> None:
        found.append(inspect.getclosurevars(given["mask_function"]).nonlocals["sequences"])

    with machine() as order, as_rank(0, 2) as ranks, places(order):
        group: Any = ranks.group
        group.device = torch.device("cpu")  # the simulated device
        positions = torch.tensor([[0, 1, 2, 0, 1, 2, 3, 4]])
        cut_entries({"input_ids": torch.zeros(1, 8), "position_ids": positions}, ranks, MODEL)
        whole_mask("sdpa", mask, q_length=4, kv_length=4, mask_function=lambda *_: True)
        layout = last_layout(ranks)
        assert layout is not None
        assert [order.is_host(sequences) for sequences in (layout.sequences, *found)] == [True, False]
    assert found[0].tolist() == [[0, 0, 0, 1, 1, 1, 1, 1]]


UNKNOWN: list[tuple[Any, str]] = [
    (torch.zeros(2, 12), r"a batch of Tensor has no names.*Define Hooked.sequence_batch"),
    ({"x": torch.zeros(2, 12)}, r"a batch with 'x' has no tokens \(input_ids\).*sequence_batch"),
    ({**batch_of(0), "scores": torch.zeros(2, 12)}, r"'scores' of shape \[2, 12\] may have a value for each token"),
    ({**batch_of(0), "labels": torch.zeros(2, 9)}, r"'labels' of shape \[2, 9\] is not of the 12 tokens"),
    ({**batch_of(0), "cu_seq_lens_q": torch.tensor([0, 5, 24])}, r"'cu_seq_lens_q' describes whole rows"),
    (batch_of(0, 11), r"a row has 11 tokens, which 2 ranks cannot share equally\. Use a multiple of 2.*attention_mask"),
]


class Hooked(nn.Module):
    """Says how its batches are cut if ``hook`` does."""

    def __init__(self, hook: Any = None) -> None:
        super().__init__()
        if hook is not None:
            self.sequence_batch = hook


@pytest.mark.parametrize(("batch", "text"), UNKNOWN)
def test_what_cannot_be_cut_is_named(batch: Any, text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        parts(batch, 2, Hooked())


def test_a_model_says_how_its_batches_are_cut() -> None:
    frames = torch.arange(2 * 3 * 8).view(2, 3, 8)
    dims = parts({"frames": frames, "kind": torch.zeros(2)}, 2, Hooked(lambda batch: {"frames": 2}))
    assert torch.equal(torch.cat([part["frames"] for part, _ in dims], 2), frames)
    own = parts(frames, 2, Hooked(lambda batch: (cut_sequence(batch, -1), 1)))
    assert torch.equal(torch.cat([part[0] for part, _ in own], 2), frames)
    with pytest.raises(ConfigError, match="returned dimensions, but got no tensor 'y'"):
        parts({"frames": frames}, 2, Hooked(lambda batch: {"y": 1}))
    with pytest.raises(ConfigError, match=r"\[2, 3, 8\] has 3 tokens, which 2 ranks cannot share"):
        parts({"frames": frames}, 2, Hooked(lambda batch: {"frames": 1}))


def test_without_such_a_run_nothing_is_cut() -> None:
    batch = batch_of(0)
    assert cut_batch(batch) is batch
    assert cut_sequence(batch["input_ids"]) is batch["input_ids"]
    with as_rank(1, 2):
        assert cut_sequence(batch["input_ids"]).data_ptr() != batch["input_ids"].data_ptr(), "the whole can be freed"
        assert torch.equal(cut_batch(batch)["input_ids"], batch["input_ids"][:, 6:])
