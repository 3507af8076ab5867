"""The recipe of a transformers model that returns a `loss`."""

import importlib.util
import inspect
import re
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import cached_property, partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from numpy.random import Generator
from torch import Tensor, nn

from recipes.huggingface.data import open_data
from recipes.huggingface.lora import adapted, check_lora, merged
from recipes.huggingface.schedule import TransformersSchedule
from trainer.annotated import check_arguments
from trainer.checkpoint.pretrained import refuse_astray_index
from trainer.data.batch import count_samples
from trainer.errors import ConfigError, nearest, printable
from trainer.log import log

if TYPE_CHECKING:
    from transformers import PretrainedConfig

WEIGHTS = ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin", "pytorch_model.bin.index.json")
LABELS = ("label", "labels", "label_ids")
IGNORED = -100  # a label without a loss
# Keywords of transformers' loaders: they choose code, files, servers and passwords, and are no settings of a model.
LOADER = {"trust_remote_code", "code_revision", "auto_map", "gguf_file", "subfolder", "cache_dir", "name_or_path"}
LOADER |= {"revision", "token", "use_auth_token", "proxies", "user_agent", "force_download", "local_files_only"}
LOADER |= {"return_unused_kwargs", "adapter_kwargs", "config", "repo_type", "tqdm_class"}
# As transformers' Trainer names what takes no weight decay.
NO_DECAY = [r"bias", r"layernorm", r"rmsnorm", r"(?:^|\.)norm(?:$|\.)", r"_norm(?:$|\.)"]


