"""`fedgs bench`: a table of this machine, on small problems."""

from command_line import printed
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
