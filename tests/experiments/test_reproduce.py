"""`fedgs privacy --reproduce`: every number agrees or its difference is explained."""

import pytest

from experiments.paper import reproduce
from experiments.paper.reproduced_numbers import Row, rows

pytest.importorskip("autodp")

FAST = (
    *("mu of epsilon", "epsilon of", "paper's Table 2", "the same average"),
    *("one draw per round, K 1000, T 20000: proved", "the algorithm as it is"),
    *("balanced", "a draw for every fake, K 1000: ", "32 fakes share a draw, K 1000"),
    *("the same of all", "the text's noise, one draw per round, K 1000"),
)


def check(found):
    for result in reproduce.results(found):
        assert result.agrees or result.note, result
        if result.dominating is not None and "noise" not in result.what:
            # Naive figures are below the valid ones.
            assert result.dominating > result.ours


def test_quick_numbers_agree():
    chosen = [row for row in rows() if row.what.startswith(FAST)]
    assert len(chosen) == 31
    check(chosen)


@pytest.mark.slow
def test_all_numbers_agree():
    found = rows()
    assert len({row.what for row in found}) == len(found) == 98
    check(found)


@pytest.mark.parametrize(
    ("reference", "ours", "same"),
    [
        ("346.66", 346.6551, True),
        ("346.66", 346.6540, False),
        ("12.600", 12.6004, True),
        ("12.600", 12.6006, False),
        ("329", 329.49, True),
        ("2,059", 2057.7, False),
        ("8.5e-4", 8.47e-4, True),
        ("8.5e-4", 8.44e-4, False),
        (">= 0.9998", 0.9999, True),
        (">= 0.9998", 0.9997, False),
        ("<= 1e-15", 1e-16, True),
    ],
)
def test_digits_of_the_reference_are_the_tolerance(reference, ours, same):
    assert reproduce.agrees(reference, ours) == same


def test_a_wrong_number_is_exit_code_1(monkeypatch, capsys):
    wrong = [Row("a number", "3.0", lambda: 3.2), Row("another", "3.0", lambda: 3.0)]
    monkeypatch.setattr(reproduce, "rows", lambda: wrong)
    with pytest.raises(reproduce.typer.Exit) as stopped:
        reproduce.main(as_json=False)
    assert stopped.value.exit_code == 1
    out, err = capsys.readouterr()
    assert "NOT EXPLAINED" in out
    assert "2 of 2" in err


def test_an_explanation_covers_a_small_difference_only(monkeypatch, capsys):
    for ours, code in ((3.02, 0), (3.2, 1)):
        explained = [Row("a number", "3.00", lambda n=ours: n, differs="a grid")]
        monkeypatch.setattr(reproduce, "rows", lambda found=explained: found)
        if code:
            with pytest.raises(reproduce.typer.Exit):
                reproduce.main(as_json=True)
        else:
            reproduce.main(as_json=True)
    assert '"note": "a grid"' in capsys.readouterr().out
