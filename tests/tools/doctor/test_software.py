"""Versions of this environment, and environments that lack something."""

import sys
from importlib import metadata

import pytest
import torch

from trainer.tools.doctor import software
from trainer.tools.doctor.finding import ERROR, NOTE, OK, WARNING


def by_subject(environ: dict[str, str] | None = None):
    return {finding.subject: finding for finding in software.examine(environ or {})}


def test_this_environment():
    found = by_subject()
    assert found["torch"].value == torch.__version__ and found["Python"].data == sys.executable
    assert f"torch {torch.__version__}" in found["packages"].value and "pytest" not in found["packages"].value
    assert found["gloo"].level == OK


def test_variables_are_shown_without_secrets_and_without_those_of_the_rank():
    environ = {
        "NCCL_DEBUG": "INFO", "GLOO_SOCKET_IFNAME": "eth0", "TORCH_API_TOKEN": "x1", "PATH": "/bin",
        "CUDA_VISIBLE_DEVICES": "3", "NCCL_PROXY": "http://me:pass@host",
    }  # fmt: skip
    assert by_subject(environ)["variables"].value == (
        "GLOO_SOCKET_IFNAME=eth0 NCCL_DEBUG=INFO NCCL_PROXY=http://***@host TORCH_API_TOKEN=***"
    )


def require(monkeypatch, *texts: str) -> dict:
    monkeypatch.setattr(metadata, "requires", lambda name: list(texts))
    return {finding.subject: finding for finding in software.packages()}


def test_packages_that_are_missing_or_out_of_bounds(monkeypatch):
    found = require(monkeypatch, "not-there>=2", "numpy<1", 'absent>=1; extra == "s3"', 'torch>=1; extra == "test"')
    assert found["not-there"].level == ERROR and found["not-there"].way_out == "pip install 'not-there'"
    assert found["numpy"].level == WARNING and found["numpy"].consequence == "Echelon is tested with <1"
    assert "absent" not in found and "torch" not in found["packages"].value


def test_a_checkout_that_is_not_installed(monkeypatch):
    def unknown(name):
        raise metadata.PackageNotFoundError(name)

    monkeypatch.setattr(metadata, "requires", unknown)
    (found,) = software.packages()
    assert found.level == NOTE and "echelon-trainer" in found.value


@pytest.mark.parametrize("error", [ImportError("libcudart.so.13: cannot open\nmore"), OSError("damaged")])
def test_a_torch_that_can_not_be_imported_is_one_line(monkeypatch, error):
    class Broken:
        def find_spec(self, name, path, target=None):
            if name == "torch":
                raise error

    with monkeypatch.context() as patch:
        patch.delitem(sys.modules, "torch")
        patch.setattr(sys, "meta_path", [Broken(), *sys.meta_path])
        (found,) = software.libraries()
    assert found.level == ERROR and "\n" not in found.line()
    assert str(error).splitlines()[0] in found.value
