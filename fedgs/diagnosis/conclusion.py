"""What a finished run of group means says: a verdict, in words, and pictures.

In the run folder:

    groups/*.npz      mean picture and label of every class, of each group of clients
    diagnosis.png     a row for each cohort or node, a column for each class
    diagnosis.json    what was compared, the verdicts and what they rest on; last

Privacy: post-processing of DP output.
"""

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from fedgs.config.run_config import GroupMeansConfig, ResolvedConfig
from fedgs.data.corruption import spoilt_node
from fedgs.data.transformations import TRANSFORMATIONS, Transformation
from fedgs.diagnosis import sentences
from fedgs.diagnosis.catalogue import class_means
from fedgs.diagnosis.diagnosis import UNDECIDED, Diagnosis, diagnose
from fedgs.diagnosis.rule import Rule
from fedgs.diagnosis.sites import SiteVerdict, compare_sites
from fedgs.errors import UserError
from fedgs.evaluation.images import LabelledImages
from fedgs.files import make_folder, read_json, replacing, write_json
from fedgs.methods.group_means import Group, groups_released
from fedgs.round.checkpoint import restored_releases
from fedgs.runs.run_folder import RunFolder, versions
from fedgs.runs.sample_files import save_images

DIAGNOSIS = "diagnosis.json"
PICTURE = "diagnosis.png"
FORMAT = 5
THE_OTHERS = "all others"
LEAST_SEEN = 5.0  # standard deviations, which noise alone hardly ever has

Samples = Mapping[str, Sequence[LabelledImages]]  # of each cohort's groups


def conclude(
    folder: RunFolder,
    rule: Rule | None = None,
    suspects: Sequence[Transformation] = (),
) -> dict[str, Any] | None:
    """Compares the groups of a finished run, and writes what they differ in.

    Args:
        folder: of the run.
        rule: another one than that of its settings: it judges what is released
            already, so it costs no epsilon.
        suspects: the user's own, beside the catalogue.

    Returns:
        The content of diagnosis.json; None of a run that compares no groups, or that is
        not finished.

    Raises:
        UserError: a suspect fails, or the folder is broken.
    """
    config = folder.config.at_phase(0)
    if not isinstance(config, GroupMeansConfig) or not folder.is_finished:
        return None
    groups = groups_in(folder, config)
    if not groups:  # a budget that was spent before the release
        return None
    samples = samples_of(groups)
    rule = rule or Rule(config.alpha, config.min_effect)
    entries = (*TRANSFORMATIONS, *suspects)
    absent = _absent(groups)
    comparisons = list(_comparisons(config, samples, absent, rule, entries))
    make_folder(folder.path / "groups")
    for cohort, own in samples.items():
        for number, (images, labels) in enumerate(own):
            path = folder.path / "groups" / f"{cohort}-{number}.npz"
            with replacing(path) as file:
                shown = images.clip(0, 1)
                np.savez_compressed(file, images=shown, labels=labels)
    _draw(folder, config, samples)
    content: dict[str, Any] = {
        "format": FORMAT,
        "comparisons": comparisons,
        "conditions": sentences.conditions(folder.config, config),
        "planted": planted(folder.config, config),
        "picture": PICTURE,
        "rows": list(samples),
        "versions": versions(),
    }
    # Last, because its existence says that all others are there.
    write_json(folder.path / DIAGNOSIS, content)
    return content


def is_written(run: Path) -> bool:
    """Tells whether a run folder has a diagnosis that this fedgs can read.

    One that is damaged, or of another format, is made again from what was released.
    """
    with contextlib.suppress(UserError):  # missing, cut off or no JSON
        return read_json(run / DIAGNOSIS).get("format") == FORMAT
    return False


def groups_in(folder: RunFolder, config: GroupMeansConfig) -> list[Group]:
    """Returns what a run has released of every group.

    Privacy: post-processing of DP output.
    """
    committed = folder.committed()
    tensors = {}
    if committed is not None:
        _, tensors = committed
    return groups_released(config, restored_releases(folder.config, tensors))


def _absent(groups: Sequence[Group]) -> list[str]:
    """Returns the cohorts or nodes of which the release shows no client, if any.

    Noise alone looks like a bug, so of these none may be named. Where no cohort is
    seen, the noise hides all of them, and the comparison finds none by itself.
    """
    seen: dict[str, list[float]] = {}
    for group in groups:
        seen.setdefault(group.cohort, []).append(group.seen)
    # Of all groups of a cohort together, their noise has a standard deviation of 1.
    clear = {
        name: sum(own) / len(own) ** 0.5 > LEAST_SEEN for name, own in seen.items()
    }
    if not any(clear.values()):
        return []
    return [name for name, is_seen in clear.items() if not is_seen]


