"""What a model is to the rest of the program: embed, blocks, head.

A :class:`ModelDefinition` makes three kinds of ordinary ``nn.Module``; a pipeline stage is a slice of the blocks, plus
embed and head at the ends. Nothing about pipelines, ZeRO or recompute enters a model file, and nothing of the tensor
layout either: layers of ``megatron_lite.tensor.layers`` split themselves, and a model writes ``-1`` where a rank's
share of the heads stands. Hidden states are always a flat row of tokens, [T, H] with T = B * S, or [T / tp, H] under
sequence parallelism.

``head`` returns the *sum* of the losses of the tokens whose ``loss_mask`` is 1: the division by the token count of
the whole step happens in one place, outside. A block may return ``(hidden, aux_sum)``: a sum over tokens that is
divided by the same count and added to the objective. Like the loss it has to be the same number on every tp rank, so
one computed from a sequence-parallel slice goes through ``tensor.regions.reduce_from_tp``.

A team's model is one file with a subclass of :class:`ModelDefinition`, its own frozen config dataclass, and, where
wanted, ``problems``, ``flops`` and ``hf_tensors``. It may hold ordinary ``nn.Linear`` layers: it then trains under
data parallelism, ZeRO and pipelines, and tensor parallelism is refused by the names of those parameters.
"""

from __future__ import annotations

import hashlib
from abc import ABC, abstractmethod
from dataclasses import dataclass, is_dataclass, replace
from fnmatch import fnmatchcase
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch import nn

from megatron_lite.config.own_code import import_own, own_digest
from megatron_lite.tensor.spec import ParamSpec, Rectangle, TensorParallel

if TYPE_CHECKING:
    from megatron_lite.data.batch import Batch
    from megatron_lite.mesh.layout import Layout
    from megatron_lite.model.cache import KVCache
    from megatron_lite.model.names import HfTensor


@dataclass(frozen=True)
class ForwardContext:
    """What every module of a forward pass may read besides the hidden states.

    Attributes:
        batch: the microbatch.
        seed, step: key of the dropout masks (with the row's index in the global batch, the layer and the site).
        training: dropout is on.
        cache: keys and values of earlier tokens, when generating.
    """

    batch: Batch
    seed: int = 0
    step: int = 0
    training: bool = False
    cache: KVCache | None = None


@dataclass(frozen=True)
class Flops:
    """Floating point operations of one optimizer step, forward and backward, independent of the layout.

    Attributes:
        model_full: with full attention, the papers' convention; MFU uses it.
        computed: with the causal half of the documents' own squares, what has to be computed.
    """

    model_full: int
    computed: int


class ModelDefinition(ABC):
    """One architecture. Instances are cheap: they make modules, they hold none."""

    Config: ClassVar[type]
    """Frozen dataclass whose fields are the model's options (``model:`` in YAML, ``--model.FIELD``)."""

    def __init__(self, config: Any, parallel: TensorParallel) -> None:
        self.config = config
        self.parallel = parallel

    @property
    def num_blocks(self) -> int:
        """Blocks of the whole model."""
        return int(self.config.num_layers)

    @property
    def hidden_size(self) -> int:
        """Width H of the hidden states that pass between stages."""
        return int(self.config.hidden_size)

    @property
    def vocab_size(self) -> int:
        """True vocabulary size, without padding."""
        return int(self.config.vocab_size)

    @abstractmethod
    def make_embed(self) -> nn.Module:
        """Module with ``forward(ctx) -> hidden``."""

    @abstractmethod
    def make_block(self, index: int) -> nn.Module:
        """Module with ``forward(hidden, ctx) -> hidden`` or ``(hidden, aux_sum)``; ``index`` counts over the model."""

    @abstractmethod
    def make_head(self) -> nn.Module:
        """Module with ``forward(hidden, ctx) -> loss_sum`` and ``logits(hidden, ctx) -> [T, vocab_size]``."""

    @classmethod
    def problems(cls, config: Any, layout: Layout, *, sequence_parallel: bool, seq_length: int) -> list[str]:
        """Everything that is wrong with this config under this layout, one sentence each, with numbers and remedy."""
        return []

    @classmethod
    def flops(cls, config: Any, tokens: int, seq_length: int, sum_squared_lengths: int | None = None) -> Flops | None:
        """FLOPs of one step of ``tokens`` tokens, or None when not known (then no MFU is reported).

        Args:
            sum_squared_lengths: sum of the squared lengths of the documents packed in the step's rows;
                None: every row is one document.
        """
        return None

    @classmethod
    def hf_tensors(cls, config: Any) -> list[HfTensor] | None:
        """The name map to a Hugging Face checkpoint, or None when there is none."""
        return None


