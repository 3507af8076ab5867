"""The choices of a search: what a run would refuse is not among them."""

from pathlib import Path

import pytest
from support.configs import toy_config

from trainer.cost.workload import Choice
from trainer.process.cgroup import Limit
from trainer.process.environment import Place
from trainer.tools.tune.candidates import (
    NOTHING,
    candidates,
    changes_micro_batch,
    describe,
    family,
    near,
    with_settings,
)
from trainer.tools.tune.configs import is_exact, merge, refusal


@pytest.fixture
def config() -> dict:
    return toy_config()


def two(local: int = 2) -> Place:
    return Place(0, 2, 0, local, starts=True)


@pytest.mark.slow
def test_exact_ones_by_default_and_each_once(config: dict) -> None:
    found = candidates(config, two(), lossy=False)
    made = [merge(config, choice) for choice in found]
    assert found and NOTHING not in found and all(map(is_exact, made))
    assert all(one != other for i, one in enumerate(made) for other in made[:i])
    assert {"overlap", "shard"} <= {name for choice in found for name in choice.callbacks}
    lossy = candidates(config, two(), lossy=True)
    assert not any("onebit_adam" in choice.callbacks for choice in lossy)  # a trial would end in its warm-up
    assert {"grad_compress", "local_sgd"} <= {name for choice in lossy for name in choice.callbacks}
    assert len(lossy) > len(found)
    left = candidates(config, two(), lossy=False, without=["compile", "shard", "activation_checkpoint"])
    assert {name for choice in left for name in choice.callbacks} == {"overlap"}


def test_with_batch_norm_the_micro_batch_of_exact_choices_is_todays(config: dict) -> None:
    one, without = Place(0, 1, 0, 1, starts=True), ["compile", "activation_checkpoint"]
    exact, lossy = (candidates(config, one, lossy, without, batch_norm=True) for lossy in (False, True))
    assert {key for choice in exact for key in choice.settings} == {"data.workers"}
    assert {key for choice in lossy for key in choice.settings} == {"micro_batch", "accumulate", "data.workers"}
    pipeline = {"pipeline": {"stages": 2, "schedule": "1f1b"}}  # one replica has the samples of two ranks
    config |= {"batch": 16, "micro_batch": None, "accumulate": 2}
    assert changes_micro_batch(config, Choice(pipeline, {}), 2)
    assert not changes_micro_batch(config, Choice(pipeline, {"micro_batch": 4, "accumulate": None}), 2)


