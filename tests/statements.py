"""The statements of a syntax tree, for tests that read all of the source."""

import ast
from collections import deque


def statements(tree):
    """``tree`` and every statement in it, in the order of ``ast.walk``, which takes several times as long over expressions."""
    left = deque([tree])
    while left:
        node = left.popleft()
        yield node
        for name in node._fields:
            part = getattr(node, name)
            if type(part) is list and part and isinstance(part[0], _HOLD_STATEMENTS):
                left.extend(part)


_HOLD_STATEMENTS = (ast.stmt, ast.ExceptHandler, ast.match_case)
