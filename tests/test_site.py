"""The site as people read it: links lead somewhere, and what is typed is understood.

No command is run. Each one is given to the parser of its own command, and the settings
of a training run to what makes its configuration.
"""

import re
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import unquote

import click
import pytest
import typer
from markdown.extensions.toc import slugify
from mkdocs.commands.build import build
from mkdocs.config import load_config

from fedgs.app.cli.main import app
from fedgs.config.method_settings import settings_of
from fedgs.config.recipes import configure
from fedgs.config.tree import assigned
from fedgs.errors import UserError
from site_text import OUTSIDE, ROOT, STANDS_FOR, Page, pages, words_of

FEDGS = typer.main.get_command(app)
PAGES = pages()
SETTINGS = {spec.name for spec in settings_of()}
FLAG = re.compile(r"(?<![\w-])--[a-z][\w-]*")
SET = re.compile(r"--set[ \n]([a-z][\w.-]*=)")
CITATION = re.compile(
    r'(docs/[a-z-]+\.md)((?:, "[^"]+")+)'
)  # of a section, in the code
# With these a command may be shown without what it needs otherwise.
IN_PART = {"...", "--help", "--list"}
# Flags that a page names of programs that are not of fedgs.
OF_OTHERS = {"--build", "--detach", "--rm"}  # docker
OF_OTHERS |= {"--now"}  # systemctl
OF_OTHERS |= {"--no-deps"}  # pip
OF_OTHERS |= {"--stream", "--run-config", "--federation-config", "--node-config"}


def name_of(page: Page) -> str:
    return page.path.relative_to(ROOT).as_posix()


every_page = pytest.mark.parametrize("page", PAGES, ids=name_of)


def commands_below(command: click.Command) -> Iterator[click.Command]:
    """All commands of a command, itself included."""
    yield command
    if isinstance(command, click.Group):
        context = click.Context(command)
        for name in command.list_commands(context):
            found = command.get_command(context, name)
            assert found is not None
            yield from commands_below(found)


def flags_of(command: click.Command) -> set[str]:
    found = {"--help"}
    for parameter in command.params:
        found |= {*parameter.opts, *parameter.secondary_opts}
    return found


def command_of(words: list[str]) -> tuple[click.Command, list[str]]:
    """The command that words name, and the words that are left for it."""
    command, rest = FEDGS, list(words)
    while isinstance(command, click.Group) and rest and rest[0][0] != "-":
        name = rest.pop(0)
        if name == STANDS_FOR or ":" in name:
            break  # any command of the group, or one of a reader's own
        found = command.get_command(click.Context(command), name)
        assert found is not None, f"no command {name}"
        command = found
    return command, rest


def check_flags(words: list[str]) -> None:
    """Checks command and flags of words that may leave out what the command needs."""
    command, rest = command_of(words)
    given = {word.split("=")[0] for word in rest if FLAG.match(word)}
    assert given <= flags_of(command)


def check_whole(words: list[str]) -> None:
    """Checks that a command takes these words, and a training run its settings."""
    command, rest = command_of(words)
    assert not isinstance(command, click.Group), "no command"
    # Raises for an unknown flag, a missing argument and a value of another type.
    given = command.make_context(command.name, rest).params
    settings = assigned(given.get("set") or ())
    assert settings.keys() <= SETTINGS
    if words[0] != "train" or given["config"] is not None:
        return
    flags = {n: v for n, v in given.items() if n in SETTINGS and v is not None}
    recipe = given["recipe"]
    if recipe is None or ":" not in recipe:  # else a method of a reader's own
        configure(recipe, None, flags | settings)


def check_links(linked: dict[Path, Page]) -> None:
    """Checks that links of pages, by their paths, lead to files and to anchors."""
    dead = []
    for path, page in linked.items():
        for target in page.targets:
            if target.startswith(OUTSIDE):
                continue
            place, _, anchor = unquote(target).partition("#")
            there = (path.parent / place).resolve() if place else path
            anchors = linked[there].anchors if there in linked else {""}
            if not (there in linked or there.exists()) or anchor not in {*anchors, ""}:
                dead.append(f"{path.name}: {target}")
    assert not dead


