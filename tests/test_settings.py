"""Settings that change how gradients are reduced or used, with each callback that does too: refused, or the numbers of
training with the setting alone, to the callback's bound."""

from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from support.callbacks import CHANGES, CODECS, name_of
from support.composition import SETTINGS, refusal
from support.ranks import run_ranks
from support.sharded import whole
from torch import nn
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.config.options import DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

# Relative in the L2 norm, of the update of the first steps.
ROWS = {
    "bucket": 1e-5, "hierarchical": 1e-5, "blocksparse": 1e-5, "overlap": 1e-5, "fp16": 0.02, "int8": 0.2,
    "topk": 0.9, "powersgd": 0.9, "local_sgd": 0.5, "bf16": 0.05, "dgc": 0.9, "sign": 0.95, "ema": 1e-5,
    "activation_checkpoint": 1e-5, "optimizer_in_backward": 1e-5, "shard": 1e-5, "shard.2": 1e-5, "shard.3": 1e-5,
    "compile": 1e-5, "swa": 1e-5,
}  # fmt: skip
OPTIONS: dict[str, dict[str, Any]] = {
    "clip": {"clip_norm": 0.5},
    "clip_value": {"clip_value": 0.05},
    "fp16": {"precision": "fp16"},
    **{
        name: {"ddp": DDPOptions(0.005, **{name: True})}
        for name in SETTINGS
        if name not in ("clip", "clip_value", "fp16", "fp8", "bf16_params", "bf16_weights", "sync_batch_norm")
    },
}
# Clipping by value is of one's own gradients: what cuts, defers or sends them otherwise.
BY_VALUE = {
    "bucket",
    "hierarchical",
    "overlap",
    "int8",
    "local_sgd",
    "optimizer_in_backward",
    "shard",
    "shard.2",
    "shard.3",
}
CASES = [(setting, row) for setting in OPTIONS for row in ROWS if setting != "clip_value" or row in BY_VALUE]
# In each run of the tests: some of what replaces DDP's buckets, its reduction, its step or DDP. The others: `-m pairs`.
QUICK = {"bucket", "overlap", "shard.3"}
BESIDE_DDP = {"bucket", "shard"}


def is_pair(setting: str, row: str) -> bool:
    return row not in (BESIDE_DDP if "ddp" in OPTIONS[setting] else QUICK)


class Weights(Callback):
    """Gathers the weights before and after training, while the ranks are together."""

    def on_fit_start(self, trainer) -> None:
        self.start = flat(trainer.module)

    def on_fit_end(self, trainer) -> None:
        self.end = flat(trainer.module)


def flat(module: nn.Module) -> np.ndarray:
    return np.concatenate([whole(p).numpy().ravel().copy() for p in module.parameters()])


def train(place: Place, setting: str, row: str) -> np.ndarray | str:
    table, weights = {**CHANGES, **CODECS}, Weights()
    try:
        trainer = Trainer(
            Toy(width=32), {"weights": weights} | ({name_of(row): table[row]()} if row else {}), sgd,
            batch=12, accumulate=2,
            options=Options(max_steps=4, log_every_steps=1, run_dir=f"runs/{setting} {row}", **OPTIONS[setting]),
            data=DataOptions(workers=0, shuffle_shards=4, shuffle_window=4),
            place=replace(place, store=f"{place.store}-{setting}-{row}"),
        )  # fmt: skip
    except ConfigError as error:
        return str(error)
    trainer.fit()
    return weights.end - weights.start


def train_all(place: Place, cases: list[tuple[str, str]]) -> list[np.ndarray | str]:
    return [train(place, *case) for case in cases]


@pytest.fixture(scope="module")
def updates(request, tmp_path_factory) -> dict[tuple[str, str], list[Any]]:
    """What every rank gives for every case that is selected; the ranks are started once."""
    params = [item.callspec.params for item in request.session.items if item.path == request.path]
    cases = [*((setting, "") for setting in OPTIONS), *((param["setting"], param["row"]) for param in params)]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(tmp_path_factory.mktemp("settings"))
        by_rank = run_ranks(3, train_all, cases, timeout_s=400)
    return dict(zip(cases, zip(*by_rank, strict=True), strict=True))


@pytest.mark.timeout(440)
@pytest.mark.parametrize(
    ("setting", "row"),
    [pytest.param(*case, marks=pytest.mark.pairs if is_pair(*case) else ()) for case in CASES],
)
def test_refused_or_to_its_bound(updates, setting, row):
    alone, *_ = updates[setting, ""]
    assert np.abs(alone).max() > 1e-3
    refused = refusal(row, setting) if setting in SETTINGS else ""
    bound = max(ROWS[row], 0.02 if "bf16" in setting else 0.0)  # where a sum's last bit may be one of 8
    for update in updates[setting, row]:
        if refused:
            assert update == refused
        else:
            assert not isinstance(update, str), update
            assert np.linalg.norm(update - alone) <= bound * np.linalg.norm(alone)
