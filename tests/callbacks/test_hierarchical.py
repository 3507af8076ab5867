"""Two levels give plain training's numbers, send fewer bytes over a real link, and compress the slow one alone."""

import os
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from support.messages import refuses
from support.network import Cluster, needs_cluster
from support.quick import quick
from support.ranks import run_ranks
from toy_recipe import Toy

from trainer.callback import Callback, Role
from trainer.callbacks.activation_checkpoint import ActivationCheckpoint
from trainer.callbacks.bucket.callback import Bucket
from trainer.callbacks.ema import EMA
from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.callbacks.local_sgd.callback import LocalSGD
from trainer.callbacks.overlap.callback import Overlap
from trainer.composition import arrange
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.optim.factories import sgd
from trainer.process.environment import Place
from trainer.trainer import Trainer

STEPS = 5


class Even(Toy):
    """Every rank's share of a step counts as much, so that the mean over ranks is the mean of what they give."""

    def weight(self, batch: dict[str, torch.Tensor]) -> int:
        return len(batch["x"])


CLASSES: dict[str, type[Callback]] = {
    "bucket": Bucket, "hierarchical": Hierarchical, "grad_compress": GradCompress, "local_sgd": LocalSGD,
    "overlap": Overlap, "ema": EMA, "activation_checkpoint": ActivationCheckpoint,
}  # fmt: skip
TWO = {"hierarchical": {"ranks_per_node": 2}}
TOPK = {"grad_compress": {"codec": "topk", "density": 0.3, "level": "inter"}}


