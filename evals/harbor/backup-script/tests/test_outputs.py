import subprocess
import tarfile


def backup(*arguments):
    return subprocess.run(["sh", "/app/backup.sh", *map(str, arguments)], capture_output=True, text=True)


def make_source(tmp_path):
    source = tmp_path / "my source"
    (source / "a folder").mkdir(parents=True)
    (source / "a folder" / "x y.txt").write_text("one")
    (source / ".hidden").write_text("two")
    return source


def test_everything_is_packed_relative_to_the_source(tmp_path):
    done = backup(make_source(tmp_path), tmp_path / "new place")
    assert (done.returncode, done.stdout.strip()) == (0, str(tmp_path / "new place" / "backup-1.tar.gz"))
    with tarfile.open(done.stdout.strip()) as archive:
        names = {name.removeprefix("./") for name in archive.getnames() if archive.getmember(name).isfile()}
    assert names == {"a folder/x y.txt", ".hidden"}


def test_three_are_kept_and_numbers_go_on(tmp_path):
    source, place = make_source(tmp_path), tmp_path / "place"
    place.mkdir()
    (place / "backup-note.tar.gz").write_text("not one of them")
    (place / "other.txt").write_text("stays")
    for _ in range(12):
        assert backup(source, place).returncode == 0
    assert sorted(path.name for path in place.iterdir()) == [
        "backup-10.tar.gz",
        "backup-11.tar.gz",
        "backup-12.tar.gz",
        "backup-note.tar.gz",
        "other.txt",
    ]


def test_no_folder_is_refused(tmp_path):
    done = backup(tmp_path / "gone", tmp_path / "place")
    assert (done.returncode, done.stdout, len(done.stderr.strip().splitlines())) == (2, "", 1)
    assert not (tmp_path / "place").exists()
