"""Table 2: what its cells are, that nothing is trained twice, and bad input."""

import json
import re
import threading
from contextlib import nullcontext

import numpy as np
import pytest
import torch
from flwr.app import ConfigRecord, Message, RecordDict
from flwr.supercore.task_identity import TaskIdentity

import small_scale
from baselines import DIGITS
from clients.client_app import app as client_app
from experiments.paper import scores, stored_runs, table2, table2_report
from experiments.paper.fed_avg_gan import update_bytes
from experiments.paper.scales import configured, label
from fedgs.app.evaluation import evaluate as evaluation
from fedgs.baselines.run import new_run, train
from fedgs.baselines.target import Asked
from fedgs.config.run_config import ResolvedConfig
from fedgs.federation.codec import pack_release, round_fakes
from fedgs.federation.messages import RECORD, FakeBatch, encode_answer, encode_batch
from fedgs.files import read_json_lines
from fedgs.mechanism.noise import NoiseStream
from fedgs.mechanism.quantization import release_step, to_grid
from fedgs.mechanism.sanitizer import PerSampleGradients, clip, sanitize
from fedgs.privacy.accounting import Plan, statements
from fedgs.privacy.plan import RELATIONS
from fedgs.runs.run_folder import RunFolder
from refusals import assert_refused
from server.launch.local_grid import LocalGrid
from server.launch.measuring_grid import (
    MeasuringGrid,
    communication,
    message_bytes,
    values_per_node,
)
from small_scale import data_flags, refuse

EVALUATE = evaluation.evaluate


@pytest.fixture(autouse=True)
def _process(monkeypatch, tmp_path):
    small_scale.prepare(monkeypatch, tmp_path)


@pytest.fixture
def flags(tmp_path) -> list[str]:
    return [*data_flags(tmp_path), f"--output={tmp_path / 'out'}"]


def lines_of(tmp_path) -> dict[str, dict]:
    lines = read_json_lines(tmp_path / "out" / "table2.jsonl")
    return {line["row"]: line for line in lines}


# ------------------------------------------------------------------ the cells