def train(
    place: Place,
    name: str,
    settings: dict[str, dict[str, Any]],
    resume: str | None = None,
    options: Any = None,
    dtype: str = "float64",
) -> np.ndarray:
    """`settings`: callback -> its arguments. The weights of the model that is validated."""
    trainer = Trainer(
        Toy(width=37, dtype=dtype), {row: CLASSES[row](**knobs) for row, knobs in settings.items()}, sgd, batch=12,
        options=Options(
            max_steps=STEPS, ddp=DDPOptions(0.005), run_dir=f"runs/{name}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3, keep=5), **options or {},
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return np.concatenate([p.detach().numpy().ravel() for p in trainer.eval_model.parameters()])


@pytest.mark.parametrize(
    "others",
    [
        {},
        pytest.param({"overlap": {}}, marks=pytest.mark.slow),
        pytest.param({"local_sgd": {"every": 2}}, marks=pytest.mark.slow),
        pytest.param({"bucket": {"mib": 0.005, "delayed": ["*bias"]}}, marks=pytest.mark.slow),
        pytest.param({"ema": {"decay": 0.5}, "activation_checkpoint": {}}, marks=pytest.mark.slow),
    ],
    ids="+".join,
)
def test_the_mean_over_two_levels_is_the_mean(tmp_path, others):
    """Also where a node has one rank or all, and sizes do not divide."""
    (plain, *_) = run_ranks(4, train, "plain", others)
    for per_node in (1, 2, 4):
        for weights in run_ranks(
            4, train, f"{per_node} per node", others | {"hierarchical": {"ranks_per_node": per_node}}
        ):
            np.testing.assert_allclose(weights, plain, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize(
    ("options", "dtype", "bound"),
    quick([({"clip_norm": 0.05}, "float64", 1e-12), ({"precision": "fp16"}, "float32", 1e-2)]),
    ids=["clip", "fp16"],
)
def test_settings_with_two_levels(tmp_path, options, dtype, bound):
    """What clips and scales sees the mean, of whichever levels."""
    (start, *_) = run_ranks(1, start_of_all)
    (unset, *_) = run_ranks(4, train, "unset", TWO, None, {}, dtype)
    (plain, *_) = run_ranks(4, train, "plain", {}, None, options, dtype)
    for weights in run_ranks(4, train, "two levels", TWO, None, options, dtype):
        assert np.linalg.norm(weights - plain) <= bound * np.linalg.norm(plain - start)
        assert np.linalg.norm(weights - unset) > 1e-5 * np.linalg.norm(plain - start)  # the setting did something


@pytest.mark.parametrize(
    ("others", "least", "bound"),
    [
        pytest.param(
            {"grad_compress": {"codec": "bf16", "feedback": True, "level": "inter"}}, 1e-7, 1e-2, marks=pytest.mark.slow
        ),
        pytest.param({"grad_compress": {"codec": "fp16", "level": "inter"}}, 1e-7, 1e-2, marks=pytest.mark.slow),
        pytest.param({"grad_compress": {"codec": "int8", "level": "inter"}}, 1e-7, 0.2, marks=pytest.mark.slow),
        pytest.param(
            {"grad_compress": {"codec": "dgc", "density": 0.3, "level": "inter"}}, 1e-7, 1.0, marks=pytest.mark.slow
        ),
        pytest.param({"grad_compress": {"codec": "sign", "level": "inter"}}, 1e-7, 1.0, marks=pytest.mark.slow),
        pytest.param(
            {"grad_compress": {"codec": "blocksparse", "block": 4, "level": "inter"}}, 0.0, 1e-9, marks=pytest.mark.slow
        ),
        (TOPK, 1e-7, 1.0),
        pytest.param(TOPK | {"overlap": {}}, 1e-7, 1.0, marks=pytest.mark.slow),
        pytest.param(TOPK | {"local_sgd": {"every": 2}}, 1e-7, 1.0, marks=pytest.mark.slow),
    ],
    ids=["bf16", "fp16", "int8", "dgc", "sign", "blocksparse", "topk", "topk+overlap", "topk+local_sgd"],
)
def test_compressed_between_nodes_only(tmp_path, others, least, bound):
    """Where all ranks are on one node nothing is compressed; else it is, and resumes with the same bits."""
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


@pytest.mark.slow
@pytest.mark.parametrize(("codec", "bound"), [("fp16", 15 * 2**-11), ("powersgd", 1e-9)])
def test_what_is_encoded_is_reduced_in_both_levels(tmp_path, codec, bound):
    """What a codec sums is summed inside a node, too; with overlap, to the same bits."""
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


@pytest.mark.slow
def test_what_was_kept_back_for_other_levels_is_refused_before_anything_changes(tmp_path):
    """By all ranks, of which each has a part; what was saved later is still where it was."""
    run_ranks(4, train, "run", TOPK | TWO)
    saved = sorted(Path("ckpt").rglob("*"))
    messages = run_ranks(4, resumed_as_nodes_of, 1)
    assert len(set(messages)) == 1 and "set callbacks.hierarchical and the size of buckets as they were" in messages[0]
    assert [path for path in sorted(Path("ckpt").rglob("*")) if "refused" not in path.parts] == saved


class Ledger(Callback):
    """Around both levels: what this rank gives, what comes back, and of what it keeps the part that it has."""

    role = Role.SYNC

    def __init__(self, compress: GradCompress) -> None:
        self.compress = compress
        self.books: dict[str, dict[Any, np.ndarray]] = {"given": {}, "back": {}, "before": {}, "after": {}}

    def wrap_reduce(self, trainer, reduce):
        names, two_level = {p: name for name, p in trainer.module.named_parameters()}, reduce

        def noted(flat, bucket):
            if trainer.rehearsing or not self.compress.own:
                return reduce(flat, bucket)
            shard = self.compress.own(bucket)
            residual = self.compress.codec.kept["residual"].of(shard, flat[: sum(b - a for _, a, b in shard.pieces)])
            given, kept = flat.double().numpy().copy(), np.full(flat.numel(), np.nan)
            first = two_level.local_rank * -(-flat.numel() // two_level.per_node)
            own = kept[first : first + residual.numel()]
            own[:] = residual
            self.note(names, bucket, "before", kept, first_only=True)
            back = reduce(flat, bucket)
            own[:] = residual
            self.note(names, bucket, "after", kept, anew=True)
            self.note(names, bucket, "given", given)
            self.note(names, bucket, "back", back.double().numpy())
            return back

        return noted

    def note(
        self, names: Any, bucket: Any, book: str, values: np.ndarray, first_only: bool = False, anew: bool = False
    ) -> None:
        entries = self.books[book]
        for view, (p, _, _) in zip(bucket.split(torch.from_numpy(values)), bucket.pieces, strict=True):
            name, part = names[p], view.numpy().ravel().copy()
            if anew or name not in entries:
                entries[name] = part
            elif not first_only:
                entries[name] += part

    def totals(self) -> dict[str, np.ndarray]:
        return {key: np.concatenate([book[name] for name in sorted(book)]) for key, book in self.books.items()}


def books(place: Place, name: str, steps: int, per_node: int, resume: str | None = None) -> dict[str, np.ndarray]:
    compress = GradCompress(**TOPK["grad_compress"])
    ledger = Ledger(compress)
    trainer = Trainer(
        Even(width=37, dtype="float64"),
        {"hierarchical": Hierarchical(per_node), "grad_compress": compress, "ledger": ledger}, sgd, batch=12,
        options=Options(
            max_steps=steps, ddp=DDPOptions(0.005), run_dir=f"runs/{name}", resume=resume,
            checkpoint=CheckpointOptions(every_steps=3, keep=5),
        ),
        data=DataOptions(workers=0), place=place,
    )  # fmt: skip
    trainer.fit()
    return ledger.totals() if compress.own else {}


@pytest.mark.parametrize(
    ("world", "per_node"),
    [pytest.param(2, 1, marks=pytest.mark.slow), (3, 1), pytest.param(6, 2, marks=pytest.mark.slow)],
    ids=["fewer", "one level", "more"],
)
def test_what_nodes_keep_back_is_sent_by_other_nodes(world, per_node, tmp_path):
    """Of each element, the mean over the ranks that have it: what is sent, and that, is what was given, across a change
    of nodes, too."""
    means = []
    for ranks in (
        run_ranks(4, books, "run", 3, 2),
        run_ranks(world, books, "on", 6, per_node, "ckpt/run/step-00000003"),
    ):
        mean = {key: np.nanmean([rank[key] for rank in ranks], axis=0) for key in ranks[0]}
        scale = np.abs(mean["given"]).max()
        np.testing.assert_allclose(
            mean["back"] + mean["after"], mean["given"] + mean["before"], atol=1e-7 * scale
        )  # sent as float32
        means.append(mean)
    before, on = means
    assert not before["before"].any() and np.abs(before["after"]).max() > 0
    np.testing.assert_allclose(on["before"], before["after"], rtol=1e-12)


@pytest.mark.slow
def test_one_node_has_nothing_to_send_what_was_kept_back(tmp_path):
    """It says so, keeps it, and more nodes find it again."""
    kept = [rank["after"] for rank in run_ranks(4, books, "run", 3, 2)]
    run_ranks(2, books, "one", 6, 2, "ckpt/run/step-00000003")
    assert (
        "grad_compress.level=inter does nothing on one node; its residuals are kept"
        in Path("runs/one/logs/rank0.log").read_text()
    )
    found = [rank["before"] for rank in run_ranks(4, books, "again", 9, 2, "ckpt/one/step-00000006")]
    np.testing.assert_allclose(np.nanmean(found, axis=0), np.nanmean(kept, axis=0), rtol=1e-12)


def start_of_all(place: Place) -> np.ndarray:
    trainer = Trainer(Toy(width=37, dtype="float64"), {}, sgd, batch=12, options=Options(max_steps=1), place=place)
    trainer.close()
    return np.concatenate([p.detach().numpy().ravel() for p in trainer.module.parameters()])


def refused(place: Place) -> str:
    with pytest.raises(ConfigError) as refusal:
        train(place, "run", TWO)
    return str(refusal.value)


def test_ranks_that_do_not_divide_are_refused(tmp_path):
    for message in run_ranks(3, refused):
        assert message.startswith("callbacks.hierarchical.ranks_per_node=2: does not divide the 3 ranks; ")


def uneven(place: Place) -> str:
    uneven = replace(place, local_rank=place.rank % 2, local_world=2 if place.rank < 2 else 1)
    trainer = Trainer(Toy(), {}, sgd, batch=12, options=Options(max_steps=1), place=uneven)
    with pytest.raises(ConfigError) as refusal:
        trainer.ranks.ranks_per_node("hierarchical")
    trainer.close()
    return str(refusal.value)


def test_nodes_that_differ_are_refused(tmp_path):
    for message in run_ranks(3, uneven):
        assert message.startswith(
            "callbacks.hierarchical: rank 2 has local rank 0 of 1, and rank 0's node has 2 ranks; "
        )


def test_level_inter_needs_levels():
    with refuses("grad_compress needs hierarchical", "level=all"):
        arrange({"grad_compress": GradCompress(level="inter")}, set())


@pytest.mark.slow
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
    assert 4 < sent / gradients - steps < 4.5  # two passes of the rehearsal, and the weights for two ranks
