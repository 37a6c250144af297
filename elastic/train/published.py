"""Finds out what lets ``from_pretrained`` of transformers and of peft open an export: names of tensors, and
the files beside the weights.

The model that the job builds decides: it may be a model of transformers or contain one, have adapters of
peft, or be a model of Elastic that computes what a model of transformers does.  These libraries are not
imported here: if the model uses one, it is imported already.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from torch import nn

from elastic.code.imports import failure, load
from elastic.data.mixture import Mixture
from elastic.data.tokenizer import CONFIGURATIONS, DEFINITION, files_of
from elastic.errors import CodeError, ElasticError, ModelError
from elastic.ids import Version
from elastic.job import Job
from elastic.models.spec import Equivalent
from elastic.runs import code
from elastic.runs.run import Run
from elastic.state.shard import DTYPE_NAMES
from elastic.train.errands import encoder_of
from elastic.train.model import build_model, builder_of, misfit
from elastic.train.session import opened
from storage.checkpoints import Names
from storage.errors import StorageError
from storage.slices import Tensor

CONFIG, GENERATION = "config.json", "generation_config.json"
ADAPTER, ADAPTER_CONFIG = "adapter_model.safetensors", "adapter_config.json"
KEPT = (GENERATION, DEFINITION, *CONFIGURATIONS, "chat_template.jinja")
"""Files of a folder of weights that training does not change."""


@dataclass
class Published:
    """Describes the files of an export.  ``names`` are the names of tensors in the model's file; None means
    the names in the state.
    """

    names: Names | None = None
    more: dict[str, bytes | Names] = field(default_factory=dict)
    """Maps the name of each other file to its bytes, or to its tensors."""


@dataclass(frozen=True)
class Text:
    """Describes the data, if it is text: the files of its tokenizer, the token that ends documents, and the
    length of a sample.
    """

    files: Mapping[str, bytes] = field(default_factory=dict)
    end: int | None = None
    length: int | None = None

    def ends(self, known: Any) -> Any:
        """Returns the tokens that end a text: those that a config has (``known``), unless the data's own end
        is not among them; then that one.
        """
        return (
            known
            if self.end is None or self.end in (known if isinstance(known, list) else [known])
            else self.end
        )


def published(
    run: Run, job: Job, version: Version, *, rename: bool, accept_code: bool, tell: Callable[[str], None]
) -> Published:
    """Returns the description of an export of ``version``.  Only with ``rename`` do tensors have other names
    than in the state.

    If no library could open the export, it raises with ``rename``: an :class:`ElasticError`, or an error of
    the bucket.  Without ``rename`` it calls ``tell`` with the reason, if transformers is imported.
    """
    by, found, text = run.job_at(version), Published(), Text()
    its = code.with_objects(by, job)
    try:
        text = _text(its)
    except Exception as error:  # the dataset may be the user's, or be on another machine
        tell(f"exported without the files of a tokenizer: {_why(error, its.data.dataset)}")
    try:
        described = _described(its, run, version, text, rename)
        if described.more:
            code.check_look(run, version, by, job, accept=accept_code)
        found = described
    except Exception as error:  # the model's classes are the user's, or of another library
        if rename:
            raise _why(error, its.model) from error
        if "transformers" in sys.modules:
            tell(f"from_pretrained cannot open this export: {_why(error, its.model)}")
    found.more = {**text.files, **found.more}
    return found


def _why(error: Exception, place: str) -> Exception:
    """Returns an error with a sentence for the user; an error that is not Elastic's is put down to the code
    at ``place``.
    """
    return (
        error if isinstance(error, ElasticError | StorageError) else ModelError(f"{place}: {failure(error)}")
    )


def _text(job: Job) -> Text:
    """Describes the data, which it opens only if it may be text that Elastic has prepared."""
    try:
        kind = load(job.data.dataset, "data.dataset")
    except CodeError:  # the code of the dataset is not here
        return Text()
    if not hasattr(kind, "encoder") and kind is not Mixture:
        return Text()
    dataset = opened(job)
    source = next(
        (
            each
            for each in (dataset, *getattr(dataset, "parts", ()))
            if callable(getattr(each, "encoder", None))
        ),
        None,
    )
    if source is None:
        return Text()
    encoder = encoder_of(source)
    return Text(files_of(encoder), encoder.coding.end_of_document, getattr(source, "seq_len", None))


def _described(job: Job, run: Run, version: Version, text: Text, rename: bool) -> Published:
    model = build_model(job, builder_of(job))
    here = [
        Tensor(name, "parameter", DTYPE_NAMES[each.dtype], tuple(each.shape))
        for name, each in model.named_parameters()
    ]
    stored = [each for each in run.checkpoints.open(version).tensors() if each.kind == "parameter"]
    if differs := misfit(job, here, stored, version, "use the model of the run"):
        raise ModelError(differs)
    library = sys.modules.get("transformers")
    modules = [each for _, each in model.named_modules()]  # a module comes before those in it
    if (adapted := next((each for each in modules if getattr(each, "peft_config", None)), None)) is not None:
        return _adapters(model, adapted)
    if (
        inner := next(
            (each for each in modules if library and isinstance(each, library.PreTrainedModel)), None
        )
    ) is not None:
        return _of_the_library(model, inner, text, rename)
    # a class that is derived from ours may compute something else
    own = vars(type(model)).get("as_transformers")
    if not rename:
        return Published()
    if own is None or not all(
        type(each).__module__.startswith(("torch.nn.", type(model).__module__)) for each in modules
    ):
        raise ModelError(
            f"--transformers: model = {job.model!r} ({type(model).__name__}) has no equivalent in "
            "transformers; leave --transformers out"
        )
    equivalent: Equivalent = own(model)
    dtype = str(next(model.parameters()).dtype).removeprefix("torch.")
    config = {**equivalent.config, "bos_token_id": None, "eos_token_id": text.end, "dtype": dtype}
    if "rope_theta" in config and text.length:
        # rotation has no limit, so this is what the model was trained with
        config.setdefault("max_position_embeddings", text.length)
    ending = {} if text.end is None else {"eos_token_id": text.end}
    return Published(
        equivalent.names(each.name for each in here), {CONFIG: _json(config), GENERATION: _json(ending)}
    )


def _json(about: Mapping[str, Any]) -> bytes:
    return json.dumps(about, indent=2, sort_keys=True).encode() + b"\n"


def _own(model: nn.Module) -> dict[int, str]:
    """Maps the id of each parameter and buffer to its name in the state."""
    return {id(each): name for name, each in (*model.named_parameters(), *model.named_buffers())}


def _of_the_library(model: nn.Module, inner: Any, text: Text, rename: bool) -> Published:
    """Describes a model that is ``inner``, a model of transformers, or has all its parameters in ``inner``.

    Raises :class:`ModelError` if it has other parameters, or if ``inner`` is not as its config says.
    """
    own, kind = _own(model), type(inner).__name__
    with torch.device("meta"):
        usual = type(inner)(deepcopy(inner.config))
    shapes, wanted = ({name: each.shape for name, each in one.state_dict().items()} for one in (inner, usual))
    if other := sorted({*shapes.items()} ^ {*wanted.items()}):
        raise ModelError(
            f"the model differs from its config: a {kind} built from the config has no "
            f"{other[0][0]!r}, or one of another shape; correct the config"
        )
    names, first = dict[str, tuple[str, bool]](), dict[int, str]()
    for name, each in inner.state_dict(keep_vars=True).items():
        if (
            not {name, first.setdefault(id(each), name)} & {*inner.all_tied_weights_keys}
            or first[id(each)] == name
        ):
            # the library ties some weights by itself; other shared weights it wants under each name
            names[name] = own[id(each)], False
    inside = {its for its, _ in names.values()}
    if outside := [name for name, _ in model.named_parameters() if name not in inside]:
        raise ModelError(
            f"{outside[0]!r} is outside of the {kind} in the model, so transformers could not load it; "
            f"keep all parameters inside the {kind}"
        )
    if not rename and any(name != its for name, (its, _) in names.items()):
        raise ModelError(
            f"the {kind} in the model has other names for its tensors than the whole model; "
            f"--transformers writes the names of the {kind}"
        )
    config = deepcopy(inner.config)
    config.architectures, config.dtype = [kind], inner.dtype
    config.get_text_config().eos_token_id = text.ends(config.get_text_config().eos_token_id)
    found = Published(names if rename else None, {CONFIG: config.to_json_string().encode()})
    if inner.can_generate():
        generation = deepcopy(inner.generation_config)
        generation.eos_token_id = text.ends(generation.eos_token_id)
        found.more[GENERATION] = generation.to_json_string().encode()
    found.more |= _kept(inner.config.name_or_path, text)
    return found


def _kept(folder: str, text: Text) -> dict[str, bytes]:
    """Returns the files that stay as they are in ``folder``, from which the first weights came.  Files of its
    tokenizer are left out unless the data has the same tokenizer.
    """
    there = {
        name: (Path(folder) / name).read_bytes()
        for name in KEPT
        if folder and (Path(folder) / name).is_file()
    }
    same = there.pop(DEFINITION, b"") == text.files.get(DEFINITION)
    return {name: each for name, each in there.items() if same or name == GENERATION}


def _adapters(model: nn.Module, adapted: Any) -> Published:
    """Describes adapters of peft in ``adapted``.  Raises :class:`ModelError` if there are several, or if a
    parameter outside of them trains.
    """
    if len(adapted.peft_config) > 1:
        raise ModelError(
            f"the model has the adapters {' and '.join(adapted.peft_config)}, but a folder of peft "
            "can have only one; train one adapter to export it"
        )
    ((adapter, config),) = adapted.peft_config.items()
    state, own = adapted.state_dict(keep_vars=True), _own(model)
    found = sys.modules["peft"].get_peft_model_state_dict(
        adapted, state, adapter, save_embedding_layers=False
    )
    root = "base_model.model."  # peft puts it before the names of the adapted model
    names = {
        name if name.startswith(root) else f"{root}{name}": (own[id(each)], False)
        for name, each in found.items()
    }
    inside = {its for its, _ in names.values()}
    if outside := [
        name for name, each in model.named_parameters() if each.requires_grad and name not in inside
    ]:
        raise ModelError(
            f"{outside[0]!r} is trained, but is not part of peft's adapters; name its module in "
            "modules_to_save"
        )
    about = deepcopy(config)
    about.inference_mode = True
    about.base_model_name_or_path = (
        config.base_model_name_or_path
        or getattr(getattr(adapted, "config", None), "name_or_path", None)
        or None
    )
    if about.task_type is None and type(adapted).__name__.endswith("ForCausalLM"):
        about.task_type = "CAUSAL_LM"
    with TemporaryDirectory() as folder:
        about.save_pretrained(folder)
        return Published(None, {ADAPTER_CONFIG: (Path(folder) / ADAPTER_CONFIG).read_bytes(), ADAPTER: names})
