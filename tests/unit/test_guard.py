"""Which tensors a guard takes for managed ones."""

from __future__ import annotations

from typing import Any

import torch

from tiermem_client.guard import GuardBook, is_guarded, shut


def test_a_storage_that_died_is_not_mistaken_for_the_next_at_its_address() -> None:
    """The job was closed, or made this tensor anew; its place in the table is by the address of a storage."""
    nobody: Any = None  # must not be asked
    books = []
    for _ in range(100):
        managed = torch.zeros(4)
        books.append(GuardBook(nobody, nobody))
        books[-1].cover(managed, [])
        del managed
    guarded = torch.zeros(4)
    shut(guarded)
    copies = [guarded.clone() for _ in range(1000)]
    assert not [copy for copy in copies if is_guarded(copy)]


def test_what_shares_the_storage_is_recognised_until_the_job_ends() -> None:
    nobody: Any = None
    book, managed = GuardBook(nobody, nobody), torch.zeros(4)
    book.cover(managed, [])
    alias = managed.detach()
    GuardBook(nobody, nobody)
    assert is_guarded(managed) and is_guarded(alias) and is_guarded(managed.detach())
    book.uncover_all()
    assert not is_guarded(managed.detach())
