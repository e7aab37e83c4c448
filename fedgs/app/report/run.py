"""What the report knows of one run: read from its folder, public files only.

`private/`, `flower.log` and the pictures of `fedgs evaluate` (they show real images)
are never opened, and of `audit/` only what attack A found, which reads no image.
"""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from PIL import Image

from fedgs.config.run_config import ResolvedConfig
from fedgs.diagnosis.conclusion import DIAGNOSIS, FORMAT, PICTURE
from fedgs.errors import UserError, wrap_error
from fedgs.files import read_bytes, read_json, read_json_lines
from fedgs.privacy.accountant import Statement
from fedgs.privacy.ledger import Event
from fedgs.privacy_label import privacy_label
from fedgs.runs import epsilons
from fedgs.runs.epsilons import spread
from fedgs.runs.other_runs import OtherRun, open_other
from fedgs.runs.run_folder import RunFolder, versions_of
from fedgs.runs.sample import check_trains_generator

MOST_GRIDS = 5
GRID_PADDING = 2  # pixels around each image, of fedgs.runs.sample_files.save_images


@dataclass(frozen=True)
class Grid:
    """A picture of generated images, as the run wrote it.

    Attributes:
        round: after which it was drawn.
        png: the file's content.
        width, height: in pixels.
    """

    round: int
    png: bytes
    width: int
    height: int


@dataclass(frozen=True)
class DiagnosisFacts:
    """What a run of group means has found; see `fedgs.diagnosis.conclusion`.

    Attributes:
        run: the folder, for errors.
        content: what diagnosis.json holds. Its format is right; the rest may be
            anything.
        picture: content of diagnosis.png.
    """

    run: Path
    content: Mapping[str, Any]
    picture: bytes


@dataclass(frozen=True)
class RunFacts:
    """One run, as its folder records it.

    Attributes:
        name: the name of the folder, without the path.
        config: the run's configuration.
        events: its ledger's, in order.
        metrics: lines of metrics.jsonl.
        statements: what the run has released so far.
        versions: content of versions.json.
        evaluation: results of `fedgs evaluate`, later lines over earlier ones.
        grids: first to last, at least one, at most `MOST_GRIDS`.
        is_finished: whether the generator is written.
        label: see `fedgs.privacy_label`.
        baseline: the run as one of `fedgs baseline`, which has no events here; None
            of `fedgs train`.
        diagnosis: None of a run that has compared no groups.
    """

    name: str
    config: ResolvedConfig
    events: Sequence[Event]
    metrics: Sequence[dict[str, Any]]
    statements: Sequence[Statement]
    versions: dict[str, Any]
    evaluation: dict[str, Any]
    grids: Sequence[Grid]
    is_finished: bool
    label: Mapping[str, Any]
    baseline: OtherRun | None = None
    diagnosis: DiagnosisFacts | None = None

    @property
    def round(self) -> int:
        """The last finished round."""
        if self.metrics:
            return int(self.metrics[-1]["round"])
        return 0

    @property
    def unit_of_time(self) -> str:
        """What the run counts: round or step."""
        if self.baseline is None:
            return "round"
        return "step"

    @property
    def repeats(self) -> int:
        """Attempts beyond the first of a round; each cost privacy again."""
        return len(self.events) - len({event.round for event in self.events})

    @property
    def headline(self) -> Statement:
        """The statement that the run was made for: its own adversary and relation."""
        # A baseline states its own guarantee first, and its configuration's adversary
        # and relation mean nothing for it.
        if self.baseline is not None:
            return self.statements[0]
        return epsilons.ranked(self.config, self.statements)[0]


def read_run(path: Path) -> RunFacts:
    """Reads what the report shows of a run folder.

    Privacy: post-processing of DP output, or public; reads nothing private.

    Raises:
        UserError: no run folder, a broken file, no sample grid yet, or the run of a
            selection, which has none.
    """
    folder = RunFolder.open(path)
    check_trains_generator(folder)
    # A baseline has no ledger of rounds: it accounts for its steps itself.
    if folder.is_baseline:
        baseline = open_other(folder.path)
        events: Sequence[Event] = ()
        statements = baseline.guarantees()
    else:
        baseline = None
        events = folder.read_ledger().events
        statements = epsilons.of_run(path)
    return RunFacts(
        name=folder.path.name,
        config=folder.config,
        events=events,
        metrics=folder.metrics(),
        statements=statements,
        versions=versions_of(folder.path),
        evaluation=_evaluation(folder.path),
        grids=_grids(folder.path),
        is_finished=folder.is_finished,
        label=privacy_label(folder.path),
        baseline=baseline,
        diagnosis=_diagnosis(folder.path),
    )


def _diagnosis(run: Path) -> DiagnosisFacts | None:
    """Returns the diagnosis that a run folder may hold.

    Raises:
        UserError: it cannot be read, or is of another format.
    """
    path = run / DIAGNOSIS
    if not path.exists():
        return None
    content = read_json(path)
    if content.get("format") != FORMAT:
        raise UserError(
            f"{path}: it is no diagnosis of this fedgs; `fedgs debug --output {run}` "
            "writes it again"
        )
    png, _ = _png(run / PICTURE)
    return DiagnosisFacts(run, content, png)


def _evaluation(run: Path) -> dict[str, Any]:
    """Returns the last evaluation, filled up from earlier ones of the same kind."""
    lines = read_json_lines(run / "evaluations.jsonl")
    merged: dict[str, Any] = {}
    # Metrics may be computed one by one. They stand in one column only if all were
    # computed of the same generator against the same real images; a mixture of two
    # rounds, for example, would describe a generator that never was.
    kind = ("data", "fast", "reading", "round")
    for line in lines:
        last = lines[-1]
        is_same_kind = all(line.get(name) == last.get(name) for name in kind)
        if is_same_kind:
            merged |= line
    return merged


def _grids(run: Path) -> list[Grid]:
    """Returns the last grid and some before it, evenly spread.

    Raises:
        UserError: there is none, or one cannot be read.
    """
    # Sorted by name is sorted by round, because the numbers in the names are padded.
    paths = sorted((run / "samples").glob("round-*.png"))
    if not paths:
        raise UserError(
            f"{run}: it has no samples yet (samples/ has no round-*.png); continue it "
            f"with `{RunFolder.open(run).go_on}`"
        )
    return [_grid(paths[place]) for place in spread(len(paths), MOST_GRIDS)]


def _grid(path: Path) -> Grid:
    with wrap_error(ValueError, f"{path}: not named by its round", "remove it"):
        round = int(path.stem.removeprefix("round-"))
    png, (width, height) = _png(path)
    return Grid(round, png, width, height)


def _png(path: Path) -> tuple[bytes, tuple[int, int]]:
    """Returns the content of a PNG, and its width and height in pixels."""
    with wrap_error(Exception, f"{path}: no readable PNG", "restore it from a copy"):
        png = read_bytes(path)
        # The page embeds these bytes, and the folder may come from somebody else. So
        # Pillow must not try its other formats, and the whole file has to be sound.
        with Image.open(io.BytesIO(png), formats=["PNG"]) as image:
            image.verify()
            return png, image.size
