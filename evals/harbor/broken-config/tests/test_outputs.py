import json
from pathlib import Path


def test_the_settings_are_those_that_were_asked_for():
    assert json.loads(Path("/app/service.json").read_text()) == {
        "listen": {"port": 8443, "address": "0.0.0.0"},
        "log": {"level": "info"},
        "root": "/srv/www",
        "max_clients": 64,
        "upstreams": ["10.0.0.4:9000", "10.0.0.5:9000"],
    }


def test_the_check_was_left_as_it_is():
    assert Path("/app/check.py").read_bytes() == Path("/tests/check.py").read_bytes()
