"""What grad_compress refuses before a model exists: knobs, what else runs, what a checkpoint has."""

import pytest
from support.messages import refuses

from trainer.callbacks.grad_compress import GradCompress
from trainer.callbacks.hierarchical import Hierarchical
from trainer.composition import arrange
from trainer.errors import ConfigError


@pytest.mark.parametrize(
    ("knobs", "words"),
    [
        ({"start_step": -1}, r"start_step=-1: must be at least 0"),
        ({"density": 0.1}, r"density=0\.1: codec=bf16 has no such knob; leave it out \(its knobs: none\)"),
        ({"codec": "dgc", "feedback": True}, r"feedback=true: codec=dgc has an error feedback .*; leave feedback out"),
    ],
)
def test_knobs(knobs, words):
    with pytest.raises(ConfigError, match=rf"^callbacks\.grad_compress\.{words}"):
        GradCompress(**knobs)


GATHERED = ["int8", "topk", "dgc", "sign", "blocksparse"]


@pytest.mark.parametrize("codec", GATHERED)
def test_what_gathers_is_refused_above_two_levels(codec):
    with refuses("grad_compress and hierarchical can't run together", "callbacks.grad_compress.level=inter"):
        arrange({"grad_compress": GradCompress(codec), "hierarchical": Hierarchical()}, set())
    arrange({"grad_compress": GradCompress(codec, level="inter"), "hierarchical": Hierarchical()}, set())


def test_what_keeps_gradients_is_refused_under_a_loss_scale():
    with refuses("grad_compress and fp16 can't run together", "trainer.precision=bf16"):
        arrange({"grad_compress": GradCompress("bf16", feedback=True)}, {"fp16"})
    for codec in ("topk", "dgc", "sign", "powersgd"):
        with pytest.raises(ConfigError, match="grad_compress and fp16"):
            arrange({"grad_compress": GradCompress(codec)}, {"fp16"})
    for codec in ("bf16", "fp16", "int8", "blocksparse"):
        arrange({"grad_compress": GradCompress(codec)}, {"fp16"})


def test_a_resume_that_would_lose_what_is_kept_back_is_refused():
    """And one that only says what is so anyway is not."""
    saved = GradCompress("topk").state_dict()
    GradCompress("topk", feedback=True).load_state_dict(saved)
    for other, key in ((GradCompress("dgc"), "codec"), (GradCompress("topk", feedback=False), "feedback")):
        with pytest.raises(
            ConfigError, match=rf"^callbacks\.grad_compress\.{key}=.*: the checkpoint has .*; set {key} back"
        ):
            other.load_state_dict(saved)
    GradCompress("fp16").load_state_dict(GradCompress("bf16").state_dict())


@pytest.mark.parametrize(
    ("name", "feedback", "level", "words"),
    [
        ("dgc", True, "all", r"feedback=true: codec=dgc has an error feedback of its own; leave feedback out"),
        ("blocksparse", True, "all", r"feedback=true: codec=blocksparse sends everything; leave feedback out"),
        ("powersgd", None, "inter", r"level=inter: .*; use level=all, or another codec"),
    ],
)
def test_what_means_nothing_for_a_codec_is_refused(name, feedback, level, words):
    with pytest.raises(ConfigError, match=rf"^callbacks\.grad_compress\.{words}$"):
        GradCompress(codec=name, feedback=feedback, level=level)
    GradCompress(codec=name, feedback=False)
    GradCompress(codec="topk", feedback=feedback, level=level)
