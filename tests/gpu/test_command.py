"""The command on one CUDA device: deterministic, resumed bit for bit, and with checkpoints of the step's own bytes."""

import os

import torch
from support.cli import PYTHONPATH, toy
from support.gpu import ACCELERATOR, delay, on_device

from trainer.checkpoint.serialize import load_state
from trainer.checkpoint.snapshot import Snapshot

pytestmark = on_device


def weights(run: str, cwd, steps: int, *more: str) -> bytes:
    arguments = [f"trainer.accelerator={ACCELERATOR}", "trainer.devices=1", "trainer.deterministic=true"]
    arguments += [f"trainer.run_dir=runs/{run}", f"trainer.max_steps={steps}", "trainer.precision=bf16"]
    arguments += ["schedule=constant", *more]
    # Packages that the machine lacks are on this path: scripts/gpu_test.
    result = toy(arguments, cwd, PYTHONPATH=os.pathsep.join([PYTHONPATH, os.environ.get("PYTHONPATH", "")]))
    assert result.code == 0, result.err
    return (cwd / f"ckpt/{run}/step-{steps:08}/model.safetensors").read_bytes()


def test_a_deterministic_run_is_resumed_bit_for_bit(tmp_path):
    straight = weights("straight", tmp_path, 10)
    weights("halves", tmp_path, 4)
    assert weights("halves", tmp_path, 10, "trainer.resume=auto") == straight


def test_a_checkpoint_has_the_bytes_of_its_step_while_the_stream_is_late(tmp_path):
    weight, snapshot = torch.ones(2**20, device=ACCELERATOR), Snapshot()
    for value in (2.0, 3.0):  # the second uses the memory of the first
        delay()
        weight.fill_(value)
        files = snapshot.take({"model": {"w": weight}})
        weight.fill_(-1.0)  # the next step's
        snapshot.wait()
        for name, content in files.items():
            (tmp_path / name).write_bytes(content)
        assert bool((load_state(tmp_path, list(files))["model"]["w"] == value).all())
