"""The BERT recipe: what is masked, the head at the masked positions alone, FLOPs by count, the export's logits."""

import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hydra import compose, initialize_config_dir
from omegaconf import OmegaConf
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.data import default_collate
from torch.utils.flop_counter import FlopCounterMode

from recipes.bert import Bert, MaskedLM
from recipes.wordpiece import CLS, MASK, SEP, SPECIALS
from trainer.errors import ConfigError
from trainer.log import log

CONF = Path(__file__).parents[2] / "conf"
SIZES: dict[str, Any] = {"vocab": 300, "sequence": 40, "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.0}


@pytest.fixture(scope="module")
def recipe(tmp_path_factory: pytest.TempPathFactory) -> Bert:
    folder = tmp_path_factory.mktemp("text")
    for i in range(12):
        (folder / f"{i}.txt").write_text(f"The quick brown Fox number {i} jumps over {i * 7} lazy dogs. " * 5)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TOKENIZERS_PARALLELISM", "false")  # a build sets it for the rest of the process
        recipe = Bert(text=str(folder), cache=str(tmp_path_factory.mktemp("cache")), **SIZES)
        assert recipe.corpus.shards("train")
    return recipe


@pytest.fixture(scope="module")
def model(recipe: Bert) -> MaskedLM:
    torch.manual_seed(0)
    model = recipe.model().eval()
    with torch.no_grad():  # away from the start, where biases are 0
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


def sample(length: int = 40) -> np.ndarray:
    tokens = np.arange(5, 5 + length, dtype=np.uint16)
    tokens[[0, 10, -1]] = CLS, SEP, SEP
    return tokens


def batch(recipe: Bert, size: int = 3) -> dict[str, torch.Tensor]:
    return default_collate([recipe.transform({"npy": sample()}, np.random.default_rng(i)) for i in range(size)])


def test_mask_15_percent_of_which_80_10_10(recipe: Bert):
    tokens = sample()
    vocabulary = recipe.corpus.meta["vocabulary"]
    masked = kept = 0
    others, chosen, repeats = [], np.zeros(40, int), 2000
    for i in range(repeats):
        out = recipe.transform({"npy": tokens}, np.random.default_rng(i))
        positions, labels, input_ids = out["positions"], out["labels"], out["input_ids"]
        assert len(set(positions)) == len(positions) == 6 and {v.dtype for v in out.values()} == {np.dtype(np.int64)}
        assert (labels == tokens[positions]).all() and (
            np.delete(input_ids, positions) == np.delete(tokens, positions)
        ).all()
        chosen[positions] += 1
        new = input_ids[positions]
        masked += (new == MASK).sum()
        kept += (new == labels).sum()
        others += new[(new != MASK) & (new != labels)].tolist()
    assert (chosen == 0).nonzero()[0].tolist() == [0, 10, 39]  # the special tokens alone are never chosen
    mean = repeats * 6 / 37
    assert np.abs(chosen[chosen > 0] - mean).max() < 5 * mean**0.5
    assert masked / (repeats * 6) == pytest.approx(0.8, abs=0.015)
    assert kept / (repeats * 6) == pytest.approx(0.1 + 0.1 / vocabulary, abs=0.015)
    assert len(SPECIALS) == min(others) and max(others) == vocabulary - 1
    first, again, other = (recipe.transform({"npy": tokens}, np.random.default_rng(seed)) for seed in (1, 1, 2))
    assert all((first[key] == again[key]).all() for key in first)
    assert any((first[key] != other[key]).any() for key in first)


def test_logits_are_those_of_the_whole_model_at_the_positions(recipe: Bert, model: MaskedLM):
    data = batch(recipe)
    everywhere = model.bert(data["input_ids"]).logits  # (B, T, V)
    expected = torch.stack([everywhere[i, positions] for i, positions in enumerate(data["positions"])])
    torch.testing.assert_close(model(data["input_ids"], data["positions"]), expected, rtol=1e-5, atol=1e-5)
    assert model.bert.config._attn_implementation == "sdpa"


def test_loss_and_metrics_by_hand(recipe: Bert, model: MaskedLM):
    data = batch(recipe)
    logits = model(data["input_ids"], data["positions"]).double()
    surprise = [
        (logits[i, j].logsumexp(0) - logits[i, j, label]).item()
        for i, labels in enumerate(data["labels"].tolist())
        for j, label in enumerate(labels)
    ]
    hits = sum(int(logits[i, j].argmax()) == data["labels"][i, j] for i in range(3) for j in range(6))
    assert recipe.weight(data) == len(surprise) == 18
    assert recipe.loss(model, data).item() == pytest.approx(sum(surprise) / 18, rel=1e-5)
    metrics = recipe.metrics(model, data)
    assert {name: count for name, (_, count) in metrics.items()} == {"loss": 18, "accuracy": 18}
    assert metrics["loss"][0].item() == pytest.approx(sum(surprise), rel=1e-5) and metrics["accuracy"][0].item() == hits


WEIGHTS = {(300,), (32, 300)}  # the head's bias, and its matrix, transposed


class Wide(TorchDispatchMode):
    """The most rows of a tensor with a column for each token of the vocabulary; of those that are no weights."""

    def __init__(self) -> None:
        super().__init__()
        self.rows = 0

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = function(*args, **kwargs or {})
        for tensor in out if isinstance(out, tuple | list) else [out]:
            if isinstance(tensor, torch.Tensor) and tensor.shape[-1:] == (300,) and tensor.shape not in WEIGHTS:
                self.rows = max(self.rows, tensor.numel() // 300)
        return out


@pytest.mark.parametrize(("chunks", "rows"), [(2, 9), (4, 5), (18, 1), (50, 1)])  # of 3 x 6
def test_a_loss_in_chunks_is_the_same_with_fewer_logits_in_memory(
    chunks: int, rows: int, recipe: Bert, model: MaskedLM
):
    data, results = batch(recipe), []
    parts = Bert(**SIZES, loss_chunks=chunks)
    other = parts.model()
    other.load_state_dict(model.state_dict())
    for own, net in ((recipe, model), (parts, other)):
        net.zero_grad()
        kept: list[tuple[int, ...]] = []
        with Wide() as wide:
            with torch.autograd.graph.saved_tensors_hooks(lambda t: (kept.append(tuple(t.shape)), t)[1], lambda t: t):  # noqa: B023
                loss = own.loss(net, data)
            loss.backward()
        grads = [p.grad for p in net.parameters() if p.grad is not None]
        results.append(
            ([loss.detach(), *grads], wide.rows, sum(shape[-1:] == (300,) and shape not in WEIGHTS for shape in kept))
        )
    (expected, plain_rows, plain_kept), (got, most, still_kept) = results
    torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-6)
    assert (plain_rows, plain_kept, most, still_kept) == (18, 2, rows, 0)  # both of log_softmax's result
    model.zero_grad()


def test_flops_by_count_and_no_host_sync(recipe: Bert, model: MaskedLM):
    """torch counts each matrix product of a step; nothing in it reads a value or depends on a count of values."""

    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    data, names = batch(recipe), set[str]()
    with Watch():
        recipe.loss(model, data).backward()
    assert (
        not names & {"_local_scalar_dense", "nonzero", "masked_select", "index", "is_nonzero", "equal"}
        and "gather" in names
    )
    model.bert.set_attn_implementation("eager")  # whose products the counter knows on the CPU
    try:
        with FlopCounterMode(display=False) as counter:
            recipe.loss(model, data).backward()
    finally:
        model.bert.set_attn_implementation("sdpa")
        model.zero_grad()
    assert recipe.flops_per_sample * 3 == counter.get_total_flops()
    assert recipe.tokens_per_sample == 40


def test_export_loads_with_the_same_logits_and_tokens(recipe: Bert, model: MaskedLM, tmp_path: Path):
    from transformers import AutoModelForMaskedLM, AutoTokenizer

    recipe.export(model, tmp_path)
    loaded, tokenizer = AutoModelForMaskedLM.from_pretrained(tmp_path), AutoTokenizer.from_pretrained(tmp_path)
    data = batch(recipe)
    with torch.no_grad():
        torch.testing.assert_close(loaded(data["input_ids"]).logits, model.bert(data["input_ids"]).logits)
    vocabulary = recipe.corpus.vocabulary()
    assert tokenizer.get_vocab() == vocabulary and tokenizer.model_max_length == 40
    special = tokenizer.convert_tokens_to_ids(["[CLS]", tokenizer.mask_token, "[SEP]"])
    assert special == [CLS, MASK, SEP]
    ids = tokenizer("The [MASK] brown Fox").input_ids
    assert ids == [CLS, vocabulary["The"], MASK, vocabulary["brown"], vocabulary["Fox"], SEP]


@pytest.mark.parametrize("shown", [True, False])
def test_export_shows_no_progress_bar_and_leaves_the_setting(
    shown: bool, recipe: Bert, model: MaskedLM, tmp_path: Path, capfd: pytest.CaptureFixture[str]
):
    from transformers.utils import logging

    before = logging.is_progress_bar_enabled()
    (logging.enable_progress_bar if shown else logging.disable_progress_bar)()
    try:
        recipe.export(model, tmp_path)
        assert logging.is_progress_bar_enabled() is shown
    finally:
        (logging.enable_progress_bar if before else logging.disable_progress_bar)()
    assert capfd.readouterr() == ("", "")


def test_recipe_yields_its_data(recipe: Bert):
    assert recipe.data("train") == recipe.corpus.shards("train") and "val-" in recipe.data("val")[0].name
    assert recipe.summary() == {"unigram_entropy_nats": recipe.corpus.meta["unigram_entropy_nats"]}


@pytest.mark.slow
def test_importing_and_constructing_does_not_import_transformers():
    code = (
        "import sys; from recipes.bert import Bert; Bert(); assert not {'transformers', 'tokenizers'} & {*sys.modules}"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


@pytest.mark.parametrize(
    ("knobs", "reason"),
    [
        ({"heads": 5}, "recipe.heads=5: must divide recipe.hidden=768"),
        ({"heads": 0}, "recipe.heads=0: must be at least 1"),
        ({"hidden": 0}, "recipe.hidden=0: must be at least 1"),
        ({"layers": -1}, "recipe.layers=-1: must be at least 1"),
        ({"dropout": 2.0}, "recipe.dropout=2.0: must be at least 0, and below 1"),
        ({"loss_chunks": 0}, "recipe.loss_chunks=0: must be at least 1"),
        ({"attention_dropout": 1.0}, "recipe.attention_dropout=1.0: must be at least 0, and below 1"),
        ({"dropout": -0.1}, "recipe.dropout=-0.1: must be at least 0, and below 1"),
        ({"vocab": 100}, "recipe.vocab=100: "),
        ({"sequence": 4}, "recipe.sequence=4: "),
        ({"mask": 0.0}, "recipe.mask=0.0: "),
        ({"mask": 0.9}, "recipe.mask=0.9: "),
        ({"val_fraction": 0.0}, "recipe.val_fraction=0.0: "),
    ],
)
def test_refused(knobs: dict[str, Any], reason: str):
    with pytest.raises(ConfigError) as caught:
        Bert(**knobs)
    assert str(caught.value).startswith(reason)


def test_the_three_configs_differ_in_values_only_and_give_every_knob():
    files = {
        name: OmegaConf.load(CONF / "recipe" / f"{name}.yaml") for name in ("bert_tiny", "bert_base", "bert_large")
    }
    keys = {name: sorted(flat(OmegaConf.to_container(file))) for name, file in files.items()}
    assert keys["bert_tiny"] == keys["bert_base"] == keys["bert_large"]
    parameters = {f"recipe.{name}" for name in inspect.signature(Bert).parameters}
    assert {key for key in keys["bert_base"] if key.startswith("recipe.")} == parameters | {"recipe._target_"}
    for name, file in files.items():
        with initialize_config_dir(str(CONF), version_base="1.3"):
            config = compose("config", [f"recipe={name}"])
        for key in keys[name]:
            assert OmegaConf.select(config, key) == OmegaConf.select(file, key)
        Bert(**{key: value for key, value in config.recipe.items() if key != "_target_"})


def test_large_batches_by_lamb():
    """BERT large in every size; the rest is the last row of the paper's table."""
    with initialize_config_dir(str(CONF), version_base="1.3"):
        plain, lamb = (compose("config", [f"recipe={name}"]) for name in ("bert_large", "bert_large_lamb"))
    assert lamb.recipe == plain.recipe and lamb.optimizer._target_ == "trainer.optim.factories.lamb"
    assert (lamb.batch, lamb.optimizer.lr, lamb.trainer.max_steps) == (32768, 5 / (2**0.0 * 10**3), 15625)
    assert lamb.schedule.warmup == f"{15625 // 5} steps"
    assert lamb.batch % lamb.micro_batch == 0


def test_sizes_are_those_of_the_paper():
    for name, millions in (("bert_base", 110), ("bert_large", 335)):
        knobs = OmegaConf.load(CONF / "recipe" / f"{name}.yaml").recipe
        with torch.device("meta"):
            model = Bert(**{key: value for key, value in knobs.items() if key != "_target_"}).model()
        assert sum(p.numel() for p in model.parameters()) / 1e6 == pytest.approx(millions, rel=0.01)


def flat(node: Any, prefix: str = "") -> list[str]:
    if not isinstance(node, dict):
        return [prefix[1:]]
    return [key for name, item in node.items() for key in flat(item, f"{prefix}.{name}")]


@pytest.mark.parametrize(("knobs", "told"), [({}, True), ({"attention_dropout": 0.0}, False)])
def test_attention_that_is_slow_for_its_dropout_is_told(knobs: dict[str, Any], told: bool, monkeypatch):
    messages: list[str] = []
    monkeypatch.setattr(log, "info", lambda form, *values: messages.append(form % values))
    Bert(document_mask=True, hidden=8, layers=1, heads=2, vocab=256, sequence=16, **knobs).model()
    assert [text for text in messages if "attention_dropout=0.1: FlexAttention has no dropout" in text] == messages
    assert bool(messages) == told
