"""Ends a job when an operator asks for it: `chaos-lightning reset`.

Theory of operation. Where a scheduler serves the job, it is asked: it knows who lives, stores the end, puts the chain
away and begins with an empty one. Where none does, the chain's file on this machine is ended in the same way, once its
lock says that no scheduler has it. Who was in the last view may train on all the same, for that needs no scheduler:
this machine's process table tells of those that were on it, and of the others nothing is known, so the operator must
say that they are gone. Training states that members of that chain kept beside it on this machine (member/keeping.py)
are removed; elsewhere they stay, and are not used, since they are of another chain.
"""

from __future__ import annotations

import os

from chaos_lightning.control.job_chain import JobChain, open_chain
from chaos_lightning.control.options import HOSTED, SchedulerOptions, folder_beside
from chaos_lightning.errors import ConfigurationError, RefusedError, SchedulerUnreachableError, StoreError
from chaos_lightning.machine.addresses import is_local, split_endpoint, split_endpoints
from chaos_lightning.machine.process_table import rebooted, same_machine_verdict
from chaos_lightning.membership.effects import Persist
from chaos_lightning.protocol.types import Member, ViewId
from chaos_lightning.security.credentials import Secret
from chaos_lightning.service.options import MEMORY


def reset_job(endpoint: str, options: SchedulerOptions, secret: Secret, *, force: bool) -> str:
    """Ends the job at `endpoint`; returns a text that says what was ended.

    Args:
        endpoint: HOST:PORT of the job's scheduler, or of several with commas.
        options: Options of a scheduler; they name the chain to end if no scheduler answers.
        secret: Token or credentials.
        force: Whether to end the job also while members live, or may.

    Raises:
        RefusedError: Members live, or there is nothing to end.
        SchedulerUnreachableError: No scheduler answers, and the chain is on another machine.
        ConfigurationError, StoreError: The chain cannot be ended here.
    """
    from chaos_lightning.control.requests import fetch_status, reset

    try:
        chain = str(fetch_status(endpoint, secret).get("machine", {}).get("chain", ""))
        done = reset(endpoint, force=force, token=secret)
    except SchedulerUnreachableError as error:
        here = any(is_local(split_endpoint(place)[0]) for place in split_endpoints(endpoint))
        if options.store == MEMORY or not (options.store or here):
            raise SchedulerUnreachableError(
                f"{error}. Without a scheduler, run this on the machine where the chain's file is, or name the store: "
                "--store"
            ) from error
    else:
        return done + _forget_kept(options, chain)
    found = open_chain(options, read_only=False)
    if found is None:
        raise RefusedError(
            f"there is nothing to end: no scheduler answers at {options.listen}, and {options.store_path} is not there"
        )
    with found:
        chain = found.tip().chain
        return _end(found, force) + _forget_kept(options, chain)


def _forget_kept(options: SchedulerOptions, chain: str) -> str:
    """Deletes the training states that members of an ended chain kept on this machine; returns a text about them."""
    from chaos_lightning.replication.kept import forget  # it needs torch

    job, stores = options.settings.job, ("", options.store, os.environ.get(HOSTED["store"].variable, ""))
    folders = dict.fromkeys(folder_beside(store, job, options.listen) for store in stores)
    gone = [str(path) for folder in folders for path in (forget(folder, job, chain) if chain else ())]
    return f". The training state that was kept for it in {', '.join(gone)} is removed" if gone else ""


def _end(chain: JobChain, force: bool) -> str:
    tip, views = chain.tip(), chain.load().views
    if tip.finished and tip.ending is not None:
        return f"the job was finished, and nobody is told of it any more. Its chain is {chain.begin_again()}"
    if tip.finished or not views:
        what = "the job is finished already" if tip.finished else "no view of the job was decided"
        raise RefusedError(f"there is nothing to end in {chain.place}: {what}; the next member begins it anew")
    last = views[-1]
    alive = [words for member in last.members if (words := _may_live(member))]
    if alive and not force:
        raise RefusedError(
            f"of the last view's members {'; '.join(alive)}. They train on without a scheduler, as long as they live. "
            "End them first (Ctrl+C there); if you know that they are gone: --force"
        )
    try:
        term = chain.take_term()
    except ConfigurationError as error:
        raise ConfigurationError(f"{error}. A scheduler that has it does not answer: wait for it, or end it") from error
    done = chain.append(Persist(1, "finish", ViewId(term, tip.highest.number + 1)))
    if not done.ok:
        raise StoreError(f"{chain.place}: the end was not accepted: {done.detail}")
    who = ", ".join(last.ids()) or "nobody"
    return f"the job is ended; its last view had {who} in it. Its chain is {chain.begin_again()}"


def _may_live(member: Member) -> str:
    """Returns a text about a member that may live, without asking a scheduler; "" if its process is known to be
    dead.
    """
    sight = same_machine_verdict(member)
    if sight.certain or (not sight.evidence and rebooted(member)):
        return ""
    known = sight.evidence or "it was on another machine, and cannot be seen from here"
    return f"{member.id} (pid {member.pid} at {member.address}): {known}"
