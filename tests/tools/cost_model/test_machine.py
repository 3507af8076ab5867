"""A machine goes through JSON, also one without a link."""

import json
import math

from support.costs import machine

from trainer.tools.cost_model.machine import Link, from_json, to_json


def test_json_has_all_of_a_machine() -> None:
    own = machine(8, 4, Link(1e-4, math.inf, 0.0), memory_bytes=80e9, disk_bytes_per_s=math.inf)
    assert from_json(json.loads(json.dumps(to_json(own)))) == own
