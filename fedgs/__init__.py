"""fedgs: federated, differentially private generative modelling (GS-WGAN).

The public names are imported when first used, so that accounting never loads torch.
"""

import importlib
from typing import Any

_MODULES = {
    "RunConfig": "config",
    "UserError": "config",
    "Plan": "accounting",
    "Statement": "accounting",
    "statements": "accounting",
    "statements_from_ledger": "accounting",
    "calibrate_noise": "budget",
    "epsilon_from_mu": "gaussian",
    "Event": "ledger",
    "Ledger": "ledger",
    "FederatedImages": "data",
    "load_data": "data",
    "build_generator": "models",
    "build_discriminator": "models",
    "Discriminators": "discriminators",
    "PerSampleGradients": "sanitizer",
    "clip": "sanitizer",
    "sanitize": "sanitizer",
    "RunFolder": "run_folder",
    "load_generator": "sample",
}
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(_MODULES)


def __getattr__(name: str) -> Any:
    """Imports a public name on first use."""
    if name not in _MODULES:
        raise AttributeError(f"module 'fedgs' has no attribute {name!r}")
    return getattr(importlib.import_module(f"fedgs.{_MODULES[name]}"), name)