def load_definition(name: str) -> type[ModelDefinition]:
    """The model class behind ``--model``: ``gpt``, ``llama`` or ``package.module:Class``.

    A module is looked for in the working directory first and then among what is installed.

    Raises:
        ValueError: no such model, module or class, or a class that is no usable definition; says what is there.
    """
    name = {"gpt": "megatron_lite.model.gpt:GPT", "llama": "megatron_lite.model.llama:Llama"}.get(name, name)
    module_name, colon, class_name = name.partition(":")
    if not colon or not module_name or not class_name:
        raise ValueError(f"no model {name!r}: choose gpt, llama or a class of your own as package.module:Class")
    module = import_own(module_name)
    found = getattr(module, class_name, None)
    if found is None:
        known = [
            key
            for key, value in vars(module).items()
            if isinstance(value, type) and issubclass(value, ModelDefinition) and value is not ModelDefinition
        ]
        there = f"; it defines {', '.join(known)}" if known else "; it defines no subclass of ModelDefinition"
        raise ValueError(f"{module.__file__} has no {class_name}{there}")
    if not (isinstance(found, type) and issubclass(found, ModelDefinition)):
        raise ValueError(f"{class_name} is not a subclass of megatron_lite.model.protocol.ModelDefinition")
    missing = sorted(getattr(found, "__abstractmethods__", ()))
    if missing:
        raise ValueError(f"{class_name} does not define {', '.join(missing)}")
    config = getattr(found, "Config", None)
    if not (isinstance(config, type) and is_dataclass(config) and config.__dataclass_params__.frozen):  # type: ignore[attr-defined]
        raise ValueError(
            f"{class_name}.Config must be a frozen dataclass (@dataclass(frozen=True)) of the model's options"
        )
    return found


def source_digest(definition: type[ModelDefinition]) -> str:
    """Digest of a model's source files: of its class, of those it is derived from, and of the rest of its package."""
    return own_digest(definition.__module__, {cls.__module__ for cls in definition.__mro__})


def part_names(definition: ModelDefinition) -> list[str]:
    """Names of the parts in order: ``embed``, ``blocks.0`` ... , ``head``."""
    return ["embed", *(f"blocks.{i}" for i in range(definition.num_blocks)), "head"]


def tie(parameter: nn.Parameter, canonical: str) -> nn.Parameter:
    """Declare that ``parameter`` is one tensor with the parameter whose global name is ``canonical``.

    Every holder declares it, the one that bears the name included; holders may sit in any parts. Initial values are
    those of the canonical holder.
    """
    spec = getattr(parameter, "spec", None) or ordinary_spec(parameter)
    parameter.spec = replace(spec, tie=canonical)  # type: ignore[attr-defined]
    return parameter


def ordinary_spec(parameter: nn.Parameter) -> ParamSpec:
    """Spec of a parameter that no layer of ours made: replicated, and it keeps the values it was built with."""
    shape = tuple(parameter.shape)
    return ParamSpec("", shape, (None,) * len(shape), init=None, decay=len(shape) > 1)


def build_part(definition: ModelDefinition, part: str, seed: int = 0) -> nn.Module:
    """Make one part of the model; every parameter of it gets a ``.spec`` with its global name
    and a ``.rectangle``.

    Ordinary ``nn`` layers are built on the CPU under a generator seeded by (seed, part), so that they start the same
    in every layout, and then moved to the definition's device and dtype. Parameters of our own layers are empty until
    ``tensor.init.initialise`` fills them.

    Raises:
        ValueError: the part holds ordinary parameters and the tensor-parallel size is more than 1.
    """
    module = _make(definition, part, seed)
    ordinary = _describe(definition, module, part)
    if definition.parallel.axis.size > 1 and ordinary:
        names = [p.spec.name for p in ordinary]  # type: ignore[attr-defined]
        raise ValueError(ordinary_refusal(names, definition.parallel.axis.size))
    for parameter in ordinary:
        canonical = parameter.spec.tie  # type: ignore[attr-defined]
        if canonical is not None and _part_of(canonical) != part and parameter.device.type != "meta":
            parameter.data.copy_(_canonical_values(definition, canonical, seed))
    return module


