"""The paper's statements about convergence, each with the result of this benchmark.

Every function takes plain JSON: what `convergence.Comparison.as_json` says of each model, and `Run.transfer` of joins.
So claims can be made again from a saved run, and tested without training anything.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from benchmarks.paper.convergence.curves import Change
from benchmarks.paper.figure import Claim

MIB = 1 << 20
TITLES = {"resnet": "like ResNet", "alexnet": "like AlexNet", "vgg": "like VGG", "gpt": "GPT with LoRA"}
TRACKS = {"resnet": 0.5, "alexnet": 0.5, "vgg": 0.5, "gpt": 0.005}
"""Greatest distance of two curves that track each other: percent points, nats per byte."""
ON_ITS_WAY = 0.25
"""Which part of the way to the other curve a curve has behind it at the end, at least, that shifts there."""
SMOOTH = 1.0
"""The largest change just after coming or going, in units of the largest where nobody comes or goes."""


def unit(kind: str) -> str:
    return "nats/byte" if kind == "gpt" else "points"


def curve_claims(found: Sequence[dict[str, Any]], change: Change) -> list[Claim]:
    """Returns the paper's statements about the training curves, each with the result of this benchmark.

    Args:
        found: what `Comparison.as_json` says of each model.
        change: "out" or "in".
    """
    first, second = ("4-node", "5-node") if change == "out" else ("5-node", "4-node")
    event = "the node joins" if change == "out" else "the node leaves"
    scaled = "smaller models, data and training than the paper's; shards are skewed by kind here, so that data matter"
    return [
        _tracking_claim(found, first, event, scaled),
        _moving_claim(found, first, second, change, scaled),
        _smoothness_claim(found, change, scaled),
    ]


def _tracking_claim(found: Sequence[dict[str, Any]], first: str, event: str, scaled: str) -> Claim:
    worst = [(TITLES[f["kind"]], f["tracks"], TRACKS[f["kind"]], unit(f["kind"])) for f in found]
    agrees = all(g <= bound for _, g, bound, _ in worst)
    ours = "; ".join(f"{title}: largest difference before it {g:.3g} {u}" for title, g, _, u in worst)
    why = scaled
    if all(f["identical"] for f in found):
        ours += " (what was learned is the same to the last bit)"
    elif not any(f["unexplained"] for f in found):
        reasons = sorted({reason for f in found for reason in f["rewired"]})
        why = (
            "trees changed on the way, with them the order of sums, and so the last bits, which training amplifies "
            f"({'; '.join(reasons)}); where they did not, what was learned is the same to the last bit"
        )
    else:
        why = "what was learned differs in its last bits at first, for a reason that the event logs do not tell"
    return Claim(f"before {event}, the curve closely tracks the {first} curve", ours, "scaled down", agrees, why)


def _moving_claim(found: Sequence[dict[str, Any]], first: str, second: str, change: Change, scaled: str) -> Claim:
    parts, agrees = [], True
    for f in found:
        at = f["levels"]
        part = f["moved"]
        agrees &= not math.isnan(part) and part >= ON_ITS_WAY
        parts.append(
            f"{TITLES[f['kind']]}: {first} {at['first']:.3g}, {second} {at['second']:.3g}, changing "
            f"{at['changing']:.3g} {'nats/byte' if f['kind'] == 'gpt' else '%'} at the end, {part:.0%} of the way "
            f"({f['newcomer_moved']:.0%} on the fifth node's own kinds)"
        )
    paper = (
        f"after the new node joins, the curve smoothly shifts toward the {second} curve"
        if change == "out"
        else f"after the node leaves, the curve gradually shifts toward the {second} curve"
    )
    return Claim(paper, "; ".join(parts), "scaled down", agrees, scaled)


def _smoothness_claim(found: Sequence[dict[str, Any]], change: Change, scaled: str) -> Claim:
    parts, agrees = [], True
    why = scaled
    for f in found:
        agrees &= f["setback"] <= SMOOTH * f["usual_setback"]
        parts.append(
            f"{TITLES[f['kind']]}: largest setback between measurements just after {f['setback']:.3g}, "
            f"without a change {f['usual_setback']:.3g}; largest change either way {f['sharpest']:.3g} and "
            f"{f['usual_sharpest']:.3g} {unit(f['kind'])}"
        )
    worse = [(1 if f["kind"] == "gpt" else -1) * (f["levels"]["second"] - f["levels"]["first"]) > 0 for f in found]
    if not agrees and change == "in" and all(worse):
        why = (
            "where a node goes, the way to the other curve leads downhill, and counts as a setback beside curves that "
            "rise on the whole; without a change, too, neighbouring measurements differ by what is told"
        )
    return Claim("the curve stays smooth, with no sharp fluctuations", "; ".join(parts), "scaled down", agrees, why)


def knowledge_claim(found: Sequence[dict[str, Any]]) -> Claim:
    """Returns the claim of Fig. 12: "even after the node leaves, the model retains knowledge from its data"."""
    parts, agrees = [], True
    for f in found:
        at, better = f["newcomer_levels"], (-1 if f["kind"] == "gpt" else 1)
        agrees &= better * (at["changing"] - at["second"]) > 0
        parts.append(
            f"{TITLES[f['kind']]}, on the kinds of the node that left: {at['changing']:.3g} at the end, "
            f"{at['second']:.3g} where it never was, {at['first']:.3g} where it stayed"
        )
    return Claim(
        "even after the node leaves, the model retains knowledge from its data",
        "; ".join(parts),
        "scaled down",
        agrees,
        "measured on test samples of the kinds that the node had most of",
    )


def moved_nbytes(transfer: dict[str, Any]) -> int:
    """Returns the bytes of state that a join moved, in all its pulls."""
    return sum(int(p["nbytes"]) for p in transfer["pulls"])


def learned_nbytes(transfer: dict[str, Any]) -> int:
    """Returns the bytes that training changes: learned parameters, their optimizer's state, and buffers."""
    return int(transfer["trained_nbytes"] + transfer["optimizer_nbytes"] + transfer["buffers_nbytes"])


