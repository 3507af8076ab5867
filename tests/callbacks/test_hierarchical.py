"""Two levels give plain training's numbers, send fewer bytes over a real link, and compress the slow one alone."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from net import Cluster, needs_cluster
from ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback, arrange
from trainer.callbacks.bucket import Bucket
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.local_sgd import LocalSGD
from trainer.callbacks.overlap import Overlap
from trainer.errors import ConfigError
from trainer.launch import Place
from trainer.optim import sgd
from trainer.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.trainer import Trainer

STEPS = 5


CLASSES: dict[str, type[Callback]] = {
    "bucket": Bucket, "hierarchical": Hierarchical, "grad_compress": GradCompress, "local_sgd": LocalSGD,
    "overlap": Overlap,
}  # fmt: skip
TWO = {"hierarchical": {"ranks_per_node": 2}}
TOPK = {"grad_compress": {"codec": "topk", "density": 0.3, "level": "inter"}}


def train(place: Place, name: str, settings: dict[str, dict[str, Any]], resume: str | None = None) -> np.ndarray:
    """`settings`: callback -> its arguments."""
    trainer = Trainer(
        Toy(width=37, dtype="float64"), {row: CLASSES[row](**knobs) for row, knobs in settings.items()}, sgd, batch=12,
        options=Options(
            max_steps=STEPS, ddp=DDPOptions(0.005), run_dir=f"runs/{name}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3, keep=5),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return np.concatenate([p.detach().numpy().ravel() for p in trainer.module.parameters()])


@pytest.mark.parametrize(
    "others",
    [{}, {"overlap": {}}, {"local_sgd": {"every": 2}}, {"bucket": {"mib": 0.005, "late": ["*bias"]}}],
    ids="+".join,
)
def test_the_mean_over_two_levels_is_the_mean(tmp_path, monkeypatch, others):
    """Also where a node has one rank or all, and sizes do not divide."""
    monkeypatch.chdir(tmp_path)
    (plain, *_) = run_ranks(4, train, "plain", others)
    for per_node in (1, 2, 4):
        for weights in run_ranks(
            4, train, f"{per_node} per node", others | {"hierarchical": {"ranks_per_node": per_node}}
        ):
            np.testing.assert_allclose(weights, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("others", "least", "bound"),
    [
        ({"grad_compress": {"codec": "bf16", "feedback": True, "level": "inter"}}, 1e-7, 1e-2),
        ({"grad_compress": {"codec": "fp16", "level": "inter"}}, 1e-7, 1e-2),
        ({"grad_compress": {"codec": "int8", "level": "inter"}}, 1e-7, 0.2),
        ({"grad_compress": {"codec": "dgc", "density": 0.3, "level": "inter"}}, 1e-7, 1.0),
        ({"grad_compress": {"codec": "sign", "level": "inter"}}, 1e-7, 1.0),
        ({"grad_compress": {"codec": "blocksparse", "block": 4, "level": "inter"}}, 0.0, 1e-9),
        (TOPK, 1e-7, 1.0),
        (TOPK | {"overlap": {}}, 1e-7, 1.0),
        (TOPK | {"local_sgd": {"every": 2}}, 1e-7, 1.0),
    ],
    ids=["bf16", "fp16", "int8", "dgc", "sign", "blocksparse", "topk", "topk+overlap", "topk+local_sgd"],
)
def test_compressed_between_nodes_only(tmp_path, monkeypatch, others, least, bound):
    """Where all ranks are on one node nothing is compressed; else it is, and resumes with the same bits."""
    monkeypatch.chdir(tmp_path)
    exact = {row: knobs for row, knobs in others.items() if row != "grad_compress"}
    (start, *_) = run_ranks(1, start_of_all)
    (plain, *_) = run_ranks(4, train, "plain", exact)
    (one_node, *_) = run_ranks(4, train, "one node", others | {"hierarchical": {"ranks_per_node": 4}})
    np.testing.assert_allclose(one_node, plain, rtol=1e-12, atol=1e-14)
    straight = run_ranks(4, train, "straight", others | TWO)
    resumed = run_ranks(4, train, "resumed", others | TWO, "ckpt/straight/step-00000003")
    assert [weights.tobytes() for weights in straight] == [weights.tobytes() for weights in resumed]
    assert len({weights.tobytes() for weights in straight}) == 1
    assert least <= np.linalg.norm(straight[0] - plain) / np.linalg.norm(plain - start) < bound


@pytest.mark.parametrize(("codec", "bound"), [("fp16", 15 * 2**-11), ("powersgd", 1e-9)])
def test_what_is_encoded_is_reduced_in_both_levels(tmp_path, monkeypatch, codec, bound):
    """What a codec sums is summed inside a node, too; with overlap, to the same bits."""
    monkeypatch.chdir(tmp_path)
    (start, *_) = run_ranks(1, start_of_all)
    compressed = {"grad_compress": {"codec": codec}}
    (plain, *_) = run_ranks(4, train, "one level", compressed if codec == "powersgd" else {})
    settings = compressed | TWO
    weights = run_ranks(4, train, "two levels", settings) + run_ranks(4, train, "later", settings | {"overlap": {}})
    assert len({each.tobytes() for each in weights}) == 1
    off = np.linalg.norm(weights[0] - plain) / np.linalg.norm(plain - start)
    assert off < bound and (off > 1e-7 or codec == "powersgd")  # whose linear algebra is as exact as its numbers


def resumed_as_nodes_of(place: Place, per_node: int) -> str:
    others = TOPK | {"hierarchical": {"ranks_per_node": per_node}}
    with pytest.raises(ConfigError) as refusal:
        train(place, "refused", others, "ckpt/run/step-00000003")
    return str(refusal.value)


def test_what_was_kept_back_for_other_levels_is_refused_before_anything_changes(tmp_path, monkeypatch):
    """By all ranks, of which each has a part; what was saved later is still where it was."""
    monkeypatch.chdir(tmp_path)
    run_ranks(4, train, "run", TOPK | TWO)
    saved = sorted(Path("ckpt").rglob("*"))
    messages = run_ranks(4, resumed_as_nodes_of, 1)
    assert len(set(messages)) == 1 and "set callbacks.hierarchical and the size of buckets as they were" in messages[0]
    assert [path for path in sorted(Path("ckpt").rglob("*")) if "refused" not in path.parts] == saved


def start_of_all(place: Place) -> np.ndarray:
    trainer = Trainer(Toy(width=37, dtype="float64"), {}, sgd, batch=12, options=Options(max_steps=1), place=place)
    trainer.close()
    return np.concatenate([p.detach().numpy().ravel() for p in trainer.module.parameters()])


def refused(place: Place) -> str:
    with pytest.raises(ConfigError) as refusal:
        train(place, "run", TWO)
    return str(refusal.value)


def test_ranks_that_do_not_divide_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for message in run_ranks(3, refused):
        assert message.startswith("callbacks.hierarchical.ranks_per_node=2: does not divide the 3 ranks; ")


def uneven(place: Place) -> str:
    uneven = replace(place, local_rank=place.rank % 2, local_world=2 if place.rank < 2 else 1)
    trainer = Trainer(Toy(), {}, sgd, batch=12, options=Options(max_steps=1), place=uneven)
    with pytest.raises(ConfigError) as refusal:
        trainer.ranks.ranks_per_node()
    trainer.close()
    return str(refusal.value)


def test_nodes_that_differ_are_refused(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for message in run_ranks(3, uneven):
        assert message.startswith("callbacks.hierarchical: rank 2 is number 0 of 1 on its node, rank 0's has 2; ")


def test_level_inter_needs_levels():
    with pytest.raises(ConfigError, match=r"grad_compress needs hierarchical: .*; add it, or use level=all"):
        arrange({"grad_compress": GradCompress(level="inter")}, set())


@needs_cluster
def test_fewer_bytes_cross_the_network(tmp_path):
    """2 hosts of 2 ranks: each rank exchanges its half with one peer, 4 * P bytes a host and step; a flat ring would
    send 2 * 3 / 4 * 4 * P over each host's link."""
    toy, steps = Path(__file__).parents[1] / "toy", 20
    command = [sys.executable, "-m", "trainer.main", "--config-dir", str(toy / "conf"), "recipe=toy"]
    command += ["recipe.width=600", "batch=16", f"trainer.max_steps={steps}", "trainer.accelerator=cpu"]
    command += ["+callbacks=[hierarchical]", "trainer.checkpoint.every_steps=null", "data.workers=0"]
    path = os.pathsep.join([str(toy.parents[1]), str(toy)])
    with Cluster(hosts=2) as cluster:
        before = cluster.sent(0)
        codes = cluster.run(command, ranks_per_host=2, env={"PYTHONPATH": path}, cwd=tmp_path)
        sent = cluster.sent(0) - before
    assert codes == [0, 0, 0, 0]
    gradients = 4 * sum(p.numel() for p in Toy(width=600).model().parameters())
    assert 1.0 < sent / ((steps + 2) * gradients) < 1.1  # two passes more in the rehearsal
