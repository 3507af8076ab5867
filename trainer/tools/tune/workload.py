"""The workload that predictions start from: measured by each rank alone, or derived from today's short run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from trainer.cost.setup import Setup
from trainer.cost.workload import Workload
from trainer.errors import ConfigError
from trainer.parallel.batch_norm import normalises_by_batch
from trainer.parallel.blocks import find_blocks
from trainer.tools.scale.work import NUMBER, kept_by, on_meta


def make_workload(answers: Sequence[Mapping[str, Any]]) -> Workload:
    """Return the workload of the slowest rank, since the others wait for it, with the bytes of the fullest."""
    slowest = max(answers, key=lambda answer: answer.get("step_s", 0.0))  # an outline has the same times on all
    names = [field.name for field in dataclasses.fields(Workload) if field.name in slowest]
    values: dict[str, Any] = {name: slowest[name] for name in names}
    values |= {name: max(answer[name] for answer in answers) for name in names if name.endswith("_bytes")}
    values |= {name: tuple(values[name]) for name in ("parameters", "compute", "parts", "part_of")}
    return Workload(**{**values, "shapes": tuple(map(tuple, values["shapes"]))})


def without_recomputation(setup: Setup) -> Workload:
    """Return the measured workload less the cost of the setup's recomputation, which predictions add."""
    work, share = setup.workload, setup.recomputed
    backward_s, pass_s = max(0.0, work.backward_s - share * work.forward_s), work.pass_s / (1 + share / 3)
    activation_bytes = work.activation_bytes / (setup.keeps or 1.0)  # a budget of 0 keeps none, so nothing is known
    return dataclasses.replace(work, backward_s=backward_s, pass_s=pass_s, activation_bytes=activation_bytes)


def outline(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what is known of a model without running it: shapes and blocks, but no times or activations."""
    recipe, model, new_optimizer = on_meta(config)
    shapes = [list(p.shape) for p in model.parameters() if p.requires_grad]
    sizes = list(map(math.prod, shapes))
    try:
        blocks = len(find_blocks(recipe, model, None, "tune"))
    except ConfigError:
        blocks = 0
    unknown = dict.fromkeys(("forward_s", "backward_s", "pass_s", "optimizer_s", "other_s", "data_s"), 0.0)
    unknown |= dict.fromkeys(("data_cpu", "activation_bytes", "boundary_bytes", "tied_bytes"), 0.0)
    state = NUMBER * (2 + kept_by(new_optimizer)[0]) * sum(sizes)  # weights, gradients and what the optimizer keeps
    return {
        "parameters": sizes, "shapes": shapes, "compute": [], "parts": [], "part_of": [], "blocks": blocks,
        "batch_norm": normalises_by_batch(model.train()), "state_bytes": state, **unknown,
    }  # fmt: skip


def with_phases(found: Mapping[str, Any], phases: Mapping[str, float], setup: Setup) -> dict[str, Any]:
    """Return an outline with the seconds of today's phases, as `step_timer` reports them.

    `setup` is today's config's, for the share of the work that a rank has.
    """
    a_sample = setup.stages / setup.samples
    return {
        **found,
        "forward_s": phases["forward"] * a_sample,
        "backward_s": phases["backward"] * a_sample / setup.backward_factor,
        "optimizer_s": phases["optimizer"] * setup.stages / setup.stepped,
        "random": True,  # whether losses draw random numbers is not known
    }