def test_the_table_holds_all_and_invents_none(flags, tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(evaluation, "evaluate", EVALUATE)
    rows = "paper-mode,full-participation,fed-avg-gan"
    assert table2.main([*flags, f"--rows={rows}"]) == 0
    found = lines_of(tmp_path)
    assert list(found) == rows.split(",")
    for row, recipe in (("paper-mode", "algorithm-2"), ("full-participation",) * 2):
        line = found[row]
        config = RunFolder.open(tmp_path / "out" / "runs" / line["run"]).config
        expected = statements(Plan.from_config(config), config.delta)
        assert config.engine == "flower"
        for statement in expected:
            got = scores.epsilon_of(line, statement.adversary, statement.relation)
            assert got == pytest.approx(statement.epsilon)
        assert len(expected) == 6  # three adversaries, two relations
        assert 1 <= table2_report.metric(line, "is_lenet_npz_fast_10")[1] <= 3
        assert table2_report.metric(line, "fid_lenet_npz_fast")[1] > 0
        assert 0 <= line["scores"]["downstream_cnn_accuracy"] <= 1
        stated = line["scale"].split(", ")
        assert set(stated) < set(label(config, recipe).split(", "))
        assert "num_rounds 4 (recipe: 30000)" in stated or row != "paper-mode"
    missing = found["fed-avg-gan"]
    assert missing["missing"] == "fedgs baseline"
    assert not any(isinstance(value, int | float) for value in missing.values())
    text = (tmp_path / "out" / "table2.md").read_text()
    (fed_avg,) = [x for x in text.splitlines() if x.startswith("| Fed-Avg GAN |")]
    assert not re.search(r"\d", fed_avg)
    assert "num_rounds 4 (recipe: 30000)" in text
    assert "not to be compared" in text
    assert "Table 2" in capsys.readouterr().out


def test_the_row_of_fed_avg_gan_is_of_stored_runs(flags, tmp_path):
    own = {"steps": 2, "clients_per_round": 4, "batch_size": 4}
    given = DIGITS | {"output": str(tmp_path / "run"), "clients_per_node": 4}
    run, data = new_run("fedavg-gan", own, Asked(), given)
    train(run, data, lambda metrics: None, threading.Event())
    words = [*flags, "--rows=fed-avg-gan", f"--fed-avg-gan={tmp_path / 'run'}"]
    assert table2.main(words) == 0
    line = lines_of(tmp_path)["fed-avg-gan"]
    sent = line["communication"]
    assert sent["bytes_per_client"] == sum(update_bytes(run))
    assert 0 < sent["bytes_per_client"] - 4 * sent["values_per_node"] < 5000
    known = {
        row.relation: row.epsilon for row in run.guarantees() if row.unit == "user"
    }
    for relation in RELATIONS:
        assert scores.epsilon_of(line, "release", relation) == known[relation]
        assert scores.epsilon_of(line, "server", relation) > known[relation]
    assert line["scale"].startswith("steps 2 (default: 1000), clients_per_round 4")
    assert table2.main([*flags, "--fed-avg-gan=nowhere", "--rows=fed-avg-gan"]) == 2


def test_communication_is_what_flower_serialises(flags, tmp_path):
    assert table2.main([*flags, "--rows=paper-mode,full-participation"]) == 0
    found = lines_of(tmp_path)
    # 2 steps of 4 fakes of 16 x 16 float32, with an int64 label each; 4 gradients up.
    paper, full = (found[row]["communication"] for row in found)
    down, up = 8 * (256 * 4 + 8), 4 * 256 * 4
    assert down < paper["bytes_down"] < down + 1200
    assert up < paper["bytes_up"] < up + 1200
    assert paper["values_per_node"] == 8 * 256 + 4 * 256
    assert paper["messages_per_round"] == 1
    assert paper["rounds_measured"] == 4
    assert paper["bytes_per_client"] == pytest.approx(
        paper["bytes_down"] + paper["bytes_up"], abs=2
    )
    # 6 clients on 2 nodes share two messages in each direction.
    assert full["messages_per_round"] == 2
    assert full["values_per_node"] == 8 * 256 + 4 * 64
    both = full["bytes_down"] + full["bytes_up"]
    assert full["bytes_per_client"] == pytest.approx(both * 2 / 6, abs=2)
    assert full["bytes_per_client"] <= full["bytes_per_client_max"]
    assert full["bytes_before"] > 2 * down  # every node's warm start


@pytest.mark.parametrize("precision", ["exact", "compact"])
def test_measured_bytes_do_not_depend_on_the_release(tmp_path, monkeypatch, precision):
    of_data = {"num_clients": 866, "num_classes": 10}
    config = configured(
        "algorithm-2", "paper", {"message_precision": precision}, of_data
    )
    shape, step = config.release_shape, release_step(config)
    noise = torch.randn(shape) * config.noise_std
    values = [torch.zeros(shape), noise if step is None else to_grid(noise, step)]
    contents = [pack_release(value.float(), config) for value in values]
    replies = [
        Message(RecordDict({RECORD: ConfigRecord(record)}), 2, "train")
        for record in ({"tensors": contents[0]}, {"tensors": contents[1]}, {})
    ]
    sent = Message(RecordDict({RECORD: ConfigRecord({"round": 1})}), 2, "train")
    monkeypatch.setattr(TaskIdentity, "_node_id", 1)
    grid = MeasuringGrid(client_app, config, tmp_path / "lines.jsonl")
    monkeypatch.setattr(LocalGrid, "_deliver", lambda self, message: replies.pop(0))
    for _ in range(3):
        grid._deliver(sent)
    sizes = [line["bytes_up"] for line in read_json_lines(tmp_path / "lines.jsonl")]
    assert sizes[0] == sizes[1] == pytest.approx(len(contents[1]), rel=0.1)
    assert sizes[2] < 300  # a node without participants
    assert (len(contents[0]) < len(contents[1])) == (precision == "compact")


def test_a_round_that_was_repeated_counts_once(tmp_path):
    few = {"num_clients": 3, "clients_per_round": 2}
    config = configured("algorithm-2", "small", few)
    folder = RunFolder(tmp_path, config)
    before = {"round": 0, "node": 2, "bytes_down": 7, "bytes_up": 1}
    lines = [before, before]
    for down in (999, 10):  # the first attempt was lost
        lines.append({"round": 1, "node": 2, "bytes_down": down, "bytes_up": 2})
    lines.append({"round": 1, "node": 3, "bytes_down": 20, "bytes_up": 4})
    lines.append({"round": 2, "node": 2, "bytes_down": 40, "bytes_up": 8})
    text = "".join(json.dumps(line) + "\n" for line in lines)
    (tmp_path / "communication.jsonl").write_text(text + '{"round": 3, "no')
    assert communication(folder) == {
        "bytes_down": 23,
        "bytes_up": 5,
        "bytes_per_client": 21,  # (36 + 48) / 2 rounds / 2 participants
        "bytes_per_client_max": 24,
        "messages_per_round": 1.5,
        "rounds_measured": 2,
        "values_per_node": values_per_node(config),
        "bytes_before": 16,
    }
    (tmp_path / "communication.jsonl").unlink()
    assert_refused("not measured", communication, folder)


def round_bytes(
    config: ResolvedConfig, images: torch.Tensor, labels: torch.Tensor
) -> int:
    """Returns the bytes of a round with one client on a node; its release is noise."""
    client = (0,)
    images = round_fakes(images, config)
    request = FakeBatch(1, images, labels, participants=client, trainees=client)
    nothing = PerSampleGradients(torch.zeros(1, *config.release_shape))
    noise = NoiseStream(None, node_id=0, round=1)
    parts, step = [clip(nothing, config.clip_bound)], release_step(config)
    release = sanitize(parts, config.noise_std, noise, 1, 0, step)
    down, up = encode_batch(request, config), encode_answer(release, config, request)
    TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1
    records = [RecordDict({RECORD: ConfigRecord(dict(p))}) for p in (down, up)]
    return sum(message_bytes(Message(r, 2, "train")) for r in records)


@pytest.mark.parametrize("kind", ["noise", "halves", "black"])
def test_compact_rounds_of_algorithm_2_stay_below_the_target_whatever_they_show(kind):
    """5e4 bytes for one client and generator update, at the paper's own size."""
    pictures = {
        "noise": torch.rand(160, 1, 28, 28),
        "halves": torch.rand(160, 1, 28, 28).round(),
        "black": torch.zeros(160, 1, 28, 28),
    }
    known = {"num_clients": 866, "num_classes": 10}
    sizes = {}
    for row in ("paper-mode", "paper-mode-compact"):
        config = configured("algorithm-2", "paper", table2.ROWS[row][2], known)
        labels = torch.arange(160) % 10
        sizes[row] = round_bytes(config, pictures[kind], labels)
    assert sizes["paper-mode-compact"] <= 50_000
    fields = sizes["paper-mode"] - 4 * 150_528 - 8 * 160  # float32 values and labels
    assert 0 < fields < 1000


# ------------------------------------------------------------------ again


def test_called_again_it_trains_and_evaluates_nothing(flags, tmp_path, monkeypatch):
    flags.append("--rows=paper-mode-compact,fed-avg-gan")
    assert table2.main(flags) == 0
    first = (tmp_path / "out" / "table2.jsonl").read_bytes()
    monkeypatch.setattr(table2, "train", refuse)
    monkeypatch.setattr(evaluation, "evaluate", refuse)
    assert table2.main(flags) == 0
    assert (tmp_path / "out" / "table2.jsonl").read_bytes() == first
    with pytest.raises(AssertionError, match="trained"):
        table2.main([*flags, "--seeds=1"])


def test_an_interrupted_table_goes_on(flags, tmp_path, monkeypatch):
    flags.append("--rows=full-participation")
    stop = threading.Event()
    append = RunFolder.append_metrics

    def stop_after_round_1(self: RunFolder, metrics: dict) -> None:
        append(self, metrics)
        stop.set()

    with monkeypatch.context() as patch:
        patch.setattr(RunFolder, "append_metrics", stop_after_round_1)
        patch.setattr(stored_runs, "stop_on_signal", lambda: nullcontext(stop))
        assert table2.main(flags) == 1
    assert table2.main([*flags, "--no-training"]) == 0
    assert lines_of(tmp_path)["full-participation"]["missing"] == "not run yet"
    assert table2.main(flags) == 0
    found = lines_of(tmp_path)["full-participation"]
    assert found["round"] == 4
    (run,) = (tmp_path / "out" / "runs").iterdir()
    rounds = [line["round"] for line in read_json_lines(run / "metrics.jsonl")]
    assert rounds == [1, 2, 3, 4]


def test_runs_with_other_settings_are_other_runs(flags, tmp_path):
    flags.append("--rows=paper-mode")
    assert table2.main(flags) == 0
    assert table2.main([*flags, "--set=num_rounds=2", "--seeds=0"]) == 0
    assert len(list((tmp_path / "out" / "runs").iterdir())) == 2
    assert lines_of(tmp_path)["paper-mode"]["round"] == 2


# ------------------------------------------------------------------ what it says


def test_seeds_share_a_row_and_seeded_noise_is_no_guarantee(flags, tmp_path):
    flags += ["--rows=paper-mode", "--seeds=0,1", "--set=noise_seed=3"]
    assert table2.main(flags) == 0
    lines = read_json_lines(tmp_path / "out" / "table2.jsonl")
    assert [line["seed"] for line in lines] == [0, 1]
    header, rows = table2_report.cells(lines)
    mean = np.mean([table2_report.metric(line, "fid_")[1] for line in lines])
    assert rows[0][2].startswith(f"{mean:.4g} ± ")
    assert rows[0][header.index("epsilon, server")].count("*") == 2
    assert any("no guarantee" in note for note in table2_report.notes(lines))
    _, private = table2_report.cells([{**line, "is_private": True} for line in lines])
    assert not any("*" in cell for cell in private[0])


@pytest.mark.parametrize(
    ("flag", "words"),
    [
        ("--rows=paper", "rows = 'paper'"),
        ("--seeds=x", "seeds = 'x'"),
        ("--seeds=0,0", "seeds = '0,0': give each one once"),
        ("--rows=full-participation,full-participation", "give each one once"),
        ("--count=-5", "count = -5: give --count at least 10"),
        ("--count=0", "count = 0: give --count at least 10"),
        ("--scale=huge", "scale = 'huge'"),
        ("--set=num_rounds", "SETTING=VALUE"),
        ("--set=rounds=3", "rounds"),
        ("--set=num_rounds=three", "num_rounds = 'three'"),
        ("--set=num_rounds=0", "num_rounds = 0"),
        ("--data=npz:nowhere.npz", "nowhere.npz"),
    ],
)
def test_bad_input_is_refused_before_anything_is_written(
    flag, words, flags, tmp_path, capsys
):
    assert table2.main([*flags, flag]) == 2
    assert words in capsys.readouterr().err
    assert not (tmp_path / "out").exists()
