"""Starting Flower's server: for a deployment, a simulation, or in this process."""
