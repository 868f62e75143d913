"""Which ranks have which parameters: the words of the error."""

from __future__ import annotations

from outlast.elastic.job.same_on_all_ranks import difference


def test_the_error_names_all_ranks_of_a_stage() -> None:
    first, second = [("a", (2,)), ("b", (3,))], [("a", (2,))]
    text = difference(["x", "y", "x", "y"], [first, second, None, None])
    assert "parameter 1 is 'b' of shape (3,) on ranks 0, 2, and missing on ranks 1, 3" in text
    many = difference(["x"] + ["y"] * 12, [first, second, *[None] * 11])
    assert "on rank 0, and missing on ranks 1, 2, 3, 4, 5, 6, 7, 8 and 4 more" in many