def only_learned_moved(transfer: dict[str, Any]) -> bool:
    """Returns whether a join moved just the tensors that training changes, once, and left all nodes with the same
    frozen weights.
    """
    kept = int(transfer["pulls"][0]["skipped"]) == int(transfer["frozen_nbytes"])
    return moved_nbytes(transfer) == learned_nbytes(transfer) and kept and bool(transfer["base_equal"])


def transfer_words(t: dict[str, Any]) -> str:
    """Describes the bytes that moved at one join."""
    log = f", and {t['log_nbytes'] / 1024:.0f} KiB of gradients that it replayed" if t["log_nbytes"] else ""
    return (
        f"{moved_nbytes(t) / MIB:.3g} MiB of state moved{log}; what learns has {t['trained_nbytes'] / MIB:.3g} MiB, "
        f"its optimizer {t['optimizer_nbytes'] / MIB:.3g}; {t['frozen_nbytes'] / MIB:.4g} MiB are frozen"
    )


def lora_claims(joins: Sequence[dict[str, Any]], full: dict[str, Any] | None) -> list[Claim]:
    """Returns claims on the bytes that a join moves under LoRA.

    Args:
        joins: `Run.transfer` of each scale-out.
        full: joins at the paper's size: "held" by a node that has the frozen weights, "bare" by one that has not.
    """
    claims = []
    small = joins[0]
    claims.append(
        Claim(
            "GPT-2 small fine-tuning with LoRA: what training changes travels, 1.7 MiB",
            transfer_words(small),
            "scaled down",
            all(only_learned_moved(t) for t in joins),
            "a GPT of 1 MiB; every byte that moved is of the adapters and of their Adam, by the newcomer's event log",
        )
    )
    if full is not None:
        held, bare = full["held"], full["bare"]
        claims.append(
            Claim(
                "the same, at the paper's size: 1.7 MiB, not the 475 MiB of GPT-2 small",
                f"{transfer_words(held)}; to a node without those weights {moved_nbytes(bare) / MIB:.4g} MiB moved",
                "real",
                only_learned_moved(held) and bare["base_equal"],
                "rank 4 on the attention's input maps, whose parameters and Adam state are the paper's 1.7 MiB; the "
                "weights are drawn by a seed instead of downloaded, which changes no size",
            )
        )
    return claims
