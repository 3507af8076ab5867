"""NCCL's settings: the presets, the variables they become, what is refused, and what a run says and keeps of them."""

import dataclasses
import json
import os
import re
from pathlib import Path
from typing import Any

import pytest
import yaml
from support.cli import PYTHONPATH, ROOT, run, toy

from trainer.comm.nccl import VARIABLES, NCCLOptions, applied, in_words
from trainer.errors import ConfigError

PRESETS = sorted((ROOT / "conf" / "nccl").glob("*.yaml"))
PRESET = {
    "default": {},
    "ethernet": {"NCCL_NET": "Socket", "NCCL_SOCKET_NTHREADS": "4", "NCCL_NSOCKS_PERTHREAD": "4"},
    "infiniband": {"NCCL_NET": "IB", "NCCL_IB_DISABLE": "0", "NCCL_DEBUG": "WARN"},
    "sharp": {"NCCL_IB_DISABLE": "0", "NCCL_COLLNET_ENABLE": "1", "NCCL_DEBUG": "WARN"},
}

SHORT = ["trainer.accelerator=cpu", "trainer.max_steps=1", "trainer.run_dir=runs/r"]


def load(path: Path) -> dict[str, Any]:
    return yaml.safe_load(path.read_text())


@pytest.mark.parametrize("path", PRESETS, ids=lambda path: path.stem)
def test_a_preset_shows_every_knob_and_is_valid(path):
    values = load(path)
    assert list(values) == [field.name for field in dataclasses.fields(NCCLOptions)]
    assert NCCLOptions(**values).environment() == PRESET[path.stem]


def test_a_preset_may_be_changed_on_the_command_line(tmp_path):
    words = ["nccl=ethernet", 'nccl.interface="=eth0"', "nccl.algo=[Ring,Tree]", "nccl.socket_threads=null"]
    done = run([*words, "--cfg", "job"], tmp_path)
    assert NCCLOptions(**yaml.safe_load(done.out)["nccl"]).environment() == {
        "NCCL_NET": "Socket", "NCCL_SOCKET_IFNAME": "=eth0", "NCCL_NSOCKS_PERTHREAD": "4", "NCCL_ALGO": "Ring,Tree",
    }  # fmt: skip


# Names and values as in the user guide of NCCL 2.30.
DOCUMENTED = [
    ("net", "IB", "NCCL_NET", "IB"),
    ("interface", "^docker", "NCCL_SOCKET_IFNAME", "^docker"),
    ("socket_threads", 16, "NCCL_SOCKET_NTHREADS", "16"),
    ("sockets_per_thread", 64, "NCCL_NSOCKS_PERTHREAD", "64"),
    ("ib_disable", True, "NCCL_IB_DISABLE", "1"),
    ("ib_hca", "=mlx5_0:1,mlx5_1:1", "NCCL_IB_HCA", "=mlx5_0:1,mlx5_1:1"),
    ("gpu_direct", "PXB", "NCCL_NET_GDR_LEVEL", "PXB"),
    ("collnet", False, "NCCL_COLLNET_ENABLE", "0"),
    ("algo", ["Ring", "Tree"], "NCCL_ALGO", "Ring,Tree"),
    ("algo", "^NVLS,PAT", "NCCL_ALGO", "^NVLS,PAT"),
    ("algo", "allreduce:^Tree", "NCCL_ALGO", "allreduce:^Tree"),
    ("algo", "Ring,CollnetDirect;allreduce:Tree;broadcast:Ring", "NCCL_ALGO", None),
    ("proto", "Simple", "NCCL_PROTO", "Simple"),
    ("proto", "^LL128", "NCCL_PROTO", "^LL128"),
    ("buffer_mib", 8, "NCCL_BUFFSIZE", "8388608"),
    ("buffer_mib", 0.5, "NCCL_BUFFSIZE", "524288"),
    ("min_channels", 4, "NCCL_MIN_CTAS", "4"),
    ("max_channels", 64, "NCCL_MAX_CTAS", "64"),
    ("debug", "INFO", "NCCL_DEBUG", "INFO"),
]


@pytest.mark.parametrize(("key", "value", "variable", "text"), DOCUMENTED)
def test_each_field_is_the_documented_variable(key, value, variable, text):
    assert NCCLOptions(**{key: value}).environment() == {variable: text or value}


def test_no_field_is_without_a_variable():
    assert (
        {key for key, *_ in DOCUMENTED} == {field.name for field in dataclasses.fields(NCCLOptions)} == set(VARIABLES)
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"algo": "Rnig"}, "nccl.algo=Rnig: NCCL knows no Rnig; did you mean Ring?"),
        ({"algo": ["Ring", "Tre"]}, "nccl.algo=Ring,Tre: NCCL knows no Tre; did you mean Tree"),
        ({"algo": "alreduce:Tree"}, "nccl.algo=alreduce:Tree: NCCL knows no alreduce; did you mean allreduce"),
        ({"algo": []}, "nccl.algo=: NCCL knows no empty name; there are CollnetChain"),
        ({"algo": "Tree"}, "nccl.algo=Tree: DDP's broadcast needs Ring; add it, or .*nccl.algo=allreduce:Tree$"),
        ({"algo": "^Ring"}, r"nccl.algo=\^Ring: DDP's broadcast needs Ring"),
        ({"proto": "LL64"}, "nccl.proto=LL64: NCCL knows no LL64; did you mean LL"),
        ({"gpu_direct": "PBX"}, "nccl.gpu_direct=PBX: NCCL knows no PBX; did you mean PXB"),
        ({"debug": "WRAN"}, "nccl.debug=WRAN: NCCL knows no WRAN; did you mean WARN"),
        ({"buffer_mib": 0}, "nccl.buffer_mib=0: must be at least"),
        ({"socket_threads": 17}, "nccl.socket_threads=17: must be at most 16"),
        ({"sockets_per_thread": 0}, "nccl.sockets_per_thread=0: must be at least 1"),
        (
            {"socket_threads": 16, "sockets_per_thread": 5},
            "nccl.sockets_per_thread=5: with .*=16 that makes 80 sockets",
        ),
        ({"max_channels": 65}, "nccl.max_channels=65: must be at most 64"),
        ({"min_channels": 8, "max_channels": 4}, "nccl.min_channels=8: must be at most nccl.max_channels=4"),
        ({"interface": "eth0 eth1"}, "nccl.interface=eth0 eth1: must be names"),
        ({"net": "IB", "ib_disable": True}, "nccl.ib_disable=true: nccl.net=IB needs InfiniBand"),
    ],
)
def test_refused(values, message):
    with pytest.raises(ConfigError, match=message) as caught:
        NCCLOptions(**values)
    assert "\n" not in str(caught.value)


