"""Makes networks for the tests of the all-reduce planners."""

from itertools import combinations
from typing import NamedTuple

from hypothesis import strategies as st

from chaos_lightning.planning.network import Network
from chaos_lightning.planning.packing import spanning


class Rank(NamedTuple):
    id: str
    host: str = ""


def network_of(links, access=None, hosts=None):
    """Returns a network with links given as {"ab": Mbps}; its members are the letters in alphabetical order."""
    names = sorted({name for pair in links for name in pair})
    return Network(
        [Rank(n, (hosts or {}).get(n, "")) for n in names],
        {(a, b): (0.001, rate * 1e6, rate * 1e6) for (a, b), rate in links.items()},
        {name: (rate * 1e6, rate * 1e6) for name, rate in (access or {}).items()},
    )


@st.composite
def inputs(draw, least=1, most=6, access=False, hosts=False):
    """Draws (members, links, access rates) of a connected network; rates differ by direction, and some pairs have no
    link.
    """
    size = draw(st.integers(least, most))
    names = [f"m{i}~{i}" for i in range(size)]
    rates = st.sampled_from([1e6, 1e7, 3e7, 1e8, 3e8, 1e9])
    links = {}
    for i, j in combinations(range(size), 2):
        joined = j == i + 1 or draw(st.booleans())  # a line at least
        if joined:
            a, b = draw(st.permutations([names[i], names[j]]))
            links[a, b] = (draw(st.sampled_from([0.0, 1e-4, 2e-2])), draw(rates), draw(rates))
    shared = {n: (draw(rates), draw(rates)) for n in names if access and draw(st.booleans())}
    members = [Rank(n, draw(st.sampled_from(["x", "y", "z", ""])) if hosts else "") for n in names]
    return draw(st.permutations(members)), links, shared


@st.composite
def networks(draw, least=1, most=6, access=False, hosts=False):
    return Network(*draw(inputs(least, most, access, hosts)))


def brute_force_trees(network):
    """Returns all spanning trees of a small network."""
    size = len(network)
    return [tree for tree in combinations(network.edges, size - 1) if len(spanning(size, tree)) == size - 1]
