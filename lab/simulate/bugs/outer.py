"""Planted bugs in how ranks of an outer-sync cluster share its outer state (docs/outer.md O8, O8a); as a control, the
same jobs run without them.
"""

from __future__ import annotations

from collections.abc import Callable

from lab.outer.processes import Machines
from lab.simulate.bugs.frame import Bug
from lab.simulate.outer_ranks import OuterHooks, OuterNode
from lab.simulate.plans.outer import outer_plan, waiting_plan


def _broken(rule: str, what: str, machines: Machines) -> Bug:
    node = type("BrokenRank", (OuterNode,), {"machines": machines})
    hooks: Callable[[], OuterHooks] = type("BrokenHooks", (OuterHooks,), {"node_class": node})
    return Bug(rule=rule, what=what, hooks=hooks, plan=outer_plan, control=OuterHooks)


def _holding() -> OuterHooks:
    node = type("HoldingRank", (OuterNode,), {"lets_go": False})
    hooks: Callable[[], OuterHooks] = type("HoldingHooks", (OuterHooks,), {"node_class": node})
    return hooks()


OUTER_BUGS: dict[str, Bug] = {
    "O8-apart": _broken("O8", "ranks adopt when they have the version", Machines(together=False)),
    "O8-no-base": _broken("O8", "a rank that comes gets no base", Machines(joiner_lacks="base")),
    "O8-no-frozen": _broken("O8", "a rank that comes gets no f", Machines(joiner_lacks="frozen")),
    "O8-no-pushes": _broken("O8", "a rank that comes gets no kept pushes", Machines(joiner_lacks="pushes")),
    "O8-no-residual": _broken("O8", "a rank that comes gets no residual", Machines(joiner_lacks="residual")),
    "O8a-early": _broken("O8a", "a push is offered before another commit is known", Machines(early=True)),
    "2-held": Bug(
        rule="2",
        what="ranks that wait for the server let nobody go",
        hooks=_holding,
        plan=waiting_plan,
        control=OuterHooks,
    ),
}
"""Planted bugs of ranks that hold outer state, by name."""
