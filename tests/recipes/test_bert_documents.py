"""Documents in one sequence that know nothing of each other: as each alone and padded, by transformers' own code."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import FlopCounterMode

from recipes.bert import Bert, MaskedLM, attend, block_mask, find_documents
from recipes.corpus import Corpus
from recipes.wordpiece import CLS, PAD, SEP
from trainer.data.shards.writer import write_shards

SIZES: dict[str, Any] = {"vocab": 300, "sequence": 40, "hidden": 32, "layers": 2, "heads": 4, "dropout": 0.0}
LENGTHS = ((40,), (1, 39), (12, 5, 1, 22), (2, 37, 1))  # tokens of each document, with its [SEP]
SEQUENCE = SIZES["sequence"]


def packed(lengths: tuple[int, ...], seed: int = 0) -> Tensor:
    """A sequence (T,); [CLS] stands before the first document's other tokens, but for one that is a [SEP] alone."""
    tokens = torch.randint(5, 300, (sum(lengths),), generator=torch.Generator().manual_seed(seed))
    tokens[np.cumsum(lengths) - 1] = SEP
    if lengths[0] > 1:
        tokens[0] = CLS
    return tokens


def batch() -> Tensor:
    return torch.stack([packed(lengths, i) for i, lengths in enumerate(LENGTHS)])  # (B, T)


def make(**knobs: Any) -> MaskedLM:
    torch.manual_seed(0)
    model = Bert(**SIZES | knobs).model()
    with torch.no_grad():  # away from the start, where biases are 0
        for parameter in model.parameters():
            parameter.add_(torch.randn_like(parameter), alpha=0.05)
    return model


@pytest.fixture(scope="module")
def model() -> MaskedLM:
    return make(document_mask=True)


def everywhere(tokens: Tensor) -> Tensor:
    return torch.arange(tokens.shape[1]).expand(tokens.shape)


def alone(model: MaskedLM, tokens: Tensor) -> Tensor:
    """The logits (B, T, V) if each document is a sample of its own, padded: transformers' model, mask and positions."""
    plain = make().bert
    plain.load_state_dict(model.bert.state_dict())
    rows = []
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        samples = [torch.nn.functional.pad(d, (0, SEQUENCE - len(d)), value=PAD) for d in row.split(list(lengths))]
        there = torch.stack([torch.arange(SEQUENCE) < length for length in lengths])
        logits = plain(torch.stack(samples), attention_mask=there.long()).logits
        rows.append(logits[there])
    return torch.stack(rows)


def test_documents_and_places_by_hand():
    documents, places = find_documents(torch.tensor([[CLS, 7, SEP, 8, SEP, SEP, 9, SEP], [CLS, 7, 8, 9, 5, 6, 7, SEP]]))
    assert documents.tolist() == [[0, 0, 0, 1, 1, 2, 3, 3], [0] * 8]
    assert places.tolist() == [[0, 1, 2, 0, 1, 0, 0, 1], [*range(8)]]


def test_each_document_gets_the_logits_that_it_gets_alone(model: MaskedLM):
    tokens = batch()
    expected = alone(model, tokens)
    torch.testing.assert_close(model(tokens, everywhere(tokens)), expected, rtol=1e-5, atol=1e-5)
    across = make()
    across.load_state_dict(model.state_dict())
    mixed = across(tokens, everywhere(tokens))
    torch.testing.assert_close(mixed[0], expected[0], rtol=1e-5, atol=1e-5)  # one document
    assert ((mixed - expected)[1:].abs().amax((1, 2)) > 0.1).all()


def test_gradients_are_those_of_documents_alone():
    model, tokens = make(document_mask=True), batch()
    weights = torch.randn(1, SEQUENCE, SIZES["vocab"], generator=torch.Generator().manual_seed(5))
    (model(tokens, everywhere(tokens)) * weights).sum().backward()
    got = {name: p.grad for name, p in model.bert.named_parameters()}
    plain = make().bert
    plain.load_state_dict(model.bert.state_dict())
    for row, lengths in zip(tokens, LENGTHS, strict=True):
        for document, weight in zip(row.split(list(lengths)), weights[0].split(list(lengths)), strict=True):
            (plain(document.unsqueeze(0)).logits[0] * weight).sum().backward()
    for name, p in plain.named_parameters():
        torch.testing.assert_close(got[name], p.grad, rtol=1e-4, atol=1e-3, msg=lambda text, name=name: name + text)


