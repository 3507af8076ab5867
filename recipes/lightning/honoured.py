"""Names of Lightning and of torch's DataLoader that user code may use, and those that are refused: docs/honoured.md."""

from recipes.honoured import Table

FIT = "recipes/test_lightning.py::test_losses_weights_rates_and_hooks_are_those_of_lightnings_trainer"
VALIDATION = "recipes/test_lightning_validation.py::test_numbers_are_those_of_lightnings_trainer"
MEAN = "recipes/test_lightning.py::test_a_mean_of_the_epoch_that_a_step_asks_for_is_lightnings"
STATE = "recipes/test_lightning_changes.py::test_a_state_of_the_data_is_in_checkpoints"
EPOCH = "recipes/test_lightning.py::test_what_the_end_of_an_epoch_logs_is_lightnings"
PREDICTION = "recipes/test_lightning_predict.py::test_predictions_are_those_of_lightnings_trainer"
CHECKPOINT = "recipes/test_lightning.py::test_a_checkpoint_of_lightning_begins_a_run_and_an_export_loads_in_lightning"
DATA = "recipes/test_lightning_data.py::test_a_validation_has_the_samples_of_its_loader"
READ = "recipes/test_lightning_honoured.py::test_a_module_reads_what_it_reads_in_lightning"
PREPARED = "recipes/test_lightning_prepare.py::test_data_is_prepared_once_per_node_or_once_in_all"
ATTRIBUTES = "recipes/test_lightning_attributes.py::"
FOLDERS = ATTRIBUTES + "test_folders_callbacks_and_logged_numbers"
OF_DATA = ATTRIBUTES + "test_hyperparameters_and_names_of_the_data"
CALLED = "recipes/test_lightning_honoured.py::test_hooks_are_called_in_lightnings_order"
LOADER = "data/test_torch_loader.py::test_batches_are_those_of_a_bare_loop"

MANUAL = "belongs to manual optimization, and Echelon runs the optimizer; return the loss from training_step"
OF_TEST = "no run calls it; test the exported model.ckpt with Lightning's own Trainer"
OF_PREDICTION = "do that in predict_step"
OF_PLUGIN = "the precision is Echelon's; read trainer.precision of the config"
EMPTY = "allow_zero_length_dataloader_with_multiple_devices"

