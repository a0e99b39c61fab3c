"""Single values changed in place: the file means what it should, and every other byte is as it was."""

from __future__ import annotations

import copy
import itertools
import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from islandctl.config.edit import edited
from islandctl.config.text import parse
from islandctl.errors import ConfigError

TOKEN = "7.77 Gbit/s"
SECTIONS = {"wan": ("up", "down", "rtt"), "storage": ("read", "write"), "gpu": ("type", "bf16")}


@st.composite
def profiles(draw: st.DrawFn) -> str:
    """Texts as people write them: sections in any order and style, comments, blank lines, odd line ends."""
    end, indent = draw(st.sampled_from(["\n", "\r\n"])), draw(st.sampled_from([1, 2, 4]))
    quotes = st.sampled_from(["", "'", '"'])
    head = draw(st.lists(st.sampled_from(["# a comment: with a colon", "", "---"]), max_size=1))
    lines = [*head, "name: east  # é🙂"]
    for section in draw(st.permutations(sorted(SECTIONS))):
        keys = draw(st.lists(st.sampled_from(SECTIONS[section]), unique=True))
        values = {key: f"{at + 1} Mbit/s" for at, key in enumerate(keys)}
        style = draw(st.sampled_from(["block", "flow", "wide flow", "missing"]))
        if style == "missing" or (style == "block" and not keys):
            continue
        if style == "block":
            lines.append(f"{section}:{draw(st.sampled_from(['', '   # why', f' &{section}']))}")
            for key, value in values.items():
                quote = draw(quotes)
                comment = draw(st.sampled_from(["", "      # of the site", " "]))
                lines.append(
                    f"{' ' * indent}{key}:{draw(st.sampled_from([' ', '   ']))}{quote}{value}{quote}{comment}"
                )
                lines += draw(st.lists(st.sampled_from(["", f"{' ' * indent}# {key}: no key"]), max_size=1))
        else:
            gap = f"{end}{' ' * indent}" if style == "wide flow" else ""
            inner = f",{gap or ' '}".join(f"{key}: {value}" for key, value in values.items())
            comma = draw(st.sampled_from(["", ","])) if keys else ""
            lines.append(f"{section}: {{{gap}{inner}{comma}{gap}}}{draw(st.sampled_from(['', '  # flow']))}")
        lines += draw(st.lists(st.sampled_from(["", "# about the next one"]), max_size=1))
    lines += draw(st.lists(st.sampled_from(["hosts: [a, b]", "work_dir: ~/x  # last"]), unique=True))
    text = end.join(lines) + draw(st.sampled_from(["", end, end + end]))
    return draw(st.sampled_from(["", "\ufeff"])) + text


def alike(one: str, other: str) -> int:
    """How many characters both begin with."""
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[0] == pair[1], zip(one, other, strict=False)))


@given(profiles(), st.sampled_from([f"{section}.{key}" for section, keys in SECTIONS.items() for key in keys]))
def test_one_place_changes_and_nothing_else(text: str, path: str) -> None:
    before = parse(text, "f").data
    wanted = copy.deepcopy(before)
    section, _, key = path.partition(".")
    wanted.setdefault(section, {})[key] = TOKEN
    new = edited(text, {path: TOKEN}, "f")
    assert parse(new, "f").data == wanted
    first = alike(text, new)
    last = alike(text[first:][::-1], new[first:][::-1])
    gone, come = text[first : len(text) - last], new[first : len(new) - last]
    assert gone in before.get(section, {}).get(key, "")
    around = re.escape(gone) if gone else r"[\s,{}:\w'\"]*"
    assert re.fullmatch(rf"{around}|[\s,{{}}:\w'\"./]*", come), (gone, come)
    assert "\n" not in new.replace("\r\n", "") or "\r\n" not in text
    assert edited(new, {path: TOKEN}, "f") == new


@settings(max_examples=20)
@given(profiles())
def test_several_changes_are_those_one_after_another(text: str) -> None:
    changes = {f"{section}.{key}": f"{at} GB/s" for at, section in enumerate(SECTIONS) for key in SECTIONS[section]}
    one_by_one = text
    for path, value in changes.items():
        one_by_one = edited(one_by_one, {path: value}, "f")
    assert edited(text, changes, "f") == one_by_one


@pytest.mark.parametrize(
    ("text", "path", "wanted"),
    [
        ("wan:\n  up: 1 Gbit/s # x\n", "wan.up", f"wan:\n  up: {TOKEN} # x\n"),
        ("wan:\n  up:   # x\n", "wan.up", f"wan:\n  up: {TOKEN}   # x\n"),
        (
            "wan:\n  up: 1 B\n  to: {a: 1}\nname: x\n",
            "wan.rtt",
            f"wan:\n  up: 1 B\n  to: {{a: 1}}\n  rtt: {TOKEN}\nname: x\n",
        ),
        ("name: x", "wan.up", f"name: x\n\nwan:\n  up: {TOKEN}"),
        ('{"name": "x"}\n', "wan.up", f'{{"name": "x", "wan": {{"up": "{TOKEN}"}}}}\n'),
        ('{"wan": {}}', "wan.up", f'{{"wan": {{"up": "{TOKEN}"}}}}'),
        ("a: &b\n  up: 1\nwan:\n  <<: *b\n", "wan.up", f"a: &b\n  up: 1\nwan:\n  <<: *b\n  up: {TOKEN}\n"),
        ("wan:\n  up: |\n    text\nx: 1\n", "wan.rtt", f"wan:\n  up: |\n    text\n  rtt: {TOKEN}\nx: 1\n"),
    ],
)
def test_cases(text: str, path: str, wanted: str) -> None:
    assert edited(text, {path: TOKEN}, "f") == wanted


@pytest.mark.parametrize(
    ("text", "path"),
    [
        ("wan:\n  up: |\n    1 Gbit/s\n", "wan.up"),
        ("wan:\n  up: [1, 2]\n", "wan.up"),
        ("wan: 7\n", "wan.up"),
        ("wan: [7]\n", "wan.up"),
        ("a: &b\n  wan:\n    up: 1\n    rtt: 2\n<<: *b\n", "wan.up"),
        ("wan:\n  up: 1\n  up: 2\n", "wan.up"),
        ("a: &x\n  b: 1\nwan: &x\n  up: 1\n", "wan.up"),
    ],
)
def test_what_cannot_be_changed_in_place_is_refused(text: str, path: str) -> None:
    with pytest.raises(ConfigError):
        edited(text, {path: TOKEN}, "f")


def test_a_key_with_a_point_in_it() -> None:
    new = edited("a: 1\n", {("examined", "wan.up"): "x", ("examined", "wan.rtt"): "y"}, "f")
    assert parse(new, "f").data == {"a": 1, "examined": {"wan.up": "x", "wan.rtt": "y"}}
    assert edited(new, {("examined", "wan.up"): "z"}, "f") == new.replace("wan.up: x", "wan.up: z")


def test_a_nested_section_at_the_end() -> None:
    data: dict[str, Any] = parse(edited("a: 1\n", {"b.c.d": "x"}, "f"), "f").data
    assert data == {"a": 1, "b": {"c": {"d": "x"}}}
