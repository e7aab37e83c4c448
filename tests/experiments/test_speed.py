"""`fedgs bench`: a table of this machine, on small problems."""

import torch

from command_line import printed, refused
from experiments.speed import bench


def test_bench_prints_steps_by_width_and_precision(fedgs, monkeypatch):
    monkeypatch.setattr(bench, "WIDTHS", (8,))
    monkeypatch.setattr(bench, "REPEATS", 2)
    out = printed(fedgs("bench"), "")
    lines = [line for line in out.splitlines() if "│" in line]
    rows = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [r[:3] for r in rows] == [["8", k, "32"] for k in ("float32", "bfloat16")]
    # With hundredths: slow processors take less than one a second.
    assert all("." in cell and float(cell) > 0 for row in rows for cell in row[3:])


def test_a_device_that_is_none_or_not_here_is_refused_by_what_it_is(fedgs, monkeypatch):
    refused(fedgs("bench", "--device", "cpu:0"), "device = 'cpu:0': ")
    for count, there in ((0, "no GPU is here"), (2, "2 GPUs are here, from 0 on")):
        monkeypatch.setattr(torch.cuda, "is_available", lambda count=count: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda count=count: count)
        refused(fedgs("bench", "--device", "cuda:2"), f"device = cuda:2: {there}; give")
