"""A CUDA graph that is being captured: refused before anything is leased. What says that one is, is passed in."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import tiermem
from tests.integration.scripts import BlockModel, batches, default_loss, differences
from tests.integration.served import Served, served_in, train, weights
from tiermem_client.compiled import stream_is_capturing
from tiermem_client.saved_tensors import SavedTensorHooks
from tiermem_client.unit_hooks import UnitHooks
from tiermem_client.units import discover_units


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    with served_in(tmp_path_factory.mktemp("daemon")) as running:
        yield running


def test_without_cuda_nothing_is_captured() -> None:
    assert not torch.cuda.is_initialized()
    assert not stream_is_capturing()


def test_a_forward_is_refused_and_the_job_goes_on(served: Served) -> None:
    model, plain = BlockModel(blocks=2), BlockModel(blocks=2)
    plain.load_state_dict(model.state_dict())
    expected = train(plain, torch.optim.SGD(plain.parameters(), lr=0.1), batches(1))
    units = discover_units(model)
    with served.with_options(spills=False) as other:
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job: tiermem.Job = other.attach(model, optimizer)  # type: ignore[assignment]
        saved = SavedTensorHooks(job.residency, job.storages, job.book.settle)
        undo = UnitHooks(job.residency, saved, job.book, capturing=lambda: True).install(model, units)
        with pytest.raises(tiermem.errors.Unsupported, match=r"captured while unit 'embed' runs.*no-cudagraphs"):
            default_loss(model, next(batches(1)))
        undo()
        assert job.stats().leases == 0 or job.residency.keeps_idle
        assert differences(train(model, optimizer, batches(1)), expected) == []
        job.detach()
    assert differences(weights(model), weights(plain)) == []


def test_a_step_is_refused_and_may_be_repeated(served: Served) -> None:
    model, plain = BlockModel(blocks=2), BlockModel(blocks=2)
    plain.load_state_dict(model.state_dict())
    optimizers = [torch.optim.AdamW(m.parameters()) for m in (plain, model)]
    with served.with_options(spills=False) as other:
        job: tiermem.Job = other.attach(model, optimizers[1])  # type: ignore[assignment]
        for one in (plain, model):
            default_loss(one, next(batches(1))).backward()
        assert job.updater is not None
        asked, job.updater.capturing = job.updater.capturing, lambda: True
        with pytest.raises(tiermem.errors.Unsupported, match=r"captured while optimizer\.step\(\) runs"):
            optimizers[1].step()
        job.updater.capturing = asked
        for optimizer in optimizers:
            optimizer.step()
        job.detach()
    assert differences(weights(model), weights(plain)) == []
