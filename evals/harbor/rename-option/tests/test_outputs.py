import inspect
import sys
import warnings

import pytest

sys.path.insert(0, "/app")
import paint


def test_the_new_name_works_without_a_warning():
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert paint.Brush(2, color="green").stroke(3) == "green stroke of 3 x 2"
        assert paint.Brush(2, "green").describe() == "a brush from a colour wheel: green"
        assert paint.Brush(2).stroke(1) == "black stroke of 1 x 2"
        assert paint.square(2, color="teal") == ["teal stroke of 2 x 1"] * 4
        assert paint.square(2) == ["red stroke of 2 x 1"] * 4
        assert paint.circle(5, color="pink", filled=True) == "disc of radius 5 in the colour pink"
        assert paint.circle(5) == "ring of radius 5 in the colour blue"


def test_the_old_name_of_the_brush_warns():
    with pytest.warns(DeprecationWarning, match=r"\bcolor\b"):
        assert paint.Brush(2, colour="green").stroke(3) == "green stroke of 3 x 2"


def test_both_names_are_too_many():
    with pytest.raises(TypeError):
        paint.Brush(2, color="green", colour="red")


def test_the_old_name_is_gone_elsewhere():
    for function in (paint.square, paint.circle):
        assert "colour" not in inspect.signature(function).parameters
        assert "color" in inspect.signature(function).parameters
