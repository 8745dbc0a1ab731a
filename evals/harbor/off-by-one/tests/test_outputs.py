import importlib.util
import inspect

import pytest

spec = importlib.util.spec_from_file_location("pages", "/app/pages.py")
module = importlib.util.module_from_spec(spec)
spec.loader.exec_module(module)


@pytest.mark.parametrize("n", range(12))
@pytest.mark.parametrize("size", [1, 2, 3, 5, 20])
def test_every_item_is_on_one_page(n, size):
    found = module.pages(list(range(n)), size)
    assert [item for page in found for item in page] == list(range(n))
    assert all(len(page) == size for page in found[:-1])
    assert all(1 <= len(page) <= size for page in found)


@pytest.mark.parametrize("size", [0, -1])
def test_a_size_below_one_is_refused(size):
    with pytest.raises(ValueError):
        module.pages([1, 2], size)


def test_the_signature_stays():
    assert list(inspect.signature(module.pages).parameters) == ["items", "size"]
