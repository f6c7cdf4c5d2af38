"""JSON of others: a value or a ValueError, whatever it holds."""

import json

import pytest

from sigsoftmax.records.parsing import DEEPEST, check_nesting, parse_json


def nested(levels, opening="[", closing="]"):
    return opening * levels + closing * levels


@pytest.mark.parametrize("encode", [str, str.encode])
def test_the_deepest_level_is_the_same_for_lists_and_objects(encode):
    assert parse_json(encode(nested(DEEPEST))) == json.loads(nested(DEEPEST))
    for text in (nested(DEEPEST + 1), '{"a":' * (DEEPEST + 1) + "0" + "}" * (DEEPEST + 1), nested(10**6)):
        with pytest.raises(ValueError, match=rf"nested deeper than {DEEPEST} levels"):
            parse_json(encode(text))


def test_many_brackets_beside_each_other_are_not_deep():
    flat = [[i, {"a": "[[["}] for i in range(1000)]
    assert parse_json(json.dumps(flat)) == flat


def test_what_is_no_json_says_where():
    with pytest.raises(json.JSONDecodeError, match="line 1 column 2"):
        parse_json("[")
    with pytest.raises(ValueError, match="decode"):
        parse_json(b"\xff\xfe\xfd")


def test_nesting_of_values_that_were_read_otherwise():
    value = {}
    for _ in range(10**5):
        value = {"a": value}
    with pytest.raises(ValueError, match="nested deeper"):
        check_nesting(value)
    check_nesting(3)
    while value:  # taken apart level by level: freeing it at once would recurse
        value = value["a"]
