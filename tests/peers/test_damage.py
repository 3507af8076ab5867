"""Peers: the newest checkpoint has a flipped bit, is cut, or holds a pickle that runs a program."""

from pathlib import Path

import pytest
import torch
from support.peers import checkpoint, launch, off, saved, steps, stopped_at
from support.untrusted import Payload, payload

pytestmark = [pytest.mark.peers, pytest.mark.timeout(900)]


def weights(peer: str, cwd: Path) -> Path:
    """The file of step 8 that holds most of its weights."""
    path = checkpoint(peer, cwd, 8)
    files = {"lightning": path, "accelerate": path / "model.safetensors", "dcp": path / "__2_0.distcp"}
    return files[peer]


def test_a_bit_of_the_newest_is_flipped(peer, golden, tmp_path):
    """No peer sees it: they train on, with other weights."""
    stopped_at(8, peer, golden, tmp_path)
    content = bytearray((file := weights(peer, tmp_path)).read_bytes())
    middle = len(content) // 2
    exponent = min(range(middle, middle + 4), key=lambda at: len(set(content[at : at + 256 : 4])))  # varies least
    content[exponent] ^= 4
    file.write_bytes(content)
    result = launch(peer, tmp_path, restarts=0)
    assert result.code == 0, result.err
    assert steps(tmp_path) == [[9, 10, 11, 12]]
    assert off(tmp_path, golden) > 1e-4


def test_the_newest_is_cut(peer, golden, tmp_path):
    """All see it, and end; none goes back to the one before, which is there."""
    stopped_at(8, peer, golden, tmp_path)
    file = weights(peer, tmp_path)
    file.write_bytes(file.read_bytes()[: file.stat().st_size // 2])
    result = launch(peer, tmp_path, restarts=0)
    assert result.code == 1 and "Error" in result.err
    assert not (tmp_path / "samples-0.jsonl").exists() and saved(peer, tmp_path) == {4, 8}


PICKLES = {  # whether it is run
    "lightning": {"": False},
    "accelerate": {"optimizer.bin": False, "custom_checkpoint_0.pkl": True},
    "dcp": {".metadata": True},
}


def test_a_pickle_that_runs_a_program(peer, golden, tmp_path):
    for n, (name, runs) in enumerate(PICKLES[peer].items()):
        (cwd := tmp_path / str(n)).mkdir()
        stopped_at(8, peer, golden, cwd)
        file = checkpoint(peer, cwd, 8) / name if name else checkpoint(peer, cwd, 8)
        mark = cwd / "it has run"
        if peer == "dcp":
            file.write_bytes(payload(mark))
        else:
            torch.save({"state_dict": Payload(mark)}, file)
        assert launch(peer, cwd, ranks=1, restarts=0).code == 1
        assert mark.exists() == runs
