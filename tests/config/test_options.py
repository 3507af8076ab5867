"""The typed settings: what depends on the device, and what infinity can't be."""

import math

import pytest

from trainer.config.options import CheckpointOptions, DataOptions, DDPOptions, Options
from trainer.errors import ConfigError


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
