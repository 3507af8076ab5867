from trainer.monitors.progress.callback import Progress as Progress
