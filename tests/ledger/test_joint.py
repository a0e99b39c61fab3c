"""Which steps the cells can go back to together, and why not to a newer one."""

from __future__ import annotations

from islandctl.ledger.joint import Lineage, joint_checkpoints, unjoined

from .builders import Book

CELLS = ("usa", "asia")


def steps(book: Book) -> list[tuple[int, int]]:
    return [(one.attempt, one.step) for one in joint_checkpoints(book.entries, 2)]


def reasons(book: Book) -> list[tuple[int, str]]:
    return [(one.step, one.reason) for one in unjoined(book.entries, CELLS)]


def test_a_step_counts_once_every_cell_has_it() -> None:
    book = Book()
    book.checkpoint(1, 100)
    assert steps(book) == []
    book.checkpoint(0, 100)
    assert steps(book) == [(1, 100)]
    assert joint_checkpoints(book.entries, 2)[0].manifests == ("1/0/100", "1/1/100")
    assert reasons(book) == []


def test_the_reason_names_the_cell_that_lacks_it() -> None:
    book = Book()
    book.joint(100)
    book.checkpoint(0, 150)
    book.checkpoint(1, 200)
    assert steps(book) == [(1, 100)]
    assert reasons(book) == [
        (150, "cell asia has no checkpoint at step 150"),
        (200, "cell usa has no checkpoint at step 200"),
    ]


def test_different_versions_are_not_joint() -> None:
    book = Book()
    book.checkpoint(0, 100, versions=(3, 2))
    book.checkpoint(1, 100, versions=(3, 1))
    assert steps(book) == []
    assert reasons(book) == [(100, "the cells' versions of fragment 1 differ at step 100: usa 2, asia 1")]


def test_an_older_gap_is_no_reason() -> None:
    book = Book()
    book.checkpoint(0, 50)
    book.joint(100)
    assert reasons(book) == []


def test_a_step_registered_anew_counts_as_it_is_now() -> None:
    book = Book()
    book.joint(100)
    book.checkpoint(0, 100, manifest="other")
    assert joint_checkpoints(book.entries, 2)[0].manifests == ("other", "1/1/100")
    book.checkpoint(0, 100, manifest="third", versions=(9, 9))
    assert steps(book) == []


def test_after_a_rewind_the_target_and_its_ancestors_count() -> None:
    book = Book()
    book.joint(100, 200, 300)
    book.rewind(200)
    assert steps(book) == [(1, 100), (1, 200)]
    assert reasons(book) == [(300, "given up: attempt 2 began at step 200")]
    book.joint(250)
    assert steps(book) == [(1, 100), (1, 200), (2, 250)]
    book.checkpoint(0, 300)
    assert reasons(book)[-1] == (300, "cell asia has no checkpoint at step 300")
    book.rewind(100)
    book.joint(150)
    assert steps(book) == [(1, 100), (3, 150)]


def test_a_rewind_drops_what_was_half_registered() -> None:
    book = Book()
    book.joint(100)
    book.checkpoint(0, 200)
    book.rewind(100)
    book.checkpoint(1, 200)
    assert steps(book) == [(1, 100)]


def test_a_rewind_to_the_beginning_leaves_none() -> None:
    book = Book()
    book.joint(100)
    book.rewind(0)
    assert steps(book) == []
    assert reasons(book) == [(100, "given up: attempt 2 began at step 0")]


def lineage(book: Book) -> Lineage:
    one = Lineage(2)
    for entry in book.entries:
        one.add(entry)
    return one


def test_what_a_cell_has_made_alone_is_what_it_registered_while_another_was_away() -> None:
    book = Book()
    book.joint(100)
    book.checkpoint(0, 200)
    assert lineage(book).alone(0) == []  # the other one may only be slow
    book.alone()
    book.checkpoint(0, 300)
    assert (lineage(book).alone(0), lineage(book).alone(1)) == ([(1, 200)], [])
    book.alone()
    assert lineage(book).alone(0) == [(1, 200), (1, 300)]
    book.checkpoint(1, 300)
    assert lineage(book).alone(0) == [(1, 200)]


def test_a_joint_one_that_a_cell_may_have_removed_before_it_was_joint_keeps_nothing_older_from_staying() -> None:
    book = Book()
    book.joint(100)
    for step in (200, 300, 400):
        book.checkpoint(0, step)
    assert [one.step for one in lineage(book).kept(2)] == [100]
    book.checkpoint(1, 200)  # nobody was away: slow, but in time
    book.alone()
    book.checkpoint(1, 300)  # cell 0 has one newer
    assert [one.step for one in lineage(book).kept(2)] == [100, 200, 300]
    book.checkpoint(0, 500)
    book.checkpoint(0, 600)
    book.alone()
    book.checkpoint(1, 400)  # cell 0, which keeps two, had 500 and 600
    assert [one.step for one in lineage(book).kept(2)] == [100, 200, 300]
    assert [one.step for one in lineage(book).joint] == [100, 200, 300, 400]
    book.rewind(400)  # it was there all the same: a resume has looked
    assert [one.step for one in lineage(book).kept(2)] == [100, 200, 300, 400]
