"""scripts/cluster: manifests as their published schemas want them, whose commands train, and the image's build."""

import json
import re
import shutil
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli import QUICK, ROOT, TOY, popen
from support.slurm import free_ports

CLUSTER = ROOT / "scripts" / "cluster"
PYTORCHJOB = yaml.safe_load((CLUSTER / "pytorchjob.yaml").read_text())
RUNTIME, TRAINJOB = yaml.safe_load_all((CLUSTER / "trainjob.yaml").read_text())


def valid(kind: str, value: dict[str, Any]) -> bool:
    """The models check types and required keys, and drop what they do not know."""
    from kubeflow_trainer_api import models

    return getattr(models, kind).from_dict(value).to_dict() == value


@pytest.mark.slow
def test_trainjob_and_its_runtime():
    assert RUNTIME["apiVersion"] == TRAINJOB["apiVersion"] == "trainer.kubeflow.org/v1alpha1"
    assert valid("TrainerV1alpha1TrainingRuntime", RUNTIME)
    assert valid("TrainerV1alpha1TrainJob", TRAINJOB)
    ref = {"apiGroup": "trainer.kubeflow.org", "kind": RUNTIME["kind"], "name": RUNTIME["metadata"]["name"]}
    assert TRAINJOB["spec"]["runtimeRef"] == ref


def test_pytorchjob():
    """No package on PyPI has this schema without a Kubernetes client: by hand, but for the pods."""
    assert (PYTORCHJOB["apiVersion"], PYTORCHJOB["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert set(PYTORCHJOB["spec"]) == {"runPolicy", "pytorchReplicaSpecs"}
    replicas = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]
    assert set(replicas) == {"Master", "Worker"} and replicas["Master"]["replicas"] == 1
    for replica in replicas.values():
        assert set(replica) == {"replicas", "restartPolicy", "template"} and replica["restartPolicy"] == "OnFailure"
        assert valid("IoK8sApiCoreV1PodTemplateSpec", replica["template"])
        assert [container["name"] for container in replica["template"]["spec"]["containers"]] == ["pytorch"]
    nodes = sum(replica["replicas"] for replica in replicas.values())
    (container,) = replicas["Master"]["template"]["spec"]["containers"]
    per_node = container["resources"]["limits"]["nvidia.com/gpu"]
    assert {f"--nnodes={nodes}", f"--nproc-per-node={per_node}"} <= set(container["command"])


def under_operator(node: int, port: int) -> dict[str, str]:
    return {"RANK": str(node), "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}


def under_trainer(node: int, port: int) -> dict[str, str]:
    values = {"NNODES": 2, "NPROC_PER_NODE": 1, "NODE_RANK": node, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    return {f"PET_{name}": str(value) for name, value in values.items()}


@pytest.mark.slow
@pytest.mark.parametrize(
    ("job", "container", "variables"),
    [
        (TRAINJOB["spec"]["trainer"], RUNTIME["spec"]["template"]["spec"]["replicatedJobs"][0], under_trainer),
        pytest.param({}, PYTORCHJOB["spec"]["pytorchReplicaSpecs"]["Worker"], under_operator, marks=pytest.mark.slow),
    ],
    ids=["trainjob", "pytorchjob"],
)
def test_what_the_pods_run_trains(job, container, variables, tmp_path):
    """Two of them, with the variables that their operator sets, one rank each instead of eight."""
    while "containers" not in container:
        container = container.get("template") or container["spec"]
    (container,) = container["containers"]
    typed = [word for word in job.get("args", container.get("args")) if not word.startswith("recipe=")]
    port, pods = free_ports(1)[0], []
    for node in range(2):
        env = variables(node, port)
        words = [re.sub(r"\$\((\w+)\)", lambda found: env[found[1]], word) for word in container["command"]]  # noqa: B023
        words = [word.replace("--nproc-per-node=8", "--nproc-per-node=1") for word in words]
        assert words.pop(0) == "torchrun"
        command = [sys.executable, "-m", "torch.distributed.run", *words]
        pods.append(popen([*TOY, *QUICK, "trainer.max_steps=2", *typed], tmp_path, command, **env))
    ended = [(pod.communicate(timeout=90), pod.returncode) for pod in pods]
    assert [code for _, code in ended] == [0, 0], ended
    summary = json.loads((tmp_path / "runs" / "echelon" / "summary.json").read_text())
    assert (summary["steps"], summary["ranks"]) == (2, 2)


@pytest.mark.slow
def test_the_image_has_what_the_package_is_built_from(tmp_path: Path):
    """There is no Docker to build it: what is copied becomes a wheel."""
    lines = (CLUSTER / "Dockerfile").read_text().splitlines()
    for line in [line for line in lines if line.startswith("COPY ")]:
        *sources, target = line.split()[1:]
        for source in sources:
            if (ROOT / source).is_dir():
                shutil.copytree(ROOT / source, tmp_path / target)
            else:
                shutil.copy(ROOT / source, tmp_path / target)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", str(tmp_path / "dist"), "."]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout + done.stderr
    names = zipfile.ZipFile(next(tmp_path.glob("dist/*.whl"))).namelist()
    assert {"trainer/main.py", "trainer/conf/config.yaml", "recipes/bert.py", "echelon/__init__.py"} <= set(names)


def test_the_image_has_all_packages_a_compiler_and_remote_dma():
    """`compile` needs g++; NCCL opens libibverbs.so.1, and that the provider of the card."""
    text = (CLUSTER / "Dockerfile").read_text().replace("\\\n", " ")
    project = (ROOT / "pyproject.toml").read_text()
    (packages,) = re.findall(r"^only-include = (\[.*\])$", project, re.MULTILINE)
    copied = {line.split()[1] for line in text.splitlines() if line.startswith("COPY ")}
    assert set(json.loads(packages)) <= copied
    system, install = [line for line in text.splitlines() if line.startswith("RUN ")]
    assert {"g++", "libibverbs1", "ibverbs-providers"} <= set(system.split())
    (extras,) = re.findall("^ARG EXTRAS=(.*)$", text, re.MULTILINE)
    assert all(f"\n{extra} = [" in project for extra in extras.split(",")) and "recipes" in extras.split(",")
    assert install == 'RUN pip install --no-cache-dir -c constraints.txt ".[$EXTRAS]"'


def test_pods_ask_for_remote_dma():
    jobs = PYTORCHJOB["spec"]["pytorchReplicaSpecs"]
    (node,) = RUNTIME["spec"]["template"]["spec"]["replicatedJobs"]
    pods = [jobs["Master"]["template"], jobs["Worker"]["template"], node["template"]["spec"]["template"]]
    containers = [container for pod in pods for container in pod["spec"]["containers"]]
    assert [c["securityContext"] for c in containers] == [{"capabilities": {"add": ["IPC_LOCK"]}}] * 3
    limits = [containers[0]["resources"]["limits"], TRAINJOB["spec"]["trainer"]["resourcesPerNode"]["limits"]]
    assert limits == [{"nvidia.com/gpu": 8, "rdma/hca_shared_devices_a": 1}] * 2
