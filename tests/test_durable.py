"""Files that several processes write at once."""

from functools import partial

from store_cases import FORK, at_once

from eagle3.durable import create_text, write_text


def test_files_that_several_processes_write_at_once_are_whole_and_nothing_else_is_left(tmp_path):
    """Each time, the file holds all of what one of them wrote."""
    texts = [letter * 1000 for letter in "abcd"]
    together = FORK.Barrier(len(texts))

    def write_often(text: str) -> None:
        for number in range(50):
            together.wait(60)
            write_text(tmp_path / "one", text)
            create_text(tmp_path / f"first of {number}", text)

    assert at_once(*(partial(write_often, text) for text in texts)) == [0] * len(texts)
    assert {path.name for path in tmp_path.iterdir()} == {"one", *(f"first of {number}" for number in range(50))}
    assert {path.read_text() for path in tmp_path.iterdir()} <= {*texts}
