"""The one line: `tiermem.attach(model, optimizer)`."""

from __future__ import annotations

import atexit
import faulthandler
import logging
import os
import sys
import weakref
from collections.abc import Mapping
from typing import TYPE_CHECKING, overload

import torch
from torch import nn

from tiermem.errors import InvalidArgument, TiermemError, Unsupported
from tiermem.notices import NoticeKind
from tiermem.units import format_size
from tiermem_client import compiled, storage_swap
from tiermem_client.activation_hooks import check_policies, new_activations, recompute_units, saves_memory
from tiermem_client.activation_policy import Policy, policies_for
from tiermem_client.activations import Activations
from tiermem_client.address_space import Mechanism
from tiermem_client.adoption import adopt, find_files
from tiermem_client.checkpoints import ModelCheckpoints, OptimizerCheckpoints
from tiermem_client.compiled import Cuts, cuda_graph_refusals
from tiermem_client.devices import DeviceChoice, memory_for, parse_device
from tiermem_client.early_updates import InBackward
from tiermem_client.embedded import EmbeddedDaemon, default_flash_directory
from tiermem_client.file_backed import FileSources
from tiermem_client.floors import choose_floor
from tiermem_client.grads import GradBook
from tiermem_client.guard import GuardBook
from tiermem_client.heap import map_large_blocks, trim_heap, unmap_large_blocks
from tiermem_client.integrations import resolve
from tiermem_client.job import Job, close_all, remember
from tiermem_client.memory import Bundle, Memory
from tiermem_client.opening import open_session
from tiermem_client.private_copies import PrivateCopies
from tiermem_client.residency import Residency
from tiermem_client.saved_tensors import SavedTensorHooks
from tiermem_client.session import MAIN, Session
from tiermem_client.shadow import OptimizerForm, OptimizerProbe
from tiermem_client.unit_hooks import UnitHooks
from tiermem_client.units import (
    ManagedStorage,
    Unit,
    Weight,
    build_groups,
    collect_storages,
    discover_units,
    weight_of,
)
from tiermem_client.updates import Updater
from tiermem_client.vertical import Vertical

if TYPE_CHECKING:
    import transformers

_log = logging.getLogger("tiermem.attach")
_IN_BACKWARD = {None: InBackward.OPTIMISTIC, False: InBackward.NEVER, True: InBackward.OPTED_IN}
_attached: weakref.WeakSet[nn.Module] = weakref.WeakSet()  # modules of all models that are attached now


@overload
def attach(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dram: int | str | None = None,
    flash: int | str | os.PathLike[str] | None = None,
    job: str | None = None,
    device: str | None = None,
    deferred: bool = True,
    optimizer_in_backward: bool | None = None,
    activations: str | Mapping[str, str] = "keep",
    endpoint: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
) -> Job: ...


@overload
def attach(
    model: transformers.Trainer,
    *,
    dram: int | str | None = None,
    flash: int | str | os.PathLike[str] | None = None,
    job: str | None = None,
    device: str | None = None,
    deferred: bool = True,
    optimizer_in_backward: bool | None = None,
    activations: str | Mapping[str, str] = "keep",
    endpoint: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
) -> Job: ...


