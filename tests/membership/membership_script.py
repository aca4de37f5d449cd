"""Runs scenario files, in a small language: one state machine gets an event by each line, and its effects are written
below the line.

Lines that begin with ">" are told to the machine (or define a name); the indented lines below are its effects. Run the
tests with CHAOS_REWRITE=1 to write the effects anew, and read the difference before keeping it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

from membership_words import message_words, parts_words, view_words

from chaos_lightning.membership import effects as fx
from chaos_lightning.membership.member import MemberMachine
from chaos_lightning.membership.recovery import with_scope
from chaos_lightning.membership.scheduler import SchedulerMachine
from chaos_lightning.membership.slots import close_slot
from chaos_lightning.planning.pipelines.plan import Pipeline, PipelinePlan, PlanStage
from chaos_lightning.planning.pipelines.units import ViewPipelines, coverage
from chaos_lightning.protocol.types import (
    GENESIS,
    NO_VIEW,
    WHOLE,
    CatchUp,
    Contribution,
    Decide,
    Differs,
    Entered,
    Fence,
    Finished,
    FromMember,
    Header,
    Heartbeat,
    Hello,
    Kind,
    Leave,
    LinkEvent,
    LinkReport,
    LinkRequest,
    LinkSpec,
    Member,
    NextView,
    OpenLinks,
    Prepare,
    Ready,
    Refused,
    Released,
    Report,
    ServeLearners,
    Settings,
    Source,
    ToMember,
    Verdict,
    View,
    ViewId,
    Welcome,
)

SCOPE = ((0, 100),)
NOT_OFFERED = "it did not offer to replay"


def member(member_id: str) -> Member:
    name = member_id.partition("~")[0]
    return Member(member_id, name, f"host-{name}", "127.0.0.1", 7000)


def stored(view: View) -> View:
    """Returns this view as a scheduler's store has it: its members have the process ids of their hellos."""
    return replace(view, members=tuple(replace(m, pid=1, pid_start=1) for m in view.members))


def number(text: str) -> ViewId:
    term, _, count = text.partition(".")
    return ViewId(int(term), int(count))


def contribution(view: View, prev: Header, kind: str, who: str, **fields: object) -> Contribution:
    """Returns the contribution of a correct member to the slot after `prev`."""
    if view.pipelines and kind == "step":
        pipelines = ViewPipelines.from_json(view.pipelines)
        ran = {"micro_batches": ((0, pipelines.plan.micro_batches),), "coverage": coverage(pipelines.units(who))}
        fields = {"reduced": True, **ran, **fields}
    return Contribution(
        member=who,
        view=view.id,
        seq=prev.seq + 1,
        kind=Kind(kind),
        step=prev.step,
        prev_hash=prev.hash,
        weight=1.0 if kind == "step" else 0.0,
        coefficient=1.0 if kind == "step" else 0.0,
        payload=f"{who} votes".encode() if kind == "gather" else b"",
        **fields,  # type: ignore[arg-type]
    )


def header_after(
    view: View, prev: Header, kind: str, waiting: View | None = None, learners: tuple[str, ...] | None = None
) -> Header:
    """Returns the header of the slot after `prev`, as the root of `view` makes it; by default it names the same
    learners as `prev`.
    """
    box = {m: contribution(view, prev, kind, m) for m in view.ids()}
    named = prev.learners if learners is None else learners
    return close_slot(view=view, prev=prev, contributions=box, waiting=waiting, learners=named)


def pipelines_of(text: str, shared: str = "") -> str:
    """Returns the JSON text of a view's pipelines, each with one micro-batch, from a short form: in "a~1:2+b~2:2,c~3:4"
    there are two, and a~1 has two layers.

    `shared`: parameters that several layers use, such as "wte:0.3".
    """
    rows = []
    for row in text.split(","):
        at, stages = 0, []
        for stage in row.split("+"):
            name, _, count = stage.partition(":")
            stages.append(PlanStage(name, at, at := at + int(count)))
        rows.append(Pipeline(tuple(stages), 1))
    users = (word.split(":") for word in shared.split(",") if word)
    named = {name: map(int, layers.split(".")) for name, layers in users}
    return ViewPipelines.of(PipelinePlan(rows[0].cut[-1], tuple(rows)), shared=named).to_json()


