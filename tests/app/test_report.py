"""`fedgs report`: what is on the page, what is not, and bad input."""

import json
import re
import shutil
from functools import lru_cache
from pathlib import Path

import pytest
from PIL import Image

from fedgs.app.commands.train import train
from fedgs.app.report.diagnosis_cards import verdict_of
from fedgs.app.report.page import read_page, render, report
from fedgs.config.recipes import configure
from fedgs.errors import UserError
from fedgs.privacy.rounding import upper
from fedgs.privacy_label import privacy_label
from fedgs.runs import epsilons
from plans import epsilon
from report_folders import compared, compared_site, make_diagnosed, make_run


@pytest.fixture(scope="module")
def folders(tmp_path_factory) -> Path:
    """A private run, one without noise, one with seeded noise, one with a diagnosis."""
    root = tmp_path_factory.mktemp("report")
    make_run(root / "private")
    make_run(root / "noise-free", noise_multiplier=0.0)
    make_run(root / "seeded", noise_seed=7)
    make_diagnosed(root / "diagnosed")
    return root


@pytest.fixture
def run(folders, tmp_path) -> Path:
    """A private run that a test may break."""
    return Path(shutil.copytree(folders / "private", tmp_path / "private"))


@pytest.fixture
def diagnosed(folders, tmp_path) -> Path:
    """A run with a diagnosis that a test may break."""
    return Path(shutil.copytree(folders / "diagnosed", tmp_path / "diagnosed"))


@lru_cache
def page_of(*paths: Path) -> str:
    """The page of folders that no test changes."""
    return fresh_page_of(*paths)


def fresh_page_of(*paths: Path) -> str:
    return render(read_page(paths))


def text_of(page: str) -> str:
    """The words of a page's content without markup and spaces in a row."""
    page = page[page.index("<main") :] if "<main" in page else page
    return " ".join(re.sub(r"<[^>]*>", " ", page).split())


# ------------------------------------------------------------------ content


def test_one_node_is_one(tmp_path):
    run = make_run(tmp_path / "run", clients_per_node=6)
    assert "on 1 node, " in text_of(fresh_page_of(run))


def test_one_run_shows_picture_and_epsilon_first(folders):
    page = page_of(folders / "private")
    stated = epsilon(epsilons.of_run(folders / "private"), relation="replace-one")
    glance = page[: page.index('id="training"')]
    assert f"= {stated:.4g}" in glance or f"= {stated:.2f}" in glance
    assert "weak" in text_of(glance)  # between 10 and 100
    noise_free = text_of(page_of(folders / "noise-free"))
    assert "no epsilon NO GUARANTEE; epsilon is unbounded" in noise_free
    seeded = text_of(page_of(folders / "seeded"))
    assert "no epsilon NO GUARANTEE; noise seeded: not private" in seeded
    assert "data:image/png;base64," in glance


def test_every_statement_of_every_run_is_in_the_privacy_table(folders):
    page = page_of(folders / "private", folders / "noise-free")
    privacy = text_of(page[page.index('id="privacy"') :])
    for name in ("private", "noise-free"):
        for row in epsilons.of_run(folders / name):
            assert row.theorem in privacy
            for condition in row.conditions:
                assert text_of(str(condition)).replace("'", "&#39;") in privacy


def test_every_run_shows_its_label_as_one_block(folders):
    page = page_of(folders / "private", folders / "seeded")
    for name in privacy_label(folders / "private").keys() - {"conditions", "versions"}:
        assert f">{name.replace('_', ' ')}</th>" in page
    for name in ("private", "seeded"):
        assert text_of(page).count(f"Privacy label of {name}") == 1


def test_runs_on_the_same_clients_are_also_stated_together(folders):
    paths = [folders / "private", folders / "seeded"]
    (stated, *_) = epsilons.of_runs(paths, {})
    assert stated.epsilon is not None
    page = page_of(*paths)
    assert "All of these runs together" in page
    assert upper(stated.epsilon) in page


def test_runs_on_other_clients_are_not_added_up(folders, tmp_path):
    other = make_run(tmp_path / "other", num_clients=5)
    page = page_of(folders / "private", other)
    assert "All of these runs together" not in page
    assert "Not added up" in page


def test_a_diagnosis_answers_first(folders):
    page = text_of(page_of(folders / "diagnosed"))
    assert page.startswith("diagnosed: v2 against v1 Bug: inverted The images of v2")
    assert "are inverted &lt;b&gt;&amp; more&lt;/b&gt;." in page
    assert "invert was planted in 0.5 of the clients." in page
    assert "rows from the top: v1, v2" in page
    assert "inverted named 0.97 0.96 [0.9, 1] 0.0571" in page
    assert page.count("any difference no difference seen – – –") == 1
    assert "What the verdict rests on Groups are disjoint." in page
    # And all that the page of any run has.
    assert "ε = " in page
    assert "Privacy label of diagnosed" in page
    assert "Diagnosis" not in text_of(page_of(folders / "private"))


