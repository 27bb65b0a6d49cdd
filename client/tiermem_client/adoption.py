"""Bytes come into the store at attach: parameters, and gradients and optimizer state that exist."""

from __future__ import annotations

import torch

from tiermem.bundle import Mode
from tiermem.layout import arena_layout
from tiermem.notices import NoticeKind
from tiermem_client.file_backed import FileSources
from tiermem_client.grad_handles import GradHandle
from tiermem_client.job import Job
from tiermem_client.storage_swap import rehome
from tiermem_client.units import Group, ManagedStorage, Unit


def find_files(
    storages: dict[int, ManagedStorage], optimizer: torch.optim.Optimizer | None, sources: FileSources
) -> None:
    """Note for each frozen storage the file that it seems to be in."""
    updated = {p for g in optimizer.param_groups for p in g["params"]} if optimizer is not None else set()
    for storage in storages.values():
        if not any(m.parameter.requires_grad or m.parameter in updated for m in storage.parameters):
            storage.source = sources.find(storage.origin.data_ptr(), storage.nbytes)


def _adopt_from_file(job: Job, group: Group, sources: FileSources) -> bool:
    """Leave a group's bytes in the file that they were loaded from; False if they are not there after all."""
    file = group.storages[0].file
    if file is None:
        return False
    opened, adoptions = job.residency.session.opened, []
    chunk_bytes = arena_layout(opened.arena_bytes).chunk_bytes
    for bundle in group.bundles:
        first = bundle.address  # of the bundle's bytes; a tile's tensor is a part of its storage
        parts = [
            (s, first + t.offset_bytes - s.address) for s, t in zip(group.storages, bundle.spec.tensors, strict=True)
        ]
        addresses = [s.origin.data_ptr() + at for s, at in parts]
        offsets = [s.source.offset + at for s, at in parts if s.source is not None]
        adoption = sources.adoption(bundle.spec, addresses, offsets, file, chunk_bytes)
        if adoption is None:
            names = ", ".join(s.name for s in group.storages[:3])
            job.note(
                NoticeKind.FILE_CHANGED,
                f"frozen weights of {group.unit!r} ({names}, ...): copied (changed since they were loaded)",
            )
            return False
        adoptions.append(adoption)
    job.residency.adopt(group.bundles, adoptions)
    for storage in group.storages:
        rehome(storage.storage, storage.address, storage.nbytes, tensors=storage.tensors, copy=False)
        storage.host = None
        job.adopted.append(storage)
        job.adopted_file_bytes += storage.nbytes
    return True


def adopt(job: Job, units: list[Unit], sources: FileSources) -> None:
    """Bring bytes into the store: parameters, gradients that exist, optimizer state that exists."""
    residency = job.residency
    for refusal in sources.refusals:
        job.note(NoticeKind.FILE_REFUSED, refusal)
    for unit in units:
        for group in unit.groups:
            if _adopt_from_file(job, group, sources):
                continue
            residency.acquire(group.bundles, Mode.CREATE)
            for storage in group.storages:
                place = storage.address, storage.nbytes
                rehome(storage.storage, *place, tensors=storage.tensors, source=storage.host)
                storage.host = None
                job.adopted.append(storage)
            for bundle in group.bundles:
                bundle.written = True
            residency.release(group.bundles)
    for storage in job.storages.values():
        for managed in storage.parameters:
            grad = managed.parameter.grad
            if grad is not None and type(grad) is not GradHandle:
                managed.parameter.grad = job.book.put(managed, grad)
    job.book.settle()
    if job.updater is not None:
        job.updater.shown.adopt()
