"""BERT in stages: its embedding is its decoder, which the first and the last stage train together."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.ranks import run_ranks

from recipes.bert import Bert
from trainer.callback import Callback
from trainer.callbacks.pipeline import PipelineParallel
from trainer.config.options import DataOptions, Options
from trainer.process.environment import Place
from trainer.trainer import Trainer

SIZES: dict[str, Any] = {"vocab": 300, "sequence": 40, "hidden": 32, "layers": 3, "heads": 4, "dropout": 0.0}
TIED = "bert.bert.embeddings.word_embeddings.weight"


class Losses(Callback):
    def __init__(self) -> None:
        self.seen: list[float] = []

    def on_step_end(self, trainer) -> None:
        self.seen += [loss.item() for loss in trainer.losses]


def train(place: Place, folder: str, schedule: str | None) -> dict[str, Any]:
    losses = Losses()
    pipeline = {"pipeline": PipelineParallel(place.world, schedule)} if schedule else {}  # pyright: ignore
    trainer = Trainer(
        Bert(text=f"{folder}/text", cache=f"{folder}/cache", **SIZES),
        {**pipeline, "losses": losses},
        lambda groups: torch.optim.SGD(groups, lr=0.1, momentum=0.9),
        batch=12,
        accumulate=4,
        options=Options(max_steps=3, clip_norm=1.0, timeout_s=60.0),
        data=DataOptions(workers=0),
        place=place,
    )
    trainer.fit()
    own = {name: p.detach().numpy() for name, p in trainer.module.named_parameters() if p.requires_grad}
    return {"weights": own, "losses": losses.seen, "validation": trainer.validation}


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_bert_in_three_stages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """The gradients of the tied matrix are summed per stage first, so all is the unsplit model's to rounding."""
    monkeypatch.setenv("TOKENIZERS_PARALLELISM", "false")
    (tmp_path / "text").mkdir()
    for i in range(12):
        (tmp_path / f"text/{i}.txt").write_text(f"The quick brown Fox number {i} jumps over {i * 7} lazy dogs. " * 5)
    assert Bert(text=f"{tmp_path}/text", cache=f"{tmp_path}/cache", **SIZES).corpus
    (alone,) = run_ranks(1, train, str(tmp_path), None, timeout_s=300)
    ranks = run_ranks(3, train, str(tmp_path), "1f1b", timeout_s=300)
    assert (ranks[0]["weights"][TIED] == ranks[2]["weights"][TIED]).all() and TIED not in ranks[1]["weights"]
    found = {name: value for rank in ranks for name, value in rank["weights"].items()}
    assert found.keys() == alone["weights"].keys()
    for rank in ranks:
        assert rank["losses"][:4] == alone["losses"][:4]
        assert np.allclose(rank["losses"], alone["losses"], rtol=1e-6)
        assert rank["validation"] == pytest.approx(alone["validation"], rel=1e-5)
    for name, value in alone["weights"].items():
        assert np.abs(found[name] - value).max() < 2e-6, name
