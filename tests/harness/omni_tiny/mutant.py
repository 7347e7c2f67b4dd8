"""A mistake made on purpose in every process of a served run, as the environment says: is it seen?

The variable names a function of a module that can be imported, as ``mutants:drop_that_forgets``; it gives a
context manager that patches the plugin, and is entered once in each process, for as long as that lives.
"""

from __future__ import annotations

import importlib
import os

VARIABLE = "OMNI_TINY_MUTANT"

_ENTERED: list[object] = []


def mutate() -> None:
    """Make the mistake that the environment names, if it names one."""
    name = os.environ.get(VARIABLE)
    if not name or _ENTERED:
        return
    module, _, function = name.partition(":")
    mistake = getattr(importlib.import_module(module), function)()
    mistake.__enter__()
    _ENTERED.append(mistake)