class Names:
    """Views and headers that a scenario has defined, by name."""

    def __init__(self) -> None:
        self.views: dict[str, View] = {}
        self.headers: dict[str, Header] = {"genesis": GENESIS}

    def define(self, words: list[str]) -> bool:
        """Handles `view NAME ID PREDECESSOR MEMBER MEMBER*... A-B...` (a star: joiner; links, if not every pair has
        one; for `pipelines=` and `shared=` see `pipelines_of`; `leaving=MEMBER,...`) and `header NAME PREV VIEW KIND
        [WAITING] [for=LEARNER,...]` (`for=` alone: there are no learners any more).
        """
        match words:
            case ["view", name, view_id, predecessor, *members]:
                members, keys = told(members)
                links = [word for word in members if "-" in word]
                members = [word for word in members if "-" not in word]
                self.views[name] = View(
                    id=number(view_id),
                    predecessor=number(predecessor),
                    members=tuple(member(m.rstrip("*")) for m in members),
                    joiners=tuple(m.rstrip("*") for m in members if m.endswith("*")),
                    reason=f"as {name}",
                    links=tuple(LinkSpec(*link.split("-")) for link in links),
                    pipelines=pipelines_of(keys["pipelines"], keys.get("shared", "")) if "pipelines" in keys else "",
                    leaving=tuple(member(m) for m in keys["leaving"].split(",")) if "leaving" in keys else (),
                )
            case ["header", name, prev, view, kind, *more]:
                waiting, keys = told(more)
                carried = self.views[waiting[0]] if waiting else None
                named = tuple(filter(None, keys["for"].split(","))) if "for" in keys else None
                self.headers[name] = header_after(self.views[view], self.headers[prev], kind, carried, named)
            case _:
                return False
        return True

    def of_header(self, header: Header | None) -> str:
        if header is None:
            return "none"
        known = next((n for n, h in self.headers.items() if h.hash == header.hash), "")
        words = f"{known or '?'}({header.seq} {header.kind} of {header.view}"
        if header.view_change is not None:
            words += f", then {header.view_change.id}"
        words += ", boundary please" if header.boundary else ""
        words += f", for {' and '.join(header.learners)}" if header.learners else ""
        words += "".join(f", part {d.part} of {d.member} drifted" for d in header.drifted)
        words += f", error: {header.error}" if header.error else ""
        return words + ")"

    def of_hash(self, value: str) -> str:
        return next((n for n, h in self.headers.items() if h.hash == value), value or "-")


def told(words: list[str]) -> tuple[list[str], dict[str, str]]:
    """Splits these words into plain ones and key=value ones."""
    plain = [w for w in words if "=" not in w]
    return plain, dict(w.split("=", 1) for w in words if "=" in w)


def spans(text: str) -> tuple[tuple[int, int], ...]:
    return tuple((int(a), int(b)) for a, b in (part.split("-") for part in text.split(",") if part))


def hashes(keys: dict[str, str]) -> tuple[str, ...]:
    """Returns the hashes of the parts of the state that a member owns, from a word such as `hashes=x,y`."""
    return tuple(filter(None, keys.get("hashes", "").split(",")))


