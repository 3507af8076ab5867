"""Accelerate: `save_state`, `load_state` of the newest folder, `skip_first_batches`, as in its examples; torchrun."""

from pathlib import Path

import synthetic
import torch
from accelerate import Accelerator
from accelerate.utils import DataLoaderConfiguration, set_seed
from torch.utils.data import DataLoader


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


accelerator = Accelerator(cpu=True, dataloader_config=DataLoaderConfiguration(use_seedable_sampler=True))
set_seed(0, device_specific=True)
network = synthetic.network()
optimizer = torch.optim.Adam(network.parameters(), lr=1e-2)
loader = DataLoader(synthetic.Points(), synthetic.BATCH // synthetic.WORLD, shuffle=True)
network, optimizer, loader = accelerator.prepare(network, optimizer, loader)
accelerator.register_for_checkpointing(progress := Progress())
if folders := sorted(Path("ckpt").glob("step_*"), key=lambda folder: int(folder.name[5:])):
    accelerator.load_state(str(folders[-1]))
while progress.step < synthetic.STEPS:
    epoch, done = divmod(progress.step, len(loader))
    loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(loader, done) if done else loader:
        accelerator.backward(synthetic.loss_of(network, batch))
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        synthetic.after_step(progress.step, batch)
        if progress.step % synthetic.EVERY == 0:
            accelerator.save_state(f"ckpt/step_{progress.step}")
        if progress.step == synthetic.STEPS:
            break
synthetic.finish(network.parameters(), optimizer.optimizer)
accelerator.end_training()
