"""DeepSpeed's engine, without ZeRO."""

from pathlib import Path

import deepspeed  # pyright: ignore[reportMissingImports]
from torch.utils.data import DataLoader, DistributedSampler

from scripts.bench.peers import task

deepspeed.init_distributed("nccl" if task.CUDA else "gloo")
model = task.model().to(task.DEVICE)
config = {"train_micro_batch_size_per_gpu": task.BATCH, "steps_per_print": task.LOG_EVERY}
engine, *_ = deepspeed.initialize(model=model, optimizer=task.optimizer(model.parameters()), config=config)
step, epoch = 0, 0
if Path("ckpt/latest").exists():
    _, state = engine.load_checkpoint("ckpt")
    step, epoch = state["step"], state["epoch"]
data = task.Random()
sampler = DistributedSampler(data, task.WORLD, task.RANK)
loader = DataLoader(data, task.BATCH, sampler=sampler)
while step < task.STEPS:
    sampler.set_epoch(epoch)
    for batch in loader:
        loss = engine(**{key: value.to(task.DEVICE) for key, value in batch.items()})["loss"]
        engine.backward(loss)
        engine.step()
        step += 1
        if step % task.LOG_EVERY == 0:
            print(step, loss.item())
        if step == task.SAVE_AT:
            engine.save_checkpoint("ckpt", client_state={"step": step, "epoch": epoch})
        task.tick()  # bench
        if step == task.STEPS:
            break
    epoch += 1
