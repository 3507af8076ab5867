"""A machine goes through JSON and comes back, also without a link."""

import json
import math

from trainer.cost.machine import CodecCost, Link, Machine, from_json, to_json


def test_a_machine_comes_back_from_json() -> None:
    links = Link(1e-4, 1.2e7, 5e-10), Link(0.0, math.inf, 0.0)
    for memory, disk in ((8e9, 1e8), (None, math.inf)):
        machine = Machine(4, 2, 1.5, *links, {"bf16": CodecCost(1e-9, 2e-9)}, memory, disk)
        text = json.dumps(to_json(machine), allow_nan=False)
        assert from_json(json.loads(text)) == machine