def samples_of(groups: Sequence[Group]) -> Samples:
    """Returns the mean pictures of every cohort's groups, a sample of each class."""
    samples: dict[str, list[LabelledImages]] = {}
    for group in groups:
        own = LabelledImages(group.images.numpy(), group.labels.numpy())
        samples.setdefault(group.cohort, []).append(own)
    return samples


def _comparisons(
    config: GroupMeansConfig,
    samples: Samples,
    absent: Sequence[str],
    rule: Rule,
    entries: Sequence[Transformation],
) -> Iterator[dict[str, Any]]:
    """Yields each comparison as JSON values: who, with whom, and the diagnosis.

    A node of which the release shows no client is undecided, and so are two cohorts if
    one of them is such.
    """
    how: dict[str, Any] = {
        "num_classes": config.num_classes,
        "num_frequencies": config.moment_size,
        "rule": rule,
        "entries": entries,
    }
    if config.suspicious is None:
        for name, verdict in compare_sites(samples, **how).items():
            found = _of_site(verdict, len(samples))
            if name in absent:
                found |= _undecided([name]) | {"is_accused": False, "rivals": []}
            yield found
        return
    suspicious = samples[config.suspicious]
    others = [own for name, own in samples.items() if name != config.suspicious]
    healthy = [group for groups in others for group in groups]
    diagnosis = diagnose(healthy, suspicious, **how)
    names = config.suspicious, config.healthy or THE_OTHERS
    if config.compares_nodes:
        titles = names
    else:
        titles = f"cohort {config.suspicious}", f"cohort {config.healthy}"
    found = _as_json(names, diagnosis, sentences.sentence(diagnosis, *titles))
    if absent:
        found |= _undecided(absent)
    yield found


def _undecided(absent: Sequence[str]) -> dict[str, Any]:
    """Returns what is said in the place of a verdict that needs clients unseen."""
    sentence = sentences.unseen(absent)
    return {"verdict": UNDECIDED, "sentence": sentence}


def _of_site(verdict: SiteVerdict, num_sites: int) -> dict[str, Any]:
    others = THE_OTHERS
    if len(verdict.others) < num_sites - 1:  # some were named, and taken out
        others = " and ".join(verdict.others)
    names = verdict.site, others
    sentence = sentences.sentence_of_site(verdict, others)
    return _as_json(names, verdict.diagnosis, sentence) | {
        "p": verdict.p,
        "is_accused": verdict.is_accused,
        "rivals": list(verdict.rivals),
    }


def _as_json(
    names: tuple[str, str],
    diagnosis: Diagnosis,
    sentence: str,
) -> dict[str, Any]:
    suspicious, healthy = names
    return {
        "suspicious": suspicious,
        "healthy": healthy,
        "sentence": sentence,
        **sentences.with_titles(diagnosis),
    }


def planted(config: ResolvedConfig, own: GroupMeansConfig) -> dict[str, Any] | None:
    """Returns the bug that an experiment planted; None without one.

    Privacy: public, of settings.
    """
    if config.corruption == "none":
        return None
    where = f"{config.corruption_fraction:g} of the {config.corruption_unit}s"
    if config.corruption_unit == "node":
        where = own.site_names[spoilt_node(config, config.num_nodes)]
    return {"bug": config.corruption, "where": where}


def _draw(folder: RunFolder, config: GroupMeansConfig, samples: Samples) -> None:
    """Writes a row for each cohort: the mean picture of each class, over its groups."""
    rows = list[NDArray[np.float32]]()
    for groups in samples.values():
        images = np.concatenate([own.images for own in groups])
        labels = np.concatenate([own.labels for own in groups])
        flat = images.reshape(len(images), -1)
        means = class_means(flat, labels, config.num_classes)
        # Black where none of the groups has a class.
        means = np.nan_to_num(means)
        pictures = means.reshape(-1, *images.shape[1:]).clip(0, 1)
        rows.append(pictures.astype(np.float32))
    pictures = np.concatenate(rows)
    save_images(folder.path / PICTURE, pictures, config.num_classes)
