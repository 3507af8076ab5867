"""Accelerate, as in its examples: `save_state`, `load_state` and `skip_first_batches`."""

from pathlib import Path

from accelerate import Accelerator
from torch.utils.data import DataLoader

from scripts.bench.peers import task

FOLDER = Path("ckpt")


class Progress:
    step = 0

    def state_dict(self) -> dict[str, int]:
        return {"step": self.step}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.step = state["step"]


accelerator = Accelerator(cpu=not task.CUDA)
model = task.model()
loader = DataLoader(task.Random(), task.BATCH, shuffle=True)
net, optimizer, loader = accelerator.prepare(model, task.optimizer(model.parameters()), loader)
accelerator.register_for_checkpointing(progress := Progress())
if FOLDER.exists():
    accelerator.load_state(str(FOLDER))
while progress.step < task.STEPS:
    epoch, done = divmod(progress.step, len(loader))
    loader.set_epoch(epoch)
    for batch in accelerator.skip_first_batches(loader, done) if done else loader:
        loss = net(**batch)["loss"]
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
        progress.step += 1
        if progress.step % task.LOG_EVERY == 0:
            accelerator.print(progress.step, loss.item())
        if progress.step == task.SAVE_AT:
            accelerator.save_state(str(FOLDER))
        task.tick()  # bench
        if progress.step == task.STEPS:
            break
accelerator.end_training()