class MemberScript:
    """Scenario interpreter that drives a MemberMachine."""

    def __init__(self) -> None:
        self.names = Names()
        self.machine = MemberMachine()
        self.now = 0.0

    def line(self, words: list[str]) -> list[str]:
        """Carries out one line of a scenario; returns the effects in words."""
        if self.names.define(words):
            return []
        if words[0] == "after":
            self.now += float(words[1])
            return []
        effects = self.machine.on(self.now, self._event(words))
        self.machine.validate_state()
        return [self._effect(e) for e in effects if not isinstance(e, fx.Note)]

    def _event(self, words: list[str]) -> fx.MemberEvent:
        plain, keys = told(words)
        match plain:
            case ["own", kind]:
                assert self.machine.view is not None
                mine = contribution(self.machine.view, self.machine.header, kind, self.machine.member_id)
                ran = self.names.views[keys["view"]].id if "view" in keys else mine.view
                mine = replace(mine, reduced=False, view=ran if mine.coverage else NO_VIEW)
                mine = replace(mine, state_hashes=hashes(keys))
                return fx.Contribute(replace(mine, prev_hash=keys.get("prev", mine.prev_hash)))
            case ["peer", who, "contributes", kind]:
                view = self.names.views[keys["view"]]
                prev = self.names.headers[keys["prev"]]
                fields = {k: v for k, v in keys.items() if k not in ("view", "prev", "hashes")}
                return fx.PeerIn(who, contribution(view, prev, kind, who, state_hashes=hashes(keys), **fields))
            case ["peer", who, "header", name]:
                return fx.PeerIn(who, self.names.headers[name])
            case ["ranges", view, seq]:
                return fx.RangesDone(self.names.views[view].id, int(seq))
            case ["pulled", seq]:
                return fx.ResultPulled(int(seq))
            case ["loaded", name]:
                came = spans(keys["parts"]) if "parts" in keys else WHOLE
                view_id = self.names.views[keys["view"]].id if "view" in keys else NO_VIEW
                return fx.StateLoaded(self.names.headers[name].hash, came, view_id)
            case ["link", peer, state, *evidence]:
                return fx.LinkChanged(peer, state == "up", " ".join(evidence) or "connected")
            case ["leave"]:
                return fx.LeaveRequested("Ctrl+C")
            case ["tick"]:
                return fx.Tick()
            case ["prepare", view_id]:
                held = with_scope(spans(keys.get("held", "")), SCOPE) if "held" in keys else ()
                return fx.ControlIn(Prepare(number(view_id), "a test"), held)
            case _:
                return fx.ControlIn(self._message(plain, keys))

    def _message(self, plain: list[str], keys: dict[str, str]) -> ToMember:
        names = self.names
        match plain:
            case ["welcome", who, role]:
                return Welcome(member(who), 1, role, "hello", 0.1, 0.35)
            case ["open", "links", *peers]:
                return OpenLinks(tuple(member(p) for p in peers))
            case ["next", view]:
                return NextView(names.views[view])
            case ["learners", "in", view, *ids]:
                return ServeLearners(tuple(ids), names.views[view])
            case ["decide", view, "after", base]:
                return Decide(names.views[view], names.headers[base], reason="a test")
            case ["decide", view, "hand", "on", base, *sources]:
                return Decide(names.views[view], names.headers[base], True, tuple(Source(s, ()) for s in sources))
            case ["fence"]:
                return Fence("a view went on without it")
            case ["released"]:
                return Released("nobody needs it")
            case ["refused", *rest]:
                return Refused("the name is taken", retry=bool(rest))
            case _:
                raise AssertionError(f"no such line: {plain} {keys}")

    def _effect(self, effect: fx.MemberEffect) -> str:
        names = self.names
        match effect:
            case fx.ToScheduler(message):
                return f"tells the scheduler: {message_words(names, message)}"
            case fx.ToPeer(peer, message):
                return f"sends {peer}: {message_words(names, message)}"
            case fx.Connect(peers):
                return f"wants links to {','.join(p.id for p in peers) or 'nobody'}"
            case fx.OpenAttempt(view, seq):
                return f"opens slot {seq} in view {view.id}"
            case fx.DropAttempt(view_id):
                return f"drops attempts up to view {view_id}"
            case fx.Committed(header, view):
                return f"commits {names.of_header(header)}; it names view {view.id}"
            case fx.PullResult(header, sources):
                return f"pulls bytes of {names.of_header(header)} from {','.join(s.member for s in sources)}"
            case fx.PullState(header, view, parts):
                donors = [m for m in view.ids() if m not in view.joiners]
                what = "the state" if parts == WHOLE else parts_words(parts)
                return f"pulls {what} at {names.of_header(header)} from {','.join(donors)}"
            case fx.PullParts(header, view, parts):
                donors = [m.id for m in (*view.members, *view.leaving) if m.id != self.machine.member_id]
                return f"pulls {parts_words(parts)} at {names.of_header(header)} from {','.join(donors)}"
            case fx.DropParts(parts):
                return f"drops {parts_words(parts)}"
            case fx.Rerun(view, seq):
                return f"begins slot {seq} anew in view {view.id}"
            case fx.Observe(header, view):
                donors = [m for m in view.ids() if m not in view.joiners]
                return f"observes from {names.of_header(header)} on, served by {','.join(donors)}"
            case fx.Viewed(view):
                return f"sees {view_words(view)}"
            case fx.Ejected(reason, rejoin):
                return f"is out, {'joins again' if rejoin else 'for good'}: {reason}"
            case fx.Left(reason):
                return f"goes: {reason}"
            case _:
                return repr(effect)


