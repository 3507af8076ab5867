from trainer.callbacks.local_sgd.callback import LocalSGD as LocalSGD
