"""The tests mirror trainer/: a module's tests lie where its name says, in test_NAME.py and test_NAME_TOPIC.py."""

from pathlib import Path

TESTS, TRAINER = Path(__file__).parent, Path(__file__).parents[1] / "trainer"
UNTESTED = {
    "recipe": "a Protocol, which has types and no behaviour",
    "cost/workload": "dataclasses without behaviour",
}
FOLDERS = {
    "docs": "of pages, cards and docstrings",
    "faults": "of whole runs that are killed, stopped, cut off or short of something",
    "gpu": "of what a GPU alone shows",
    "peers": "of other trainers",
    "recipes": "of recipes/",
    "scripts": "of scripts/",
    "security": "of what strangers write",
}
WIDE = {
    "callbacks/test_rank_states": "the merges of ranks' states, of three callbacks",
    "checkpoint/test_killed": "kills at each system call of a commit, of all of checkpoint/",
    "checkpoint/test_stored": "checkpoints that an older version wrote",
    "launch/test_slurm": "jobs of a real SLURM, through all of launch/",
    "test_callback_names": "the names of callbacks, in all sources",
    "test_changed": "which tests a change needs, of support/changed.py",
    "test_complexity": "all sources",
    "test_contract": "each callback, and each pair",
    "test_extension_points": "hooks of users' callbacks, from the plan to the step",
    "test_foreign_files": "files of other users in all places of a run",
    "test_layers": "all imports",
    "test_mirror": "all names",
    "test_package": "the wheel",
    "test_parity": "a run against a bare loop",
    "test_resume": "runs that are killed and go on",
    "test_settings": "each callback under each setting of the trainer",
    "test_syncs": "all that a step reads from the device",
    "test_user_errors": "errors of a user's code, wherever they happen",
    "test_user_recipe": "the recipe of the README",
}


MODULES = {path.relative_to(TRAINER).with_suffix("").as_posix() for path in TRAINER.rglob("[!_]*.py")}
FILES = {path.relative_to(TESTS).with_suffix("").as_posix() for path in TESTS.rglob("test_*.py")}
OF = {name: (Path(name).parent / f"test_{Path(name).name}").as_posix() for name in MODULES}  # a module's tests


def test_each_module_has_its_tests_where_its_name_says() -> None:
    assert not {name for name in MODULES - UNTESTED.keys() if OF[name] not in FILES}


def test_each_file_of_tests_is_named_after_a_module() -> None:
    others = {name for name in FILES - WIDE.keys() if name.split("/")[0] not in FOLDERS}
    assert not {name for name in others if not any(f"{name}_".startswith(f"{own}_") for own in OF.values())}


def test_no_exception_is_left_over() -> None:
    assert UNTESTED.keys() <= MODULES and not {name for name in UNTESTED if OF[name] in FILES}
    assert WIDE.keys() <= FILES and not WIDE.keys() & set(OF.values())
    assert not [name for name in FOLDERS if (TRAINER / name).exists() or not (TESTS / name).is_dir()]
