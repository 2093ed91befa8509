"""ModelSpec: a model as its parameter tensors, grouped in units, without a framework.

Note [Units]
    A *unit* is the grain in which engines move parameters: the embedding, one transformer block, the head.
    Blocks of one shape are stored once with a count, so a model of 126 blocks costs what one of 16 does.
    Tensors stand in the order of ``module.parameters()``, on which DeepSpeed's flattening depends.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from zeroplan.core.parameters import Parameters

#: The parameter of DeepSpeed's transformer layer that holds the weights of query, key and value.
FUSED_WEIGHT = "attn_qkvw"


@dataclass(frozen=True, slots=True)
class Tensor:
    """One parameter. `name` is relative to its unit; `tied_to` names in full the parameter that owns the storage, if not this.

    `kind` says what the parameter is to its module, where known: ``"linear"`` (weight of shape ``(out, in)``), ``"conv1d"``
    (GPT-2's weight of shape ``(in, out)``), ``"head"`` (the output projection), ``"embedding"``, or empty. `quantized` says
    that it is quantised.
    """

    name: str
    shape: tuple[int, ...]
    trainable: bool = True
    tied_to: str | None = None
    kind: str = ""
    quantized: bool = False

    @property
    def numel(self) -> int:
        """Elements (1 for a scalar)."""
        return math.prod(self.shape)

    @property
    def autocast(self) -> bool:
        """Whether it is the weight of a layer that autocast runs in 16 bits; of a matrix of no known kind it is assumed."""
        return self.kind in ("linear", "head") if self.kind else len(self.shape) >= 2


@dataclass(frozen=True, slots=True)
class SpecUnit:
    """`count` consecutive modules of one shape. ``name`` holds ``{}`` where the index goes, counted from `first`.

    Example: ``Unit("model.layers.{}", tensors, count=16)``.
    """

    name: str
    tensors: tuple[Tensor, ...]
    count: int = 1
    first: int = 0
    block: bool = False

    @property
    def own(self) -> list[Tensor]:
        """The tensors of one of the `count` modules, tied ones left out."""
        return [t for t in self.tensors if t.tied_to is None]

    @property
    def numel(self) -> int:
        """Elements of one of the `count` modules, tied tensors left out."""
        return sum(t.numel for t in self.own)

    @property
    def modules(self) -> list[list[int | Tensor]]:
        """The parameters of each module inside, in order: a place in :attr:`own`, or a tensor that is tied to another."""
        place = 0
        found: dict[str, list[int | Tensor]] = {}
        for tensor in self.tensors:
            members = found.setdefault(tensor.name.rpartition(".")[0], [])
            members.append(place if tensor.tied_to is None else tensor)
            place += tensor.tied_to is None
        return list(found.values())

    @property
    def modules_by_autocast(self) -> list[tuple[list[int | Tensor], bool]]:
        """:attr:`modules`, each with whether autocast runs its product in 16 bits."""
        own = self.own
        return [(m, any((own[one] if isinstance(one, int) else one).autocast for one in m)) for m in self.modules]

    def names(self) -> Iterator[str]:
        """Yield the modules' names."""
        for i in range(self.first, self.first + self.count):
            yield self.name.replace("{}", str(i))


@dataclass(frozen=True, slots=True)
class OwnExperts:
    """The experts of DeepSpeed's MoE layers, of which a module has one rank's.

    Attributes:
        ranks: those that share the experts of a layer (``ep_size``).
        drops_tokens: whether experts take no more tokens than their capacity.
    """

    ranks: int
    drops_tokens: bool = True


@dataclass(frozen=True)
class ModelSpec:
    """A model's parameters and where they came from.

    `units` stand in the order of ``module.parameters()``. `config` is the published config (a plain dict; empty when only
    counts are known). `source` says where the shapes came from: catalog, hub, config, safetensors, module or params.
    `auto_class` is the transformers class whose ``from_config`` gives these parameters, such as ``AutoModelForCausalLM``;
    empty when the model is not of transformers or the class is unknown. `own_experts` are one rank's that a module shows.
    """

    name: str
    units: tuple[SpecUnit, ...]
    source: str
    model_type: str = ""
    config: Mapping[str, Any] = field(default_factory=dict)
    largest_module: int | None = None  # elements of the largest module's own parameters, where known without shapes
    auto_class: str = ""
    own_experts: OwnExperts | None = None

    @cached_property
    def parameters(self) -> Parameters:
        """Every parameter in one list, tied ones once."""
        names: list[str] = []
        tensors: list[Tensor] = []
        blocks: list[str] = []
        modules: list[list[int]] = []
        products: list[list[int]] = []  # of those, the ones that autocast runs in 16 bits
        tied: list[tuple[list[int], int, str]] = []  # a module, where in it, the owner's name
        for unit in self.units:
            own, inside = unit.own, unit.modules_by_autocast
            leaves = [tensor.name for tensor in own]
            tensors += own * unit.count
            for prefix in unit.names():
                start = len(names)
                names += [f"{prefix}.{leaf}" for leaf in leaves] if prefix else leaves
                blocks += [prefix if unit.block else ""] * len(own)
                for members, runs_autocast in inside:
                    module = [start + member if isinstance(member, int) else -1 for member in members]
                    modules.append(module)
                    if runs_autocast:
                        products.append(module)
                    tied += [(module, at, m.tied_to or "") for at, m in enumerate(members) if isinstance(m, Tensor)]
        index = {name: p for p, name in enumerate(names)} if tied else {}
        for module, at, owner in tied:
            module[at] = index[owner]
        in_products = {p for module in products for p in module}
        return Parameters(
            names=tuple(names),
            shapes=tuple(tensor.shape for tensor in tensors),
            trainable=tuple(tensor.trainable for tensor in tensors),
            autocast=tuple(p in in_products for p in range(len(tensors))),
            blocks=tuple(blocks),
            modules=tuple(map(tuple, modules)),
            embeddings=tuple(tensor.kind == "embedding" for tensor in tensors),
            quantized=tuple(tensor.quantized for tensor in tensors),
            stand_in=not self.has_shapes,
            largest_layer=self.largest_module,
        )

    @cached_property
    def params(self) -> int:
        """Elements of all parameters, tied ones counted once."""
        return sum(u.numel * u.count for u in self.units)

    @cached_property
    def trainable(self) -> int:
        """Elements of the parameters that receive a gradient."""
        return sum(t.numel * u.count for u in self.units for t in u.tensors if t.tied_to is None and t.trainable)

    @cached_property
    def has_fused_layers(self) -> bool:
        """Whether a module has layers that are not its config's: DeepSpeed's transformer layer, or ours in its place."""
        names = (tensor.name for unit in self.units for tensor in unit.tensors) if self.source == "module" else ()
        return any(name.rpartition(".")[2] == FUSED_WEIGHT for name in names)

    @property
    def frozen(self) -> int:
        """Elements of the parameters without gradient."""
        return self.params - self.trainable

    @property
    def ties(self) -> bool:
        """Whether a tensor is another one's."""
        return any(tensor.tied_to is not None for unit in self.units for tensor in unit.tensors)

    @property
    def has_shapes(self) -> bool:
        """False for a bare count, whose units are a stand-in."""
        return self.source != "params"

    def tensors(self) -> Iterator[tuple[str, Tensor]]:
        """Yield every parameter with its full name, in order, tied ones left out."""
        for unit in self.units:
            for prefix in unit.names():
                for tensor in unit.tensors:
                    if tensor.tied_to is None:
                        yield f"{prefix}.{tensor.name}" if prefix else tensor.name, tensor

    def tensor_groups(self) -> Iterator[tuple[Tensor, int]]:
        """Yield every different parameter with how often it occurs; sums over this cost the same at any depth."""
        for unit in self.units:
            for tensor in unit.tensors:
                if tensor.tied_to is None:
                    yield tensor, unit.count
