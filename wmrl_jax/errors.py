"""The one exception for what a user can mend, and the hint that goes with a wrong name."""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """Bad input from the user: one sentence that says what is wrong, where, and what to do."""


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`"; did you mean 'x'?"` for the known name nearest to `name`, and `""` where none is near."""
    near = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f"; did you mean '{near[0]}'?" if near else ""
