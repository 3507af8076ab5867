"""The workload that predictions start from: of the passes that ranks have measured alone, or of today's short run."""

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from trainer.blocks import find_blocks
from trainer.config.build import build
from trainer.config.check import ALLOWED
from trainer.errors import ConfigError
from trainer.tools.cost_model.memory import kept
from trainer.tools.cost_model.passes import recomputed
from trainer.tools.cost_model.setup import Setup
from trainer.tools.cost_model.workload import Workload

STATE_BYTES = 16.0  # of a parameter: weight, gradient and AdamW's moments, in float32


def make_workload(answers: Sequence[Mapping[str, Any]]) -> Workload:
    """Return the workload of the slowest rank, since the others wait for it."""
    names = [field.name for field in dataclasses.fields(Workload) if field.name in answers[0]]
    values: dict[str, Any] = {name: max(answer[name] for answer in answers) for name in names}
    values |= {"parameters": tuple(values["parameters"]), "shapes": tuple(map(tuple, values["shapes"]))}
    values["compute"] = tuple(answers[0]["compute"])
    return Workload(**values)


def without_recomputation(setup: Setup) -> Workload:
    """Return the workload that was measured with the setup's recomputation, less its cost: predictions add it."""
    work, share = setup.workload, recomputed(setup)
    backward_s = max(0.0, work.backward_s - share * work.forward_s)
    return dataclasses.replace(work, backward_s=backward_s, activation_bytes=work.activation_bytes / kept(setup))


def outline(config: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a model tells without memory: its shapes and its blocks. No time and no activation is known."""
    recipe = build("recipe", config["recipe"], (*ALLOWED, *config["trainer"]["allow_targets"]))
    with torch.device("meta"):
        model = recipe.model()
    shapes = [list(p.shape) for p in model.parameters() if p.requires_grad]
    sizes = list(map(math.prod, shapes))
    try:
        blocks = len(find_blocks(recipe, model, None, "callbacks.pipeline"))
    except ConfigError:
        blocks = 0
    unknown = dict.fromkeys(("forward_s", "backward_s", "pass_s", "optimizer_s", "other_s", "data_s"), 0.0)
    unknown |= dict.fromkeys(("data_cpu", "activation_bytes", "boundary_bytes"), 0.0)
    state = STATE_BYTES * sum(sizes)
    return {"parameters": sizes, "shapes": shapes, "compute": [], "blocks": blocks, "state_bytes": state, **unknown}


def with_phases(found: Mapping[str, Any], phases: Mapping[str, float], setup: Setup) -> dict[str, Any]:
    """Return an outline with the seconds of today's phases, as `step_timer` has them.

    Args:
        setup: Of today's config, for the share of the work that a rank has.
    """
    a_sample = setup.stages / setup.samples
    return {
        **found,
        "forward_s": phases["forward"] * a_sample,
        "backward_s": phases["backward"] * a_sample,
        "optimizer_s": phases["optimizer"] * setup.stages / setup.stepped,
        "random": True,  # whether losses draw random numbers is not known
    }
