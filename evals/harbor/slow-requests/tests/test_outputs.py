from pathlib import Path


def expected():
    durations = {}
    for line in Path("/tests/access.log").read_text().splitlines():
        fields = line.split()
        if len(fields) == 5 and fields[3].startswith("2"):
            durations.setdefault(fields[2], []).append(int(fields[4]))
    means = {path: sum(values) / len(values) for path, values in durations.items() if len(values) >= 5}
    return [f"{path} {means[path]:.1f}" for path in sorted(means, key=means.get, reverse=True)[:3]]


def test_the_three_slowest_paths():
    assert Path("/app/slow.txt").read_text().splitlines() == expected()


def test_the_log_was_left_as_it_is():
    assert Path("/app/access.log").read_bytes() == Path("/tests/access.log").read_bytes()
