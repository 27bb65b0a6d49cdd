"""A model as units, and units as groups of storages that share bundles.

A *unit* is what is used together: an entry of the largest outer ModuleLists (a transformer block), or a leftover module
with parameters of its own. A *group* is a run of a unit's parameters whose bytes fill one bundle per kind, cut at the
same places for all kinds; a storage that is too large for a bundle is a group of its own, cut into *tiles*: bundles
that lie side by side.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import nn

from tiermem.bundle import Kind, TensorSpec
from tiermem.errors import Unsupported
from tiermem.layout import TENSOR_ALIGN_BYTES
from tiermem.units import round_up
from tiermem_client.file_backed import FileSource
from tiermem_client.memory import Bundle
from tiermem_client.residency import Residency
from tiermem_client.storage_swap import storage_key

_CONTAINERS = (nn.ModuleList, nn.ModuleDict)
_WIDEST_GRADIENT = 4  # bytes of an element: a gradient may be wider than its parameter
_UPDATES_IN_ARENA = 16
"""Tiles are as large as bundles can be where this many tiles' updates fit into the arena."""


class Weight(NamedTuple):
    """Bytes over those of the parameter, at least 1: of all its optimizer state, which is one bundle, and of the
    largest of its gradient and state tensors, which have bundles of their own where the parameter is tiled.
    """

    state: float
    largest: float


@dataclass(slots=True, eq=False)
class ManagedParameter:
    """The user's Parameter object and where its elements lie in its storage (elements, not bytes)."""

    parameter: nn.Parameter = field(repr=False)
    name: str
    storage: ManagedStorage
    storage_offset: int
    shape: tuple[int, ...]
    stride: tuple[int, ...]

    @property
    def nbytes(self) -> int:
        return self.parameter.numel() * self.parameter.element_size()

    @property
    def whole(self) -> bool:
        """Whether the parameter is all of its storage, contiguous: the condition for updating it in tiles."""
        return self.storage_offset == 0 and self.nbytes == self.storage.nbytes and self.parameter.is_contiguous()


@dataclass(slots=True, eq=False)
class ManagedStorage:
    """One torch storage that lives in the store; views, tied parameters and saved tensors all point into it.

    `source`: a file that its bytes seem to be in, if it is frozen (`file_backed`). `host`: the storage in host memory
    that it was before attach, if it lives on another device, as long as its bytes are nowhere else (`relocation`).
    """

    storage: torch.UntypedStorage = field(repr=False)  # its text reads bytes, which may not be here
    nbytes: int
    name: str
    parameters: list[ManagedParameter] = field(default_factory=list)
    group: Group | None = None
    offset_bytes: int = 0
    source: FileSource | None = None
    host: torch.UntypedStorage | None = field(default=None, repr=False)

    @property
    def tensors(self) -> list[nn.Parameter]:
        return [m.parameter for m in self.parameters]

    @property
    def origin(self) -> torch.UntypedStorage:
        """Where its bytes are before they are in the store."""
        return self.storage if self.host is None else self.host

    @property
    def file(self) -> int | None:
        return None if self.source is None else self.source.file

    @property
    def address(self) -> int:
        assert self.group is not None
        return self.group.bundles[0].range.address + self.offset_bytes


@dataclass(slots=True, eq=False)
class Group:
    """Storages whose bytes share bundles: of one file, or of none. `bundles` are its PARAM bundles: one, or the tiles
    of one large storage.
    """

    owner: Unit
    storages: list[ManagedStorage]
    bundles: list[Bundle]
    tile_elements: int = 0  # 0: not tiled

    @property
    def unit(self) -> str:
        return self.owner.name

    @property
    def parameters(self) -> list[ManagedParameter]:
        return [p for s in self.storages for p in s.parameters]

    @property
    def tiled(self) -> bool:
        return self.tile_elements > 0


@dataclass(slots=True, eq=False)
class Unit:
    """`modules` are hooked; `bundles` is what their forward needs: its own groups', and those of tied parameters owned
    elsewhere.
    """

    name: str
    modules: list[nn.Module]
    parameters: list[nn.Parameter] = field(repr=False)
    groups: list[Group] = field(default_factory=list)
    bundles: list[Bundle] = field(default_factory=list)
    used: list[nn.Parameter] = field(default_factory=list, repr=False)  # its own, and tied ones owned elsewhere


