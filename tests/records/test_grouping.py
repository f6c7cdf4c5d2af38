"""Items that belong together keep their order."""

from sigsoftmax.records.grouping import grouped


def test_groups_come_in_the_order_of_their_first_items():
    assert grouped(["pear", "apple", "plum", "fig"], lambda fruit: fruit[0]) == {
        "p": ["pear", "plum"],
        "a": ["apple"],
        "f": ["fig"],
    }
    assert list(grouped([3, 1, 2, 5], lambda number: number % 2)) == [1, 0]
    assert grouped([], str) == {}
