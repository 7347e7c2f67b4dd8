"""No two files of tests have one name: of two in different folders pytest would collect one alone."""

from collections import Counter
from pathlib import Path


def test_each_file_of_tests_has_a_name_of_its_own():
    names = Counter(path.name for path in Path(__file__).parents[1].rglob("test_*.py"))
    assert [name for name, count in names.items() if count > 1] == []
