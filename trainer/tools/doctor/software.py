"""Examines Python, torch with its libraries, packages, and the environment variables that they read."""

import os
import platform
import sys
from collections.abc import Iterator, Mapping
from importlib import metadata

import trainer
from trainer.redact import is_secret, redact_urls
from trainer.tools.doctor.finding import ERROR, NOTE, WARNING, Finding, find

PREFIXES = ("NCCL_", "GLOO_", "TORCH_", "PYTORCH_", "CUDA_", "OMP_", "MKL_", "UCX_", "FI_", "NVIDIA_")
DEVELOPMENT = ("test", "peers")  # extras that no run needs
OWN = {  # differ between ranks by nature
    "TORCH_CPP_LOG_LEVEL", "NVIDIA_VISIBLE_DEVICES", "TORCHELASTIC_ERROR_FILE", "CUDA_VISIBLE_DEVICES",
}  # fmt: skip


def examine(environ: Mapping[str, str] = os.environ) -> Iterator[Finding]:
    yield Finding("Python", platform.python_version(), data=sys.executable)
    yield Finding("Echelon", trainer.__version__)
    yield from libraries()
    yield from packages()
    variables = {name: value for name, value in environ.items() if name.startswith(PREFIXES) and name not in OWN}
    shown = (f"{name}={'***' if is_secret(name) else redact_urls(value)}" for name, value in sorted(variables.items()))
    yield Finding("variables", " ".join(shown) or "none of NCCL, gloo, torch, CUDA or OpenMP")


def libraries() -> Iterator[Finding]:
    try:
        import torch
        import torch.distributed as dist
    except Exception as error:  # a library that is missing or damaged
        yield Finding(
            "torch", f"can't be imported: {type(error).__name__}: {error}".splitlines()[0], ERROR, "nothing can train",
            "install it again: pip install --force-reinstall torch",
        )  # fmt: skip
        return
    yield Finding("torch", torch.__version__)
    built = f"CUDA {torch.version.cuda}" if torch.version.cuda else f"ROCm {torch.version.hip}"
    yield Finding("torch's accelerator", built if torch.version.cuda or torch.version.hip else "none: a CPU build")
    if dist.is_available() and dist.is_nccl_available():
        from torch.cuda import nccl

        yield Finding("NCCL", ".".join(map(str, nccl.version())))
    else:
        yield Finding("NCCL", "none: this torch was built without")
    gloo = dist.is_available() and dist.is_gloo_available()
    value = f"part of torch {torch.__version__.partition('+')[0]}, which reports no version of it" if gloo else "none"
    yield find(not gloo, "gloo", value, ERROR, "several ranks can't agree on a step", "install a torch with gloo")


def packages() -> Iterator[Finding]:
    try:
        from packaging.requirements import Requirement

        required = [Requirement(text) for text in metadata.requires("echelon-trainer") or ()]
    except (ImportError, metadata.PackageNotFoundError) as error:
        yield Finding("packages", f"unknown: {error}", NOTE, "versions are not compared", "pip install -e .")
        return
    found = dict[str, str]()
    for requirement in required:
        marker = str(requirement.marker)
        if any(f'"{extra}"' in marker for extra in DEVELOPMENT):
            continue
        try:
            found[requirement.name] = version = metadata.version(requirement.name)
        except metadata.PackageNotFoundError:
            if "extra ==" not in marker:
                fix = f"pip install '{requirement.name}'"
                yield Finding(requirement.name, "missing", ERROR, "Echelon needs it", fix)
            continue
        if not requirement.specifier.contains(version, prereleases=True):
            yield Finding(
                requirement.name, version, WARNING, f"Echelon is tested with {requirement.specifier}",
                f"pip install '{requirement.name}{requirement.specifier}'",
            )  # fmt: skip
    yield Finding("packages", ", ".join(f"{name} {version}" for name, version in sorted(found.items())))
