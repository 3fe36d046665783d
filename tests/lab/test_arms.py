"""Arms are read as users write them, and what this version cannot run is said."""

import pytest

from memnorm import norms
from memnorm.lab.arms import parse_arm, unsupported
from memnorm.lab.errors import UsageError
from memnorm.lab.spec import RunSpec


@pytest.mark.parametrize(
    ("word", "norm", "scheme"),
    [
        ("bn", "bn", "single"),
        ("bn-1", "bn", "single"),
        ("mbn", "mbn", "double"),
        ("mbn-1", "mbn", "single"),
        (" MBN-2 ", "mbn", "double"),
    ],
)
def test_arms_are_read_as_users_write_them(word, norm, scheme):
    assert parse_arm(word) == {"norm": norm, "scheme": scheme}


@pytest.mark.parametrize(
    ("word", "scheme", "taken"),
    [("mbn", None, "double"), ("mbn", "single", "single"), ("bn", "double", "double"), ("mbn-1", "single", "single")],
)
def test_a_scheme_of_its_own_decides_for_a_norm_without_a_number(word, scheme, taken):
    assert parse_arm(word, scheme)["scheme"] == taken


def test_a_scheme_that_contradicts_the_number_is_refused():
    with pytest.raises(UsageError, match="mbn-2 means the scheme double; got single"):
        parse_arm("mbn-2", "single")


@pytest.mark.parametrize("word", ["", "-", "-1", "mbn-3", "mbn_2", "batchnorm", "1"])
def test_an_arm_that_is_none_is_refused_with_those_that_are(word):
    with pytest.raises(UsageError, match=rf"there is no norm {word!r}; there are bn, .*mbn"):
        parse_arm(word)


def test_double_forward_with_a_norm_that_records_nothing_is_refused():
    silent = [name for name in norms.available() if not norms.get(name).records]
    assert silent
    for name in silent:
        with pytest.raises(UsageError, match=rf"{name}-2: Double-Forward needs a norm that .*{name}"):
            parse_arm(f"{name}-2")
        assert f"{name!r} has none" in unsupported(RunSpec(norm=name, recalibrate=10))
    assert "nope" in unsupported(RunSpec(norm="nope"))
    assert unsupported(RunSpec(norm="mbn", scheme="double")) is None