HOOKS = Table(
    "Hooks and methods that a LightningModule overrides",
    {
        **dict.fromkeys(("training_step", "configure_optimizers", "on_before_backward", "on_train_batch_start"), FIT),
        **dict.fromkeys(("on_train_batch_end", "on_train_epoch_start", "on_before_optimizer_step", "forward"), FIT),
        **dict.fromkeys(("on_after_batch_transfer", "on_train_epoch_end", "on_validation_epoch_end"), FIT),
        **dict.fromkeys(("validation_step", "train_dataloader", "val_dataloader"), VALIDATION),
        **dict.fromkeys(("on_fit_start", "on_fit_end", "on_train_start", "on_train_end", "on_after_backward"), CALLED),
        **dict.fromkeys(("on_validation_start", "on_validation_end", "on_validation_epoch_start"), CALLED),
        **dict.fromkeys(("on_validation_batch_start", "on_validation_batch_end", "setup", "teardown"), CALLED),
        **dict.fromkeys(("prepare_data", "configure_model", "on_before_batch_transfer"), CALLED),
        **dict.fromkeys(("predict_step", "predict_dataloader"), PREDICTION),
    },
    {
        "backward": "Echelon runs loss.backward()",
        "configure_callbacks": "Lightning's callbacks do not run here; return [], and choose Echelon's by "
        "'+callbacks=[NAME]'",
        "configure_gradient_clipping": "give trainer.clip_norm or trainer.clip_value",
        "configure_sharded_model": "'+callbacks=[shard]' shards the model",
        "lr_scheduler_step": "return a torch LRScheduler from configure_optimizers",
        "on_before_zero_grad": "use on_train_batch_end",
        "on_load_checkpoint": "keep the state in buffers, which checkpoints have",
        "on_save_checkpoint": "keep the state in buffers, which checkpoints have",
        "on_validation_model_eval": "Echelon sets the mode of the module; do that in on_validation_start",
        "on_validation_model_train": "Echelon sets the mode of the module; do that in on_validation_end",
        "on_validation_model_zero_grad": "gradients are dropped after each step; leave it out",
        "optimizer_step": "write a callback of Echelon's, as in docs/step.md",
        "optimizer_zero_grad": "Echelon drops the gradients after each step",
        "transfer_batch_to_device": "give tensors, or objects with a method `to`",
    },
)
LATER = Table(
    "Hooks and methods that a fit does not call",
    {},
    {
        **dict.fromkeys(("test_step", "test_dataloader", "on_test_start", "on_test_end"), OF_TEST),
        **dict.fromkeys(("on_test_batch_start", "on_test_batch_end", "on_test_epoch_start"), OF_TEST),
        **dict.fromkeys(("on_test_epoch_end", "on_test_model_eval", "on_test_model_train"), OF_TEST),
        **dict.fromkeys(("on_predict_start", "on_predict_end", "on_predict_batch_start"), OF_PREDICTION),
        **dict.fromkeys(("on_predict_batch_end", "on_predict_epoch_start", "on_predict_epoch_end"), OF_PREDICTION),
        "on_predict_model_eval": OF_PREDICTION,
    },
)
MODULE = Table(
    "Attributes of a LightningModule",
    {
        **dict.fromkeys(("log", "log_dict"), FIT),
        **dict.fromkeys(("freeze", "unfreeze"), ATTRIBUTES + "test_a_frozen_part_does_not_train"),
        "optimizers": READ,
        **dict.fromkeys(("hparams", "save_hyperparameters", "load_from_checkpoint", "hparams_initial"), CHECKPOINT),
        **dict.fromkeys(("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME"), CHECKPOINT),
        **dict.fromkeys(("CHECKPOINT_HYPER_PARAMS_TYPE", "remove_ignored_hparams"), CHECKPOINT),
        **dict.fromkeys(("lr_schedulers", "all_gather", "automatic_optimization", "current_epoch", "device"), READ),
        **dict.fromkeys(("device_mesh", "dtype", "example_input_array", "fabric", "global_rank", "global_step"), READ),
        **dict.fromkeys(("local_rank", "logger", "loggers", "on_gpu", "print", "strict_loading", "trainer"), READ),
    },
    {
        **dict.fromkeys(("manual_backward", "toggle_optimizer", "untoggle_optimizer", "toggled_optimizer"), MANUAL),
        "clip_gradients": "give trainer.clip_norm or trainer.clip_value",
        "to_onnx": "call it on the module that load_from_checkpoint returns",
        "to_tensorrt": "call it on the module that load_from_checkpoint returns",
        "to_torchscript": "call it on the module that load_from_checkpoint returns",
    },
)
DATAMODULE = Table(
    "Hooks and attributes of a LightningDataModule",
    {
        **dict.fromkeys(("train_dataloader", "val_dataloader"), DATA),
        "from_datasets": ATTRIBUTES + "test_data_from_datasets",
        "predict_dataloader": PREDICTION,
        "trainer": READ,
        **dict.fromkeys(("state_dict", "load_state_dict"), STATE),
        **dict.fromkeys(("prepare_data", "setup", "teardown"), CALLED),
        **dict.fromkeys(("hparams", "hparams_initial", "save_hyperparameters", "name"), OF_DATA),
        "load_from_checkpoint": CALLED,
        **dict.fromkeys(("CHECKPOINT_HYPER_PARAMS_KEY", "CHECKPOINT_HYPER_PARAMS_NAME"), OF_DATA),
        **dict.fromkeys(("CHECKPOINT_HYPER_PARAMS_TYPE", "remove_ignored_hparams"), OF_DATA),
    },
    {
        "test_dataloader": OF_TEST,
        "on_exception": "Echelon reports errors itself; use teardown",
        "transfer_batch_to_device": "give tensors, or objects with a method `to`",
        "on_before_batch_transfer": "define it in the LightningModule",
        "on_after_batch_transfer": "define it in the LightningModule",
    },
)
SET = Table(
    "Attributes that a LightningModule or a LightningDataModule sets",
    {"prepare_data_per_node": PREPARED},
    {EMPTY: "a rank needs samples to train on, and none in a validation; leave it out (False is taken)"},
)
TRAINER = Table(
    "Attributes of Lightning's Trainer, as self.trainer",
    {
        **dict.fromkeys(("accumulate_grad_batches", "barebones", "checkpoint_callback"), READ),
        **dict.fromkeys(("callbacks", "default_root_dir", "log_dir", "logged_metrics"), FOLDERS),
        **dict.fromkeys(("checkpoint_callbacks", "current_epoch", "datamodule"), READ),
        "device_ids": READ,
        **dict.fromkeys(("early_stopping_callback", "early_stopping_callbacks", "enable_validation"), READ),
        **dict.fromkeys(("estimated_stepping_batches", "evaluating", "fast_dev_run", "global_rank"), READ),
        **dict.fromkeys(("global_step", "gradient_clip_algorithm", "gradient_clip_val", "interrupted"), READ),
        **dict.fromkeys(("is_global_zero", "is_last_batch", "lightning_module", "local_rank"), READ),
        **dict.fromkeys(("log_every_n_steps", "logger", "loggers", "lr_scheduler_configs", "max_epochs"), READ),
        **dict.fromkeys(("max_steps", "min_epochs", "min_steps", "model", "node_rank", "num_devices"), READ),
        **dict.fromkeys(("num_nodes", "num_training_batches", "optimizers", "predicting", "print"), READ),
        **dict.fromkeys(("progress_bar_callback", "received_sigterm", "sanity_checking", "should_stop"), READ),
        **dict.fromkeys(("strategy", "testing", "training", "validating", "world_size"), READ),
        "callback_metrics": EPOCH,
    },
    {
        **dict.fromkeys(("precision", "precision_plugin", "scaler"), OF_PLUGIN),
        **dict.fromkeys(("fit", "validate", "predict"), "a run can't start another; use Echelon's Trainer"),
        **dict.fromkeys(("test", "test_dataloaders", "test_loop", "num_test_batches", "limit_test_batches"), OF_TEST),
        **dict.fromkeys(("fit_loop", "predict_loop", "validate_loop", "state"), "the loop is Echelon's; read "
        "current_epoch, global_step, training or validating"),
        **dict.fromkeys(("train_dataloader", "val_dataloaders", "predict_dataloaders"), "the samples are in "
        "Echelon's order; read num_training_batches, or self.trainer.datamodule"),
        **dict.fromkeys(("num_predict_batches", "num_sanity_val_batches", "num_val_batches", "num_sanity_val_steps"),
        "batches of a validation are Echelon's; count them in validation_step"),
        **dict.fromkeys(("limit_train_batches", "limit_val_batches", "limit_predict_batches", "overfit_batches"),
        "read trainer.limit_batches and trainer.overfit of the config"),
        **dict.fromkeys(("check_val_every_n_epoch", "val_check_batch", "val_check_interval"), "read "
        "trainer.validate_every of the config"),
        "accelerator": "read self.device",
        "ckpt_path": "read trainer.resume and trainer.init_from of the config",
        "distributed_sampler_kwargs": "Echelon splits the samples over the ranks",
        "enable_autolog_hparams": "the config of a run is in its folder",
        "init_module": "build the module in configure_model",
        "profiler": "'+callbacks=[profiler]' profiles the run",
        "progress_bar_metrics": "read callback_metrics",
        "reload_dataloaders_every_n_epochs": "data is opened once; give a sampler with set_epoch",
        "save_checkpoint": "give trainer.checkpoint.every_steps or keep_best",
    },
)  # fmt: skip
LOG = Table(
    "Arguments of self.log",
    {
        **dict.fromkeys(("name", "value", "on_step", "on_epoch", "batch_size", "prog_bar", "logger"), MEAN),
        **dict.fromkeys(("add_dataloader_idx", "metric_attribute", "sync_dist"), MEAN),
    },
    {
        "enable_graph": "a logged value has no graph here; return the loss",
        "rank_zero_only": "Echelon logs the mean over ranks; leave it out (on one rank it is taken)",
        "reduce_fx": "Echelon logs means; leave reduce_fx out ('mean' is taken)",
        "sync_dist_group": "Echelon logs the mean over all ranks; leave it out",
    },
)
ARGUMENTS = Table(
    "Arguments of a DataLoader of torch",
    dict.fromkeys(
        (
            "dataset", "batch_size", "shuffle", "sampler", "batch_sampler", "num_workers", "collate_fn", "pin_memory",
            "drop_last", "timeout", "worker_init_fn", "multiprocessing_context", "generator", "prefetch_factor",
            "persistent_workers", "pin_memory_device", "in_order",
        ),
        LOADER,
    ),
    {},
)  # fmt: skip
TABLES = (HOOKS, LATER, MODULE, LOG, DATAMODULE, SET, TRAINER, ARGUMENTS)
