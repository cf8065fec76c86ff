"""Answer verification: numbers as numbers, text as text, every occurrence once."""

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.rewards.verify import numbers, verify


@pytest.mark.parametrize(
    "text",
    [
        "9472",
        "结果是9472元",
        "9472.",
        "9472。",
        "It is 9,472.",
        "９４７２",
        "=9472",
        "256×37=9472",
        "9472.0",
        "9472km",
        "USD9472",
        "**9472**",
        "+9472",
        "9.472e3",
        "答案：9472",
        "1-9472",
        "结果1：9472，结果2：5",
        "9472/5",
        "(9472)",
        "9472%",
        "on 2025-03-07: 9472",
        "1.2.3 9472",
        "Sure.9472",
        "No.9472",
        "9\u202f472",
        "9\u2009472",
        "9\u00a0472",
        "9'472",
        "9’472",
    ],
)
def test_found(text: str) -> None:
    assert verify(["9472"], text) == [True]


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("5", "2025"),
        ("5", "15"),
        ("5", "5.3"),
        ("5", "-5"),
        ("5", "−5"),
        ("5", "–5"),
        ("5", "‐5"),
        ("5", "‑5"),
        ("0.5", "No.5"),
        ("1000000", "1000000.9"),
        ("1000000", "1000000.5"),
        ("10000000", "10000009.5"),
        ("1000000.5", "1000000"),
        ("9472", "9 472"),
        ("-5", "5"),
        ("-5", "10-5"),
        ("-5", "5 - 5 = 10"),
        ("5", "1,005"),
        ("5", "5,000"),
        ("5", "0.5"),
        ("5", ".5"),
        ("5", "5e3"),
        ("5", "3.5.1"),
        ("30", "14:30"),
        ("30", "14:30:00"),
        ("3", "2025-03-07"),
        ("9472", "9473"),
        ("9472", ""),
        ("20758280", "20758281"),  # integers must be equal, though these differ by less than a millionth
        ("0.5", "0.50001"),
        ("", "anything"),
        ("  ", "a  b"),
        ("9472", "9" * 5000),
    ],
)
def test_not_found(expected: str, text: str) -> None:
    assert verify([expected], text) == [False]


@pytest.mark.parametrize(
    ("expected", "text"),
    [
        ("-285", "结果是-285。"),
        ("-285", "x = −285"),
        ("-285", "(-285)"),
        ("-5", "-5°C"),
        ("-5", "气温-5°C"),
        ("-5", "about –5"),
        ("10", "5–10"),
        ("5", "No.5"),
        ("0.5", "结果是.5"),
        ("30", "29.9999999999996"),
        ("5", "5-10"),
        ("10", "5-10"),
        ("5", "- 5"),
        ("1e-05", "about 1e-05."),
        ("0.00001", "1e-05"),
        (".5", "0.5"),
        ("1,234,567.5", "1234567.5"),
        ("62.1371", "62.137100"),
        ("0.333333333", "0.3333333"),  # within a millionth
        ("9472", "9472.00000001"),
        ("９４７２", "9472"),
        ("+7", "7"),
    ],
)
def test_numbers_by_value(expected: str, text: str) -> None:
    assert verify([expected], text) == [True]


@pytest.mark.parametrize(
    ("expected", "text", "found"),
    [
        ("Good morning", "He said: good  MORNING!", True),
        ("sun", "It is sunny", False),
        ("sunny", "It is sunny.", True),
        ("sunny", "现在sunny天", True),  # a CJK neighbour is no Latin word
        ("晴", "北京今天晴朗", True),
        ("北京", "我在北京市", True),
        ("多云", "天气:多 云", False),
        ("café", "Cafés", False),
        ("café", "CAFÉ", True),
        ("ＡＢＣ", "abc", True),
        ("14:30", "2025-03-07 14:30:00", True),
        ("14:30", "09:14:30", False),
        ("14:30", "现在14:30。", True),
        ("14:3", "14:30", False),
        ("28°C", "北京28°C", True),
        ("28°C", "128°C", False),
        ("28°C", "-28°C", False),
        ("8°C", "2.8°C", False),
        ("28°C", "晴,28°C", True),
        ("28°C", "28 °C", True),
        ("28°C", "28 ℃", True),
        ("28 °C", "28°C", True),
        ("28°C", "−28°C", False),
        ("28°C", "20–28°C", True),
        ("50%", "50 %", True),
        ("50%", "50％", True),
        ("5 km", "5km", True),
        ("-5°C", "−5°C", True),
        ("ガ", "ｶﾞ", True),
        ("v1.2", "v1.2.3", False),
        ("a+b (c)", "A+B (C)", True),
    ],
)
def test_text(expected: str, text: str, found: bool) -> None:
    assert verify([expected], text) == [found]


