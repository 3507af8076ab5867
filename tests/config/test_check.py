"""What the check of a config says, in one line, before anything is built."""

import pytest
from support.messages import refuses

from trainer.config.check import absent_callback, check_node, check_type, check_values, stage_node
from trainer.config.schema import Knob
from trainer.config.targets import LIBRARIES
from trainer.errors import ConfigError

SIGNED = "https://h/a-{0..9}.tar?X-Amz-Expires=9&X-Amz-Signature=s3cr3t"


def test_a_value_is_printed_without_them() -> None:
    """Where its key is mistyped, or its type is another."""
    store = {"user": "me", "password": "s3cr3t"}
    told = r"^a\.stor=\{'user': 'me', 'password': '\*\*\*'\}: no such key"
    with pytest.raises(ConfigError, match=told):
        check_values("a", {"stor": store}, {"store": Knob(dict)})
    with refuses("a.shrads=https://h/a-{0..9}.tar?***", "such"):
        check_values("a", {"shrads": SIGNED}, {"shards": Knob(str)})
    with refuses("a=https://***@h"):
        check_type("a", "https://u:s3cr3t@h", int)
    for call in (lambda: check_node("recipe", store, ()), lambda: stage_node("data.map.0", store)):
        with pytest.raises(ConfigError) as caught:
            call()
        assert "s3cr3t" not in str(caught.value)


def test_a_class_of_another_package_is_refused_before_it_is_imported() -> None:
    node = {"_target_": "recipes.lightning.Lightning", "module": "nowhere.Module"}
    told = (
        r"^recipe\.module=nowhere\.Module: nowhere is not a package that configs may name; .*allow_targets=\[nowhere\]"
    )
    with pytest.raises(ConfigError, match=told):
        check_node("recipe", node, LIBRARIES)
    check_node("recipe", node, (*LIBRARIES, "nowhere"))


@pytest.mark.parametrize(
    ("name", "fix"),
    [
        ("early_stopping", "here it is '+callbacks=[early_stop]'"),
        ("early_stops", "did you mean early_stop?"),
        ("ema", "'+callbacks=[ema]' adds it"),
        ("progres", "did you mean callbacks.progress?"),
    ],
)
def test_only_callbacks_that_exist_are_named(name, fix) -> None:
    said = absent_callback(name, {"progress", "memory"})
    assert said.startswith(f"callbacks.{name}: is not in this run, which has memory, progress; {fix}")
