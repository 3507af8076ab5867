"""Whole runs by the command on one GPU: BERT that is killed and goes on, memory that runs out, a kernel that fails."""

import json
import os
import signal
import time
from pathlib import Path

import pytest
from support.cli import PYTHONPATH, QUICK, TOY, popen, run, weights
from support.faults import nobody_left
from support.gpu import ACCELERATOR, ON_GPU, on_device, only_gpu

pytestmark = on_device
HERE = [f"trainer.accelerator={ACCELERATOR}", "trainer.devices=1", "trainer.deterministic=true"]
PATHS = [PYTHONPATH, os.environ.get("PYTHONPATH", "")]  # packages that the machine lacks are on the second
WORDS = [a + b for a in ("train", "step", "rank", "batch") for b in ("s", "ing", "ed", "er", "able")]


def bert(folder: Path, name: str, steps: int, *more: str) -> list[str]:
    text = folder / "text"
    if not text.exists():
        text.mkdir()
        for i in range(60):
            order = [WORDS[(i * k + k) % len(WORDS)] for k in range(1, 120)]
            (text / f"{i}.txt").write_text(" ".join(order))
    return [
        *QUICK, *HERE, "recipe=bert_tiny", f"recipe.text={text}", f"recipe.cache={folder / 'cache'}",
        "recipe.vocab=256", "recipe.sequence=32", "recipe.hidden=32", "recipe.dropout=0.1", "batch=16", "accumulate=2",
        f"trainer.max_steps={steps}", f"trainer.run_dir=runs/{name}", "trainer.log_every_steps=5",
        "trainer.validate_every=10 steps", "trainer.checkpoint.every_steps=10", "trainer.checkpoint.keep_every=10",
        "schedule=constant", "+callbacks=[activation_checkpoint]", *more,
    ]  # fmt: skip


@pytest.mark.timeout(300)
def test_bert_is_killed_and_goes_on_bit_for_bit_and_is_exported(tmp_path):
    path = {"PYTHONPATH": os.pathsep.join(PATHS)}
    straight = run(bert(tmp_path, "straight", 30), tmp_path, timeout_s=120, **path)
    assert straight.code == 0, straight.err
    process = popen(bert(tmp_path, "killed", 100_000), tmp_path, **path)
    try:
        deadline = time.monotonic() + 120
        while not (tmp_path / "ckpt" / "killed" / "step-00000010").exists():
            assert process.poll() is None and time.monotonic() < deadline
            time.sleep(0.01)
        process.send_signal(signal.SIGKILL)
        process.communicate(timeout=60)
    finally:
        process.kill()
    nobody_left(tmp_path, within_s=20)
    early = "trainer.resume=ckpt/killed/step-00000010"  # later ones may be there, beyond the straight run's end
    resumed = run(bert(tmp_path, "resumed", 30, early), tmp_path, timeout_s=120, **path)
    assert resumed.code == 0, resumed.err
    assert weights("resumed", tmp_path, 30) == weights("straight", tmp_path, 30)
    assert (tmp_path / "runs" / "resumed" / "export" / "model.safetensors").exists()
    lines = [json.loads(line) for line in (tmp_path / "runs" / "straight" / "metrics.jsonl").read_text().splitlines()]
    assert any("val/loss" in line for line in lines)
    if ON_GPU:
        assert all(0 < line["perf/mfu"] < 1 for line in lines if "perf/mfu" in line)
        assert any("perf/mfu" in line and line["perf/peak_memory_gib"] > 0 for line in lines)


FAILING = """
import torch
from toy_recipe import Toy


class Greedy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, loss):
        return loss.clone()

    @staticmethod
    def backward(ctx, gradient):
        total = torch.cuda.get_device_properties(0).total_memory
        torch.empty(2 * total, dtype=torch.uint8, device=gradient.device)
        return gradient


class Failing(Toy):
    def __init__(self, kind="", at=4, **sizes):
        super().__init__(**sizes)
        self.kind, self.at, self.calls = kind, at, 0

    def loss(self, model, batch):
        self.calls += model.training
        loss = super().loss(model, batch)
        if self.calls != self.at or not model.training:
            return loss
        if self.kind == "forward":
            torch.empty(2 * torch.cuda.get_device_properties(0).total_memory, dtype=torch.uint8, device=loss.device)
        if self.kind == "backward":
            return Greedy.apply(loss)
        if self.kind == "assert":
            wrong = torch.tensor([99], device=loss.device)
            return loss + torch.nn.functional.embedding(wrong, torch.ones(2, 1, device=loss.device)).sum()
        return loss
"""


@only_gpu
@pytest.mark.timeout(300)
@pytest.mark.parametrize("kind", ["forward", "backward", "assert"])
def test_what_fails_on_the_device_ends_the_run_with_its_reason_and_a_resume_goes_on(kind, tmp_path):
    (tmp_path / "failing.py").write_text(FAILING)
    path = {"PYTHONPATH": os.pathsep.join([str(tmp_path), *PATHS])}
    words = [*TOY, *QUICK, *HERE, "trainer.run_dir=runs/r", "trainer.checkpoint.every_steps=2", "trainer.max_steps=8"]
    words += ["recipe._target_=failing.Failing", "trainer.allow_targets=[toy_recipe,failing]"]
    failed = run([*words, f"+recipe.kind={kind}"], tmp_path, timeout_s=100, **path)
    assert failed.code == 1
    if kind == "assert":
        assert "device-side assert" in failed.err
    else:
        assert "out of memory" in failed.err and "try" in failed.err.splitlines()[-1]
    nobody_left(tmp_path, within_s=20)
    again = run([*words, "trainer.resume=auto"], tmp_path, timeout_s=100, **path)
    assert again.code == 0, again.err
    assert (tmp_path / "ckpt" / "r" / "step-00000008").exists()
