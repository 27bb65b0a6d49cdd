"""What a step would move and how long it would take: simulation and bounds. Pure."""