class SchedulerScript:
    """Scenario interpreter that drives a SchedulerMachine. Streams have their members' names; writes succeed at once
    unless `store waits`.
    """

    def __init__(self) -> None:
        self.names = Names()
        self.settings = Settings(
            job="job",
            min_nodes=1,
            max_nodes=4,
            heartbeat_interval_s=0.1,
            heartbeat_timeout_s=0.35,
            confirm_timeout_s=0.15,
            hang_timeout_s=5.0,
            last_holder_timeout_s=10.0,
            report_timeout_s=2.0,
            join_timeout_s=60.0,
            reconnect_grace_s=2.0,
        )
        self.machine: SchedulerMachine | None = None
        self.now = 0.0
        self.conns: dict[str, int] = {}
        self.ids: dict[str, str] = {}
        self.waiting: list[fx.Persist] = []
        self.store_waits = False
        self.chain = fx.Chain(1, NO_VIEW)
        self.at: dict[str, tuple[int, int]] = {}
        """Slot and step at which each stands, for its heartbeats."""

    def line(self, words: list[str]) -> list[str]:
        if self.names.define(words):
            return []
        plain, keys = told(words)
        match plain:
            case ["set", name, value]:
                kind = type(getattr(self.settings, name))
                self.settings = replace(self.settings, **{name: kind(value)})
                return []
            case ["chain", highest, *views]:
                # removed=a-b,...: links that were removed while an earlier scheduler ruled
                pairs = [pair.split("-") for pair in keys.get("removed", "").split(",") if pair]
                wishes = tuple(fx.LinkWish(a, b, False, "removed, an operator asks") for a, b in pairs)
                known = tuple(stored(self.names.views[v]) for v in views)
                self.chain = fx.Chain(2, number(highest), known, wishes=wishes)
                return []
            case ["store", how] if how in ("waits", "writes"):
                self.store_waits = how == "waits"
                return []
            case ["after", seconds]:
                return self._pass(float(seconds))
            case ["jump", seconds]:
                self.now += float(seconds)
                return []
            case ["beats", *names]:
                # Time passes in which these send their heartbeats.
                return self._pass(float(keys["for"]), names)
        return self._feed(self._event(plain, keys))

    def _pass(self, seconds: float, beating: list[str] | None = None) -> list[str]:
        lines: list[str] = []
        end = self.now + seconds
        while self.now < end - 1e-9:
            self.now = min(end, self.now + 0.05)
            for name in beating or []:
                lines += self._feed(fx.MessageIn(self.conns[name], Heartbeat(NO_VIEW, *self.at.get(name, (0, 0)))))
            lines += self._feed(fx.SchedulerTick())
        return lines

    def _feed(self, event: fx.SchedulerEvent) -> list[str]:
        if self.machine is None:
            self.machine = SchedulerMachine(self.settings, self.chain)
        lines: list[str] = []
        for effect in self.machine.on(self.now, event):
            if isinstance(effect, fx.Persist):
                what = view_words(effect.view) if effect.view is not None else str(effect.number)
                if effect.wish is not None:
                    what = f"{'add' if effect.wish.add else 'remove'} {effect.wish.a} {effect.wish.b}"
                lines.append(f"stores {effect.kind} {what}")
                self.waiting.append(effect)
            elif isinstance(effect, fx.Send):
                lines.append(f"to {self._name(effect.conn)}: {message_words(self.names, effect.message)}")
                if isinstance(effect.message, Welcome):
                    self.ids[self._name(effect.conn)] = effect.message.member.id
            elif isinstance(effect, fx.Close):
                lines.append(f"closes the stream of {self._name(effect.conn)}: {effect.reason}")
            elif isinstance(effect, fx.Look):
                lines.append(f"looks for the process of {effect.member.id}")
            elif isinstance(effect, fx.Answer):
                lines.append(f"answers {'yes' if effect.accepted else 'no'}: {effect.text}")
            elif isinstance(effect, fx.SchedulerDone):
                lines.append(f"is done: {effect.reason}")
            elif effect.name in ("death", "suspect", "notice", "way_in", "caught_up"):
                fields = dict(effect.fields)
                if fields.get("reason") == NOT_OFFERED:
                    continue
                lines.append(f"notes {effect.name} {' '.join(str(v) for v in fields.values())}")
        self.machine.validate_state()
        if self.waiting and not self.store_waits:
            lines += self._feed(fx.Stored(self.waiting.pop(0).token, True))
        return lines

    def _name(self, conn: int) -> str:
        return next(name for name, c in self.conns.items() if c == conn)

    def _event(self, plain: list[str], keys: dict[str, str]) -> fx.SchedulerEvent:
        match plain:
            case ["stored"]:
                return fx.Stored(self.waiting.pop(0).token, True)
            case ["lost"]:
                return fx.Stored(self.waiting.pop(0).token, False, "another term")
            case [name, "closes"]:
                return fx.Closed(self.conns[name], abrupt="clean" not in keys)
            case ["gone", name]:
                return fx.Gone(self.ids.get(name, name), "its process is gone")
            case ["drain", name]:
                return fx.Drain(name)
            case ["operator", "link", how, a, b]:
                return fx.ChangeLink(7, a, b, how == "add")
            case ["tick"]:
                return fx.SchedulerTick()
            case [name, "hello", *_]:
                self.conns[name] = max(self.conns.values(), default=0) + 1
        name, *rest = plain
        return fx.MessageIn(self.conns[name], self._message(name, rest, keys))

    def _message(self, name: str, plain: list[str], keys: dict[str, str]) -> FromMember:
        names = self.names
        match plain:
            case ["hello", *_]:
                return Hello(
                    job=keys.get("job", "job"),
                    name=keys.get("name", name),
                    host=keys.get("host", f"host-{name}"),
                    address="127.0.0.1",
                    port=7000,
                    pid=int(keys.get("pid", "1")),
                    pid_start=int(keys.get("started", "1")),
                    quota=1,
                    accumulate=1,
                    package="1.0",
                    fingerprint=(("script", keys.get("script", "train.py")),),
                    resume=keys.get("resume", ""),
                    view=number(keys["view"]) if "view" in keys else NO_VIEW,
                    replay="" if "replays" in plain else NOT_OFFERED,
                    neighbours=tuple(filter(None, keys.get("neighbours", "").split(","))),
                )
            case ["ready"]:
                return Ready()
            case ["beats"]:
                return Heartbeat(NO_VIEW, *self.at.get(name, (0, 0)))
            case ["caught", "up"]:
                return CatchUp(int(keys["at"]))
            case ["cannot", "catch", "up"]:
                return CatchUp(int(keys["at"]), able=False, reason="the log was cut")
            case ["entered", view, *rest]:
                header = names.headers[keys["on"]]
                self.at[name] = (header.seq, header.step)
                return Entered(number(view), header.seq, header.step, header.hash, () if "loading" in rest else WHOLE)
            case ["reports", promised, *rest]:
                header = names.headers[keys["on"]]
                return Report(
                    number=number(promised),
                    entered=number(keys["entered"]),
                    seq=header.seq,
                    head=header.hash,
                    parts=() if "loading" in rest else WHOLE,
                    raw="loading" not in rest,
                    pending=names.headers[keys["pending"]] if "pending" in keys else None,
                    last=header,
                    held=with_scope(spans(keys["held"]), SCOPE) if "held" in keys else (),
                )
            case ["link", peer, state, *evidence]:
                return LinkEvent(self.ids.get(peer, peer), state == "up", " ".join(evidence) or "connected")
            case ["measures", peer, rate]:
                return LinkReport(self.ids[peer], 0.001, float(rate), "probe")
            case ["asks", "link", how, peer]:
                return LinkRequest(peer, how == "add", "a test")
            case ["says", peer, "is", state]:
                # "gone": the process table says so; "dead": it says that it is stopped; "silent" is a guess.
                seen = state in ("gone", "dead")
                return Verdict(self.ids.get(peer, peer), state == "alive", "asked", state == "gone", seen)
            case ["says", peer, "differs"]:
                return Differs(self.ids.get(peer, peer), "slot 1: it has hyper 'lr=2'", keys.get("join") == "again")
            case ["leaves"]:
                return Leave("Ctrl+C")
            case ["finished"]:
                header = names.headers[keys["on"]]
                return Finished(header.seq, header.step)
            case _:
                raise AssertionError(f"no such line: {name} {plain} {keys}")


def replay(path: Path, make: Callable[[], MemberScript | SchedulerScript]) -> tuple[str, str]:
    """Runs a scenario file; returns its text, and the text that it would have with the present effects."""
    script = make()
    text = path.read_text()
    lines: list[str] = []
    for line in text.splitlines():
        if line.startswith("    "):
            continue
        lines.append(line)
        if line.startswith("> "):
            lines += [f"    {effect}" for effect in script.line(line[2:].partition(" # ")[0].split())]
    now = "\n".join(lines) + "\n"
    if os.environ.get("CHAOS_REWRITE"):
        path.write_text(now)
        return now, now
    return text, now