def test_the_environment_is_set_and_given_back():
    environ = {"PATH": "/bin", "NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "INFO"}
    before = dict(environ)
    with applied(NCCLOptions(algo="Ring", debug="INFO"), environ):
        assert environ == before | {"NCCL_ALGO": "Ring"}
    assert environ == before
    with pytest.raises(ZeroDivisionError), applied(NCCLOptions(algo="Ring"), environ):
        _ = 1 / 0
    assert environ == before


def test_what_the_shell_says_otherwise_is_refused():
    environ = {"NCCL_BUFFSIZE": "4194304"}
    with pytest.raises(ConfigError) as caught, applied(NCCLOptions(algo="Ring", buffer_mib=8), environ):
        raise AssertionError("was let in")
    assert str(caught.value) == (
        "nccl.buffer_mib=8: NCCL_BUFFSIZE=4194304 is set in the environment; unset it, or nccl.buffer_mib=null"
    )
    assert environ == {"NCCL_BUFFSIZE": "4194304"}


def test_what_is_said():
    options = NCCLOptions(algo="Ring", collnet=True)
    with applied(options, environ := {"NCCL_IB_TIMEOUT": "22", "NCCL_DEBUG": "WARN", "HOME": "/"}):
        said = "NCCL_COLLNET_ENABLE=1 NCCL_ALGO=Ring"
        kept = "from the environment NCCL_DEBUG=WARN NCCL_IB_TIMEOUT=22"
        assert in_words(options, "nccl", 2, environ) == f"nccl: {said}; {kept}"
        assert in_words(options, "gloo", 2, environ) == f"nccl: {said} has no effect: the backend is gloo"
        assert in_words(options, "nccl", 1, environ) == f"nccl: {said} has no effect: one rank does not communicate"
    assert in_words(NCCLOptions(), "nccl", 2, environ) == f"nccl: {kept}"
    assert in_words(NCCLOptions(), "nccl", 2, {"HOME": "/"}) == ""
    assert in_words(NCCLOptions(), "gloo", 2, environ) == ""


LOOK = """
import json, os
from trainer.callback import Callback

class Look(Callback):
    def on_step_end(self, trainer):
        found = {name: value for name, value in os.environ.items() if name.startswith("NCCL_")}
        (trainer.run_dir / f"nccl-{trainer.rank}.json").write_text(json.dumps(found))
"""


@pytest.mark.slow
def test_ranks_are_given_it_and_the_run_says_and_keeps_it(tmp_path):
    """Two ranks that the command starts; a callback notes what each finds in its environment."""
    (tmp_path / "look.py").write_text(LOOK)
    words = ["+callbacks.look._target_=look.Look", "trainer.allow_targets=[toy_recipe,look]", *SHORT]
    more = {"PYTHONPATH": os.pathsep.join([str(tmp_path), PYTHONPATH]), "NCCL_IB_TIMEOUT": "22"}
    done = toy([*words, "trainer.devices=2", "nccl=ethernet", "nccl.interface=eth0"], tmp_path, **more)
    assert (done.code, done.err) == (0, "")
    wanted = PRESET["ethernet"] | {"NCCL_SOCKET_IFNAME": "eth0"}
    for rank in (0, 1):
        found = json.loads((tmp_path / "runs" / "r" / f"nccl-{rank}.json").read_text())
        assert found.items() >= (wanted | {"NCCL_IB_TIMEOUT": "22"}).items()
    said = [line for line in done.out.splitlines() if line.startswith("nccl: ")]
    assert [sorted(line.split()[1:5]) for line in said] == [sorted(f"{k}={v}" for k, v in wanted.items())]
    assert said[0].endswith(" has no effect: the backend is gloo")
    assert load(tmp_path / "runs" / "r" / "config.yaml")["nccl"] == load(PRESETS[1]) | {"interface": "eth0"}


def test_a_run_that_the_shell_contradicts_ends_at_once(tmp_path):
    done = toy(["nccl.algo=Ring", *SHORT], tmp_path, NCCL_ALGO="Tree")
    assert (done.code, done.out) == (78, "")
    assert done.err == (
        "echelon: nccl.algo=Ring: NCCL_ALGO=Tree is set in the environment; unset it, or nccl.algo=null\n"
    )
    assert not (tmp_path / "runs").exists()


@pytest.mark.slow
def test_runs_of_one_command_do_not_contradict_each_other(tmp_path):
    done = toy(["-m", "nccl.debug=WARN,INFO", "trainer.max_steps=1", "trainer.accelerator=cpu"], tmp_path)
    assert (done.code, done.err) == (0, "")
    assert re.findall("^nccl: NCCL_DEBUG=(.*) has no effect", done.out, re.MULTILINE) == ["WARN", "INFO"]
