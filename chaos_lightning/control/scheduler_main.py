"""Runs a scheduler process: `chaos-lightning scheduler`, or `python -m chaos_lightning.control.scheduler_main`.

Both take the same options; control/hosting.py runs the second one detached, as a grandchild that survives the member
which needed it. Heavy imports (gRPC) come after the detaching fork. Nothing secret is accepted on
the command line. SIGTERM, SIGINT and SIGHUP end it; members train on and find the next scheduler by themselves.
One that a member has started stays for those who leave at the same moment.
"""

from __future__ import annotations

import argparse
import asyncio
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from chaos_lightning.control.options import (
    SchedulerOptions,
    SchedulerServerConfig,
    change_settings,
    check_settings,
    default_store,
    settings_from_json,
)
from chaos_lightning.declared import Setting, declared, read_options
from chaos_lightning.errors import ConfigurationError
from chaos_lightning.machine.addresses import split_endpoint
from chaos_lightning.machine.descriptors import allow_descriptors
from chaos_lightning.machine.signals import ends
from chaos_lightning.machine.terminal import TerminalGuard
from chaos_lightning.planning.plans import DEFAULT_PLAN, read_plan
from chaos_lightning.protocol.types import Settings
from chaos_lightning.security.credentials import Credentials
from chaos_lightning.service.main import EXIT_FAILED, EXIT_OK, detach, exit_code, options_parser
from chaos_lightning.service.options import check_advertise, check_reached
from chaos_lightning.settings import EngineConfig

if TYPE_CHECKING:
    from chaos_lightning.control.etcd_rules import EtcdRules
    from chaos_lightning.control.scheduler_server import SchedulerServer
    from chaos_lightning.service.store import Store

HELP = """\
Run a job's scheduler in the foreground.

Usually not needed: the first torchrun (or training script) on the endpoint's machine starts one. Run it by hand to keep
it apart from training, for example under systemd on a small machine that stays. It may be killed and started again at
any time: training goes on meanwhile, and the chain of decided views is continued from its file.
"""
_RULES = ("job", "min_nodes", "max_nodes")
OPTIONS: Mapping[str, Setting] = {
    **{name: declared(Settings)[name] for name in _RULES},
    "plan": declared(EngineConfig)["plan"],
    **declared(SchedulerOptions),
}
"""Options of the command, by the fields' names; other rules are given by --set."""
_ALL_DESCRIPTORS = 1 << 30
_PER_MEMBER_WITH_KEYS = 3
"""Number of connections per member: to the TLS proxy, and both ends of the one between it and gRPC."""
_OTHER_DESCRIPTORS = 64
"""Number of descriptors of the store, the log and gRPC, and of callers that are about to be refused."""


def open_store(options: SchedulerOptions) -> Store:
    """Opens the chain; archives a finished one first, unless it is to be kept or newcomers are still told of its
    end.
    """
    from chaos_lightning.control.job_chain import JobChain
    from chaos_lightning.service.memory_store import MemoryStore
    from chaos_lightning.service.sqlite_store import SqliteStore, archive

    path, job = options.store_path, options.settings.job
    if path is None:
        return MemoryStore(job)
    if path.exists() and not options.keep_finished:
        with JobChain(SqliteStore(path, job)) as old:
            tip = old.tip()
        if tip.finished and not tip.tells_s(options.settings.finished_s, time.time()):
            _say(f"the chain in {path} is finished; archived as {archive(path)}")
    return SqliteStore(path, job, exclusive=True)


def _rules(options: SchedulerOptions, *, followed: bool) -> EtcdRules | None:
    """Returns rules and candidacy for a scheduler whose chain is in etcd, where one of several leads; None for other
    stores.
    """
    if not options.in_etcd:
        return None
    from chaos_lightning.control.etcd_rules import EtcdRules
    from chaos_lightning.service.etcd_address import read_address

    return EtcdRules(
        read_address(options.store),
        options.settings.job,
        keep_finished=options.keep_finished,
        followed=followed,
        finished_s=options.settings.finished_s,
    )


def _take_all_descriptors(max_nodes: int, *, keys: bool) -> str:
    """Raises this process's limit of open files to the hard limit; the usual 1,024 is too few for connections of a
    large job.

    Returns:
        Words if they are too few for `max_nodes` members; else "".
    """
    limit, each = allow_descriptors(_ALL_DESCRIPTORS), _PER_MEMBER_WITH_KEYS if keys else 1
    needed, fits = max_nodes * each + _OTHER_DESCRIPTORS, (limit - _OTHER_DESCRIPTORS) // each
    if needed <= limit:
        return ""
    return (
        f"max_nodes={max_nodes} needs {needed} open files, and this process may have {limit}: from about "
        f"{max(0, fits)} members on nobody else can connect. Raise the hard limit (`ulimit -Hn`, LimitNOFILE of a "
        "service), or lower max_nodes"
    )


