"""Roles, conflicts and the order of callbacks: which can't run together because they would do the same."""

import pytest
from support.messages import refuses

from trainer.callback import Callback, Role, Symptom
from trainer.callbacks.ema import EMA
from trainer.composition import arrange, in_words, kinds, remedies
from trainer.config.folders import CONF
from trainer.errors import ConfigError


class Both(Callback):
    role = Role.OPTIMIZER
    also = (Role.COMPRESS,)
    provides = frozenset({"both_ways"})


class Compress(Callback):
    role = Role.COMPRESS


class Measure(Callback):
    role = Role.MEASURE
    also = (Role.OBSERVE,)
    provides = frozenset({"measure"})


@pytest.mark.parametrize("other", [Compress, Both])
def test_a_role_that_a_callback_has_beside_its_own_is_taken(other):
    for names in (("one", "two"), ("two", "one")):  # the order of names decides nothing
        with pytest.raises(
            ConfigError, match=r"(one|two) and (one|two) both decide what is sent \(role COMPRESS\): leave one out"
        ):
            arrange(dict(zip(names, (Both(), other()), strict=True)), set())


class Refuses(Callback):
    conflicts = {Role.COMPRESS: "why; one way out", "both_ways": "why; another", "clip": "why; a third"}
    requires = {"measure": "add it"}


@pytest.mark.parametrize(
    ("other", "told"),
    [
        (Compress(), ["any and other can't run together: why; one way out"]),
        (
            Both(),
            ["any and other can't run together: why; one way out", " and other can't run together: why; another"],
        ),
        (Callback(), []),
    ],
)
def test_what_is_refused_is_what_it_is_not_its_name(other, told):
    """Names are the user's. One that is called like a feature of the trainer is none."""
    named = {"any": Refuses(), "clip": Measure(), "other": other}
    if told:
        with pytest.raises(ConfigError) as refusal:
            arrange(named, set())
        assert str(refusal.value).split("; any") == told
    else:
        arrange(named, set())
        with refuses("any and clip can't run together", "third"):
            arrange(named, {"clip"})
        del named["clip"]
        with pytest.raises(ConfigError, match=r"^any needs measure: add it$"):
            arrange(named, set())


def test_it_runs_at_its_own_role_and_shares_what_is_shared():
    callbacks = {"both": Both(), "measure": Measure(), "observe": Callback(), "second": Measure()}
    assert list(arrange(callbacks, set())) == ["both", "measure", "second", "observe"]


def test_a_callback_that_defers_may_read_gradients_itself():
    class Defers(Callback):
        provides = frozenset({"defers"})

        def on_before_optimizer_step(self, trainer) -> None: ...

    arrange({"one": Defers()}, set())
    with refuses("one and two can't run together", "gradients"):
        arrange({"one": Defers(), "two": Defers()}, set())


def test_each_yaml_has_its_class():
    found = kinds()
    assert found.keys() == {path.stem for path in (CONF / "callbacks").glob("*.yaml")} and found["ema"] is EMA
    assert all(issubclass(kind, Callback) for kind in found.values())


def test_remedies_that_are_exact_come_first():
    found = remedies(Symptom.NETWORK, Symptom.NODES)
    assert [name for name, _ in found] == ["overlap", "hierarchical", "grad_compress"]
    assert all(remedies(symptom) for symptom in Symptom)
    assert in_words("shard", {"stage": 3}) == "'+callbacks=[shard]' callbacks.shard.stage=3"
