"""fedgs: federated, differentially private generative modelling (GS-WGAN).

The public names are imported when first used, so that accounting never loads torch.
"""

import importlib
from typing import Any

_MODULES = {
    "RunConfig": "config.run_config",
    "UserError": "config.run_config",
    "Plan": "privacy.accounting",
    "Statement": "privacy.accounting",
    "statements": "privacy.accounting",
    "statements_from_ledger": "privacy.accounting",
    "calibrate_noise": "privacy.budget",
    "epsilon_from_mu": "privacy.gaussian",
    "Event": "privacy.ledger",
    "Ledger": "privacy.ledger",
    "FederatedImages": "data.federated",
    "load_data": "data.load",
    "build_generator": "gan.models",
    "build_discriminator": "gan.models",
    "Discriminators": "gan.discriminators",
    "PerSampleGradients": "mechanism.sanitizer",
    "clip": "mechanism.sanitizer",
    "sanitize": "mechanism.sanitizer",
    "RunFolder": "runs.run_folder",
    "load_generator": "runs.sample",
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
