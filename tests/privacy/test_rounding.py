"""Bounds in words: an upper bound is never less than it is, a lower one never more."""

import re
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from fedgs.app.commands import audit_report, privacy, privacy_words
from fedgs.app.report import words
from fedgs.audit.finding import Finding
from fedgs.privacy.accountant import AS_PUBLISHED, Statement
from fedgs.privacy.rounding import lower, upper
from fedgs.runs.data_card import in_words, to_outsiders

ROOT = Path(__file__).resolve().parents[2]
EPSILON, UP = 24.38161, "24.39"


@given(value=st.floats(0, 1e300), digits=st.integers(2, 6))
def test_nothing_is_rounded_to_the_wrong_side(value, digits):
    assert float(lower(value, digits)) <= value <= float(upper(value, digits))
    if 1e-300 < value < 100:  # and by less than one of the last digit
        assert float(upper(value, digits)) <= value * (1 + 1.01 * 10 ** (1 - digits))


@pytest.mark.parametrize(
    ("value", "up", "down"),
    [
        (EPSILON, UP, "24.38"),
        (9.9936, "9.994", "9.993"),
        (99.999, "100", "99.99"),
        (610.3442, "610.35", "610.34"),
        (168.8, "168.8", "168.8"),
        (217_012_345, "2.171e+08", "2.170e+08"),  # nobody counts so many digits
        (0.26231, "0.2624", "0.2623"),
        (1e-5, "1e-05", "1e-05"),  # as it was typed
        (0, "0", "0"),
        (None, "unbounded", "unbounded"),
        (float("inf"), "unbounded", "unbounded"),
    ],
)
def test_the_form_of_a_bound(value, up, down):
    assert (upper(value), lower(value)) == (up, down)


def label(**own: object) -> dict:
    who = {"adversary": "release", "unit": "client", "epsilon": {"zero-out": EPSILON}}
    bound = {"lower_bound": EPSILON, "epsilon": EPSILON, "delta": 1.23456789e-5}
    return {
        "guarantee": "holds",
        "epsilon": EPSILON,
        "delta": 1.23456001e-5,
        "relation": "zero-out",
        "adversary": "release",
        "unit_of_privacy": "one client",
        "who_sees_what": [who],
        "public": ["10 clients"],
        "audited_bound": bound,
    } | own


def test_every_place_that_tells_an_epsilon_rounds_it_up():
    row = Statement("valid", "client", "zero-out", EPSILON, 1.23456001e-5, "exact")
    told = [
        privacy._number(row),
        words.stated(EPSILON),
        "\n".join(privacy_words.explained(label())),
        privacy_words.protection(label()),
        to_outsiders(label()),
        in_words(EPSILON, "epsilon"),
    ]
    assert [UP in text for text in told] == [True] * len(told)
    assert not [text for text in told if "24.38" in text]
    assert "delta 1.23457e-05" in told[2]
    assert "a factor of 2.88" not in told[2]  # e^24.38161 = 3.88e10
    assert in_words(label()["audited_bound"]) == (
        "lower_bound 24.38, epsilon 24.39, delta 1.23457e-05"
    )
    assert "delta 1.23457e-05" in privacy._title(row)
    published = Statement(AS_PUBLISHED, "client", "replace-one", 598.6049, 1e-5, "RDP")
    assert privacy._number(published) == "598.605"  # a figure, not a bound


def test_an_audit_rounds_what_it_proves_down_and_what_is_claimed_up(tmp_path, capsys):
    numbers = {"rounds": 1, "delta": 1e-5, "lower_bound": 9.9999, "epsilon": 9.0001}
    who = {"adversary": "release", "relation": "replace-one", "theorem": "exact"}
    finding = Finding(attack="A takes part", **who, **numbers)
    audit_report.conclude(tmp_path, {}, [finding], [], [], as_json=False)
    out, err = capsys.readouterr()
    assert "epsilon is at least 9.999, 9.001 is claimed" in err
    assert re.search(r"9\.99 .*9\.001", out)


# An epsilon, a delta or what was spent, in a format that rounds to nearest.
TO_NEAREST = re.compile(
    r"\{[^{}]*(?:epsilon|delta|spent|claimed|lower_bound)[^{}]*:\.?\d*[efg]\}"
)
# What people typed, and the paper's own figures.
GIVEN = ("target_epsilon", "client_epsilon", "membership_epsilon", "limits.delta")
GIVEN += (
    "row.epsilon:.3f",
    "row.epsilon:.4g",
    "LEAST_DELTA",
    "{delta:g}); give",
    "2 * epsilon",
)
GIVEN += (
    "-eps{",
    "self.epsilon:g",
    "{epsilon:g}: the",
    'if epsilon is None else f"{epsilon:g}"',
    "{delta:g}):",
)


def test_no_product_code_rounds_a_bound_to_nearest():
    found = [
        f"{path.relative_to(ROOT)}: {line.strip()}"
        for package in ("fedgs", "clients", "server", "experiments")
        for path in (ROOT / package).rglob("*.py")
        for line in path.read_text().splitlines()
        if TO_NEAREST.search(line) and not any(text in line for text in GIVEN)
    ]
    assert found == []
