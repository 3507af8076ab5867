from trainer.callbacks.overlap.callback import Overlap as Overlap
