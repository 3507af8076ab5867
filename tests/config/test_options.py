"""The typed settings: what depends on the device, and what infinity can't be."""

import math
from pathlib import Path

import pytest
from support.messages import refuses

from recipes.cache import root
from trainer.config.folders import config_dirs
from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError
from trainer.files import refuse_folder
from trainer.run_dir import find_checkpoint, make_parent, make_writable


@pytest.mark.parametrize(
    ("asked", "cuda", "view"), [(None, True, True), (None, False, False), (True, False, True), (False, True, False)]
)
def test_gradients_are_views_of_ddps_buckets_on_cuda_unless_the_config_says_otherwise(asked, cuda, view):
    arguments = DDPOptions(bucket_mib=3, gradient_as_bucket_view=asked).arguments(cuda)
    assert arguments["gradient_as_bucket_view"] is view
    assert arguments["bucket_cap_mb"] == 3 and "bucket_mib" not in arguments


@pytest.mark.parametrize(
    ("options", "name", "key"),
    [
        (Options, "max_epochs", "trainer.max_epochs"),
        (Options, "timeout_s", "trainer.timeout_s"),
        (DataOptions, "max_bad", "data.max_bad"),
        (DataOptions, "cache_gb", "data.cache_gb"),
        (DDPOptions, "bucket_mib", "trainer.ddp.bucket_mib"),
    ],
)
def test_infinity_is_refused_where_a_finite_number_is_needed(options, name, key):
    with pytest.raises(ConfigError, match=f"{key}=inf: must be less than inf"):
        options(**{name: math.inf})


def test_infinity_clips_nothing_and_never_saves():
    assert Options(clip_norm=math.inf).clip_norm == Options(clip_value=math.inf).clip_value == math.inf
    assert CheckpointOptions(every_minutes=math.inf).every_minutes == math.inf


PATHS = {
    "trainer.run_dir": Options,
    "trainer.resume": Options,
    "trainer.init_from": Options,
    "trainer.checkpoint.dir": CheckpointOptions,
    "data.cache_dir": DataOptions,
}


@pytest.mark.parametrize("url", ["s3://bucket/x", "gs://bucket/x", "hdfs://host/x", "file:///x", "hf://a/b"])
@pytest.mark.parametrize("key", PATHS)
def test_a_url_is_no_local_path(key, url):
    """It made a folder `s3:` in the current one."""
    with pytest.raises(ConfigError, match=rf"^{key}={url}: is a URL, and only local paths work here; mount the store"):
        PATHS[key](**{key.rpartition(".")[2]: url})


@pytest.mark.parametrize("key", PATHS)
def test_an_empty_path_is_refused_by_its_key(key):
    """As of `trainer.run_dir=$UNSET`, which was dropped; an empty `checkpoint.dir` was the current folder."""
    with pytest.raises(ConfigError, match=rf"^{key}=: is empty; give a path, or leave {key} out"):
        PATHS[key](**{key.rpartition(".")[2]: ""})
    with refuses("recipe.cache=", "recipe.cache"):
        root("")
    with refuses("--config-dir=", "--config-dir"):
        config_dirs(["--config-dir", ""])


@pytest.mark.parametrize(
    "refuse",
    [
        lambda url: make_writable("FOLDER", Path(url)),
        lambda url: make_parent("--output", Path(url)),
        lambda url: refuse_folder("--png", Path(url)),
        lambda url: find_checkpoint(url, f"CHECKPOINT={url}"),
        root,
    ],
)
def test_tools_and_caches_refuse_urls_too(refuse, tmp_path):
    with pytest.raises(ConfigError, match=r"^[\w.-]+=s3:/+bucket/x: is a URL"):
        refuse("s3://bucket/x")
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("key", ["max_steps", "max_epochs"])
def test_a_run_without_a_step_is_refused(key):
    with pytest.raises(ConfigError, match=rf"^trainer.{key}=0: trains no step"):
        Options(**{key: 0})
    Options(**{key: 0}, init_from="w.safetensors")  # whose weights are validated and saved


@pytest.mark.parametrize("key", ["max_steps", "seed", "log_every_steps"])
def test_a_whole_number_that_64_bits_do_not_hold_is_refused(key):
    with pytest.raises(ConfigError, match=rf"^trainer.{key}={2**63}: must be at most {2**63 - 1}$"):
        Options(**{key: 2.0**63})
