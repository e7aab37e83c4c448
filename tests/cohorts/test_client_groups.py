"""Groups of clients: the owner's file of cohorts, who is in which group, and how many.

What one owner may move is in tests/methods/test_group_means.py.
"""

import dataclasses
import random
from collections import Counter
from collections.abc import Callable, Sequence

import pytest

from fedgs.app.debug.cohorts import smallest_group
from fedgs.cohorts.client_groups import (
    CohortOfClient,
    InGroup,
    groups_of,
    read_client_cohorts,
    weighted,
)
from fedgs.config.run_config import RunConfig
from fedgs.data.cohort import keep_cohort
from fedgs.data.federated import FederatedImages
from fedgs.data.load import load_data
from fedgs.privacy_label import privacy_label
from fedgs.runs.publication import publish
from fedgs.runs.run_folder import RunFolder
from fedgs.runs.sample import draw_samples
from groups import (
    finished,
    made,
    of_cohorts,
    of_nodes,
    people,
    phase_of,
    write_cohorts,
)
from refusals import assert_refused
from tiny import tiny_config, write_tiny_npz

NAMES = tuple(f"p{number:02}" for number in range(12))

# ------------------------------------------------------------------ the file

pytestmark = pytest.mark.filterwarnings("ignore:.*have no line")


def test_a_file_says_a_value_and_may_say_a_part(tmp_path):
    path = tmp_path / "own.csv"
    path.write_text('owner,cohort\nann,v1\n"b, c",\n')
    found = read_client_cohorts(path)
    assert found == {"ann": CohortOfClient("v1"), "b, c": CohortOfClient("")}
    path.write_text("owner,cohort,part\nann,v1,3\n\n")
    assert read_client_cohorts(path) == {"ann": CohortOfClient("v1", 3)}


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "it is empty; give --cohorts a CSV file whose first line is"),
        ("name,cohort\nann,v1\n", "the first line is 'name,cohort'"),
        ("ann,v1\nbob,v2\n", "the first line is 'ann,v1'"),
        ("owner,cohort\n", "names no owner"),
        ("owner,cohort\nann\n", "line 2: give owner,cohort"),
        ("owner,cohort\nann,v1,0\n", "line 2: give owner,cohort"),
        ('owner,cohort\n"a\nb",v1\nann\n', "line 4: give owner,cohort"),
        ("owner,cohort\nann,v1\nann,v2\n", "line 3: the owner is there twice"),
        ("owner,cohort,part\nann,v1,x\n", "line 2: give part a number"),
        ("owner,cohort,part\nann,v1,-1\n", "line 2: give part a number"),
        ("owner,cohort,part\nann,v1,6\n", "line 2: give part a number from 0 to 5"),
        ("owner,cohort,part\nann,v1," + "9" * 5000 + "\n", "line 2: give part a"),
        ("owner,cohort\nann,v1 \n", "line 2: the cohort 'v1 ' begins or ends with"),
        ('owner,cohort\n"ann,v1\n', "cannot be read"),
    ],
)
def test_a_file_that_cannot_be_read_is_refused_by_its_line(tmp_path, text, words):
    path = tmp_path / "own.csv"
    path.write_text(text)
    assert_refused(f"cohorts = .*own.csv: .*{words}", read_client_cohorts, path)
    assert_refused(
        "^cohorts = .*absent.csv: ", read_client_cohorts, tmp_path / "absent.csv"
    )


# ------------------------------------------------------------------ groups of nodes


def test_a_nodes_groups_have_one_size_and_who_is_left_over_is_in_none():
    own = phase_of(of_nodes(clients_per_group=2))
    groups = groups_of(own, NAMES, ())
    assert Counter(groups) == {0: 2, 1: 2, 2: 2, 3: 2, None: 4}
    # By names and the seed, whatever the order of the clients.
    order = random.Random(0).sample(range(12), 12)
    shuffled = groups_of(own, [NAMES[place] for place in order], ())
    assert shuffled == [groups[place] for place in order]
    other = groups_of(dataclasses.replace(own, seed=6), NAMES, ())
    assert other != groups
    assert Counter(other) == Counter(groups)


