"""Frozen weights that are read from the file they were loaded from: bit for bit, never written, and what happens when
the file or the tensor is not what it was.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

import tiermem
from tests.integration.daemon_process import REPOSITORY, Daemon, environment, serve, within
from tests.integration.scripts import BlockModel, batches, default_loss
from tiermem.errors import DataLoss

WIDTH, BLOCKS = 96, 8
DRAM = "1MiB"
Optimizer = torch.optim.Optimizer


@pytest.fixture(scope="module")
def daemon(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Daemon]:
    with serve(tmp_path_factory.mktemp("frozen")) as running:
        yield running


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    torch.manual_seed(0)
    path = tmp_path / "model.safetensors"
    safetensors.torch.save_file(BlockModel(WIDTH, BLOCKS).state_dict(), path)
    return path


def load(path: Path) -> BlockModel:
    """The base frozen and mapped, as transformers leaves it; the head is to be trained."""
    model = BlockModel(WIDTH, BLOCKS)
    model.load_state_dict(safetensors.torch.load_file(path), assign=True)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(name.startswith("head."))
    return model


def optimizer_of(model: BlockModel) -> Optimizer:
    return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=1e-2)


def train(model: BlockModel, optimizer: Optimizer, data: Iterator[torch.Tensor], steps: int = 3) -> list[float]:
    losses = []
    for _ in range(steps):
        optimizer.zero_grad()
        loss = default_loss(model, next(data))
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def weights(model: torch.nn.Module) -> dict[str, bytes]:
    return {name: tensor.detach().clone().numpy().tobytes() for name, tensor in model.state_dict().items()}


def frozen_bytes(model: BlockModel) -> int:
    return sum(p.nbytes for p in model.parameters() if not p.requires_grad)


def write_all(model: torch.nn.Module) -> None:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.0)


def mapped(path: Path) -> bool:
    return str(path) in Path("/proc/self/maps").read_text()


def unchanged(path: Path) -> Callable[[], None]:
    before = hashlib.sha256(path.read_bytes()).hexdigest()

    def check() -> None:
        assert hashlib.sha256(path.read_bytes()).hexdigest() == before, "the checkpoint was written to"

    return check


def test_frozen_weights_are_read_from_their_file_and_never_written(daemon: Daemon, checkpoint: Path) -> None:
    check_file, plain = unchanged(checkpoint), load(checkpoint)
    expected = train(plain, optimizer_of(plain), batches(1))
    model = load(checkpoint)
    optimizer = optimizer_of(model)
    addresses = {name: p.data_ptr() for name, p in model.named_parameters()}
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
    assert job.stats().adopted_file_bytes == frozen_bytes(model) > 2 << 20
    assert job.stats().fallbacks == ()
    assert addresses["blocks.0.up.weight"] != model.get_parameter("blocks.0.up.weight").data_ptr()
    created = job.stats().creates
    assert train(model, optimizer, batches(1)) == expected
    assert weights(model) == weights(plain), "state_dict"
    stats = job.stats()
    head = model.head.weight.nbytes + model.head.bias.nbytes
    frame = 4096  # of an arena of 1 MiB
    trained = 4 * (head + frame)  # weights, gradients, two moments
    assert stats.links["dram_to_flash"].bytes <= trained * (3 + 1), (
        "more than the trained part, once a step and at first"
    )
    assert stats.links["dram_to_flash"].bytes < stats.adopted_file_bytes / 3
    assert stats.links["flash_to_dram"].bytes > stats.adopted_file_bytes, "it never left DRAM: nothing is shown"
    assert stats.tiers["flash"].used_bytes <= 2 * trained
    assert created <= 4, "frozen bundles were created, not adopted"
    job.detach()
    assert weights(model) == weights(plain)
    check_file()
    within(2, daemon.left_of_jobs)
    assert not [name for name in daemon.files() if "safetensors" in name], "the daemon keeps the file open"


def test_detach_brings_real_memory_back(daemon: Daemon, checkpoint: Path) -> None:
    model = load(checkpoint)
    assert mapped(checkpoint)
    job = tiermem.attach(model, optimizer_of(model), dram=DRAM, endpoint=daemon.endpoint)
    assert not mapped(checkpoint), "the mapping is kept although nobody needs it"
    expected = weights(load(checkpoint))
    job.detach()
    assert not mapped(checkpoint)
    checkpoint.unlink()
    assert weights(model) == expected
    with torch.no_grad():
        model.embed.weight.add_(1)
    assert model.embed.weight.untyped_storage().resizable()


@pytest.mark.parametrize("everything_fits", [False, True])
def test_unfreezing_later_is_exact(daemon: Daemon, checkpoint: Path, everything_fits: bool) -> None:
    """The optimizer gets the parameters of two blocks and the embedding after two steps."""

    def script(model: BlockModel, optimizer: Optimizer) -> list[float]:
        data = batches(1)
        losses = train(model, optimizer, data, 2)
        late = [*model.blocks[1].parameters(), *model.blocks[6].parameters(), model.embed.weight]
        for parameter in late:
            parameter.requires_grad_()
        optimizer.add_param_group({"params": late})
        return losses + train(model, optimizer, data, 3)

    plain, model = load(checkpoint), load(checkpoint)
    expected = script(plain, optimizer_of(plain))
    optimizer = optimizer_of(model)
    check_file = unchanged(checkpoint)
    with tiermem.attach(model, optimizer, dram="8MiB" if everything_fits else DRAM, endpoint=daemon.endpoint) as job:
        assert job.stats().adopted_file_bytes == frozen_bytes(model)
        assert script(model, optimizer) == expected
        assert weights(model) == weights(plain)
    assert weights(model) == weights(plain)
    check_file()


def test_a_write_to_a_frozen_weight_stays_in_the_store(daemon: Daemon, checkpoint: Path) -> None:
    check_file = unchanged(checkpoint)
    plain, model = load(checkpoint), load(checkpoint)
    with tiermem.attach(model, optimizer_of(model), dram=DRAM, endpoint=daemon.endpoint):
        for one in (plain, model):
            with torch.no_grad():
                one.get_parameter("blocks.3.down.weight").mul_(2)
        assert train(model, optimizer_of(model), batches(1)) == train(plain, optimizer_of(plain), batches(1))
        assert weights(model) == weights(plain)
    check_file()


def test_a_weight_that_was_changed_after_loading_is_copied(daemon: Daemon, checkpoint: Path) -> None:
    plain, model = load(checkpoint), load(checkpoint)
    for one in (plain, model):
        with torch.no_grad():
            one.get_parameter("blocks.3.norm.weight")[5] = 3.0  # in the private mapping: the file does not have it
    with tiermem.attach(model, optimizer_of(model), dram=DRAM, endpoint=daemon.endpoint) as job:
        stats = job.stats()
        assert 0 < stats.adopted_file_bytes < frozen_bytes(model)
        assert any("blocks.3" in text and "copied" in text for text in stats.fallbacks)
        assert weights(model) == weights(plain)
        assert train(model, optimizer_of(model), batches(1)) == train(plain, optimizer_of(plain), batches(1))


def test_only_what_is_frozen_and_in_no_optimizer_is_adopted(daemon: Daemon, checkpoint: Path) -> None:
    model = load(checkpoint)
    model.get_parameter("blocks.0.up.weight").requires_grad_()
    optimizer = torch.optim.SGD([model.head.weight, model.get_parameter("blocks.1.up.weight")], lr=0.1)
    with tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint) as job:
        assert job.stats().adopted_file_bytes == frozen_bytes(model) - model.get_parameter("blocks.1.up.weight").nbytes


@pytest.mark.parametrize("change", ["overwritten", "cut", "removed", "replaced"])
def test_a_file_that_changes_is_data_loss_and_never_a_wrong_number(
    daemon: Daemon, checkpoint: Path, tmp_path: Path, change: str
) -> None:
    """A name is not the file: removed or replaced, the file that was loaded is still there for who has it open."""
    plain = load(checkpoint)
    expected = train(plain, optimizer_of(plain), batches(1))
    reference = weights(plain)
    del plain  # its mapping would be cut as well
    model = load(checkpoint)
    optimizer = optimizer_of(model)
    job = tiermem.attach(model, optimizer, dram=DRAM, endpoint=daemon.endpoint)
    size = checkpoint.stat().st_size
    match change:
        case "overwritten":
            with checkpoint.open("r+b") as file:
                for at in range(size // 10, size, 4096):
                    file.seek(at)
                    file.write(b"\xff")
        case "cut":
            os.truncate(checkpoint, size // 4)
        case "removed":
            checkpoint.unlink()
        case _:
            (tmp_path / "other").write_bytes(bytes(size))
            (tmp_path / "other").rename(checkpoint)
    if change in ("removed", "replaced"):
        assert train(model, optimizer, batches(1)) == expected
        job.detach()
        assert weights(model) == reference
        return
    with pytest.raises(DataLoss, match=r"model\.safetensors"):
        train(model, optimizer, batches(1))
    job.close()
    within(2, daemon.left_of_jobs)


def test_it_works_where_the_flash_quota_holds_only_what_is_trained(daemon: Daemon, checkpoint: Path) -> None:
    """The frozen part is larger than the quota; a first write to it beyond that is refused, and nothing is lost."""
    model, plain = load(checkpoint), load(checkpoint)
    optimizer, quota = optimizer_of(model), 512 << 10
    assert frozen_bytes(model) > 4 * quota
    job = tiermem.attach(model, optimizer, dram=DRAM, flash=quota, endpoint=daemon.endpoint)
    assert train(model, optimizer, batches(1)) == train(plain, optimizer_of(plain), batches(1))
    with pytest.raises(tiermem.errors.TierFull, match="raise the flash size"):
        write_all(model)
    assert weights(model) == weights(plain)
    job.detach()


TRAINER = """
    import json, sys
    import torch, transformers
    import tiermem
    folder, flash = sys.argv[1:]
    torch.set_num_threads(1)

    def run(attached):
        torch.manual_seed(0)
        model = transformers.AutoModelForCausalLM.from_pretrained(folder)
        for name, parameter in model.named_parameters():
            parameter.requires_grad_("norm" in name)
        trained = [p for p in model.parameters() if p.requires_grad]
        optimizer = torch.optim.AdamW(trained, lr=1e-2)
        job = tiermem.attach(model, optimizer, dram="2MiB", flash=flash, endpoint="embedded") if attached else None
        losses = []
        for step in range(3):
            tokens = torch.arange(16).view(1, 16) + step
            loss = model(input_ids=tokens, labels=tokens).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        seen = {"losses": losses, "frozen": sum(p.nbytes for p in model.parameters() if not p.requires_grad)}
        if job is not None:
            stats = job.stats()
            seen |= {"adopted": stats.adopted_file_bytes, "fallbacks": stats.fallbacks,
                     "links": {name: link.bytes for name, link in stats.links.items()}}
            job.detach()
        seen["sum"] = [float(t.double().sum()) for t in model.state_dict().values()]
        return seen

    print(json.dumps([run(False), run(True)]))
"""

SAVER = """
    import sys, transformers
    shape = dict(vocab_size=64, hidden_size=128, intermediate_size=512, num_hidden_layers=6, num_attention_heads=4)
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(num_key_value_heads=4, **shape))
    model.save_pretrained(sys.argv[1], max_shard_size="3MB")
"""


def python(code: str, *arguments: str) -> Any:
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(code), *arguments],
        cwd=REPOSITORY, env=environment(), capture_output=True, text=True, check=False, timeout=110,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout


def test_from_pretrained_in_several_files(tmp_path: Path) -> None:
    """transformers' own loader, a sharded checkpoint, the embedded daemon."""
    folder = tmp_path / "model"
    python(SAVER, str(folder))
    assert len(list(folder.glob("*.safetensors"))) > 1
    plain, ours = json.loads(python(TRAINER, str(folder), str(tmp_path / "flash")))
    assert (ours["losses"], ours["sum"]) == (plain["losses"], plain["sum"])
    assert ours["adopted"] == ours["frozen"] > 4 << 20
    assert ours["fallbacks"] == []
    assert ours["links"]["flash_to_dram"] > ours["adopted"]
    assert ours["links"]["dram_to_flash"] < ours["adopted"] / 10