def discover_units(model: nn.Module) -> list[Unit]:
    """Units of a model in the order of `named_modules`; every parameter is owned by the first unit that has it."""
    units: list[Unit] = []
    owner: dict[nn.Parameter, Unit] = {}
    inside: set[nn.Module] = set()
    for name, entry in _blocks(model):
        if entry in inside:
            continue
        unit = Unit(name, list(_callable_modules(entry)), [])
        for parameter in entry.parameters():
            if parameter not in owner:
                owner[parameter] = unit
                unit.parameters.append(parameter)
        inside.update(entry.modules())
        if any(True for _ in entry.parameters()):
            units.append(unit)
    for name, module in model.named_modules():
        own = list(module.parameters(recurse=False))
        if not own or module in inside:
            continue
        new = [p for p in own if p not in owner]
        joined = next((owner[p] for p in own if p in owner), None)
        if joined is None:
            joined = Unit(name, [], [])
            units.append(joined)
        joined.modules.append(module)
        joined.parameters += new
        owner.update(dict.fromkeys(new, joined))
    return units


def _blocks(model: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Entries of the outermost ModuleLists with several parametrised entries, largest lists first when they nest."""
    lists = [
        (name, module)
        for name, module in model.named_modules()
        if isinstance(module, nn.ModuleList) and len(module) > 1 and any(True for _ in module.parameters())
    ]
    lists.sort(key=lambda item: -sum(p.numel() for p in item[1].parameters()))
    chosen: list[str] = []
    for name, module in lists:
        if any(name.startswith(c + ".") or c.startswith(name + ".") for c in chosen):
            continue
        chosen.append(name)
        for key, entry in module.named_children():
            yield f"{name}.{key}", entry


def _callable_modules(module: nn.Module) -> Iterator[nn.Module]:
    """The module, or what is inside where it is a mere container that nobody calls (`for attn, ff in self.layers`)."""
    if isinstance(module, _CONTAINERS):
        for child in module.children():
            yield from _callable_modules(child)
    else:
        yield module


def collect_storages(
    model: nn.Module, units: list[Unit], device: torch.device | None = None
) -> dict[int, ManagedStorage]:
    """Every parameter's storage by key; raises Unsupported for a parameter that has none in host memory or on `device`
    (sparse, quantised wrappers, meta, another GPU).
    """
    places = ["in host memory", *([] if device is None else [f"on {device}"])]
    names = {p: n for n, p in model.named_parameters(remove_duplicate=True)}
    storages: dict[int, ManagedStorage] = {}
    for unit in units:
        for parameter in unit.parameters:
            name = names.get(parameter, unit.name)
            key = storage_key(parameter)
            if key is None or (parameter.device.type != "cpu" and parameter.device != device):
                raise Unsupported(
                    f"parameter {name!r} ({type(parameter).__name__} on {parameter.device}, layout {parameter.layout}) "
                    f"has no dense storage {' or '.join(places)}; move the model to the CPU before attach"
                )
            storage = storages.get(key)
            if storage is None:
                raw = parameter.untyped_storage()
                storage = storages[key] = ManagedStorage(raw, raw.nbytes(), name)
            storage.parameters.append(
                ManagedParameter(
                    parameter,
                    name,
                    storage,
                    int(parameter.storage_offset()),
                    tuple(parameter.shape),
                    tuple(parameter.stride()),
                )
            )
    return storages


def weight_of(storage: ManagedStorage, itemsizes: Mapping[nn.Parameter, Sequence[int]]) -> Weight:
    """`itemsizes`: bytes of an element of each state tensor of a parameter."""
    mine = [(m.parameter, itemsizes.get(m.parameter, ())) for m in storage.parameters]
    state = sum(p.numel() * sum(sizes) for p, sizes in mine) / max(1, storage.nbytes)
    widest = max(max([_WIDEST_GRADIENT, *sizes]) / p.element_size() for p, sizes in mine)
    return Weight(max(1.0, state), max(1.0, widest))


def build_groups(
    unit: Unit, storages: dict[int, ManagedStorage], residency: Residency, weight: Callable[[ManagedStorage], Weight]
) -> None:
    """Cut a unit's storages into groups and declare their PARAM bundles. No bundle of any kind is above the cap then.
    Storages that may be adopted from a file share no bundle with others.
    """
    mine = [s for s in dict.fromkeys(storages[storage_key(p) or 0] for p in unit.parameters) if s.group is None]
    for file in dict.fromkeys(s.file for s in mine):
        _cut(unit, [s for s in mine if s.file == file], residency, weight)


def _cut(
    unit: Unit, mine: list[ManagedStorage], residency: Residency, weight: Callable[[ManagedStorage], Weight]
) -> None:
    cap, session = residency.memory.bundle_cap_bytes, residency.session
    arena_bytes = 0 if residency.memory.keeps_copies else session.frames * session.opened.frame_bytes
    ample_bytes = arena_bytes // _UPDATES_IN_ARENA
    run: list[ManagedStorage] = []
    filled = 0.0
    for storage in mine:
        heavy = weight(storage)
        heaviest = round_up(max(1, storage.nbytes), TENSOR_ALIGN_BYTES) * heavy.state
        if heaviest > cap:
            unit.groups.append(_tiled(unit, storage, residency, tile_bytes(cap, ample_bytes, heavy)))
            continue
        if run and filled + heaviest > cap:
            unit.groups.append(_packed(unit, run, residency))
            run, filled = [], 0.0
        run.append(storage)
        filled += heaviest
    if run:
        unit.groups.append(_packed(unit, run, residency))


def tile_bytes(cap_bytes: int, ample_bytes: int, weight: Weight) -> int:
    """Bytes of a parameter that a tile has: as many as make no bundle larger than the cap, where a tile's update takes
    no more than `ample_bytes`, and fewer otherwise.

    Large tiles are fewer; small ones let more of what is used next be there in time.
    """
    update = 2 + weight.state  # the parameter, its gradient, and state
    return int(max(cap_bytes / weight.state, min(cap_bytes / weight.largest, ample_bytes / update)))


def _packed(unit: Unit, storages: list[ManagedStorage], residency: Residency) -> Group:
    offset, specs = 0, []
    for storage in storages:
        storage.offset_bytes = offset
        first = storage.parameters[0].parameter
        specs.append(
            TensorSpec(
                storage.name, str(first.dtype).removeprefix("torch."), tuple(first.shape), offset, storage.nbytes
            )
        )
        offset += round_up(max(1, storage.nbytes), TENSOR_ALIGN_BYTES)
    group = Group(unit, list(storages), residency.new_bundles([(Kind.PARAM, unit.name, offset, tuple(specs))]))
    for storage in storages:
        storage.group = group
    return group


def _tiled(unit: Unit, storage: ManagedStorage, residency: Residency, target_bytes: int) -> Group:
    parameter = storage.parameters[0]
    itemsize = parameter.parameter.element_size()
    elements = tile_elements(target_bytes, itemsize, residency.memory.frame_bytes)
    dtype = str(parameter.parameter.dtype).removeprefix("torch.")
    requests = []
    for start in range(0, storage.nbytes, elements * itemsize):
        nbytes = min(elements * itemsize, storage.nbytes - start)
        requests.append(
            (Kind.PARAM, unit.name, nbytes, (TensorSpec(storage.name, dtype, (nbytes // itemsize,), 0, nbytes),))
        )
    group = Group(unit, [storage], residency.new_bundles(requests), elements)
    storage.group, storage.offset_bytes = group, 0
    return group


def tile_elements(target_bytes: int, itemsize: int, frame_bytes: int) -> int:
    """Elements of a tile of about `target_bytes`: a multiple of the frame's bytes in *elements*, so that tiles of every
    dtype of the same elements are whole frames long.
    """
    return max(1, target_bytes // itemsize // frame_bytes) * frame_bytes
