import sys
import tarfile
import tempfile
from pathlib import Path

import pytest

sys.path.insert(0, "/tests")
import apart


@pytest.fixture
def place():
    """A folder that the script, who is another user, may write to."""
    with tempfile.TemporaryDirectory() as folder:
        Path(folder).chmod(0o777)
        yield Path(folder)


def backup(place, *arguments):
    return apart.run(["sh", "/app/backup.sh", *arguments], writable=[place])


def make_source(place):
    source = place / "my source"
    (source / "a folder").mkdir(parents=True)
    (source / "a folder" / "x y.txt").write_text("one")
    (source / ".hidden").write_text("two")
    return source


def test_everything_is_packed_relative_to_the_source(place):
    done = backup(place, make_source(place), place / "new place")
    assert (done.returncode, done.stdout.strip()) == (0, str(place / "new place" / "backup-1.tar.gz"))
    with tarfile.open(place / "new place" / "backup-1.tar.gz") as archive:
        names = {name.removeprefix("./") for name in archive.getnames() if archive.getmember(name).isfile()}
    assert names == {"a folder/x y.txt", ".hidden"}


def test_three_are_kept_and_numbers_go_on(place):
    source, target = make_source(place), place / "target"
    target.mkdir()
    target.chmod(0o777)
    (target / "backup-note.tar.gz").write_text("not one of them")
    (target / "other.txt").write_text("stays")
    for _ in range(12):
        assert backup(place, source, target).returncode == 0
    assert sorted(path.name for path in target.iterdir()) == [
        "backup-10.tar.gz",
        "backup-11.tar.gz",
        "backup-12.tar.gz",
        "backup-note.tar.gz",
        "other.txt",
    ]


def test_no_folder_is_refused(place):
    done = backup(place, place / "gone", place / "target")
    assert (done.returncode, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1)
    assert not (place / "target").exists()
