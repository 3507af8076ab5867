"""Faults under torchrun: ranks go on where they were, also on fewer nodes and on more, or it is refused."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
from support.cli import MARK, environment, popen, run
from support.faults import RUN, nobody_left, resumed, tidy, troubling, wait_for, whole
from support.network import Cluster, needs_cluster

from trainer.data.sampling.order import Order
from trainer.process.environment import FRESH_STORE, Place, refuse_nodes

RANKS = [*(word for word in RUN if not word.startswith("trainer.devices")), "trainer.resume=auto"]
TORCHRUN = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=3", "--max-restarts=2"]
TORCHRUN += ["--log-dir=torchrun", "-m", "trainer.main"]
FRESH = {FRESH_STORE: "1"}


@pytest.mark.slow
def test_a_rank_is_killed(golden, tmp_path):
    result = run([*RANKS, *troubling("SIGKILL")], tmp_path, TORCHRUN, timeout_s=110, **FRESH)
    assert result.code == 0, result.err
    assert resumed(result.out) == [4]
    whole(tmp_path, golden)


@pytest.mark.slow
def test_no_rank_moves(golden, tmp_path):
    """There is no supervisor of ours that would notice: each rank watches itself."""
    hang = [*RANKS, *troubling("sleep 3600", rank=-1), "trainer.timeout_s=6"]
    result = run(hang, tmp_path, TORCHRUN, timeout_s=110, **FRESH)
    assert result.code == 0, result.err
    whole(tmp_path, golden)
    logs = [path.read_text() for path in (tmp_path / "runs" / "r" / "logs").glob("rank*.log")]
    assert any("Timeout (0:00:12)!" in log and "in make_trouble" in log for log in logs)  # torchrun ends the others


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_the_agent_is_killed(golden, tmp_path):
    """No rank outlives it, and the same command goes on."""
    process = popen([*RANKS, "callbacks.probe.step_s=0.2"], tmp_path, TORCHRUN, **FRESH)
    try:
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
    finally:
        process.kill()
        process.communicate()
    nobody_left(tmp_path, within_s=20)
    again = run(RANKS, tmp_path, TORCHRUN, timeout_s=110, **FRESH)
    assert again.code == 0 and resumed(again.out)[0] >= 4
    whole(tmp_path, golden)


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_sigterm_to_the_agent(golden, tmp_path):
    """As from Kubernetes. It reaches the data workers, too: none of them ends before there is a checkpoint."""
    process = popen([*RANKS, "data.workers=2", "callbacks.probe.step_s=0.3"], tmp_path, TORCHRUN, **FRESH)
    try:
        wait_for(tmp_path / "ckpt" / "r" / "step-00000004")
        process.send_signal(signal.SIGTERM)
        out, err = process.communicate(timeout=110)
    finally:
        process.kill()
        process.communicate()
    assert process.returncode == 1 and "SignalException" in err  # torchrun's, whatever its ranks' are
    assert out.count("SIGTERM: stopping after this step with a checkpoint") == 1
    summary = json.loads((tmp_path / "runs" / "r" / "summary.json").read_text())
    assert summary["stopped"] == "signal" and 4 <= summary["steps"] < 12
    assert os.readlink(tmp_path / "ckpt" / "last.pt") == f"r/step-{summary['steps']:08d}"
    again = run(RANKS, tmp_path, TORCHRUN, timeout_s=110, **FRESH)
    assert again.code == 0 and resumed(again.out) == [summary["steps"]]
    whole(tmp_path, golden)


@pytest.mark.parametrize(
    ("env", "given", "told"),
    [
        (
            {"TORCHELASTIC_MAX_RESTARTS": "3"},
            (1, None, None),
            "^torchrun --max-restarts: .* add trainer.resume=auto, tr",
        ),
        (
            {},
            ("1:2", "auto", "runs/r"),
            f"^trainer.nodes=1:2: .* could not resume; add {FRESH_STORE}=1 in torchrun's env",
        ),
        ({FRESH_STORE: "1"}, ("1:2", "auto", None), "; add trainer.run_dir=runs/NAME$"),
    ],
)
def test_a_restart_that_would_begin_anew_is_refused(env, given, told):
    place = Place(launcher="torchrun")
    with pytest.raises(Exception, match=told):
        refuse_nodes(place, env, *given)
    refuse_nodes(place, {"TORCHELASTIC_MAX_RESTARTS": "0"}, 2, None, None)
    refuse_nodes(place, env | {FRESH_STORE: "1"}, "1:2", "auto", "runs/r")


@pytest.mark.slow
def test_the_refusal_comes_before_anything(tmp_path):
    result = run(RANKS, tmp_path, TORCHRUN)
    assert result.code == 1 and FRESH_STORE in result.err
    assert not (tmp_path / "runs").exists()


STEPS, BATCH, SAMPLES = 240, 12, 96  # as tests/toy/conf has the samples, and RUN the batch
AGENT = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1:2", "--nproc-per-node=2", "--max-restarts=9"]
AGENT += ["--rdzv-backend=c10d", "--rdzv-id=r"]


def start(cluster: Cluster, host: int, cwd: Path) -> subprocess.Popen[bytes]:
    here = [f"--rdzv-endpoint={cluster.address(0)}:29471", f"--local-addr={cluster.address(host)}"]
    here.append(f"--rdzv-conf=last_call_timeout=2,is_host={int(host == 0)}")  # all have one name here
    probe = ["callbacks.probe.step_s=0.1", "callbacks.probe.audit=true", "trainer.nodes='1:2'", "trainer.timeout_s=20"]
    words = [*AGENT, *here, "-m", "trainer.main", *RANKS, *probe, f"trainer.max_steps={STEPS}"]
    with (cwd / f"agent-{host}.log").open("ab") as log:
        return cluster.popen(host, words, environment(**{MARK: str(cwd)}, **FRESH), cwd=cwd, stdout=log, stderr=log)


def audit(cwd: Path) -> list[dict[str, Any]]:
    path = cwd / "runs" / "r" / "audit.jsonl"
    return [json.loads(line) for line in path.read_text().splitlines()] if path.exists() else []


def wait_for_steps(cwd: Path, agent: subprocess.Popen[bytes], world: int, more: int) -> None:
    """Until `world` ranks have taken `more` further steps."""
    known, deadline = len(audit(cwd)), time.monotonic() + 120
    while sum(line["world"] == world for line in audit(cwd)[known:]) < more * world:
        assert time.monotonic() < deadline, f"no {more} steps on {world} ranks"
        assert agent.poll() is None, (cwd / "agent-0.log").read_text()[-3000:]
        time.sleep(0.1)


@needs_cluster
@pytest.mark.slow
@pytest.mark.timeout(420)
@pytest.mark.parametrize("how", [signal.SIGKILL, signal.SIGTERM])
def test_38_a_node_leaves_and_comes_back(tmp_path, how):
    """2 nodes of 2 ranks; the second dies with all that runs there, or its agent is told to stop; the first goes on,
    and the second comes back."""
    with Cluster(hosts=2) as cluster:
        agents = [start(cluster, host, tmp_path) for host in range(2)]
        wait_for_steps(tmp_path, agents[0], world=4, more=20)
        os.kill(agents[1].pid, signal.SIGTERM) if how == signal.SIGTERM else os.killpg(agents[1].pid, signal.SIGKILL)
        agents[1].wait()
        wait_for_steps(tmp_path, agents[0], world=2, more=20)
        agents[1] = start(cluster, 1, tmp_path)
        wait_for_steps(tmp_path, agents[0], world=4, more=20)
        assert [agent.wait(timeout=200) for agent in agents] == [0, 0]
    taken: dict[int, dict[str, list[Any]]] = {}
    for line in audit(tmp_path):
        taken.setdefault(line["step"], {}).setdefault(line["start"], []).append(line)
    order = Order([1] * SAMPLES, 0, 12, 4)
    for step in range(1, STEPS + 1):
        last = list(taken[step].values())[-1]  # what was taken before it, and then lost, was taken anew
        assert len(last) == last[0]["world"]
        planned = order.local((step - 1) * BATCH, step * BATCH, 0, 1)
        assert sorted(tuple(ref) for line in last for ref in line["refs"]) == sorted(map(tuple, planned))
    steps: dict[str, list[int]] = {}
    for line in audit(tmp_path):
        steps.setdefault(line["start"], []).append(line["step"])
    (_, ended), (shrunk, _), *_ = [(min(some), max(some)) for some in steps.values()]
    assert len(steps) >= 3 and (shrunk == ended + 1 or how == signal.SIGKILL)  # no step is lost
    tidy(tmp_path)