def test_every_link_between_sources_is_there():
    """As a reader of the repository follows them."""
    check_links({page.path: page for page in PAGES})


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of mkdocs' plugins
def test_every_link_of_the_built_site_is_there(tmp_path):
    """As a reader of the site follows them, with pictures and notebooks."""
    # The reference, which takes most of the time, has its headings only.
    plugins = ["search", {"mkdocs-jupyter": {"execute": False}}]
    source = str(ROOT / "mkdocs.yml")
    build(load_config(source, site_dir=str(tmp_path), strict=True, plugins=plugins))
    built = {path: Page(path) for path in sorted(tmp_path.rglob("*.html"))}
    for path, page in built.items():
        page.feed(path.read_text())
    del built[tmp_path / "404.html"]  # its links are of the root of a host
    assert len(built) > 20
    check_links(built)


def test_help_explains_every_argument_and_every_flag():
    for command in commands_below(FEDGS):
        for parameter in command.params:
            assert getattr(parameter, "help", None), (command.name, parameter.name)


def test_help_names_only_flags_that_exist():
    known = {flag for command in commands_below(FEDGS) for flag in flags_of(command)}
    for command in commands_below(FEDGS):
        texts = [getattr(parameter, "help", None) for parameter in command.params]
        named = FLAG.findall(" ".join(text or "" for text in [command.help, *texts]))
        assert {*named} <= known | OF_OTHERS, command.name


def test_every_section_that_the_code_cites_is_there():
    anchors = {name_of(page): page.anchors for page in PAGES}
    cited = 0
    for folder in ("fedgs", "clients", "server", "experiments", "tests"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            words = re.sub(r"\s+(# )?", " ", path.read_text())
            for page, titles in CITATION.findall(words):
                for title in re.findall(r'"(.+?)"', titles):
                    assert slugify(title, "-") in anchors[page], (path, page, title)
                    cited += 1
    assert cited > 50


@every_page
def test_every_command_is_understood(page):
    problems = []
    lines = [(words, True) for words in page.commands("fedgs")]
    # A sentence may name a command without its arguments.
    lines += [(words_of(code, "fedgs"), False) for code in page.inline]
    for words, is_whole in lines:
        try:
            if is_whole and not IN_PART & {*words}:
                check_whole(words)
            elif words:
                check_flags(words)
        except (click.UsageError, UserError, AssertionError) as error:
            problems.append(f"fedgs {' '.join(words)}: {error}")
    assert not problems


@every_page
def test_every_flag_and_setting_that_is_named_exists(page):
    known = {flag for command in commands_below(FEDGS) for flag in flags_of(command)}
    words = "\n".join(page.text + page.inline + page.blocks)
    assert {*FLAG.findall(words)} <= known | OF_OTHERS | flags_of_experiments(page)
    assert assigned([f"{key}1" for key in SET.findall(words)]).keys() <= SETTINGS


def flags_of_experiments(page: Page) -> set[str]:
    """Flags of `python -m MODULE`, which are the parameters of its function."""
    found = set()
    for words in page.commands("python"):
        if words[0] == "-m" and words[1].startswith("experiments."):
            path = ROOT / f"{words[1].replace('.', '/')}.py"
            names = re.findall(r"^    (\w+): ", path.read_text(), re.MULTILINE)
            found |= {f"--{name.replace('_', '-')}" for name in names}
    return found


@every_page
def test_every_setting_for_flower_exists(page):
    for words in page.commands("flwr"):
        if "--run-config" in words:
            given = words[words.index("--run-config") + 1]
            keys = re.findall(r"([a-z][\w-]*)=", given)
            names = {key.replace("-", "_") for key in keys}
            assert names <= SETTINGS | {"recipe"}


def test_commands_are_found_and_wrong_ones_refused():
    lines = [line for page in PAGES for line in page.commands("fedgs")]
    assert {"train", "deploy", "privacy", "debug"} <= {line[0] for line in lines}
    wrong_lines = [
        ["nothing"],
        ["train", "--nothing", "1"],
        ["train", "--set", "nothing=1"],
        ["audit"],  # of no run
        ["train", "--num-rounds", "60"],  # the default recipe has no such rounds
    ]
    for wrong in wrong_lines:
        with pytest.raises((click.UsageError, UserError, AssertionError)):
            check_whole(wrong)
