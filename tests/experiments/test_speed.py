"""`fedgs bench`: a table of this machine, on small problems."""

from command_line import printed
from experiments.speed import bench


def test_bench_prints_steps_by_width_and_precision(fedgs, monkeypatch):
    monkeypatch.setattr(bench, "WIDTHS", (8,))
    monkeypatch.setattr(bench, "REPEATS", 2)
    out = printed(fedgs("bench"), "")
    rows = [line.split("│") for line in out.splitlines() if "│" in line]
    of_steps = [[cell.strip() for cell in row[1:-1]] for row in rows]
    assert [row[:2] for row in of_steps] == [["8", "float32"], ["8", "bfloat16"]]
    assert all(float(cell) > 0 for row in of_steps for cell in row[2:])