class HuggingFace:
    """A model of transformers, on samples that have its inputs, or text.

    Args:
        model: A folder with config.json, or a name of Hugging Face's hub.
        data: `.jsonl` files, a folder that `datasets` has saved, or tar shards whose samples have a `json`.
        val_data: The same, for validation; None: `data` if it is a `datasets` folder of splits, else no validation.
        architecture: A class of transformers; None: the one that config.json names.
        config_args: Settings that replace those of config.json, such as `num_labels`.
        pretrained: Whether weights are loaded; None: if they are there. Without them, weights are random.
        text: The key of text to tokenize; None: samples have the model's inputs.
        max_length: Tokens of a text, at most; None: the tokenizer's.
        collator: A data collator of transformers; None: padding for text, else `default_data_collator`.
        collator_args: Its arguments, except the tokenizer.
        lr_scheduler_type: As in `TrainingArguments`, for `schedule=recipe`.
        lr_scheduler_kwargs: As in `TrainingArguments`.
        warmup_steps: As in `TrainingArguments`: steps, or below 1 a share of the run.
        epochs: What decides transformers' number of steps, which must be Echelon's; recipe.args gives it.
        lora: Settings of peft's LoraConfig, so that adapters train instead of the weights; None: the weights train.
        merge_lora: Export the model with the adapters added to its weights, instead of the adapters alone.
    """

    paths = ("model", "data", "val_data")

    @check_arguments("recipe.")
    def __init__(  # noqa: PLR0913 each argument is a knob of the config
        self,
        model: str,
        data: str | list[str],
        val_data: str | list[str] | None = None,
        architecture: str | None = None,
        config_args: dict | None = None,
        pretrained: bool | None = None,
        text: str | None = None,
        max_length: int | None = None,
        collator: str | None = None,
        collator_args: dict | None = None,
        lr_scheduler_type: str = "linear",
        lr_scheduler_kwargs: dict | None = None,
        warmup_steps: float = 0,
        epochs: dict | None = None,
        lora: dict | None = None,
        merge_lora: bool = False,
    ) -> None:
        if not importlib.util.find_spec("transformers"):
            raise ConfigError("recipe: needs transformers; pip install 'transformers>=5,<6'")
        refuse_loaders(config_args or {})
        if lora is not None:
            check_lora(lora)
        elif merge_lora:
            raise ConfigError("recipe.merge_lora=true: the run has no adapters; give recipe.lora, or leave it out")
        self.lora, self.merge_lora = lora, merge_lora
        self.source, self.sources = model, {"train": data, "val": val_data}
        self.architecture, self.config_args, self.pretrained = architecture, config_args or {}, pretrained
        self.text, self.max_length = text, max_length
        self.collator, self.collator_args = collator, collator_args or {}
        self.schedule = TransformersSchedule(
            lr_scheduler_type=lr_scheduler_type,
            lr_scheduler_kwargs=lr_scheduler_kwargs or {},
            warmup_steps=warmup_steps,
            epochs=epochs,
        )

    @cached_property
    def config(self) -> "PretrainedConfig":
        from transformers import AutoConfig

        with in_one_line(f"recipe.model={self.source}"):
            how = {**self.config_args, "trust_remote_code": False, "return_unused_kwargs": True}
            pair: Any = AutoConfig.from_pretrained(self.source, **how)
        found, unused = pair
        if other := sorted(set(unused).intersection(self.config_args)):
            known = ["num_labels", *(name for name in vars(found) if not name.startswith("_"))]
            raise ConfigError(
                f"recipe.config_args.{other[0]}: config.json has no such setting; {nearest(other[0], known)}"
            )
        refuse_kernels(found, f"recipe.model={self.source}")
        return found

    @cached_property
    def kind(self) -> Any:
        """The class of the model."""
        import transformers

        name = self.architecture or next(iter(self.config.architectures or ()), None)
        if name is None:
            raise ConfigError(
                f"recipe.model={self.source}: its config.json names no architecture; give recipe.architecture, as "
                "AutoModelForCausalLM"
            )
        kind = getattr(transformers, name, None)
        if not isinstance(kind, type) or not (issubclass(kind, nn.Module) or name.startswith("AutoModelFor")):
            known = [other for other in dir(transformers) if "For" in other or other.endswith("LMHeadModel")]
            raise ConfigError(f"recipe.architecture={name}: is no model of transformers; {nearest(name, known)}")
        return kind

    @cached_property
    def tokenizer(self) -> Any:
        from transformers import AutoTokenizer

        with in_one_line(f"recipe.model={self.source}: the tokenizer that recipe.text needs"):
            return AutoTokenizer.from_pretrained(self.source, trust_remote_code=False)

    @cached_property
    def shifts(self) -> bool:
        """Whether the model predicts the next token, so that the first label counts nowhere."""
        name = self.model_class.__name__
        return not self.config.is_encoder_decoder and ("ForCausalLM" in name or name.endswith("LMHeadModel"))

    @property
    def model_class(self) -> type:
        """The class of the model, also if an AutoModel chooses it."""
        mapping = getattr(self.kind, "_model_mapping", None)
        return mapping[type(self.config)] if mapping is not None else self.kind

    def model(self) -> nn.Module:
        with pickle_in_one_line(self.source), in_one_line(f"recipe.model={self.source}"), no_progress_bar():
            if self.loads_weights:
                refuse_quantized(self.config, f"recipe.model={self.source}")
                how = {"config": self.config, "dtype": torch.float32, "output_loading_info": True}
                how["ignore_mismatched_sizes"] = True  # they are refused below, by name
                how["trust_remote_code"] = False
                refuse_astray_index(Path(self.source), f"recipe.model={self.source}")
                made, found = self.kind.from_pretrained(self.source, **how)
                refuse_mismatched(found["mismatched_keys"], self.source)
                return made if self.lora is None else adapted(made, self.lora, found["missing_keys"])
            if self.lora is not None:
                raise ConfigError(
                    f"recipe.lora: recipe.model={self.source} gives random weights, and an exported adapter has none "
                    "of them; give a folder with weights, or leave recipe.lora out"
                )
            log.info("recipe.model=%s: the weights are random", self.source)
            build = getattr(self.kind, "from_config", None) or self.kind._from_config
            return build(self.config, dtype=torch.float32)

    @property
    def loads_weights(self) -> bool:
        if self.pretrained is not None:
            return self.pretrained
        return not Path(self.source).is_dir() or any((Path(self.source) / name).is_file() for name in WEIGHTS)

    def data(self, split: str) -> Any:
        if split not in self.sources:
            raise ConfigError(f"recipe=hf: has no data for split={split}; give {' or '.join(self.sources)}")
        source, key = self.sources[split], "recipe.data" if split == "train" else "recipe.val_data"
        if source is None:
            own = self.sources["train"]
            if not (isinstance(own, str) and (Path(own) / "dataset_dict.json").is_file()):
                return None
            source = own
        return open_data(key, source, split)

    def transform(self, sample: Mapping[str, Any], rng: Generator) -> dict[str, Any]:
        """Return the model's inputs: tokens of a text, and the sample's values that the model or a collator takes."""
        values = dict(sample.get("json", sample))
        if self.text is not None:
            if self.text not in values:
                raise ConfigError(f"recipe.text={self.text}: a sample has no such key; {nearest(self.text, values)}")
            cut = {"truncation": True, "max_length": self.max_length}
            values |= self.tokenizer(values.pop(self.text), **cut)
        taken = {name: value for name, value in values.items() if name in self.inputs}
        if not taken:
            has = f"a sample has {printable(', '.join(values)) or 'nothing'}"
            raise ConfigError(f"recipe.data: {has}, and the model takes {', '.join(sorted(self.inputs))}; rename a key")
        return {name: self._as_real(value) if name in LABELS else value for name, value in taken.items()}

    def _as_real(self, label: Any) -> Any:
        """Return a label as the model's loss takes it: one that is no class is a float, whatever the file has."""
        if not self.regresses or isinstance(label, bool | str | None):
            return label
        return [float(each) for each in label] if isinstance(label, list) else float(label)

    @property
    def regresses(self) -> bool:
        """Whether a classifier's labels are numbers, or several of 0 and 1, instead of one class."""
        if not self.model_class.__name__.endswith("ForSequenceClassification"):
            return False
        kind = self.config.problem_type
        return kind in ("regression", "multi_label_classification") or (kind is None and self.config.num_labels == 1)

    @cached_property
    def inputs(self) -> set[str]:
        """The names of the model's inputs, and of a label, which collators rename."""
        return {*inspect.signature(self.model_class.forward).parameters, "label", "label_ids"} - {"self", "kwargs"}

    @cached_property
    def collate(self) -> Any:
        """The data collator, whose result is a dict of tensors."""
        from transformers.data import data_collator

        name = self.collator or ("default_data_collator" if self.text is None else "DataCollatorWithPadding")
        made = getattr(data_collator, name, None)
        if getattr(made, "__module__", None) != data_collator.__name__:  # the module imports other names, too
            known = [other for other in dir(data_collator) if "Collator" in other]
            raise ConfigError(f"recipe.collator={name}: is no data collator of transformers; {nearest(name, known)}")
        if isinstance(made, type):
            with in_one_line(f"recipe.collator={name}"):
                given = {"tokenizer": self.tokenizer} if "tokenizer" in inspect.signature(made).parameters else {}
                made = made(**given | self.collator_args)
        return partial(collated, made, self.limits, self.padding)

    @property
    def limits(self) -> dict[str, tuple[int, str]]:
        """The number that integers of a batch must be below, by name, and the setting of config.json that it is."""
        vocabulary = getattr(self.config.get_text_config(), "vocab_size", None)
        classifies = self.model_class.__name__.endswith(("ForSequenceClassification", "ForTokenClassification"))
        classes = (self.config.num_labels or 0) if classifies else 0
        found = {"input_ids": (vocabulary or 0, "vocab_size"), "labels": (classes, "num_labels")}
        return {name: limit for name, limit in found.items() if limit[0] > 1}

    @property
    def padding(self) -> bool:
        """Whether the tokenizer, if one is used, has a token for padding."""
        return "tokenizer" not in vars(self) or self.tokenizer.pad_token is not None

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return loss_of(self._run(model, batch), batch)

    def _run(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Any:
        return model(**batch, **({"use_cache": False} if "use_cache" in self.inputs else {}))

    def weight(self, batch: Mapping[str, Tensor]) -> int:
        """Return the labels that the model's loss is a mean over; without whole numbers as labels, the samples."""
        labels = batch.get("labels")
        if labels is None or labels.is_floating_point() or not labels.dim():
            return count_samples(batch)
        return int((self._targets(labels) != IGNORED).sum())

    def _targets(self, labels: Tensor) -> Tensor:
        return labels[..., 1:] if self.shifts and labels.dim() > 1 else labels

    def metrics(self, model: nn.Module, batch: Mapping[str, Tensor]) -> dict[str, tuple[Tensor, int]]:
        """Return the loss, and with one label for each row of logits the accuracy."""
        output, weight = self._run(model, batch), self.weight(batch)
        own = type(self).loss is not HuggingFace.loss  # of a subclass, which may take labels out of the batch
        loss = self.loss(model, dict(batch)) if own else loss_of(output, batch)
        found = {"loss": (loss * weight, weight)}
        labels, logits = batch.get("labels"), output.get("logits") if isinstance(output, Mapping) else None
        if labels is None or logits is None or labels.is_floating_point() or logits.shape[:-1] != labels.shape:
            return found
        logits = logits[..., :-1, :] if self.shifts and labels.dim() > 1 else logits
        found["accuracy"] = ((logits.argmax(-1) == self._targets(labels)).sum(), weight)
        return found

    def predict(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor | dict[str, Tensor]:
        """Return the logits. A model with several outputs gives all tensors by name, but for losses.

        A tensor is (samples, ...), with the padding of its batch. If batches have several lengths, rows become lists.

        Raises:
            ConfigError: The model's outputs have no names.
        """
        output = self._run(model, batch)
        if not isinstance(output, Mapping):
            raise ConfigError(
                f"recipe.model={self.source}: predictions need outputs with names; set return_dict in its config.json"
            )
        found = {name: value for name, value in output.items() if isinstance(value, Tensor) and value.dim()}
        return found.pop("logits") if found.keys() == {"logits"} else found

    def parameter_groups(self, model: nn.Module) -> list[dict[str, Any]]:
        """Return the matrices without weight decay. Parameters of fewer dimensions never have any."""
        from transformers.trainer_pt_utils import get_parameter_names

        decays = set(get_parameter_names(model, [nn.LayerNorm], NO_DECAY))
        names = model.named_parameters()
        others = [p for name, p in names if name not in decays and p.dim() >= 2 and p.requires_grad]
        return [{"params": others, "weight_decay": 0.0}] if others else []

    def export(self, model: nn.Module, folder: Path) -> None:
        """Write what `from_pretrained` loads: the model or its adapters, and a tokenizer if one is used."""
        save: Any = merged(model) if self.merge_lora else model
        more = {} if self.lora is None or self.merge_lora else {"save_embedding_layers": False}  # they are the base's
        with no_progress_bar():
            save.save_pretrained(folder, **more)
        if self.text is not None or "tokenizer" in vars(self):
            self.tokenizer.save_pretrained(folder)


def refuse_loaders(given: Mapping[str, Any]) -> None:
    """Raise ConfigError for a setting that would reach the code, the files or the servers of transformers' loader."""
    for name in given:
        if name in LOADER or name.startswith("_"):
            raise ConfigError(
                f"recipe.config_args.{name}: is a keyword of transformers' loader, which chooses code, files or "
                "servers, and no setting of a model; leave it out"
            )


def refuse_kernels(config: Any, key: str) -> None:
    """Raise ConfigError if a setting names a kernel of Hugging Face's hub, which is code that transformers imports."""
    name = str(getattr(config, "_attn_implementation", None))
    if "/" in name:
        raise ConfigError(
            f"{key}: attn_implementation={printable(name)} asks for code of Hugging Face's hub, which is not run; give "
            "sdpa or eager in config.json or recipe.config_args"
        )
    for part in getattr(config, "sub_configs", ()):
        refuse_kernels(getattr(config, part, None), key)


def refuse_mismatched(keys: Any, source: str) -> None:
    """Raise ConfigError if weights of the folder have other shapes than the config gives them."""
    if keys:
        name, own, other = sorted(keys)[0]
        raise ConfigError(
            f"recipe.model={source}: {name} has the shape {tuple(own)}, and the config asks for {tuple(other)}; leave "
            "recipe.config_args out, or give a folder without this weight"
        )


def refuse_quantized(config: Any, key: str) -> None:
    """Raise ConfigError if transformers would load weights that an optimizer can't step."""
    if (quantized := getattr(config, "quantization_config", None)) is not None:
        method = quantized.get("quant_method") if isinstance(quantized, Mapping) else quantized.quant_method
        raise ConfigError(
            f"{key}: config.json has quantization_config ({getattr(method, 'value', method)}), and Echelon trains "
            "weights in float32; give the model from before the quantization"
        )


def collated(
    collate: Any, limits: Mapping[str, tuple[int, str]], padding: bool, samples: list[dict[str, Any]]
) -> dict[str, Tensor]:
    """Return the collator's batch without what is no tensor.

    Raises:
        ConfigError: The collator can't pad, or a number is too large for the model's tables.
    """
    try:
        batch = collate(samples)
    except ValueError as error:
        lengths = {name: {len(s[name]) for s in samples if hasattr(s.get(name), "__len__")} for name in samples[0]}
        if not padding:
            raise ConfigError(
                "recipe.text: the tokenizer has no padding token, which samples of several lengths need; set pad_token "
                "in the folder's tokenizer_config.json, as to its eos_token"
            ) from error
        if uneven := next((name for name, of_name in lengths.items() if len(of_name) > 1), None):
            fix = "give recipe.collator=DataCollatorWithPadding, or recipe.text"
            if type(collate).__name__ == "DataCollatorWithPadding":  # which pads what its tokenizer gives
                fix = "cut the data to one length, or write collate() of a subclass of recipes.huggingface.HuggingFace"
            raise ConfigError(
                f"recipe.collator: samples have {uneven} of {min(lengths[uneven])} to {max(lengths[uneven])} items, "
                f"and the collator does not pad them; {fix}"
            ) from error
        raise
    found = {name: value for name, value in batch.items() if isinstance(value, Tensor)}
    for name, (limit, setting) in limits.items():
        value = found.get(name)
        if value is None or value.is_floating_point() or not value.numel() or (most := int(value.max())) < limit:
            continue
        fix = "the tokenizer that the model is for, or a model of that size"
        if setting == "num_labels":
            fix = f"recipe.config_args.num_labels={most + 1}, or the labels that the model is for"
        raise ConfigError(
            f"recipe.data: {name} has the number {most}, and the model's config.json has {setting}={limit}; give {fix}"
        )
    return found


def loss_of(output: Any, batch: Mapping[str, Tensor]) -> Tensor:
    """Return the loss of a model's output.

    Raises:
        ConfigError: The model computed none.
    """
    loss = output.get("loss") if isinstance(output, Mapping) else output[0]
    if loss is None:
        raise ConfigError(
            f"recipe.data: the model computes no loss from {', '.join(batch)}; give samples with labels, or a "
            "recipe.collator that makes them"
        )
    return loss


@contextmanager
def in_one_line(key: str) -> Iterator[None]:
    """Raise ConfigError for what transformers says of a file or a value that a user gave; let it ask for nothing."""
    from transformers import dynamic_module_utils

    patience, dynamic_module_utils.TIME_OUT_REMOTE_CODE = dynamic_module_utils.TIME_OUT_REMOTE_CODE, 0
    try:
        yield
    except ConfigError:
        raise
    except (OSError, ValueError, TypeError, KeyError, ImportError) as error:
        if "trust_remote_code" in str(error):
            raise ConfigError(
                f"{key}: asks for code of its own, which is not run; give a model of transformers"
            ) from None
        line = " ".join(str(error).split()).partition(". ")[0]
        raise ConfigError(f"{key}: {printable(line)}") from None
    finally:
        dynamic_module_utils.TIME_OUT_REMOTE_CODE = patience


@contextmanager
def pickle_in_one_line(source: str) -> Iterator[None]:
    """Raise ConfigError for weights in a pickle that asks for code, or is damaged."""
    try:
        yield
    except Exception as error:
        file = next((name for name in WEIGHTS if Path(source, name).is_file()), "")
        of_pickle = isinstance(error, RuntimeError | EOFError) or type(error).__name__ == "UnpicklingError"
        if not (of_pickle and file.startswith("pytorch_model.bin")):
            raise
        code = re.search(r"GLOBAL (\S+)", str(error))
        why = f"asks for {code[1]}, which is not a weight" if code else "is no file of weights"
        raise ConfigError(
            f"recipe.model={source}: {file} {why}; convert it where you trust it, by "
            "model.save_pretrained(FOLDER), which writes model.safetensors"
        ) from None


@contextmanager
def no_progress_bar() -> Iterator[None]:
    """Keep transformers from the terminal, which is the trainer's."""
    from transformers.utils import logging

    shown = logging.is_progress_bar_enabled()
    logging.disable_progress_bar()
    try:
        yield
    finally:
        if shown:
            logging.enable_progress_bar()
