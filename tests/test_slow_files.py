"""`make test` begins with the slow files."""

from tests import REPOSITORY
from tests.slow_files import SECONDS, slow_files_first


def test_slow_files_come_first_and_then_those_of_many_tests():
    slower, slow = list(SECONDS)[:2]
    assert SECONDS[slower] > SECONDS[slow]
    paths = ["few.py", slow, "many.py", "many.py", "alike.py", slower]
    assert slow_files_first(paths) == [slower, slow, "many.py", "alike.py", "few.py"]


def test_slow_files_are_there():
    assert [path for path in SECONDS if not (REPOSITORY / path).is_file()] == []
