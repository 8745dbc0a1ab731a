import re
import sys

sys.path.insert(0, "/tests")
import apart


def evaluate(*expressions):
    return apart.evaluate("/app", "import inspect\nimport paint", expressions)


def test_the_new_name_works_without_a_warning():
    expected = {
        'paint.Brush(2, color="green").stroke(3)': "green stroke of 3 x 2",
        'paint.Brush(2, "green").describe()': "a brush from a colour wheel: green",
        "paint.Brush(2).stroke(1)": "black stroke of 1 x 2",
        'paint.square(2, color="teal")': ["teal stroke of 2 x 1"] * 4,
        "paint.square(2)": ["red stroke of 2 x 1"] * 4,
        'paint.circle(5, color="pink", filled=True)': "disc of radius 5 in the colour pink",
        "paint.circle(5)": "ring of radius 5 in the colour blue",
    }
    for value, result in zip(expected.values(), evaluate(*expected), strict=True):
        assert result == {"value": value, "raised": [], "warned": []}


def test_the_old_name_of_the_brush_warns():
    [result] = evaluate('paint.Brush(2, colour="green").stroke(3)')
    assert result["value"] == "green stroke of 3 x 2"
    assert any(kind == "DeprecationWarning" and re.search(r"\bcolor\b", text) for kind, text in result["warned"])


def test_both_names_are_too_many():
    [result] = evaluate('paint.Brush(2, color="green", colour="red")')
    assert "TypeError" in result["raised"]


def test_the_old_name_is_gone_elsewhere():
    for function in ("paint.square", "paint.circle"):
        [result] = evaluate(f"list(inspect.signature({function}).parameters)")
        assert "colour" not in result["value"]
        assert "color" in result["value"]
