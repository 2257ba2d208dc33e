"""Compute capabilities in people's spellings."""

from __future__ import annotations

import pytest

from trtfuse.errors import InputError
from trtfuse.targets import capability

OFFERED = ("7.5", "8.0", "8.6", "8.9", "12.0", "12.1")


@pytest.mark.parametrize("text", ["8.9", "89", "sm_89", "SM89", "sm89", "compute_89", " 8.9 "])
def test_spellings_of_one(text):
    assert capability.read([text], OFFERED) == ("8.9",)


@pytest.mark.parametrize("text", ["12.0", "120", "sm_120"])
def test_two_digits_before_the_point(text):
    assert capability.read([text], OFFERED) == ("12.0",)


def test_several_each_once_and_in_order():
    assert capability.read(["8.9,86", "sm_89", "7.5"], OFFERED) == ("8.9", "8.6", "7.5")
    assert capability.read([], OFFERED) == ()


@pytest.mark.parametrize(
    ("text", "word"), [("all", "portable"), ("Portable", "portable"), ("native", "current")]
)
def test_words(text, word):
    assert capability.read([text], OFFERED) == (word,)


@pytest.mark.parametrize("text", ["9.9", "ampere", "8", "sm_90", "8.9.1", "x", "sm_"])
def test_others_are_refused_with_the_valid_ones(text):
    with pytest.raises(InputError, match=r"use 7\.5, 8\.0, 8\.6, 8\.9, 12\.0, 12\.1, or portable"):
        capability.read([text], OFFERED)


def test_portable_stands_alone():
    with pytest.raises(InputError, match="stands alone"):
        capability.read(["all", "8.9"], OFFERED)
