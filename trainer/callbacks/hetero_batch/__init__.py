from trainer.callbacks.hetero_batch.callback import HeteroBatch as HeteroBatch
