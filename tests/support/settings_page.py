"""What mkdocs does not do by itself when the docs are built: a hook of mkdocs.yml.

It makes the page of all settings, and has notebooks link to pages of the site.
"""

import re
from typing import Any

from fedgs.config.method_settings import KnownSettings, settings_of
from fedgs.config.recipes import recipe
from fedgs.config.run_config import RunConfig
from fedgs.config.settings import GROUPS
from tiny import run_config

PAGE = "settings.md"
HEAD = """\
# All settings

This page is for somebody who looks up a setting. `fedgs settings` prints the same.

Every setting of a run is given by `--set` (`--set batch_size=16`), as a key of a TOML
file (`--config`, `batch_size = 16`) or as a keyword of `fedgs.train`; those that people
use most are also flags of `fedgs train`. A flag overrides the file, and the file the
recipe. The settings of the groups GS-WGAN, Training and Model belong to the methods
that read them.

The recipe of all commands is `feature-means` unless another one is named. It also takes
size and channels of the images, low frequencies by the number of clients, and holds out
a tenth of every owner's images. `gs-wgan` is GS-WGAN with every client in every round.
Where a recipe says nothing, the column of the paper's defaults holds.
"""
COLUMNS = "| setting | what it is | paper | `feature-means` | `gs-wgan` |\n"


def on_files(files: Any, config: Any) -> None:
    """Adds the page to those of the site."""
    from mkdocs.structure.files import File

    files.append(File.generated(config, PAGE, content=page()))


def on_page_content(html: str, page: Any, config: Any, files: Any) -> str:
    """Returns a page with links that lead to pages; a notebook's lead to sources."""
    if not page.file.src_uri.endswith(".ipynb"):
        return html
    return re.sub(r'(href="[^":]+)\.(md|ipynb)(#[^"]*)?"', r'\1.html\3"', html)


def page() -> str:
    """Returns the page, in Markdown."""
    configs = [run_config(), recipe("feature-means"), recipe("gs-wgan")]
    parts = [HEAD]
    for group in GROUPS:
        parts.append(f"\n## {group}\n\n{COLUMNS}|---|---|---|---|---|\n")
        for spec in settings_of(group):
            default, *others = (_value(config, spec.name) for config in configs)
            choices = ", ".join(f"`{name}`" for name in spec.metadata["choices"])
            text = spec.metadata["help"] + (f" One of {choices}." if choices else "")
            for special, escaped in (("|", "\\|"), ("*", "\\*"), ("<", "&lt;")):
                text = text.replace(special, escaped)
            words = ["" if other == default else _word(other) for other in others]
            cells = [f"`{spec.name}`", text, _word(default), *words]
            parts.append(f"| {' | '.join(cells)} |\n")
    return "".join(parts)


def _value(config: RunConfig, name: str) -> object:
    """Returns a setting; its own default where no phase has it."""
    if name == "phases":
        return config.to_flat()["phases"]
    return getattr(config, name, getattr(KnownSettings, name))


def _word(value: object) -> str:
    return "unset" if value in (None, "") else f"`{value}`"
