"""torch alone: DDP, distributed checkpoints of which the newest whole one is loaded, torchdata's loader; torchrun."""

from pathlib import Path
from typing import Any

import synthetic
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader
from torchdata.stateful_dataloader.sampler import StatefulDistributedSampler


class App:
    """What is saved of all ranks; of the loaders each rank's own."""

    step = 0

    def state_dict(self) -> dict[str, Any]:
        model, optim = get_state_dict(network, optimizer)
        loaders = {str(synthetic.RANK): loader.state_dict()}
        return {"model": model, "optim": optim, "step": self.step, "loaders": loaders}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        set_state_dict(network, optimizer, model_state_dict=state["model"], optim_state_dict=state["optim"])
        loader.load_state_dict(state["loaders"][str(synthetic.RANK)])
        self.step = state["step"]


dist.init_process_group("gloo")
network = DistributedDataParallel(synthetic.network())
torch.manual_seed(synthetic.RANK)
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
sampler = StatefulDistributedSampler(synthetic.Points(), shuffle=True)
loader = StatefulDataLoader(synthetic.Points(), synthetic.BATCH // synthetic.WORLD, sampler=sampler)
app = App()
whole = [path.parent for path in Path("ckpt").glob("step_*/.metadata")]
if whole:
    dcp.load({"app": app}, checkpoint_id=max(whole, key=lambda folder: int(folder.name[5:])))
while app.step < synthetic.STEPS:
    sampler.set_epoch(app.step // (synthetic.SAMPLES // synthetic.BATCH))
    for batch in loader:
        synthetic.loss_of(network, batch).backward()
        optimizer.step()
        optimizer.zero_grad()
        app.step += 1
        synthetic.after_step(app.step, batch)
        if app.step % synthetic.EVERY == 0:
            dcp.save({"app": app}, checkpoint_id=f"ckpt/step_{app.step}")
        if app.step == synthetic.STEPS:
            break
synthetic.finish(network.parameters(), optimizer)
dist.destroy_process_group()
