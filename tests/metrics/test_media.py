"""Media that a recipe or a callback gives: pixels as another library decodes them, counts, and refusals."""

import io
import re
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from support.runs import make
from toy_recipe import Toy

from trainer.callback import Callback
from trainer.errors import ConfigError
from trainer.metrics.media import check_media, prepared, to_histogram, to_image


@pytest.mark.parametrize("channels, mode", [(1, "L"), (3, "RGB"), (4, "RGBA")])
def test_a_png_has_the_pixels(channels, mode):
    pixels = torch.randint(0, 256, (channels, 5, 7), dtype=torch.uint8)
    image = to_image(pixels)
    assert (image.height, image.width, image.channels) == (5, 7, channels)
    found = Pillow.open(io.BytesIO(image.png))
    assert found.mode == mode and found.size == (7, 5)
    assert np.array_equal(np.asarray(found).reshape(5, 7, channels), pixels.permute(1, 2, 0).numpy())


def test_floats_reach_from_black_to_white():
    pixels = torch.tensor([[[0.0, 1.0, 0.5, -3.0, 9.0, torch.nan]]], requires_grad=True)
    found = Pillow.open(io.BytesIO(to_image(pixels.bfloat16()).png))
    assert np.asarray(found).tolist() == [[0, 255, 128, 0, 255, 0]]


def test_a_histogram_counts_finite_values():
    histogram = to_histogram(torch.tensor([0.0, 1.0, 1.0, torch.inf, torch.nan, 64.0]))
    assert len(histogram.counts) == 64 and histogram.edges[0] == 0 and histogram.edges[-1] == 64
    assert histogram.counts[:2] == [1, 2] and histogram.counts[-1] == 1 and sum(histogram.counts) == 4
    assert (histogram.total, histogram.squares) == (66.0, 4098.0)
    assert sum(to_histogram(torch.tensor([torch.nan])).counts) == 0


@pytest.mark.parametrize(
    "media, told",
    [
        (None, "recipe.media(): returned a value of type NoneType; return a dict of name -> media"),
        ({"a": 1.0}, "recipe.media(): 'a' is a value of type float; give a str, an image (C, H, W)"),
        ({"a": torch.zeros(2, 3)}, "recipe.media(): 'a' is a tensor of shape (2, 3); give a str"),
        ({"a": torch.zeros(2, 3, 3)}, "recipe.media(): 'a' is a tensor of shape (2, 3, 3); give a str"),
    ],
)
def test_other_values_are_refused(media, told):
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_media(media, "recipe.media()")


class Shows(Toy):
    """A recipe with an image, a text and values of its first batch. It draws random numbers."""

    def media(self, model: Any, batch: Any) -> dict[str, Any]:
        assert not torch.is_grad_enabled() and not model.training
        out = model(batch["x"])
        return {"out": out.mean(0), "x": batch["x"][None], "text": f"{torch.rand(()).item() >= 0} {len(out)}"}


class Keeps(Callback):
    """What comes, and media of its own at step 1."""

    def __init__(self) -> None:
        self.found: list[tuple[int, list[str]]] = []

    def on_step_end(self, trainer) -> None:
        if trainer.step == 1:
            trainer.emit("on_media", {"mine": "text"})

    def on_media(self, trainer, media) -> None:
        self.found.append((trainer.step, [name for name, _ in prepared(media)]))
        self.last = media


def test_a_recipes_media_come_with_each_validation(tmp_path):
    keeps = Keeps()
    trainer = make(Shows(), {"keeps": keeps}, validate_every=2)
    trainer.fit()
    assert keeps.found == [(1, ["mine"]), (2, ["out", "x", "text"]), (4, ["out", "x", "text"])]
    first = torch.stack([trainer.recipe.data("val")[i]["x"] for i in range(12)])
    assert torch.equal(keeps.last["x"], first[None]) and keeps.last["text"] == "True 12"
    with torch.no_grad():
        assert torch.equal(keeps.last["out"], trainer.module(first).mean(0))


def test_media_change_no_number(tmp_path):
    runs = [make(recipe, run_dir=f"runs/{name}", validate_every=1) for name, recipe in (("a", Toy()), ("b", Shows()))]
    batch = {"x": torch.rand(3, 8)}
    before = torch.get_rng_state()
    with torch.no_grad():
        assert runs[1].loop.parts.evaluator._ask_media(runs[1].module.eval(), batch).keys() == {"out", "x", "text"}
    runs[1].module.train()
    assert torch.equal(torch.get_rng_state(), before)
    for trainer in runs:
        trainer.fit()
    assert runs[0].validation == runs[1].validation and runs[0].last_metrics == runs[1].last_metrics


class Wrong(Toy):
    def media(self, model: Any, batch: Any) -> dict[str, Any]:
        return {"x": batch["x"].double().sum()}


def test_a_mistake_is_told_before_the_first_step(tmp_path):
    with pytest.raises(ConfigError, match=re.escape("recipe.media(): 'x' is a tensor of shape (); give a str")):
        make(Wrong())
