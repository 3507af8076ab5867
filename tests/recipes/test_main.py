"""`python -m trainer.main` with BERT, as a user runs it: two ranks with callbacks on a little text, and the default."""

import importlib
import inspect
import json
import math
import subprocess
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from support.cli import MAIN, QUICK, environment, run

MODULES = ("argparse", "bisect", "csv", "decimal", "heapq", "json", "logging", "pathlib", "random", "statistics")
WORDS = [
    "recipe.text=text", "recipe.cache=cache", "recipe.vocab=400", "recipe.sequence=32", "recipe.hidden=32",
    "recipe.layers=1", "recipe.val_fraction=0.2", "batch=16", "trainer.devices=2", "trainer.max_steps=5",
    "trainer.run_dir=runs/bert", "+callbacks=[grad_compress,overlap]", *QUICK,
]  # fmt: skip


def write_text(folder: Path) -> None:
    """What a few modules of the standard library say of themselves."""
    folder.mkdir()
    for name in MODULES:
        module = importlib.import_module(name)
        docs = [inspect.getdoc(value) or "" for value in (module, *vars(module).values())]
        (folder / f"{name}.txt").write_text("\n".join(docs)[:4000])


def test_two_ranks_with_callbacks_and_an_export_that_loads(tmp_path: Path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    write_text(tmp_path / "text")
    done = run(WORDS, tmp_path)
    assert done.code == 0, done.err
    folder = tmp_path / "runs" / "bert"
    summary = json.loads((folder / "summary.json").read_text())
    assert (summary["steps"], summary["samples"], summary["ranks"]) == (5, 80, 2)
    vocabulary = len(AutoTokenizer.from_pretrained(folder / "export"))
    assert 1 < summary["unigram_entropy_nats"] < math.log(vocabulary)
    assert summary["val/loss"] == pytest.approx(math.log(400), rel=0.2)  # 5 steps from guessing among all rows
    assert 0 <= summary["val/accuracy"] < 0.5
    saved = load_file(tmp_path / summary["checkpoint"] / "model.safetensors")
    model: Any = AutoModelForMaskedLM.from_pretrained(folder / "export")
    exported = {f"bert.{name}": value for name, value in model.state_dict().items()}
    assert saved.keys() <= exported.keys()
    assert all(torch.equal(value, exported[name]) for name, value in saved.items())


@pytest.mark.slow
@pytest.mark.timeout(1200)
def test_the_default_run_beats_the_frequencies_of_tokens(tmp_path: Path):
    env = environment(XDG_CACHE_HOME=str(tmp_path / "cache"))
    del env["OMP_NUM_THREADS"]
    started = time.monotonic()
    done = subprocess.run(MAIN, cwd=tmp_path, env=env, capture_output=True, text=True)
    print(f"{time.monotonic() - started:.0f} s")
    assert done.returncode == 0, done.stderr
    (file,) = tmp_path.glob("runs/*/summary.json")
    summary = json.loads(file.read_text())
    assert summary["val/loss"] < summary["unigram_entropy_nats"]
    assert f"unigram_entropy_nats {summary['unigram_entropy_nats']:.4g}" in done.stdout