def test_a_token_changes_its_own_document_alone_bit_for_bit(model: MaskedLM):
    tokens = batch()[2:3]
    other = tokens.clone()
    other[0, 14] = 5 + (other[0, 14] - 4) % 295  # in the second document, tokens 12 to 16
    with torch.no_grad():
        changed = (model(tokens, everywhere(tokens)) != model(other, everywhere(tokens))).any(-1)[0]
    assert changed.nonzero().flatten().tolist() == [12, 13, 14, 15, 16]


def test_no_host_sync(model: MaskedLM):
    class Watch(TorchDispatchMode):
        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            names.add(function.overloadpacket.__name__)
            return function(*args, **kwargs or {})

    tokens, names = batch(), set[str]()
    with Watch():
        model(tokens, everywhere(tokens)).sum().backward()
    assert "cummax" in names
    assert not names & {"_local_scalar_dense", "nonzero", "masked_select", "index", "is_nonzero", "equal"}


def test_flex_attention_has_the_mask_of_sdpa():
    """On a CPU it has no backward pass; its forward pass gives the same logits, by the same code as on a GPU."""
    model, tokens = make(document_mask=True), batch()
    with torch.no_grad():
        expected = model(tokens, everywhere(tokens))
        mask = block_mask(find_documents(tokens)[0])
        hidden = model.bert.bert.embeddings(tokens, position_ids=find_documents(tokens)[1])
        got = model.bert.cls(model.bert.bert.encoder(hidden, attention_mask=mask).last_hidden_state)
    torch.testing.assert_close(got, expected, rtol=1e-5, atol=1e-5)


def test_attention_dropout_is_its_own_knob_and_reaches_sdpa():
    config = make(dropout=0.1).bert.config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.1)
    config = make(dropout=0.1, attention_dropout=0.0, document_mask=True).bert.config
    assert (config.hidden_dropout_prob, config.attention_probs_dropout_prob) == (0.1, 0.0)
    module = make(document_mask=True).train().bert.bert.encoder.layer[0].attention.self
    query = torch.ones(1, 4, 40, 8)
    mask = torch.ones(1, 1, 40, 40, dtype=torch.bool)
    for dropout, equal in ((0.0, True), (0.5, False)):
        out, _ = attend(module, query, query, query, mask, dropout=dropout, scaling=1.0)
        assert torch.allclose(out, torch.ones_like(out)) is equal


def test_flops_count_pairs_of_one_document(tmp_path: Path):
    sequences = [{"__key__": f"{i:08d}", "npy": packed(lengths).numpy()} for i, lengths in enumerate(LENGTHS)]
    write_shards(iter(sequences), tmp_path, "train", 100)
    recipe = Bert(**SIZES, document_mask=True)
    recipe.__dict__["corpus"] = corpus = Corpus(tmp_path, {})
    assert corpus.pairs_within_documents(SEP) == sum(n * n for lengths in LENGTHS for n in lengths) / len(LENGTHS)
    plain = make().bert
    plain.set_attn_implementation("eager")  # whose products the counter knows on the CPU
    with FlopCounterMode(display=False) as counter:
        for lengths in LENGTHS:
            for document in packed(lengths).split(list(lengths)):
                plain.bert.encoder(plain.bert.embeddings(document.unsqueeze(0))).last_hidden_state.sum().backward()
    head = 6 * recipe.masked * (32 * 32 + 32 * 300)
    assert counter.get_total_flops() == len(LENGTHS) * (recipe.flops_per_sample - head)


def test_an_export_is_a_plain_model(model: MaskedLM, tmp_path: Path):
    from transformers import AutoModelForMaskedLM

    model.bert.save_pretrained(tmp_path)
    loaded, tokens = AutoModelForMaskedLM.from_pretrained(tmp_path), packed((40,)).unsqueeze(0)
    assert loaded.config._attn_implementation == "sdpa"
    with torch.no_grad():
        torch.testing.assert_close(loaded.eval()(tokens).logits, model.eval()(tokens, everywhere(tokens)))
        model.bert(tokens, attention_mask=torch.ones_like(tokens))  # transformers' own masks work, too