def test_every_site_has_a_card_and_those_that_differ_are_first(tmp_path):
    alike = compared_site("north", verdict="none", is_accused=False, p=1.0)
    sites = [alike, compared_site("south")]
    rows = ["north", "south"]
    run = make_diagnosed(tmp_path / "run", comparisons=sites, rows=rows, planted=None)
    page = text_of(page_of(run))
    titles = ["run: south against all others Bug: inverted"]
    titles += ["run: north against all others No bug", "Every site against all others"]
    titles += ["rows from the top: north, south"]
    places = [page.index(title) for title in titles]
    assert places == sorted(places)
    assert places[0] == 0
    assert "south invert inverted 0.96 [0.9, 1] 0.03" in page
    assert "This was a test" not in page


@pytest.mark.parametrize(
    ("verdict", "answer", "kind"),
    [
        ("one of invert, my_module:blur", "Bug: inverted or my_module:blur", "bad"),
        ("undecided", "Undecided", "unsure"),
        ("other", "Different, but not by a known bug", "unsure"),
        ("none", "No bug of the kinds tested", "good"),
    ],
)
def test_verdicts_in_words(verdict, answer, kind):
    assert verdict_of(compared(verdict=verdict)) == (answer, kind)


def test_a_site_that_may_not_be_the_one_that_differs_is_not_accused():
    answer, kind = verdict_of(compared_site("south", is_accused=False))
    assert (answer, kind) == ("Perhaps, or another site. Bug: inverted", "unsure")


def test_names_of_cohorts_are_escaped_and_cut(tmp_path):
    name = "<img src=x onerror=alert(1)>" + 200 * "x"
    found = compared(suspicious=name, healthy=name, sentence="")
    planted = {"bug": "invert", "where": name}
    run = make_diagnosed(
        tmp_path / "run", comparisons=[found], rows=[name, "v1"], planted=planted
    )
    page = page_of(run)
    assert "&lt;img src=x onerror=alert(1)&gt;" in page
    assert "<img src=x" not in page
    assert 100 * "x" not in page


def test_next_step_names_the_run_without_its_folder(tmp_path):
    found = compared(verdict="undecided")
    found["ranking"][0] |= {"adjusted_p": 0.03, "interval": [0.17, 0.4]}
    run = make_diagnosed(tmp_path / "run", comparisons=[found])
    page = text_of(page_of(run))
    assert "fedgs debug --output run --min-effect 0.15" in page


def test_a_real_comparison_of_nodes_is_shown(tmp_path):
    settings = {"num_clients": 16, "clients_per_node": 8, "moment_size": 4}
    settings |= {"noise_multiplier": 0.05, "engine": "local", "seed": 1}
    settings |= {"corruption": "invert", "corruption_unit": "node"}
    settings |= {"output": str(tmp_path / "run")}
    config = configure("group-means", None, settings)
    train(config, {})
    page = fresh_page_of(tmp_path / "run")
    content = json.loads((tmp_path / "run" / "diagnosis.json").read_text())
    for found in content["comparisons"]:
        assert f"run: {found['suspicious']} against all others" in page
    (planted,) = {content["planted"]["where"]}
    assert f"This was a test: invert was planted in {planted}." in page
    words = ("fedgs debug", "--bug flip", "--fraction 0.5", "--each")
    assert " ".join(f"<span>{word}</span>" for word in words) in page
    assert "After round 1, one column per class" not in page  # a grid of noise
    assert page == fresh_page_of(tmp_path / "run")
    assert str(tmp_path) not in page


def test_evaluations_are_shown_as_not_covered(run, folders):
    assert 'id="evaluation"' not in page_of(folders / "private")
    of_run = {"data": "npz:/home/ada/x.npz", "fast": False}
    scores = {"accuracy": {"mlp": 0.25, "cnn": 0.75}, "calibrated": {}}
    scores["real_accuracy"] = {"mlp": 0.5}
    lines = [
        {"data": "other", "fast": False, "fid_lenet_mnist": 1.0},
        of_run | {"recall_lenet_k5": 0.25},
        of_run | {"downstream_cnn_accuracy": 0.5, "classifiers": scores},
    ]
    lines[2]["label_efficiency"] = {"generator": {"10": 0.125}}
    (run / "evaluations.jsonl").write_text("\n".join(map(json.dumps, lines)) + "\n")
    page = text_of(page_of(run))
    assert "no epsilon covers these numbers" in page
    assert "downstream_cnn_accuracy 0.5" in page
    assert "recall_lenet_k5 0.25" in page  # of the same data, so it belongs together
    assert "fid_lenet_mnist" not in page  # of other data
    assert "average 0.500 –" in page
    assert "labels: generator 0.125" in page


# ------------------------------------------------------------------ what is not there


def test_scores_that_are_no_numbers_are_not_shown(run):
    """Anybody may have written the file: it is bound by nothing."""
    line = {"data": "x", "downstream_cnn_accuracy": "a lot", "classifiers": 3}
    (run / "evaluations.jsonl").write_text(json.dumps(line) + "\n")
    assert "a lot" not in page_of(run)


