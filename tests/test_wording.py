"""How values read."""

from typing import Any

import pytest

from train.wording import count, duration, gib, number, percent, words


@pytest.mark.parametrize(
    ("size", "text"),
    [(2**30, "1.00 GiB"), (int(139.8 * 2**30), "139.8 GiB"), (50 * 2**20, "50.0 MiB"), (0, "0.0 MiB")],
)
def test_gib(size: int, text: str):
    assert gib(size) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (0, "0"),
        (0.25, "0.25"),
        (874, "874"),
        (999.6, "1.00k"),
        (24_123, "24.1k"),
        (123_456, "123k"),
        (1_843_200, "1.84M"),
        (7.62e9, "7.62B"),
        (15e12, "15.0T"),
    ],
)
def test_count(value: float, text: str):
    assert count(value) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (2.345, "2.3 s"),
        (59.4, "59 s"),
        (59.7, "1 min"),
        (92.4, "1 min 32 s"),
        (3600, "1 h"),
        (7325, "2 h 2 min"),
        (90_061, "1 d 1 h"),
    ],
)
def test_duration(seconds: float, text: str):
    assert duration(seconds) == text


@pytest.mark.parametrize(
    ("value", "text"),
    [
        (None, "–"),
        (12345, "12,345"),
        (0.5, "0.5000"),
        (1234.5, "1234"),
        (98765.4, "98,765"),
        ("x", "x"),
        (True, "True"),
    ],
)
def test_number(value: Any, text: str):
    assert number(value) == text


def test_percent_and_words():
    assert percent(0.3812) == "38.1%"
    assert words("bits_per_byte") == "bits per byte" and words("macro_f1") == "macro F1"
