"""The generator and many discriminators: models, losses, training, warm start."""
