"""GPT-2 on several ranks: its tied matrix in stages and in rows, resumes, and the presets as a user runs them."""

import json
import math
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file
from support.cli import QUICK, environment, run
from support.ranks import run_ranks

from recipes.gpt2 import Gpt2
from recipes.grow_sequence import GrowSequence
from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel
from trainer.callbacks.shard.callback import Shard
from trainer.config.options import CheckpointOptions, DataOptions, Options
from trainer.optim.groups import WithGroups
from trainer.process.environment import Place
from trainer.trainer import Trainer

SIZES: dict[str, Any] = {
    "vocab": 300,
    "sequence": 40,
    "hidden": 32,
    "layers": 3,
    "heads": 4,
    "dropout": 0.0,
    "val_fraction": 0.3,
}
STEPS = 4
TEXT = "The quick brown Fox number {} jumps over {} lazy dogs. "


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen += [loss.item() for loss in trainer.losses]


def train(place: Place, folder: str, name: str, make: dict[str, Any], **knobs: Any) -> dict[str, Any]:
    losses = Losses()
    options = {"max_steps": STEPS, "clip_norm": 1.0, "timeout_s": 60.0, **knobs.pop("options", {})}
    trainer = Trainer(
        Gpt2(text=f"{folder}/text", cache=f"{folder}/cache", **{**SIZES, "loss_chunks": 3, **knobs.pop("recipe", {})}),
        {**{key: value() for key, value in make.items()}, "losses": losses},
        WithGroups(partial(torch.optim.SGD, lr=0.1, momentum=0.9), []),
        batch=12,
        accumulate=knobs.pop("accumulate", 4),
        options=Options(checkpoint=CheckpointOptions(every_steps=2), **options),
        data=DataOptions(workers=0),
        place=place,
        name=name,
    )
    trainer.fit()
    saved = (
        {key: value.numpy() for key, value in load_file(f"{trainer.checkpoint}/model.safetensors").items()}
        if (place.rank == 0 and Path(f"{trainer.checkpoint}/model.safetensors").exists())
        else {}
    )
    return {"weights": saved, "losses": losses.seen, "validation": trainer.validation, "at": str(trainer.run_dir)}


@pytest.fixture
def text(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / f"text/{i}.txt").write_text(TEXT.format(i, i * 7) * 5)
    assert Gpt2(text=f"{tmp_path}/text", cache=f"{tmp_path}/cache", **SIZES).corpus
    return str(tmp_path)


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_stages_and_rows_have_the_numbers_of_one_rank(text: str):
    """The embedding is the head, which two stages and each row train together: sums differ to rounding."""
    (alone,) = run_ranks(1, train, text, "alone", {}, timeout_s=300)
    stages = run_ranks(3, train, text, "stages", {"pipeline": partial(PipelineParallel, 3)}, timeout_s=300)
    rows = run_ranks(3, partial(train, accumulate=1), text, "rows", {"shard": partial(Shard, 3)}, timeout_s=300)
    assert stages[0]["losses"] == stages[2]["losses"] and stages[0]["losses"][:4] == alone["losses"][:4]
    assert np.allclose(stages[0]["losses"], alone["losses"], rtol=1e-5)
    mean = np.array(alone["losses"]).reshape(STEPS, 4).mean(1)
    assert np.allclose(np.mean([rank["losses"] for rank in rows], axis=0), mean, rtol=1e-5)
    for rank in (*stages, *rows):
        assert rank["validation"] == pytest.approx(alone["validation"], rel=1e-5)


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("grows", [False, True])
def test_a_resume_has_the_same_bits(grows: bool, text: str):
    """With dropout; the sequences grow at step 1 and at step 3, on both sides of the checkpoint."""
    make = {"grow": partial(GrowSequence, [8, 20], ["1 steps", "3 steps"])} if grows else {}
    fit = partial(train, accumulate=2, recipe={"dropout": 0.1})
    whole = run_ranks(3, partial(fit, options={}), text, "whole", make, timeout_s=300)
    half = run_ranks(3, partial(fit, options={"max_steps": 2}), text, "half", make, timeout_s=300)
    name = Path(half[0]["at"]).name
    resumed = partial(fit, options={"resume": f"ckpt/{name}/step-00000002"})
    rest = run_ranks(3, resumed, text, "rest", make, timeout_s=300)
    for one, first, second in zip(whole, half, rest, strict=True):
        assert one["losses"] == first["losses"] + second["losses"] and len(second["losses"]) == 2 * (STEPS - 2)
        assert one["validation"] == second["validation"]
    assert whole[0]["weights"].keys() == rest[0]["weights"].keys() != set()
    assert all((value == rest[0]["weights"][key]).all() for key, value in whole[0]["weights"].items())


TINY = [
    "recipe.text=text", "recipe.cache=cache", "recipe.vocab=300", "recipe.sequence=32", "recipe.hidden=32",
    "recipe.layers=2", "recipe.heads=2", "recipe.val_fraction=0.2", "batch=16", "trainer.max_steps=4",
    "schedule.warmup=1", "data.workers=0", *QUICK,
]  # fmt: skip


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("gpt2", ["trainer.devices=2", "micro_batch=4"]),
        ("gpt2_xl_shard", ["trainer.devices=2", "micro_batch=4"]),
        ("gpt2_xl_pipeline", ["trainer.devices=2", "callbacks.pipeline.stages=2"]),
        ("gpt2_compile", ["micro_batch=8", "callbacks.compile.backend=aot_eager"]),
    ],
)
def test_presets_train(name: str, words: list[str], text: str):
    """With tiny sizes: four steps do not raise the loss above that of guessing, and the export is there."""
    done = run([f"recipe={name}", *TINY, *words, f"trainer.run_dir=runs/{name}"], Path(text), timeout_s=300)
    assert done.code == 0, done.err
    folder = Path(text) / "runs" / name
    summary = json.loads((folder / "summary.json").read_text())
    assert summary["steps"] == 4 and summary["val/loss"] < math.log(300) + 0.1
    assert (folder / "export" / "config.json").exists() and (folder / "export" / "tokenizer.json").exists()


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_tiny_recipe_beats_the_frequencies_of_tokens(tmp_path: Path):
    env = {"XDG_CACHE_HOME": str(tmp_path / "cache")} | {"OMP_NUM_THREADS": environment()["OMP_NUM_THREADS"]}
    done = run(["recipe=gpt2_tiny", "trainer.run_dir=runs/tiny"], tmp_path, timeout_s=1700, **env)
    assert done.code == 0, done.err
    summary = json.loads((tmp_path / "runs/tiny/summary.json").read_text())
    assert summary["val/loss"] < 0.7 * summary["unigram_entropy_nats"]
