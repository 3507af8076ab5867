from trainer.callbacks.shard.callback import Shard as Shard
