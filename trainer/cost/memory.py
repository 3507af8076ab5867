"""The bytes of a rank: parameters, gradients, optimizer state, activations, and what callbacks keep.

The cards of the callbacks have the formulas; `tests/callbacks` count most of them on real ranks.
"""

from trainer.cost.buckets import lay_out
from trainer.cost.setup import Setup

KEPT = {"full": 0.1, "selective": 0.63, "offload": 0.05}  # of activations, as activation_checkpoint's card measures
IN_FLIGHT = 4  # buckets that optimizer_in_backward holds at most
RESIDUALS = {"topk": 1, "sign": 1, "powersgd": 1, "dgc": 1}  # copies of the gradients


def predict_memory(setup: Setup) -> float:
    """Return the bytes of a rank at the peak of a step, without what torch and kernels take for themselves."""
    return model_bytes(setup) + kept_by_callbacks(setup) + activations(setup)


def model_bytes(setup: Setup) -> float:
    """Return the bytes of parameters, gradients with DDP's buckets, and optimizer state."""
    parameters, ranks, stage = setup.gradient_bytes, setup.data_ranks, setup.knob("shard", "stage", 0)
    state, gradients = setup.optimizer_bytes, parameters
    if setup.knob("pipeline", "schedule") == "pipedream_2bw":
        return 4 * parameters + state
    if stage == 3:
        units = 4 * max(bucket.elements for bucket in lay_out(setup)) * 2
        whole = parameters if setup.passes > 1 else 0.0  # accumulation keeps whole gradients
        return (2 * parameters + state) / setup.row_ranks + units + whole
    if stage == 2:
        gradients = parameters * (setup.stepped if setup.passes == 1 else 1)
    elif "optimizer_in_backward" in setup.callbacks and setup.passes == 1:
        gradients = min(parameters, IN_FLIGHT * 4 * max(bucket.elements for bucket in lay_out(setup)))
    elif ranks > 1 and setup.copies and not {"overlap", "local_sgd", "onebit_adam"} & setup.callbacks.keys():
        gradients *= 2  # DDP's buckets beside the gradients
    return parameters + gradients + state * setup.stepped


def kept_by_callbacks(setup: Setup) -> float:
    """Return the bytes of residuals, averages and errors."""
    parameters, ranks, callbacks = setup.gradient_bytes, setup.data_ranks, setup.callbacks
    kept = 0.0
    if ranks > 1 and "grad_compress" in callbacks:
        own = callbacks["grad_compress"]
        copies = RESIDUALS.get(setup.codec, 0) if own["feedback"] is None else int(own["feedback"])
        kept += max(copies, setup.codec == "dgc") * parameters + bool(own["momentum"]) * parameters
    if ranks > 1 and "local_sgd" in callbacks:
        own = callbacks["local_sgd"]
        kept += (3 if own["outer"] == "nesterov" else 2) * parameters + bool(own["delay"]) * parameters
    if ranks > 1 and "onebit_adam" in callbacks:
        kept += (3 + 1 / ranks) * parameters
    return kept + len({"ema", "swa"} & callbacks.keys()) * parameters


def activations(setup: Setup) -> float:
    """Return the bytes that autograd keeps of the micro-batches on their way."""
    return setup.workload.activation_bytes * setup.micro * kept(setup) * in_flight(setup) / setup.stages


def kept(setup: Setup) -> float:
    """Return the share of the activations that recomputation keeps."""
    own = setup.callbacks.get("activation_checkpoint")
    if own is None:
        return 1.0
    return own["budget"] if own["budget"] is not None else 1 - (1 - KEPT[own["policy"]]) / own["every"]


def in_flight(setup: Setup) -> float:
    """Return the micro-batches whose activations the first stage holds."""
    if "pipeline" not in setup.callbacks:
        return 1
    schedule, passes = setup.knob("pipeline", "schedule"), setup.passes
    if schedule == "gpipe":
        return passes
    if schedule == "pipedream_2bw":
        return setup.knob("pipeline", "run_ahead") * (setup.stages - 1) + 1
    return min(passes, setup.stages)
