import sys

sys.path.insert(0, "/tests")
import apart

CASES = [(n, size) for n in range(12) for size in (1, 2, 3, 5, 20)]


def evaluate(*expressions):
    return apart.evaluate("/app", "import inspect\nfrom pages import pages", expressions)


def test_every_item_is_on_one_page():
    results = evaluate(*(f"pages(list(range({n})), {size})" for n, size in CASES))
    for (n, size), result in zip(CASES, results, strict=True):
        assert result["raised"] == []
        found = result["value"]
        assert [item for page in found for item in page] == list(range(n))
        assert all(len(page) == size for page in found[:-1])
        assert all(1 <= len(page) <= size for page in found)


def test_a_size_below_one_is_refused():
    for result in evaluate("pages([1, 2], 0)", "pages([1, 2], -1)"):
        assert "ValueError" in result["raised"]


def test_the_signature_stays():
    [result] = evaluate("list(inspect.signature(pages).parameters)")
    assert result["value"] == ["items", "size"]
