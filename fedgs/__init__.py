"""fedgs: federated, differentially private generative modelling (GS-WGAN).

    run = fedgs.train(images, labels, clients, target_epsilon=10.0)
    run.sample(1000), run.epsilon(), fedgs.load(run.path)
    fedgs.forecast(...), fedgs.evaluate(run), fedgs.report(run), fedgs.debug(...)

The public names are imported when first used, so that accounting never loads torch.
"""

import importlib
from typing import TYPE_CHECKING

if TYPE_CHECKING:  # what type checkers and editors see of `_NAMES`
    from fedgs.app.python import debug as debug
    from fedgs.app.python import evaluate as evaluate
    from fedgs.app.python import forecast as forecast
    from fedgs.app.python import report as report
    from fedgs.config.run_config import RunConfig as RunConfig
    from fedgs.errors import UserError as UserError
    from fedgs.library import TrainingRun as TrainingRun
    from fedgs.library import load as load
    from fedgs.library import train as train
    from fedgs.privacy.accountant import Plan as Plan
    from fedgs.privacy.accountant import Statement as Statement
    from fedgs.privacy.accountant import statements as statements
    from fedgs.privacy.budget import calibrate_noise as calibrate_noise
    from fedgs.privacy.gaussian import epsilon_from_mu as epsilon_from_mu
    from fedgs.runs.sample_files import Samples as Samples

_NAMES = {
    "app.python": ("evaluate", "report", "forecast", "debug"),
    "library": ("train", "load", "TrainingRun"),
    "runs.sample_files": ("Samples",),
    "config.run_config": ("RunConfig",),
    "errors": ("UserError",),
    "privacy.accountant": ("Plan", "Statement", "statements"),
    "privacy.budget": ("calibrate_noise",),
    "privacy.gaussian": ("epsilon_from_mu",),
}
_MODULES = {name: module for module, names in _NAMES.items() for name in names}
__version__ = "0.1.0"


def __dir__() -> list[str]:
    """Lists the public names."""
    return sorted(_MODULES)


if not TYPE_CHECKING:  # else every unknown name would have the type `Any`

    def __getattr__(name: str) -> object:
        """Imports a public name on first use."""
        if name not in _MODULES:
            raise AttributeError(f"module 'fedgs' has no attribute {name!r}")
        return getattr(importlib.import_module(f"fedgs.{_MODULES[name]}"), name)
