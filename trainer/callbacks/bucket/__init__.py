from trainer.callbacks.bucket.callback import Bucket as Bucket
