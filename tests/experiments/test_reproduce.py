"""`fedgs privacy --reproduce`: every number agrees or its difference is explained."""

import pytest

from experiments.paper import reproduce
from fedgs.files import read_json

pytest.importorskip("autodp")

FAST = (
    *("mu of epsilon", "epsilon of", "paper's Table 2", "the same average"),
    *("one draw per round, K 1000, T 20000: proved", "the algorithm as it is"),
    *("balanced", "a draw for every fake, K 1000: ", "32 fakes share a draw, K 1000"),
    *("the same of all", "the text's noise, one draw per round, K 1000"),
)


NUMBERS = read_json(reproduce.STORED_NUMBERS)["numbers"]


def check(found):
    for result in reproduce.results(found):
        assert result.agrees or result.note, result
        if result.dominating is not None and "noise" not in result.what:
            # Naive figures are below the valid ones.
            assert result.dominating > result.ours


def test_quick_numbers_agree():
    chosen = [number for number in NUMBERS if number["what"].startswith(FAST)]
    assert len(chosen) == 31
    check(chosen)


@pytest.mark.slow
def test_all_numbers_agree():
    assert len({number["what"] for number in NUMBERS}) == len(NUMBERS) == 98
    check(NUMBERS)


def test_digits_of_the_reference_are_the_tolerance():
    for reference, inside, outside in (
        ("346.66", 346.6551, 346.6540),
        ("12.600", 12.6004, 12.6006),
        ("2,059", 2059.4, 2057.7),
        ("8.5e-4", 8.47e-4, 8.44e-4),
        (">= 0.9998", 0.9999, 0.9997),
        ("<= 1e-15", 1e-16, 1e-14),
    ):
        assert reproduce.agrees(reference, inside), reference
        assert not reproduce.agrees(reference, outside), reference


@pytest.mark.parametrize(
    ("ours", "differs", "code"),
    [(3.0, "", 0), (3.2, "", 1), (3.02, "a grid", 0), (3.2, "a grid", 1)],
)
def test_what_is_wrong_and_not_explained_is_exit_code_1(
    monkeypatch, capsys, ours, differs, code
):
    monkeypatch.setitem(reproduce.NUMBERS, "fixed", lambda: ours)
    row = {"what": "a number", "reference": "3.00", "quantity": "fixed"}
    stored = {"settings": {}, "numbers": [row | {"differs": differs}]}
    monkeypatch.setattr(reproduce, "read_json", lambda path: stored)
    for as_json in (False, True):
        if code:
            with pytest.raises(reproduce.Exit) as stopped:
                reproduce.main(as_json)
            assert stopped.value.exit_code == code
        else:
            reproduce.main(as_json)
    out, err = capsys.readouterr()
    assert ("NOT EXPLAINED" in out) == bool(code)
    assert ('"note": "a grid"' in out) == (ours == 3.02)
    assert "1 of 1" in err
