"""Starting Flower: simulation, deployment, certificates."""