def attach(
    model: nn.Module | transformers.Trainer,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    dram: int | str | None = None,
    flash: int | str | os.PathLike[str] | None = None,
    job: str | None = None,
    device: str | None = None,
    deferred: bool = True,
    optimizer_in_backward: bool | None = None,
    activations: str | Mapping[str, str] = "keep",
    endpoint: str | os.PathLike[str] | None = None,
    timeout_s: float | None = None,
) -> Job:
    """Put a model's parameters, gradients and optimizer state into the tiered store; the training loop stays as it is.

    `model`: a module, or a transformers `Trainer`, whose model and optimizer are then taken (the optimizer is made now,
    by the Trainer, where it has none). Of an optimizer that accelerate has prepared the one inside is taken.

    `dram`: bytes or text such as "4GiB", the job's share of the DRAM tier (default: half of the free memory, or all
    that the state needs, if less and no activations are offloaded; with a service its default share). `flash`: with an
    embedded daemon a directory, with a service the job's quota as a size; default a private directory under
    TIERMEM_FLASH or the user's cache directory, removed at exit. `device`: a third tier above DRAM, in which the
    tensors lie that are computed with: "cuda:N:SIZE" is so much of a GPU's memory (default: half of what is free); a
    model that is in host memory is moved there, and back at `detach`. "emulated:SIZE" is ordinary memory that is filled
    and emptied as a GPU's would be. `deferred`: an update is done when something of it is needed next, unless
    everything fits; False: inside `step()`. `optimizer_in_backward`: by default groups are updated inside backward
    where steps before have been such that `step()` will confirm it, and nobody can tell; False: never; True: always,
    using gradients up, so that nothing may look at them, or at parameters before `step()`. `activations`: what is to
    become of the tensors that autograd saves: "keep" leaves them in the script's memory, "recompute" runs a unit's
    forward again in backward, "offload" puts them into the tiers, where they share `dram` with everything else; one
    policy for all, or a mapping from unit names or patterns ("layers.1?", "*") to policies, of which the first that
    matches counts. `endpoint`: a service's socket, or "embedded"; default TIERMEM_ENDPOINT, else a running service,
    else embedded. `timeout_s`: how long a daemon may be silent.

    Raises InvalidArgument, Unsupported (naming what cannot be done exactly and the remedy), ResourceExhausted (the
    floor does not fit), DaemonUnavailable. After an error the model and the optimizer are as they were.
    """
    in_backward = _IN_BACKWARD[optimizer_in_backward]
    choice = parse_device(device)
    target = torch.device("cpu") if choice is None else choice.device
    model, optimizer = resolve(model, optimizer)
    if optimizer is None and optimizer_in_backward:
        raise InvalidArgument("optimizer_in_backward=True, but no optimizer was given to attach")
    units = discover_units(model)
    if not units:
        raise InvalidArgument(f"{type(model).__name__} has no parameters; there is nothing to manage")
    policies = policies_for(activations, [unit.name for unit in units])
    named = () if isinstance(activations, str) else activations
    check_policies(policies, named, units, device or "")
    for refusal in cuda_graph_refusals(model):
        raise Unsupported(refusal)
    storages = collect_storages(model, units, target)
    if any(module in _attached for module in model.modules()):
        raise InvalidArgument("this model is attached already; detach the first job before attaching again")
    forms = _probe(optimizer, storages, target)
    session, daemon, name = open_session(
        dram, flash, job, endpoint, timeout_s, storages, forms, Policy.OFFLOAD in policies.values()
    )
    residency = Residency(session, _memory(choice, session, daemon))
    book = GradBook(residency)
    attached = Job(name, model, residency, storages, book, None, daemon)
    _note_mechanisms(attached)
    sources = FileSources(session)
    try:
        attached.relocation.go(model)
        find_files(storages, optimizer, sources)
        floor = _build(attached, units, optimizer, forms, deferred, in_backward)
        if (not residency.keeps_idle or saves_memory(policies)) and map_large_blocks():
            attached.undo.append(unmap_large_blocks)
        adopt(attached, units, sources)
        _hook(attached, units, optimizer, policies, floor)
        attached.report()
        attached.begin()
    except BaseException:
        _abort(attached)
        raise
    finally:
        sources.close()
    remember(attached)
    _attached.update(model.modules())
    attached.undo.insert(0, lambda: _attached.difference_update(model.modules()))
    trim_heap()
    if not faulthandler.is_enabled() and sys.stderr is not None and _has_fileno():
        faulthandler.enable()  # a stray access to bytes that are not resident is a fault: show the Python line
    _log.info(
        "job %r: %d units, %d tensors, %s of parameters, of which %s stay in their files; %s of DRAM",
        name,
        len(units),
        len(storages),
        format_size(sum(s.nbytes for s in storages.values())),
        format_size(attached.adopted_file_bytes),
        format_size(session.opened.arena_bytes),
    )
    return attached


def _memory(choice: DeviceChoice | None, session: Session, daemon: EmbeddedDaemon | None) -> Memory:
    try:
        return memory_for(choice, session)
    except BaseException:
        session.close()
        if daemon is not None:
            daemon.stop()
        raise


def _has_fileno() -> bool:
    try:
        sys.stderr.fileno()
    except (OSError, ValueError, AttributeError):
        return False
    return True


def _probe(
    optimizer: torch.optim.Optimizer | None, storages: dict[int, ManagedStorage], device: torch.device
) -> dict[nn.Parameter, OptimizerForm]:
    """What the optimizer does with each managed parameter. Raises Unsupported before anything has changed."""
    if optimizer is None:
        return {}
    managed = {m.parameter for s in storages.values() for m in s.parameters}
    probe = OptimizerProbe(optimizer, device)
    return {
        p: probe.form(i, p)
        for i, g in enumerate(optimizer.param_groups)
        for p in g["params"]
        if p in managed and p.numel() > 0 and (p.requires_grad or _may_require_grad(p))
    }


def _may_require_grad(parameter: nn.Parameter) -> bool:
    """Whether it is of a dtype that optimizers compute with, so that it may be trained later on."""
    return parameter.is_complex() or (parameter.is_floating_point() and parameter.element_size() > 1)


def _note_mechanisms(job: Job) -> None:
    if (moves := job.residency.session.address_space.mechanism) is not Mechanism.MREMAP:
        job.note(NoticeKind.PAGE_MOVES, f"address space: {moves}")
    if (switch := storage_swap.self_test()) is not storage_swap.Mechanism.SWAP:
        job.note(NoticeKind.STORAGE_SWITCH, f"storage: {switch}")
    if unpinned := job.residency.memory.unpinned:
        job.note(NoticeKind.PAGEABLE_COPIES, f"copies to the device: pageable ({unpinned})")
    if not compiled.SEES_REGIONS:
        text = f"torch {torch.__version__}: a compile across units would not be noticed (its results may differ)"
        job.note(NoticeKind.COMPILE_UNSEEN, text)


