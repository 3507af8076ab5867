from trainer.callbacks.onebit_adam.callback import OneBitAdam as OneBitAdam
