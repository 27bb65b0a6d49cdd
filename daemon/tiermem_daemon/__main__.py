"""`python -m tiermem_daemon` is `tiermem`."""

from tiermem_daemon.cli import main

main()
