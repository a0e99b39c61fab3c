"""Strict YAML: what a plain scalar means, what is refused, and where things stand."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml
from hypothesis import given
from hypothesis import strategies as st

from islandctl.config.text import MAX_BYTES, parse
from islandctl.errors import ConfigError


def value_of(text: str) -> Any:
    return parse(f"key: {text}\n", "f.yaml").data["key"]


@pytest.mark.parametrize(
    ("text", "meant"),
    [
        ("no", "no"),
        ("on", "on"),
        ("yes", "yes"),
        ("off", "off"),
        ("n", "n"),
        ("22:22", "22:22"),
        ("1:30:00", "1:30:00"),
        ("2026-08-01", "2026-08-01"),
        ("1_000", "1_000"),
        ("0b11", "0b11"),
        ("010", 10),
        ("-010", -10),
        ("0o10", 8),
        ("0x1F", 31),
        ("1e-5", 1e-5),
        ("1.0e3", 1000.0),
        ("1e3", 1000.0),
        (".5", 0.5),
        ("1.", 1.0),
        ("+12", 12),
        ("true", True),
        ("FALSE", False),
        ("tRUE", "tRUE"),
        ("null", None),
        ("~", None),
        ("", None),
        ("'010'", "010"),
        ('"true"', "true"),
        ("::1", "::1"),
        ("=", "="),
    ],
)
def test_plain_scalars_follow_the_core_schema(text: str, meant: Any) -> None:
    value = value_of(text)
    assert value == meant
    assert type(value) is type(meant)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("a: .inf", "f.yaml:1:4: .inf is not a finite number"),
        ("a: -.INF", "f.yaml:1:4: -.INF is not a finite number"),
        ("a:\n  - .nan", "f.yaml:2:5: .nan is not a finite number"),
        ("a: 1e999", "f.yaml:1:4: 1e999 is too large for a number"),
        ("a: " + "9" * 5000, "f.yaml:1:4: a number of more than 100 digits"),
        ("a: 1\nb: 2\na: 3", "f.yaml:3:1: duplicate key 'a': lines 1 and 3"),
        ("s:\n  gpus: 8\n  x: 1\n  'gpus': 4", "f.yaml:4:3: duplicate key 'gpus': lines 2 and 4"),
        ("s: {a: 1, a: 2}", "f.yaml:1:11: duplicate key 'a': lines 1 and 1"),
        ("a: !!str 5", "f.yaml:1:4: tag 'tag:yaml.org,2002:str' is not allowed; write the plain value"),
        ("a: !!python/object/apply:os.system [ls]", "f.yaml:1:4: tag "),
        ("!!str a: 1", "f.yaml:1:1: a key takes neither tag nor anchor"),
        ("a: 1\n---\nb: 2", "f.yaml:2:1: a second document begins here; write one document a file"),
        ("a: &x 1\nb: *x", "f.yaml:2:4: alias *x is allowed only in a merge (<<: *x)"),
        ("a: &x 1\nb: {<<: *x}", "f.yaml:2:9: *x is no mapping, only a mapping can be merged"),
        ("b: {<<: *x}", "f.yaml:1:9: alias *x has no anchor &x before it"),
        ("a: &x\n  <<: *x", "f.yaml:2:7: alias *x has no anchor &x before it"),
        ("b: {<<: {c: 1}}", "f.yaml:1:9: a merge takes an alias (<<: *base) or a list of aliases"),
        ("b: {<<: [{c: 1}]}", "f.yaml:1:10: a merge's list takes only aliases"),
        ("x: &x {a: 1}\nb:\n  <<: *x\n  <<: *x", "f.yaml:4:3: duplicate key '<<': lines 3 and 4"),
        ("[a]: 1", "f.yaml:1:1: a key must be plain text"),
        (": 1", "f.yaml:1:1: a key is missing before ':'"),
        ("%YAML 1.1\n---\na: 1", "f.yaml:1:1: written for YAML 1.1; this is read as YAML 1.2"),
        ("a: b: c", "f.yaml:1:5: a second ': ' in this line; put the text in quotes"),
        ("a:\n\t- 1", "f.yaml:2:1: a tab cannot indent; use blanks"),
        ("a: [1, 2", "f.yaml:1:9: "),
        ("a: 'open", "f.yaml:1:9: "),
        ("a: 1\nb: x\x07y", "f.yaml:2:5: the character U+0007 is not allowed"),
        ("", "f.yaml: the file is empty"),
        ("# only a remark\n", "f.yaml: the file is empty"),
        ("a: " + "[" * 40 + "]" * 40, "levels deep"),
        ("a: " + "x" * MAX_BYTES, "f.yaml: more than 1024 KiB of text"),
        ("a: [" + "1," * 60_000 + "]", "more than 50000 values"),
    ],
)
def test_what_is_refused_names_its_place(text: str, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parse(text, "f.yaml")
    assert message in str(caught.value)


def test_places_of_keys_and_values() -> None:
    document = parse("model:\n  width: 8\n  list: [1, {b: 2}]\n", "f.yaml")
    assert document.values[()] == (1, 1)
    assert document.keys["model", "width"] == (2, 3)
    assert document.values["model", "width"] == (2, 10)
    assert document.values["model", "list", 1, "b"] == (3, 17)


def test_a_merge_may_be_overridden_and_the_earlier_source_wins() -> None:
    text = "a: &a {x: 1, y: 1, z: 1}\nb: &b {y: 2, w: 2}\nc:\n  z: 3\n  <<: [*a, *b]\n"
    document = parse(text, "f.yaml")
    assert document.data["c"] == {"z": 3, "x": 1, "y": 1, "w": 2}
    assert document.values["c", "x"] == (1, 11)
    assert document.values["c", "z"] == (4, 6)


def test_a_quoted_merge_key_is_a_key() -> None:
    assert parse("'<<': 1", "f.yaml").data == {"<<": 1}


def test_merges_cannot_explode() -> None:
    lines = ["a0: &a0 {x: [1, 1, 1, 1, 1, 1, 1, 1]}"]
    lines += [
        f"a{n}: &a{n} {{p: {{<<: *a{n - 1}}}, q: {{<<: *a{n - 1}}}, r: {{<<: *a{n - 1}}}}}" for n in range(1, 30)
    ]
    with pytest.raises(ConfigError, match="merges unfold to more than"):
        parse("\n".join(lines), "f.yaml")


def test_a_byte_order_mark_is_no_part_of_the_first_key() -> None:
    assert parse("\ufeffa: 1", "f.yaml").data == {"a": 1}


def _number_in_1_2_only(text: str) -> bool:
    """PyYAML writes YAML 1.1, where ``0E0`` is text and needs no quotes; in YAML 1.2 it is a number."""
    return re.fullmatch(r"[-+]?(\.\d+|\d+(\.\d*)?)([eE][-+]?\d+)?|0o[0-7]+|0x[0-9a-fA-F]+", text) is not None


TEXT = st.text(st.characters(exclude_characters="\x85\u2028\u2029", exclude_categories=("Cs",)), max_size=12).filter(
    lambda text: not _number_in_1_2_only(text)
)
"""Without the characters that YAML 1.1 breaks lines at, and YAML 1.2 does not."""
KEYS = TEXT.filter(bool)

plain = st.recursive(
    st.none() | st.booleans() | st.integers(-(10**20), 10**20) | TEXT,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


class _NoAlias(yaml.SafeDumper):
    def ignore_aliases(self, data: Any) -> bool:
        return True


@given(st.dictionaries(KEYS, plain, min_size=1, max_size=4))
def test_what_a_yaml_writer_quotes_comes_back(data: dict[str, Any]) -> None:
    text = yaml.dump(data, Dumper=_NoAlias, allow_unicode=True)
    try:
        document = parse(text, "f.yaml")
    except ConfigError as error:
        assert "not allowed" in str(error) or "must be plain text" in str(error)  # noqa: PT017
        return
    assert document.data == data


@given(st.text(max_size=200))
def test_any_text_is_read_or_refused_by_name(text: str) -> None:
    try:
        document = parse(text, "f.yaml")
    except ConfigError as error:
        assert str(error).startswith("f.yaml:")  # noqa: PT017
    else:
        assert () in document.values