def test_groups_are_as_large_as_the_smallest_node_allows():
    own = phase_of(of_nodes(node_sizes="9,15"))
    assert own.group_size == 2
    for hosted in (range(9), range(9, 24)):
        names = [f"p{number:02}" for number in hosted]
        sizes = Counter(groups_of(own, names, ()))
        assert [sizes[group] for group in range(4)] == [2] * 4


# ------------------------------------------------------------------ groups of cohorts


def test_a_cohorts_group_follows_from_the_clients_own_line_and_all_names():
    own = phase_of(of_cohorts("own.csv"))
    cohorts = [CohortOfClient(value) for value in ("v1", "v2", "other", "") * 3]
    cohorts[7] = None
    groups = groups_of(own, NAMES, cohorts)
    for cohort, group in zip(cohorts, groups, strict=True):
        expected = {"v1": range(4), "v2": range(4, 8)}.get(
            cohort.value if cohort else ""
        )
        assert group in (expected or (None,))
    # Whatever others are in, down to nothing at all, a client's group stays.
    for client, group in enumerate(groups):
        alone = [cohorts[client] if i == client else None for i in range(12)]
        assert groups_of(own, NAMES, alone)[client] == group
    # Parts are those of the node's ranks: as many of each as there are names.
    everyone = groups_of(own, NAMES, [CohortOfClient("v2")] * 12)
    assert Counter(everyone) == dict.fromkeys(range(4, 8), 3)


def test_a_part_of_the_file_is_the_group():
    own = phase_of(of_cohorts("own.csv"))
    cohorts = [
        CohortOfClient("v1", 2),
        CohortOfClient("v2", 2),
        CohortOfClient("v1", 6),
    ]
    assert groups_of(own, NAMES[:3], cohorts) == [2, 6, 2]


def test_cohorts_without_a_file_are_refused():
    own = phase_of(of_cohorts("own.csv"))
    assert_refused("^healthy = v1: ", groups_of, own, NAMES, ())


@pytest.mark.parametrize("least", [1, 2, 3, 4])
def test_of_a_group_that_is_too_small_nothing_is_told(least):
    own = phase_of(of_cohorts("own.csv"))
    found = weighted(own, [2, 2, 2, None, 5], least)
    large = {1: InGroup(2, 1.0), 2: InGroup(2, 2 / 3), 3: InGroup(2, 1 / 3), 4: None}
    small = InGroup(5, 1.0) if least == 1 else None
    assert found == [large[least]] * 3 + [None, small]
    # The sizes of groups of a node are public, and the clients' limits look at them.
    assert weighted(phase_of(of_nodes()), [0, 1], least) == [InGroup(0), InGroup(1)]


# ------------------------------------------------------------------ the data


@pytest.fixture
def tiny_run(tmp_path) -> Callable[..., RunConfig]:
    """Settings on files of six owners, of whom 0, 2 and 4 are of v1, and 5 of none."""
    values = {"0": "v1", "1": "v2", "2": "v1", "3": "v2", "4": "v1"}
    file = write_cohorts(tmp_path / "own.csv", values)
    data = write_tiny_npz(tmp_path / "tiny.npz")

    def tiny_run(**settings: object) -> RunConfig:
        given = {"data": data, "cohorts": file, "num_clients": None} | settings
        return tiny_config(RunConfig, **given)

    return tiny_run


def test_data_know_the_cohort_of_each_client(tiny_run):
    data = load_data(tiny_run())
    values = [cohort and cohort.value for cohort in data.client_cohorts]
    assert values == ["v1", "v2", "v1", "v2", "v1", None]
    assert load_data(tiny_run(cohorts=None)).client_cohorts == ()


def test_a_run_of_fewer_clients_keeps_their_cohorts(tiny_run):
    data = load_data(tiny_run(num_clients=3))
    assert data.client_names == ("0", "1", "2")
    values = [cohort and cohort.value for cohort in data.client_cohorts]
    assert values == ["v1", "v2", "v1"]