def _server_config(options: SchedulerOptions) -> SchedulerServerConfig:
    host, port = split_endpoint(options.listen)
    check_reached(options.listen, options.advertise, options.store, "schedulers", "members")
    return SchedulerServerConfig(
        host=host,
        port=port,
        advertise=check_advertise(options.advertise, "--advertise "),
        token=Credentials.load(options.keys_dir, options.token_file),
        settings=check_settings(options.settings),
        idle_timeout_s=options.idle_timeout_s,
        rebuild=options.rebuild,
        outlives=options.hosted,
        gives_way=options.hosted and not options.in_etcd,
        keep_finished=options.keep_finished,
    )


def _announce(server: SchedulerServer, options: SchedulerOptions) -> None:
    facts = server.status()
    place = f"term {facts['term']}, chain in {facts['store']}" if not options.in_etcd else f"store {options.store}"
    _say(
        f"scheduler of job {facts['job']} at {facts['endpoint']} (pid {facts['pid']}, "
        f"min_nodes {facts['min_nodes']}, max_nodes {facts['max_nodes']}, {place})"
    )


def run(options: SchedulerOptions) -> int:
    """Runs a scheduler until the job finishes, nobody connects for long, a signal comes or it fails; returns the exit
    code.
    """
    from chaos_lightning.control.scheduler_server import SchedulerServer
    from chaos_lightning.control.upkeep import clean_up
    from chaos_lightning.events.events import EventLog
    from chaos_lightning.service.server import CANNOT_LEAD, keep_standing, serve

    config = _server_config(options)
    keys = Credentials.of(config.token).keys is not None
    if words := _take_all_descriptors(options.settings.max_nodes, keys=keys):
        _say(f"warning: {words}")
    servers: list[SchedulerServer] = []
    look = True

    def on_started(server: SchedulerServer) -> None:
        loop = asyncio.get_running_loop()
        for number in ends():
            loop.add_signal_handler(number, server.asked_to_end, f"stopped by {number.name}")
        _announce(server, options)

    def once(followed: bool) -> tuple[str, bool]:
        here = replace(config, owed=servers.pop().owed if servers else None)
        rules = _rules(options, followed=followed)
        if rules is None:
            server = SchedulerServer(here, lambda: open_store(options), events)
        else:
            if look and (words := rules.check(config.settings)):
                _say(words)
            server = SchedulerServer(here, rules.open_store, events, candidacy=rules.candidacy, rules=rules.rules)
        servers.append(server)
        return asyncio.run(serve(server, on_started))

    def again(reason: str) -> bool:
        nonlocal look
        look = CANNOT_LEAD in reason  # what lies in etcd may be damaged: then it must not be tried for ever
        if options.in_etcd:
            _say(f"scheduler of job {options.settings.job} stands by again: {reason}")
        return options.in_etcd

    own = options.store_path
    if own is not None and own == default_store(options.settings.job, split_endpoint(options.listen)[1]):
        for path in clean_up(own, time.time(), options.settings.finished_s):
            _say(f"{path} is removed: its job is finished")
    with EventLog.in_directory(options.log_folder, options.settings.job, role="scheduler") as events:
        reason, failed = keep_standing(once, again)
    _say(f"scheduler of job {options.settings.job} ends: {reason}")
    return EXIT_FAILED if failed else EXIT_OK


def _say(text: str) -> None:
    print(text, flush=True)


def parser() -> argparse.ArgumentParser:
    """Returns the parser of `chaos-lightning scheduler`; values stay text, for `read`."""
    rules = "\n".join(f"  {rule.name:24}{rule.short} ({rule.shown})" for rule in declared(Settings).values())
    made = options_parser("scheduler", HELP, OPTIONS, f"rules for --set:\n{rules}")
    made.add_argument(
        "--set", action="append", default=[], metavar="NAME=VALUE", help="a rule of the job (repeatable); see below"
    )
    made.add_argument("--settings", default="", help=argparse.SUPPRESS)  # the job's rules as JSON, before --set
    made.add_argument("--detach", default="", metavar="LOGFILE", help=argparse.SUPPRESS)  # in the background
    return made


def read(given: argparse.Namespace) -> SchedulerOptions:
    """Returns the scheduler options that parsed arguments express.

    Raises:
        ConfigurationError: An unknown rule, or a value that cannot work.
    """
    values = read_options(given, OPTIONS)
    settings = settings_from_json(given.settings) if given.settings else Settings(plan=read_plan(DEFAULT_PLAN))
    if "plan" in values:
        settings = replace(settings, plan=read_plan(values.pop("plan")))
    rules = {name: values.pop(name) for name in _RULES if name in values}
    for item in given.set:
        name, equals, value = item.partition("=")
        if not equals:
            raise ConfigurationError(f"--set {item}: expected NAME=VALUE")
        rules[name.strip()] = value
    settings = check_settings(change_settings(settings, rules))
    return SchedulerOptions(settings=settings, hosted=bool(given.detach), **values)


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs a scheduler as the command line says; returns the exit code."""
    given = parser().parse_args(arguments)
    if given.detach:
        detach(Path(given.detach).absolute())
    TerminalGuard().open()
    return exit_code(lambda: run(read(given)))


def scheduler(arguments: Sequence[str]) -> None:
    """Runs the command `chaos-lightning scheduler`; ends with SystemExit."""
    sys.exit(main(arguments))


if __name__ == "__main__":
    sys.exit(main())
