from trainer.callbacks.nan_guard.callback import NanGuard as NanGuard