def ordinary_refusal(names: list[str], tp: int) -> str:
    """Why a model with ordinary parameters cannot run under tensor parallelism, in one sentence."""
    shown = ", ".join(names[:8]) + (f" and {len(names) - 8} more" if len(names) > 8 else "")
    return (
        f"tensor-model-parallel-size {tp}: these parameters belong to ordinary torch layers, which cannot be split "
        f"over tensor-parallel ranks: {shown}. Build them from megatron_lite.tensor.layers (a scale or a gate of your own: "
        f"its `replicated`), or use "
        f"tensor-model-parallel-size 1 (data parallelism, ZeRO and pipelines work as they are)"
    )


def full_specs(definition: ModelDefinition) -> dict[str, dict[str, ParamSpec]]:
    """Specs of the whole model, built on the meta device: {part: {global name: spec}}, parts in order.

    A tied tensor appears in every part that holds it, under its canonical name.

    Raises:
        ValueError: a tie names a tensor that does not exist or has another shape.
    """
    on_meta = type(definition)(definition.config, replace(definition.parallel, device=torch.device("meta")))
    specs: dict[str, dict[str, ParamSpec]] = {}
    for part in part_names(definition):
        module = _make(on_meta, part, 0)
        _describe(on_meta, module, part)
        specs[part] = {p.spec.name: p.spec for p in module.parameters()}  # type: ignore[attr-defined]
    for part, held in specs.items():
        for name, spec in held.items():
            if spec.tie is None:
                continue
            owner = specs.get(_part_of(name), {}).get(name)
            if owner is None:
                raise ValueError(f"{part} ties a parameter to {name}, which is no parameter of this model")
            if owner.full_shape != spec.full_shape:
                raise ValueError(f"{part} ties a parameter of shape {spec.full_shape} to {name} of {owner.full_shape}")
    return specs


def _make(definition: ModelDefinition, part: str, seed: int) -> nn.Module:
    """Call the right ``make_*`` with torch's default device and generator set for ordinary layers."""
    meta = definition.parallel.device.type == "meta"
    key = int.from_bytes(hashlib.sha256(f"{seed}/{part}".encode()).digest()[:8], "little")
    with torch.random.fork_rng(devices=[]), torch.device("meta" if meta else "cpu"):
        torch.random.default_generator.manual_seed(key)
        if part == "embed":
            return definition.make_embed()
        if part == "head":
            return definition.make_head()
        return definition.make_block(int(part.removeprefix("blocks.")))


def _describe(definition: ModelDefinition, module: nn.Module, part: str) -> list[nn.Parameter]:
    """Name the specs of a part's parameters, move ordinary ones; returns the ordinary parameters.

    Raises:
        ValueError: a parameter was named before, in another part: a tie that is not declared.
    """
    device, dtype = definition.parallel.device, definition.parallel.dtype
    patterns = getattr(definition.config, "no_weight_decay_patterns", ())
    ordinary = []
    for local, parameter in module.named_parameters():
        spec = getattr(parameter, "spec", None)
        if spec is None or spec.init is None:
            ordinary.append(parameter)
            parameter.data = parameter.data.to(device=device, dtype=dtype)
            spec = spec or ordinary_spec(parameter)
            parameter.rectangle = Rectangle((0,) * len(spec.full_shape), spec.full_shape)  # type: ignore[attr-defined]
        name = spec.tie or f"{part}.{local}"
        if spec.name not in ("", name):
            raise ValueError(
                f"{spec.name} and {name} are one parameter, which no pipeline could keep equal: make one for each part "
                f"and declare both with megatron_lite.model.protocol.tie(parameter, {spec.name!r})"
            )
        decay = spec.decay and len(spec.full_shape) > 1 and not any(fnmatchcase(name, p) for p in patterns)
        parameter.spec = replace(spec, name=name, decay=decay)  # type: ignore[attr-defined]
    for child in module.modules():
        for key, buffer in child._buffers.items():
            if buffer is not None:
                wide = buffer.is_floating_point() and dtype == torch.float64
                child._buffers[key] = buffer.to(device=device, dtype=dtype if wide else buffer.dtype)
    return ordinary


def _part_of(name: str) -> str:
    """The part that holds the parameter with this global name."""
    pieces = name.split(".")
    return ".".join(pieces[:2]) if pieces[0] == "blocks" else pieces[0]


def _canonical_values(definition: ModelDefinition, canonical: str, seed: int) -> torch.Tensor:
    """Initial values of an ordinary tied parameter: those of the holder that bears its name."""
    owner = build_part(definition, _part_of(canonical), seed)
    for parameter in owner.parameters():
        if parameter.spec.name == canonical:  # type: ignore[attr-defined]
            return parameter.data
    raise ValueError(f"a parameter is tied to {canonical}, which is no parameter of this model")