def test_only_versions_of_software_are_shown_and_published(run):
    """No ledger binds their file, and a line of it would become one of the card."""
    path = run / "versions.json"
    known = json.loads(path.read_text())
    added = {"host": "secret-host", "git_commit": "x\n- **guarantee**: perfect"}
    path.write_text(json.dumps(known | added))
    label = privacy_label(run)
    assert label["versions"] == {n: v for n, v in known.items() if n != "git_commit"}
    assert "secret-host" not in page_of(run)


def test_page_names_no_folder_of_the_machine(folders):
    page = page_of(folders / "private") + page_of(folders / "diagnosed")
    without_pictures = re.sub(r"data:image/png;base64,[^\"]*", "", page)
    assert str(folders) not in without_pictures
    assert not re.search(r"/(home|tmp|root|work)/", without_pictures)


def test_private_files_are_not_read(run):
    expected = fresh_page_of(run)
    shutil.rmtree(run / "private")
    (run / "flower.log").write_text("secret")
    (run / "evaluation").mkdir()
    (run / "evaluation" / "samples.png").write_bytes(b"real images")
    assert fresh_page_of(run) == expected


def test_page_asks_for_nothing_and_its_links_lead_to_one_place(folders):
    page = page_of(folders / "private", folders / "noise-free")
    places = re.findall(r'\bid="([^"]*)"', page)
    assert len(places) == len(set(places))
    links = set(re.findall(r'(?:src|href|action)="([^"]*)', page)) - {""}
    inside = {link[1:] for link in links if link.startswith("#")}
    assert len(inside) > 4
    assert inside <= set(places)
    assert {link[:5] for link in links if link[0] != "#"} == {"data:"}
    assert "<script" not in page
    assert "@import" not in page
    assert set(re.findall(r"url\((.)", page)) <= {"#"}
    assert "default-src 'none'" in page


def test_page_shows_the_seed_and_not_the_secret_of_who_took_part(tmp_path):
    run = make_run(tmp_path / "run", seed=918273)
    page = page_of(run)
    assert "918273" in page
    assert (run / "private" / "selection.key").read_text() not in page


# ------------------------------------------------------------------ files and bad input


def test_page_is_written_and_runs_of_one_name_are_told_apart(folders, run, tmp_path):
    paths = [folders / "private", run]
    report(paths, tmp_path / "out.html")
    assert (tmp_path / "out.html").read_text() == page_of(*paths)
    runs = read_page(paths).runs
    assert [facts.name for facts in runs] == ["private", "private (2)"]


def refused(paths: list[Path], output: Path) -> str:
    before = sorted(output.parent.iterdir()) if output.parent.is_dir() else []
    with pytest.raises(UserError) as error:
        report(paths, output)
    if output.parent.is_dir():
        assert sorted(output.parent.iterdir()) == before
    return str(error.value)


@pytest.mark.parametrize(
    ("of", "name", "content", "message"),
    [
        ("run", "samples/round-0000003.png", b"no picture", "no readable PNG"),
        ("run", "metrics.jsonl", b"{broken\n", "is no JSON object"),
        ("run", "ledger.jsonl", b"{}\n", "altered, deleted or moved"),
        ("run", "config.json", None, "no run folder"),
        ("run", "samples/*.png", None, "no samples yet"),
        ("diagnosed", "diagnosis.json", b'{"format": 4}', "no diagnosis of this"),
        (
            "diagnosed",
            "diagnosis.json",
            b'{"format": 5}',
            "diagnosis.json: it is broken",
        ),
        ("diagnosed", "diagnosis.json", b"[]", "is not a JSON object"),
        ("diagnosed", "diagnosis.png", b"GIF89a", "diagnosis.png: no readable PNG"),
        ("diagnosed", "diagnosis.png", None, "diagnosis.png: no readable PNG"),
    ],
)
def test_a_broken_folder_is_refused(request, tmp_path, of, name, content, message):
    folder = request.getfixturevalue(of)
    for path in folder.glob(name):
        path.unlink() if content is None else path.write_bytes(content)
    assert message in refused([folder], tmp_path / "x.html")


def test_a_grid_of_other_images_is_refused(run, tmp_path):
    Image.new("RGB", (30, 31)).save(run / "samples" / "round-0000003.png")
    assert "no grid of 16 x 16 images" in refused([run], tmp_path / "x.html")


def test_runs_that_make_no_page_together_are_refused(folders, tmp_path):
    private, output = folders / "private", tmp_path / "x.html"
    other = make_run(tmp_path / "other", data="tiny2")
    message = refused([private, other], output)
    assert message.startswith("data = tiny in private, tiny2 in other")
    again = folders / "diagnosed" / ".." / "private"
    assert "given twice" in refused([private, again], output)
    output.mkdir()
    assert "output = " in refused([tmp_path / "no run"], output)


@pytest.mark.parametrize("output", ["out.pdf", "missing/out.html", "/proc/out.html"])
def test_an_output_that_cannot_be_written_is_refused_first(tmp_path, output):
    with pytest.raises(UserError, match=r"^output = .*out\.(pdf|html): "):
        report([tmp_path / "no run"], tmp_path / output)
    assert list(tmp_path.iterdir()) == []
