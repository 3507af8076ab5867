from trainer.callbacks.pipeline.callback import PipelineParallel as PipelineParallel
