"""The peers of benchmarks/nodes.py train alike, and send what their algorithms have to; its command writes a table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
from nodes import MODES, PEERS, batches, measure, set_up

from tests.support.features import needs
from tests.support.nodes import NodePool
from tests.support.paths import ROOT

pytestmark = [pytest.mark.nodes, pytest.mark.slow, needs("compression", "one_bit", "zero_plus_plus")]
DEPTH, WIDTH = 1, 64
GRADIENTS = 4 * (4096 * WIDTH * 2)  # bytes, of the embedding and the head: almost all

ONE_BIT = {name for name, config in MODES.items() if "optimizer" in config}  # with another learning rate
COMPRESSED = ONE_BIT | {name for name, config in MODES.items() if "gradient_compression" in config}
QUANTIZED = {name for name in MODES if "ZeRO++" in name}
Measured = dict[str, list[dict[str, float]]]


def train(peer: str) -> dict[str, float]:
    """The second measurement, over four steps of batches that were seen before."""
    trained, data = set_up(peer, DEPTH, WIDTH), batches(int(os.environ["RANK"]))
    measure(trained, data, 2)
    return measure(trained, data, 4)


@pytest.fixture(scope="module")
def measured(node_pool: NodePool) -> Measured:
    """Per peer the answers by rank."""
    return {peer: node_pool.run(train, peer) for peer in PEERS}


def test_all_peers_train_alike(measured: Measured) -> None:
    expected = measured["DDP"][0]["loss"]
    lossy = {"DDP, bf16_compress": 1e-3, "DDP, PowerSGD of rank 2": 0.1, **dict.fromkeys(COMPRESSED | QUANTIZED, 0.3)}
    lossy |= dict.fromkeys(ONE_BIT, 1.0)
    for peer, answers in measured.items():
        assert answers[0]["loss"] == pytest.approx(expected, abs=lossy.get(peer, 1e-5)), peer


def test_bytes_between_nodes(measured: Measured) -> None:
    """In units of the gradients' bytes. An all-reduce on a ring of four takes 2 * 3/4 past each border of a node."""
    sent = {peer: max(answer["sent"] for answer in answers) / GRADIENTS for peer, answers in measured.items()}
    assert sent["DDP"] == pytest.approx(1.5, rel=0.2)
    assert sent["DDP, bf16_compress"] == pytest.approx(0.75, rel=0.2)
    assert sent["DDP, PowerSGD of rank 2"] < 0.2
    assert sent["HSDP (FSDP2, replicated over nodes)"] == pytest.approx(1.0, rel=0.2)
    for peer in QUANTIZED:  # half of the sums in 4 bits, half of the weights in 8, scales and flags
        assert 0.1875 < sent[peer] < 0.3, peer
    for peer in MODES.keys() - COMPRESSED - QUANTIZED:
        assert sent[peer] > 1.0, peer  # the least: half of the sums in one direction, half of the weights in the other
    for peer in COMPRESSED:
        whole = 0.0 if "stage 0" in peer else 0.5  # of the weights
        assert whole < sent[peer] < whole + 0.25, peer


def test_command_writes_a_table(tmp_path: Path) -> None:
    command = [sys.executable, "benchmarks/nodes.py", "--quick", "--slow", "1:500", "--peers", "DDP; lt_zero stage 2"]
    subprocess.run([*command, "--out", str(tmp_path / "nodes.md")], cwd=ROOT, check=True)
    text = (tmp_path / "nodes.md").read_text()
    assert re.search(r"^\| DDP \| \d+\.\d (\| \d+\.\d\d \(1\.00\) ){2}\| \d\.\d{4} \|$", text, re.MULTILINE), text
    assert "s per step at 2000 Mbit/s, node 1 at 500 |" in text
    assert re.search(r"^\| lt_zero stage 2 \| \d+\.\d \| \d+\.\d\d \(", text, re.MULTILINE), text
