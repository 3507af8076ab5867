"""Growing sequences: which length a step has, no token lost, masks as they were, and what is refused."""

from itertools import repeat
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from support.messages import refuses
from torch.utils.data import default_collate

from recipes.bert import Bert
from recipes.grow_sequence import GrowSequence
from recipes.wordpiece import CLS, SEP
from trainer.callbacks.pipeline import PipelineParallel
from trainer.composition import arrange
from trainer.config.duration import Duration
from trainer.errors import ConfigError
from trainer.log import log

SIZES: dict[str, Any] = {"vocab": 300, "sequence": 40, "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.0}


def grown(recipe: Any, lengths: list[int], until: list[str], max_steps: int | None = None) -> tuple[GrowSequence, Any]:
    ends = {"step_after": lambda key, end: Duration.parse(end, key).steps(key, 10, 100)}
    plan = SimpleNamespace(max_steps=max_steps, **ends)
    trainer: Any = SimpleNamespace(recipe=recipe, plan=plan, batch=10, step=0, metrics={})
    callback = GrowSequence(lengths, until)
    callback.wrap_model(trainer, torch.nn.Identity())
    return callback, trainer


def test_the_length_follows_from_the_step_alone():
    recipe = Bert(**SIZES)
    callback, trainer = grown(recipe, [8, 20], ["2 steps", "0.4 epochs"])
    steps = callback.wrap_batches(trainer, repeat(SimpleNamespace()))  # pyright: ignore[reportArgumentType]
    seen = []
    for trainer.step in (0, 1, 2, 3, 4, 5, 1, 3):  # a guard may take steps back
        next(steps)
        callback.on_step_end(trainer)
        seen.append((recipe.length, trainer.metrics["train/sequence"]))
    assert seen == [(8, 8), (8, 8), (20, 20), (20, 20), (None, 40), (None, 40), (8, 8), (20, 20)]


def test_a_run_that_ends_before_sequences_are_whole_is_told(monkeypatch: pytest.MonkeyPatch):
    told: list[str] = []
    monkeypatch.setattr(log, "warning", lambda text, *values: told.append(text % values))
    grown(Bert(**SIZES), [8, 20], ["2 steps", "4 steps"], 5)
    assert not told
    grown(Bert(**SIZES), [8, 20], ["2 steps", "4 steps"], 4)
    assert told[0].startswith("grow_sequence: the run ends at step 4 with 20 of 40 tokens")


@pytest.mark.parametrize("mask", [False, True])
def test_bert_in_parts_predicts_the_same_tokens_from_their_part(mask: bool):
    """By transformers' own model on the parts: row and column of each masked token, none of which is lost."""
    recipe = Bert(**SIZES, document_mask=mask)
    torch.manual_seed(0)
    model = recipe.model().eval()
    tokens = np.arange(5, 45, dtype=np.uint16)
    tokens[[0, 10, 11, 30, -1]] = CLS, SEP, 9, SEP, SEP
    corpus = SimpleNamespace(meta={"vocabulary": 300})
    recipe.__dict__["corpus"] = corpus
    batch = default_collate([recipe.transform({"npy": tokens}, np.random.default_rng(i)) for i in range(3)])
    weight = recipe.weight(batch)
    recipe.length = 8
    with torch.no_grad():
        loss = recipe.loss(model, batch)
        parts = batch["input_ids"].view(15, 8)
        surprise = []
        for i in range(3):
            for position, label in zip(batch["positions"][i].tolist(), batch["labels"][i].tolist(), strict=True):
                part, column = parts[i * 5 + position // 8], position % 8
                own = part
                if mask:  # the tokens of its document alone, which begins after a [SEP]
                    ends = [j for j in range(8) if part[j] == SEP]
                    start = max([j + 1 for j in ends if j < column], default=0)
                    stop = min([j + 1 for j in ends if j >= column], default=8)
                    own, column = part[start:stop], column - start
                logits = model.bert(own[None]).logits[0, column].double()
                surprise.append((logits.logsumexp(0) - logits[label]).item())
    assert len(surprise) == weight == recipe.weight(batch) == 18
    assert loss.item() == pytest.approx(sum(surprise) / 18, rel=1e-5)
    metrics = recipe.metrics(model, batch)
    recipe.length = None
    assert metrics["loss"][0].item() == recipe.metrics(model, batch)["loss"][0].item()


def test_a_whole_sequence_has_the_bits_of_no_length():
    recipe = Bert(**SIZES)
    torch.manual_seed(0)
    model = recipe.model().eval()
    ids, places = torch.randint(5, 300, (2, 40)), torch.arange(6).expand(2, 6)
    assert (model(ids, places) == model(ids, places, None, 40)).all()


@pytest.mark.parametrize(
    ("lengths", "until", "reason"),
    [
        ([], [], "callbacks.grow_sequence: 0 lengths and 0 durations"),
        ([8], [], "callbacks.grow_sequence: 1 lengths and 0 durations"),
        ([12], ["5 steps"], "callbacks.grow_sequence.lengths=[12]: must rise, and be divisors of 40: 8,10,20"),
        ([4], ["5 steps"], "callbacks.grow_sequence.lengths=[4]: must rise"),
        ([40], ["5 steps"], "callbacks.grow_sequence.lengths=[40]: must rise"),
        ([20, 8], ["5 steps", "6 steps"], "callbacks.grow_sequence.lengths=[20, 8]: must rise"),
        ([8, 20], ["5 steps", "5 steps"], "callbacks.grow_sequence.until=['5 steps', '5 steps']: is [5, 5] steps"),
        ([8], ["5 pages"], "callbacks.grow_sequence.until=5 pages: is not a duration"),
        ([8], ["5 minutes"], "callbacks.grow_sequence.until=5 minutes: must be a number of steps"),
    ],
)
def test_refused(lengths: list[int], until: list[str], reason: str):
    with pytest.raises(ConfigError) as caught:
        grown(Bert(**SIZES), lengths, until)
    assert str(caught.value).startswith(reason)


def test_refused_for_another_recipe_and_in_stages():
    with refuses("callbacks.grow_sequence", "SimpleNamespace", "bert_*"):
        grown(SimpleNamespace(), [8], ["5 steps"])
    with pytest.raises(ConfigError, match="stages send activations of one shape"):
        arrange({"pipeline": PipelineParallel(2), "grow_sequence": GrowSequence([8], ["5 steps"])}, set())


def test_the_preset_is_base_for_the_last_tenth():
    """BERT's paper, appendix A.2: 90 % of the steps with sequences of 128."""
    with initialize_config_dir(str(Path(__file__).parents[2] / "conf"), version_base="1.3"):
        base, growing = (compose("config", [f"recipe={name}"]) for name in ("bert_base", "bert_base_growing"))
    assert growing.recipe == base.recipe and growing.trainer == base.trainer
    knobs = growing.callbacks.grow_sequence
    assert (list(knobs.lengths), list(knobs.until)) == ([128], [f"{base.trainer.max_steps * 9 // 10} steps"])
