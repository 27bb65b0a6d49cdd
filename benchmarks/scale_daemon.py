"""The daemon of `benchmarks.scale`: tiermemd over a store that moves no bytes. Nothing else about it is different."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from tiermem.config import LoadedConfig, load_config
from tiermem.store import TensorStore
from tiermem.testing.null_store import null_store
from tiermem_daemon.app import run
from tiermem_daemon.options import ServeOptions


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--socket", type=Path, required=True)
    parser.add_argument("--dram", type=int, required=True, help="bytes, of addresses only")
    parser.add_argument("--cap", type=int, required=True, help="bytes of the largest bundle")
    parser.add_argument("--ready-fd", type=int, required=True)
    parser.add_argument("--owner-pid", type=int, required=True)
    args = parser.parse_args()
    loaded = load_config({"daemon.socket": args.socket, "daemon.log_level": "warning"}, os.environ, None)

    def open_store(loaded: LoadedConfig, options: ServeOptions) -> TensorStore:
        return null_store(args.dram, args.cap, loaded.config.mover.workers_per_directory)

    return run(loaded, ServeOptions(args.owner_pid, args.ready_fd), open_store)


if __name__ == "__main__":
    sys.exit(main())
