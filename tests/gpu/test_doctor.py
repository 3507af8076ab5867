"""The doctor on a machine with a GPU: it sees what torch sees, and finds no reason against training."""

import pytest
import torch
from support.gpu import on_device, only_gpu

from trainer.tools.doctor import gpus
from trainer.tools.doctor.finding import ERROR

pytestmark = [*on_device, only_gpu]


def test_the_gpus_of_the_driver_and_of_torch():
    pytest.importorskip("pynvml")
    found = list(gpus.examine())
    assert not [finding for finding in found if finding.level == ERROR]
    subjects = [finding.subject for finding in found]
    count = torch.cuda.device_count()
    assert "NVIDIA driver" in subjects and "GPU 0" in subjects
    assert [f"GPU {i} of torch" for i in range(count)] == [name for name in subjects if name.endswith(" of torch")]