def _build(
    job: Job,
    units: list[Unit],
    optimizer: torch.optim.Optimizer | None,
    forms: dict[nn.Parameter, OptimizerForm],
    deferred: bool,
    in_backward: InBackward,
) -> list[Bundle]:
    """Cut units into groups, declare all bundles, and be admitted with the floor that they imply."""
    residency, session = job.residency, job.residency.session

    itemsizes = {p: [s.dtype.itemsize for s in form.states] for p, form in forms.items()}

    def weight(storage: ManagedStorage) -> Weight:
        return weight_of(storage, itemsizes)

    for unit in units:
        build_groups(unit, job.storages, residency, weight)
    hooked = {module for unit in units for module in unit.modules}
    for unit in units:
        unit.used = list(
            dict.fromkeys([*unit.parameters, *(p for m in unit.modules for p in _parameters_used(m, unit, hooked))])
        )
        keys = [storage_swap.storage_key(p) for p in unit.used]
        groups = dict.fromkeys(job.storages[k].group for k in keys if k in job.storages)
        unit.bundles = [b for g in dict.fromkeys([*unit.groups, *groups]) if g is not None for b in g.bundles]
        for group in unit.groups:
            job.book.prepare(group)
    if optimizer is not None:
        updated = [g for u in units for g in u.groups]
        job.updater = Updater(optimizer, residency, job.book, updated, forms, in_backward)
    floor = choose_floor(units, job.book, job.updater, residency, deferred)
    if job.updater is not None:
        job.updater.deferred = floor.deferred
    if floor.missing_bytes:
        more = format_size(floor.missing_bytes)
        job.note(NoticeKind.UPDATE_BARRIER, f"update: inside step() (deferring it needs {more} more of {floor.tier})")
    residency.memory.check_floor(floor.bundles)
    residency.budget_frames = session.admit(MAIN, [bundle.spec.spec_id for bundle in floor.bundles])
    return floor.bundles


def _parameters_used(module: nn.Module, unit: Unit, hooked: set[nn.Module]) -> list[nn.Parameter]:
    """A block uses all parameters inside it; a leftover module only its own, since the modules inside it are units
    themselves.
    """
    if any(child in hooked and child not in unit.modules for child in module.modules() if child is not module):
        return list(module.parameters(recurse=False))
    return list(module.parameters())


def _hook(
    job: Job,
    units: list[Unit],
    optimizer: torch.optim.Optimizer | None,
    policies: Mapping[str, Policy],
    floor: list[Bundle],
) -> None:
    def kept(text: str) -> None:
        _tell(job, NoticeKind.ACTIVATIONS_KEPT, text)

    activations = new_activations(job.model, job.residency, floor, policies, kept, job.book.settle)
    saved = SavedTensorHooks(job.residency, job.storages, job.book.settle, activations)
    guards = GuardBook(job.residency, saved)
    hooks = UnitHooks(
        job.residency,
        saved,
        job.book,
        lambda unit: _enter(unit, guards, job.book, activations),
        lambda unit: _leave(unit, guards, activations),
        Cuts(lambda text: _tell(job, NoticeKind.COMPILED_ACROSS_UNITS, text)),
    )
    job.vertical = Vertical(
        job.model, hooks, job.storages.values(), lambda text: _tell(job, NoticeKind.ACCUMULATION_ORDER, text)
    )
    copies = PrivateCopies(default_flash_directory(os.environ))
    job.undo.append(hooks.install(job.model, units))
    if activations is not None:
        job.activations = activations.stats
    job.undo.append(recompute_units(hooks, units, policies, job.activations, kept))
    job.undo.append(ModelCheckpoints(job.residency, job.storages, copies).install(job.model))
    job.undo.append(job.book.install(job.storages.values()))
    if optimizer is not None and job.updater is not None:
        job.undo.append(job.updater.install())
        job.undo.append(OptimizerCheckpoints(job.residency, job.updater, copies).install(optimizer))
        job.updater.early.on_stop = lambda text: _tell(job, NoticeKind.UPDATE_NOT_EARLY, text)
        job.updater.on_barrier = lambda text: _tell(job, NoticeKind.UPDATE_BARRIER, text)
        job.updater.shown.on_state = guards.cover
        job.updater.shown.show_all()
        job.undo.append(job.updater.shown.unguarded)
    for storage in job.storages.values():
        assert storage.group is not None
        for managed in storage.parameters:
            guards.cover(managed.parameter, storage.group.bundles)
    job.undo.append(guards.uncover_all)


def _tell(job: Job, kind: NoticeKind, text: str) -> None:
    job.note(kind, text)
    job.report()


def _enter(unit: Unit, guards: GuardBook, book: GradBook, activations: Activations | None) -> None:
    if activations is not None:
        activations.enter(unit.name)
    guards.open(unit.used)
    if book.any_frozen:
        book.watch(unit.used)


def _leave(unit: Unit, guards: GuardBook, activations: Activations | None) -> None:
    if activations is not None:
        activations.leave()
    guards.shut(unit.used)


def _abort(job: Job) -> None:
    """Put back what was moved, and end the session; the first error is the one to report."""
    try:
        job.abandon()
    except TiermemError as error:
        _log.error("job %r: %s while undoing a failed attach", job.name, error)


atexit.register(close_all)