def test_after_a_warm_up_of_onebit_adam_it_is_tried(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    config["trainer"]["resume"] = "ckpt/r/step-00000100"
    for step, tried in ((99, False), (100, True)):
        monkeypatch.setattr("trainer.tools.tune.candidates.verify", lambda *_, step=step, **__: {"step": step})
        found = candidates(config, two(), lossy=True, without=["compile", "shard", "activation_checkpoint"])
        assert any("onebit_adam" in choice.callbacks for choice in found) == tried


def test_what_a_run_refuses_is_left_out(config: dict) -> None:
    clipped = {**config, "trainer": config["trainer"] | {"clip_norm": 1.0}}
    assert all("overlap" not in choice.callbacks for choice in candidates(clipped, two(), lossy=True))
    assert "clip_norm" in refusal(merge(clipped, Choice({"overlap": {}}, {})), 2)
    assert "does not divide" in refusal(merge(config, Choice({}, {"micro_batch": 5})), 2)
    assert refusal(config, 2) == ""


@pytest.mark.slow
def test_two_levels_need_several_ranks_on_several_nodes(config: dict) -> None:
    flat = candidates(config, two(1), lossy=False)
    levels = candidates({**config, "batch": 16}, Place(0, 4, 0, 2, starts=True), lossy=False)
    assert not any("hierarchical" in choice.callbacks for choice in flat)
    assert any("hierarchical" in choice.callbacks for choice in levels)
    lossy = candidates(
        {**config, "batch": 16}, Place(0, 4, 0, 2, starts=True), lossy=True, without=["compile", "shard"]
    )
    assert any(
        "hierarchical" in choice.callbacks and choice.callbacks.get("grad_compress", {}).get("level") == "inter"
        for choice in lossy
    )


def test_one_rank_has_micro_batches_workers_and_compile_alone(config: dict) -> None:
    found = candidates(config, Place(0, 1, 0, 1, starts=True), lossy=True)
    assert {name for choice in found for name in choice.callbacks} == {"compile", "activation_checkpoint"}
    assert {key for choice in found for key in choice.settings} == {"micro_batch", "accumulate", "data.workers"}


def test_data_workers_are_no_more_than_the_cores_of_a_rank(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.sched_getaffinity", lambda _: range(16))
    for cores, most in ((16.0, 4), (6.0, 2)):  # of a container, for two ranks
        monkeypatch.setattr("trainer.process.cgroup.cores", lambda *_, cores=cores: Limit(cores, Path("cpu.max")))
        assert max(each.get("data.workers", 0) for each in with_settings(config, two(), 2)) == most


def test_callbacks_of_today_stay(config: dict) -> None:
    today = merge(config, Choice({"overlap": {}}, {}))
    assert all("overlap" not in choice.callbacks for choice in candidates(today, two(), lossy=False))


def knobs_of(found: list[Choice], name: str) -> list[dict]:
    knobs = [choice.callbacks[name] for choice in found if name in choice.callbacks]
    return [one for i, one in enumerate(knobs) if one not in knobs[:i]]


def test_every_stage_of_shard_is_a_choice_and_stage_3_has_no_buckets(config: dict) -> None:
    found = candidates(config, two(), lossy=False)
    shards = [{"stage": 1}, {"stage": 2}, {"stage": 3}, {"stage": 3, "reshard": False}]
    assert knobs_of(found, "shard") == shards
    assert {"shard": {"stage": 3, "hybrid": True}} in [
        choice.callbacks for choice in candidates({**config, "batch": 16}, Place(0, 4, 0, 2, starts=True), lossy=False)
    ]
    third = [choice for choice in found if choice.callbacks.get("shard", {}).get("stage") == 3]
    assert third and not any("trainer.ddp.bucket_mib" in choice.settings for choice in third)


@pytest.mark.slow
def test_pipelines_need_blocks_and_micro_batches(config: dict) -> None:
    assert not knobs_of(candidates(config, two(), lossy=False), "pipeline")
    two_blocks = candidates(config, two(), lossy=False, blocks=2)
    assert knobs_of(two_blocks, "pipeline") == [{"stages": 2, "schedule": "1f1b"}]  # zero_bubble needs four
    for choice in two_blocks:
        if "pipeline" in choice.callbacks:  # one replica has the whole batch of 12, in two micro-batches or more
            assert choice.settings["micro_batch"] <= 6 and 12 % choice.settings["micro_batch"] == 0
            assert refusal(merge(config, choice), 2) == "" and "compile" not in choice.callbacks
    schedules = {one["schedule"] for one in knobs_of(candidates(config, two(), True, blocks=4), "pipeline")}
    assert schedules == {"1f1b", "zero_bubble", "pipedream_2bw"}


def test_nccl_s_settings_are_choices_where_nccl_communicates(config: dict, monkeypatch: pytest.MonkeyPatch) -> None:
    def keys(**more: str) -> set[str]:
        found = candidates(config, two(1), lossy=False, **more)
        return {key for choice in found for key in choice.settings if key.startswith("nccl.")}

    assert not keys() and {"nccl.algo", "nccl.max_channels", "nccl.buffer_mib"} <= keys(backend="nccl")
    monkeypatch.setenv("NCCL_ALGO", "Ring")
    assert "nccl.algo" not in keys(backend="nccl")
    config["nccl"]["max_channels"] = 4
    assert "nccl.max_channels" not in keys(backend="nccl")


def test_sizes_and_names() -> None:
    assert near(10, 10) == [5, 10] and near(1, 1) == [1] and near(64, 8) == [2, 4, 16, 32, 64]
    choice = Choice({"overlap": {}, "compile": {"fallback_random": True}}, {"micro_batch": 2, "accumulate": None})
    assert describe(choice) == "+overlap +compile(fallback_random=True) micro_batch=2"
    assert (describe(NOTHING), family(NOTHING), family(choice)) == ("today's config", "plain", "compile+overlap")
    assert (
        family(Choice({"shard": {"stage": 3}}, {"nccl.algo": "allreduce:Tree"})) == "nccl.algo=allreduce:Tree+shard.3"
    )
