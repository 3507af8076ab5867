"""A codec from a package outside Echelon is built, checked, measured and predicted like ours."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from outside.ternary import Ternary
from support.cli import TOY, lines, run, weights
from support.configs import toy_config
from support.costs import choose, machine, setup
from support.messages import refuses

from trainer.callbacks.grad_compress import GradCompress
from trainer.comm.codecs.base import Codec, ErrorFeedback
from trainer.comm.codecs.topk import TopK
from trainer.config.build import build
from trainer.config.check import check
from trainer.cost.machine import CodecCost
from trainer.cost.passes import in_step, passes
from trainer.cost.workload import Choice
from trainer.errors import ConfigError
from trainer.process.environment import Place
from trainer.tools.measure import codecs
from trainer.tools.scale.rows import own_way
from trainer.tools.tune.candidates import candidates
from trainer.tools.tune.configs import merge, whole
from trainer.tools.tune.links import codecs_of

NAME = "outside.ternary.Ternary"
NODE = {"_target_": NAME, "threshold": 0.5}
WORD = f"callbacks.grad_compress.codec={{_target_:{NAME},threshold:0.5}}"
ALLOWED = "trainer.allow_targets=[toy_recipe,probe,outside]"


@pytest.fixture
def config() -> dict[str, Any]:
    found = toy_config()
    found["trainer"]["allow_targets"] += ["outside"]
    return merge(found, Choice({"grad_compress": {"codec": NODE}}, {}))


@pytest.mark.slow
def test_a_command_trains_with_it_and_resumes(tmp_path: Path) -> None:
    words = [*TOY, ALLOWED, "+callbacks=[grad_compress]", WORD, "trainer.max_steps=8", "trainer.run_dir=runs/r"]
    done = run([*words, "trainer.devices=3", "batch=12", "trainer.checkpoint.every_steps=4"], tmp_path)
    assert done.code == 0, done.err
    assert [line["step"] for line in lines(tmp_path / "runs/r")][-1] == 8
    resumed = ["trainer.resume=ckpt/r/step-00000004", "trainer.run_dir=runs/s", "trainer.devices=3", "batch=12"]
    again = run([*words, *resumed], tmp_path)
    assert again.code == 0, again.err
    assert weights("r", tmp_path, 8) == weights("s", tmp_path, 8)
    other = run([*words, *resumed, "trainer.run_dir=runs/t", "callbacks.grad_compress.codec=topk"], tmp_path)
    assert other.code == 78 and f"callbacks.grad_compress.codec=topk: the checkpoint has {NAME}" in other.err


@pytest.mark.parametrize(
    ("node", "said"),
    [
        ({"_target_": NAME, "treshold": 1}, r"codec\.treshold=1: no such key; did you mean threshold\?"),
        ({"_target_": NAME, "threshold": "low"}, r"codec\.threshold=low: must be float, not str"),
        ({"_target_": "elsewhere.Codec"}, r"codec\._target_=elsewhere\.Codec: elsewhere is not a package that configs"),
        ({"_target_": NAME, "threshold": {"_target_": "os.mkdir"}}, r"codec\.threshold.*_target_"),
        ({"_target_": NAME, "threshold": True}, r"codec\.threshold=true: must be float"),
        ("ternary", r"codec=ternary: must be bf16 or .* or an object \(\{_target_: package\.Class, \.\.\.\}\)"),
    ],
)
def test_a_mistake_is_one_line_before_the_run(config: dict[str, Any], node: Any, said: str) -> None:
    config["callbacks"]["grad_compress"]["codec"] = node
    with pytest.raises(ConfigError, match=rf"^callbacks\.grad_compress\.{said}"):
        check(config)


def test_an_object_is_a_codec_and_has_its_own_knobs() -> None:
    given = Ternary(0.5)
    made = GradCompress(codec=given)
    assert isinstance(made.codec, ErrorFeedback) and isinstance(made.codec.codec, Ternary)
    assert made.codec.codec is not given and made.codec.codec.threshold == 0.5  # another run may have `given`, too
    assert made.setting["codec"] == NAME and isinstance(GradCompress(codec=TopK(0.1)).codec, ErrorFeedback)
    for arguments, said in [
        ({"codec": given, "density": 0.1}, rf"density=0\.1: {NAME} has knobs of its own; set .*codec\.density"),
        ({"codec": torch.nn.Linear(1, 1)}, r"codec=Linear.*must be .*, not Linear"),
        ({"codec": Ternary}, r"codec=.*must be .*, not the class Ternary"),
    ]:
        with pytest.raises(ConfigError, match=rf"^callbacks\.grad_compress\.{said}"):
            GradCompress(**arguments)


def test_its_cost_is_measured_and_predicted(config: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(codecs, "SHAPE", (128, 64))
    place = Place(0, 3, 0, 3, starts=True)
    measured = codecs.measure(torch.device("cpu"), codecs_of(config, place, lossy=False))
    assert measured.keys() == {"none", NAME} and measured[NAME].decode_s_per_byte >= 0
    choice = whole(config, 3, cuda=False)
    assert json.loads(json.dumps(choice.callbacks)) == {"grad_compress": {"codec": NODE}}
    found = setup(machine(3, codecs={NAME: CodecCost(1e-9, 1e-9)}), choice, batch=12)
    plain = setup(machine(3), choose(), batch=12)
    assert found.unknown == () and found.codec.codec_name == NAME
    assert in_step(found, passes(found), codec=True) < in_step(plain, passes(plain), codec=True)
    assert f"codec {NAME}" in setup(machine(3), choice, batch=12).unknown[0]


def test_a_search_and_a_table_have_it(config: dict[str, Any]) -> None:
    found = candidates(config, Place(0, 2, 0, 2, starts=True), lossy=True, without=["compile", "activation_checkpoint"])
    assert found and not any("grad_compress" in choice.callbacks for choice in found)  # it stays as it is
    assert all(merge(config, choice)["callbacks"]["grad_compress"]["codec"] == NODE for choice in found)
    way = own_way(config)["config"]
    assert way.callbacks["grad_compress"]["codec"] == NODE and "outside" in way.allow


class Bare(Codec):
    """Has forgotten its base, and tells no bytes."""

    def __init__(self, base: bool = False) -> None:
        if base:
            super().__init__()


def test_a_codec_that_forgets_its_base_or_its_bytes_is_named() -> None:
    with refuses("callbacks.grad_compress.codec", "constructor"):
        GradCompress(codec=Bare())
    cost = GradCompress(codec=Bare(base=True)).cost()
    assert "has no payload_bytes" in cost.left_out and not GradCompress(codec=Ternary()).cost().left_out


@pytest.mark.parametrize("target", ["torch.nn.Linear", "trainer.loggers.csv.CSV"])
def test_a_class_that_is_no_codec_is_not_called(config: dict[str, Any], target: str) -> None:
    node = {"_target_": "trainer.callbacks.grad_compress.GradCompress", "codec": {"_target_": target}}
    with pytest.raises(ConfigError, match=rf"^x\.codec\._target_={target}: is no class that x\.codec takes"):
        build("x", node, ("torch.nn",))
