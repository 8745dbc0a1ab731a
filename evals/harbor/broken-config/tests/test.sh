#!/bin/sh
# The tests are what pytest says; it is part of the image, so nothing is fetched.
if python3 -m pytest -q -p no:cacheprovider /tests/test_outputs.py; then
    echo 1 > /logs/verifier/reward.txt
else
    echo 0 > /logs/verifier/reward.txt
fi
