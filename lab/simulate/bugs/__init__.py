"""Planted bugs: breaks, one at a time, the starred rules of protocol.md and the duties of outer-sync ranks in
docs/outer.md, so that the simulator must find them.

Theory of operation. A simulator that never finds anything proves nothing; so each rule is taken away once, and a run
must show it (tests/simulate/test_planted_bugs.py). A bug is a `Hooks` whose classes override one method each;
production code has no switches for it. Some guards mask each other (protocol.md 12 and 12a, 15 and 19): such a bug
comes with the other guard off, and with a *control*, the same plans with only that other guard off, which must run
clean. The plans of a bug draw from the faults that its rule is about.
"""

from __future__ import annotations

from lab.simulate.bugs.fixed import FIXED_BUGS
from lab.simulate.bugs.frame import Bug
from lab.simulate.bugs.learners import LEARNER_BUGS
from lab.simulate.bugs.links import LINK_BUGS
from lab.simulate.bugs.members import MEMBER_BUGS
from lab.simulate.bugs.outer import OUTER_BUGS
from lab.simulate.bugs.schedulers import SCHEDULER_BUGS
from lab.simulate.bugs.staged import STAGED_BUGS

BUGS: dict[str, Bug] = {
    **MEMBER_BUGS, **SCHEDULER_BUGS, **LEARNER_BUGS, **LINK_BUGS, **OUTER_BUGS, **STAGED_BUGS, **FIXED_BUGS
}  # fmt: skip
"""Planted bugs of all subjects, by name."""