def test_every_occurrence_counts_once() -> None:
    assert verify(["5", "5"], "5") == [True, False]
    assert verify(["5", "5"], "5 and 5.0") == [True, True]
    assert verify(["5", "6", "5"], "6, 5") == [True, True, False]
    assert verify(["晴", "晴"], "今天晴") == [True, False]
    assert verify(["晴", "晴"], "今天晴，明天晴") == [True, True]
    assert verify([], "5") == []


@pytest.mark.parametrize(
    ("expected", "text", "found"),
    [
        (["晴", "晴朗"], "悉尼晴朗", [False, True]),
        (["晴", "晴朗"], "悉尼晴朗，北京晴", [True, True]),
        (["晴朗", "晴"], "北京晴，悉尼晴朗", [True, True]),
        (["28", "28°C"], "28°C", [False, True]),
        (["28", "28°C"], "28°C, that is 28 degrees", [True, True]),
        (["28", "28°C", "28°C"], "28°C", [False, True, False]),
        (["5", "5°C", "5 km"], "5km at 5 °C, and 5", [True, True, True]),
        (["Hello", "Hello world"], "Hello world", [False, True]),
        (["14:30", "14:30:00"], "14:30:00", [False, True]),
        (["5", "5.0"], "5", [True, False]),
    ],
)
def test_no_two_answers_share_a_place(expected: list[str], text: str, found: list[bool]) -> None:
    assert verify(expected, text) == found


def test_real_tasks() -> None:
    reply = "(771-242)+84*27等于2797，14**2等于196，2935*998的结果是2,929,130。"
    assert verify(["2797", "196", "2929130"], reply) == [True, True, True]
    assert verify(["475", "-285"], "9975/21=475，(317-658)+7*8=-285") == [True, True]


def test_numbers_of_a_text() -> None:
    assert numbers("3, -4.5; 1,234 和 2e3: 10-5, 14:30 2025/3/7 v1.2.3") == [3, -4.5, 1234, 2000, 10, 5]
    assert numbers("1,2345") == [1, 2345]
    assert numbers("9e999 " + "1" * 41) == []


@settings(deadline=None)
@given(st.integers(-(10**12), 10**12), st.sampled_from(["{}", "结果是{}元", "It is {}.", "={}", "({})", "{}, 好"]))
def test_any_integer_is_found_wherever_it_stands_and_its_neighbours_are_not(value: int, frame: str) -> None:
    for shown in (str(value), f"{value:,}", f"{value}.0"):
        text = frame.format(shown)
        assert verify([str(value)], text) == [True]
        assert verify([str(value + 1)], text) == [False]
        if value:
            assert verify([str(-value)], text) == [False]


@settings(deadline=None)
@given(st.text(max_size=60), st.lists(st.text(max_size=8), max_size=4))
def test_never_raises_and_never_exceeds_the_expected(text: str, expected: list[str]) -> None:
    assert len(verify(expected, text)) == len(expected)
    assert all(
        verify([answer], answer) == [True] for answer in expected if answer.strip() and answer.isascii() and answer.isalpha()
    )


@pytest.mark.parametrize(
    ("expected", "text", "there"),
    [
        ("42", "-$42", False),
        ("42", "\uff0d\uffe542", False),
        ("$42", "a loss of -$42", False),
        ("-42", "-$42", True),
        ("-$42", "-42", True),
        ("42", "5-$42", True),
        ("$50", "$42-$50", True),
        ("1000", "+\u20ac1,000", True),
        ("$42", "It costs $42.", True),
    ],
)
def test_a_sign_before_a_currency_is_the_number_s(expected: str, text: str, there: bool) -> None:
    assert verify([expected], text) == [there]
