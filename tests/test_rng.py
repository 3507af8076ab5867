"""Random numbers: each purpose has its own, and the numbers of runs that were begun before stay."""

import ast
import re
from pathlib import Path

from support.sources import trees

from trainer import rng

KEYS = {
    "SHARDS": 2, "BLOCK": 4, "SAMPLE": 2, "RECIPE_DATA": 0, "ITERABLE": 1, "STEP": 1,
    "MIXTURE_ORDER": 1, "CODEC_NOISE": 5, "MIXTURE_PLACES": 2, "POWERSGD_START": 2, "PIPELINE": 4, "ROUNDING": 2,
    "UPDATE_BN": 1, "STREAM": 3,
}  # fmt: skip


def test_no_two_purposes_have_the_same_keys() -> None:
    """Two with one number have other counts of keys, but for a frozen pair: one of the two seeds a generator."""
    table = re.findall(r"(?m)^([A-Z0-9_]+) = (\d+)  # \(", Path(rng.__file__).read_text())
    assert [name for name, _ in table] == list(KEYS)
    own = {(number, KEYS[name]): name for name, number in table}
    assert set(KEYS) - set(own.values()) == {"MIXTURE_PLACES"} and own["7", 2] == "POWERSGD_START"


def test_the_numbers_are_frozen() -> None:
    assert [getattr(rng, name) for name in KEYS] == [1, 2, 3, 4, 4, 5, 6, 6, 7, 7, 8, 9, 10, 11]


def test_every_key_begins_with_a_seed_and_a_purpose_of_the_table() -> None:
    found = set()
    for path, tree in trees("trainer").items():
        for node in ast.walk(tree) if path.name != "rng.py" else ():
            if isinstance(node, ast.Call) and ast.unparse(node.func) in ("mix", "permutation"):
                draws = ast.unparse(node.func) == "permutation"  # the place is its last key
                purpose, *keys = node.args[1 + draws :]
                purpose = ast.unparse(purpose)
                assert purpose in KEYS, f"{path}: {ast.unparse(node)}"
                several = any(isinstance(key, ast.Starred) for key in keys)
                assert several or len(keys) + draws == KEYS[purpose], f"{path}: {ast.unparse(node)}"
                found.add(purpose)
    assert found == set(KEYS)
