"""The typed settings: what depends on the device."""

import pytest

from trainer.config.options import DDPOptions


@pytest.mark.parametrize(
    ("asked", "cuda", "view"), [(None, True, True), (None, False, False), (True, False, True), (False, True, False)]
)
def test_gradients_are_views_of_ddps_buckets_on_cuda_unless_the_config_says_otherwise(asked, cuda, view):
    arguments = DDPOptions(bucket_mib=3, gradient_as_bucket_view=asked).arguments(cuda)
    assert arguments["gradient_as_bucket_view"] is view
    assert arguments["bucket_cap_mb"] == 3 and "bucket_mib" not in arguments