def test_a_run_on_one_cohort_has_its_clients_alone(tiny_run):
    data = load_data(tiny_run(cohort_value="v1"))
    assert data.client_names == ("0", "2", "4")
    assert {cohort and cohort.value for cohort in data.client_cohorts} == {"v1"}
    assert load_data(tiny_run(cohort_value="v1", num_clients=2)).num_clients == 2
    asked = tiny_run(cohort_value="v2", num_clients=3)
    assert_refused("^num_clients = ", load_data, asked)
    assert_refused("^cohort_value = v9: ", load_data, tiny_run(cohort_value="v9"))


def test_one_cohort_is_not_everybody_where_no_file_says_who_is_in_it(tiny_run):
    """A node of a deployment without the file would otherwise train on all clients."""
    asked = dataclasses.replace(tiny_run(), cohort_value="v1", cohorts=None)
    assert_refused("^cohort_value = v1: ", keep_cohort, asked, people())


@pytest.mark.filterwarnings("error:.*have no line")
def test_owners_whom_the_file_leaves_out_are_told_of(tiny_run, tmp_path):
    file = write_cohorts(tmp_path / "some.csv", {"0": "v1", "1": "v2"})
    words = f"cohorts = {file}: 4 of 6 owners have no line in it, so they are in no"
    with pytest.warns(RuntimeWarning, match=words):
        load_data(tiny_run(cohorts=file, cohort_value="v1"))
    load_data(tiny_run(cohorts=file))  # a run of everybody


def test_the_groups_of_cohorts_have_all_of_their_owners():
    words = "^clients_per_group = 5: the groups of cohorts have all owners .* leave it"
    assert_refused(words, of_cohorts, "own.csv", clients_per_group=5)


def test_a_file_of_other_owners_is_refused(tiny_run, tmp_path):
    for name in ("zoe", ""):
        file = write_cohorts(tmp_path / "other.csv", {"0": "v1", name: "v1"})
        words = rf"no client '{name}' \(1 of 2 names\)"
        assert_refused(words, load_data, tiny_run(cohorts=file))
    words = "^cohorts = .*own.csv.*: partition = iid "
    assert_refused(words, tiny_run, partition="iid", num_clients=6)


# ------------------------------------------------------------------ the run folder


def test_a_run_folder_keeps_its_own_file_of_cohorts_where_nobody_else_reads_it(
    tmp_path,
):
    config, data = made("cohorts", tmp_path)
    original = (tmp_path / "own.csv").read_bytes()
    folder = finished(config, data)
    kept = folder.path / "private" / "cohorts.csv"
    assert kept.read_bytes() == original
    assert kept.parent.stat().st_mode & 0o077 == 0
    (tmp_path / "own.csv").unlink()
    moved = folder.path.rename(tmp_path / "moved")
    config = RunFolder.open(moved).config
    assert config.cohorts == str(moved / "private" / "cohorts.csv")
    assert keep_cohort(config, people()).client_cohorts == data.client_cohorts


@pytest.mark.parametrize("mode", ["nodes", "cohorts"])
def test_a_comparison_draws_no_images_and_none_are_published(tmp_path, mode):
    """Its generator is of one release, and draws noise."""
    config, data = made(mode, tmp_path, noise_seed=None, engine="local")
    folder = finished(config, data)
    out = tmp_path / "published"
    label = privacy_label(folder.path)
    words = "compares groups of clients, .* give the folder of a `fedgs train`"
    assert_refused(words, publish, folder, out, label, count=3)
    assert_refused(words, draw_samples, folder, 3)
    assert not out.exists()
    (file,) = sorted((folder.path / "samples").glob("*.png"))
    assert file.name == "round-0000001.png"


def test_a_file_that_says_who_is_in_which_group_says_how_small_the_smallest_is():
    own = phase_of(of_cohorts("own.csv"))

    def data(parts: Sequence[int | None]) -> FederatedImages:
        cohorts = [CohortOfClient(v, part) for v in ("v1", "v2") for part in parts]
        return dataclasses.replace(people(), client_cohorts=tuple(cohorts))

    assert smallest_group(own, data([None] * 20)) == 5
    # Parts beyond the four groups come round again: 20 are 10, 6, 2 and 2.
    assert smallest_group(own, data([0, 1, 4, 0, 5, 1, 2, 3, 4, 0] * 2)) == 2
    words = "^healthy = v1: by the parts .* one of its groups has 0 clients"
    assert_refused(words, smallest_group, own, data([0] * 20))
