from trainer.loggers.progress.callback import Progress as Progress
