"""Events of outer sync: of leaders, followers and clusters.

An incarnation is written as `name~number`, a push as `name~number/number`, a version as `v3-1f0c2a` (number and the
first six digits of its entry's hash) or `no version`: as these values print themselves. What a leader decides stands
whole in the log: `entry` has the hash, and the body from which anybody can compute it again.

In a cluster's file `inner_steps`, `push_frozen`, `push_answered` and `version_adopted` stand in the order in which they
happened: the inner steps that a push covers are told before its freezing, those that an adoption keeps or discards
before that. Steps that are taken while a push is being frozen (`seconds`) may stand before it, and belong to the next.
"""

from chaos_lightning.events.registry import Event

_INCARNATION = {"incarnation": "whose, where the file's last cluster_welcomed does not say it"}

EVENTS = (
    # --- the leader
    Event(
        "outer_leader_started",
        "a leader decides from now on",
        {
            "endpoint": "HOST:PORT where it is reached",
            "job": "name",
            "term": "its number among leaders",
            "position": "of the last entry of the chain that it found; 0: none",
            "store": "where the chain is kept",
        },
        {"chain": "id of the job that the store holds; empty: none yet"},
        note="leads job {job} from entry {position} on, in term {term}",
    ),
    Event(
        "entry",
        "an entry of the chain is durable; who comes to lead tells of the last one that it found, too",
        {
            "position": "in the chain, from 1 on",
            "term": "of the leader that wrote it",
            "kind": "class name of its body (outer/rules/types.py)",
            "version": "that it makes",
            "before": 'hash of the entry before; "" for the first one',
            "hash": "of all of it",
            "body": "what it says: the dataclass as an object, with all that is in it (dataclasses.asdict)",
        },
    ),
    Event(
        "push_refused",
        "a push is not taken",
        {"push": "its name", "reason": "why"},
        note="push {push} is not taken: {reason}",
    ),
    Event(
        "cluster_refused",
        "a cluster is not let in",
        {"of": "its name", "reason": "why"},
        note="{of} is not let in: {reason}",
    ),
    Event(
        "set_aside",
        "positions are not trained any more in this epoch: pushes that cover them were rejected again and again, or "
        "they are too few for a batch",
        {"epoch": "which", "spans": "half-open intervals of positions", "reason": "which of both, in words"},
        note="{reason}",
    ),
    Event(
        "follower_refused",
        "a follower is not let in",
        {"of": "its name", "reason": "why"},
        note="follower {of} is not let in: {reason}",
    ),
    Event(
        "outer_leader_ended",
        "a leader decides nothing more",
        {"reason": "why", "failed": "whether that is not how it should end"},
        note="leads no more: {reason}",
    ),
    Event(
        "cluster_stream",
        "a cluster's stream to the leader has come up or gone",
        {"of": 'incarnation, or the cluster\'s name before it has one; "" unknown', "peer": "address", "up": "bool"},
    ),
    Event(
        "follower_stream",
        "a follower's stream to the leader has come up or gone",
        {"of": 'its name; "" unknown', "peer": "address", "up": "bool"},
    ),
    # --- a follower
    Event(
        "follower_started",
        "a follower has started",
        {"follower": "its name", "endpoint": "HOST:PORT of its data connections", "files": "versions on its disk"},
        {"digests": "of their contents, as read, in the same order"},
        note="follower {follower} starts with files of {files}",
    ),
    Event(
        "version_computed",
        "a shard's state stands at a version that was computed",
        {"version": "which", "seconds": "s", "nbytes": "of the shard's state, bytes"},
    ),
    Event(
        "version_saved",
        "a shard's version is on disk: written, synced, renamed and read back",
        {"version": "which", "seconds": "s", "nbytes": "of the file, bytes", "digest": "of the file's content"},
    ),
    Event(
        "version_loaded",
        "a shard's state stands at a version that was read from disk",
        {"version": "which", "seconds": "s"},
        {"chain": "id of the job whose leader asked for it"},
        note="loaded {version} from disk",
    ),
    Event(
        "push_staged",
        "all bytes of a push's part are here, verified",
        {
            "push": "its name",
            "nbytes": "of the part, bytes",
            "seconds": "s",
            "held": "pushes whose part had memory here, the most at once since this was told last",
        },
        {
            "sources": "{process: bytes that it sent, verified, in all attempts}; a process is written as "
            "incarnation/mark (lines.py)",
            "held_of_one": "of one incarnation, the most at once since this was told last",
        },
    ),
    Event(
        "push_not_fetched",
        "nobody served the part of a push for now",
        {"push": "its name", "reason": "why"},
        note="push {push} cannot be fetched: {reason}",
    ),
    Event(
        "file_damaged",
        "a shard's file is not what the chain says",
        {"version": "of the file, or its name"},
        {"reason": "what is wrong"},
        note="the file of {version} is damaged: {reason}",
    ),
    Event(
        "late_leader",
        "a leader speaks whose time is over",
        {"term": "its", "known": "the highest so far"},
        note="a leader of term {term} is not heard: term {known} is known",
    ),
    Event("disk_trouble", 'what keeps it from saving; "": nothing any more', {"reason": "why"}, note="disk: {reason}"),
    Event(
        "bits_differ",
        "a version that is computed again is not what it was when it became durable",
        {"version": "which", "digest": "of the shard as computed here", "marked": "digest in the chain"},
        note="computes other bits of {version} than whoever made it durable: another processor, or a fault",
    ),
    # --- a cluster
    Event(
        "cluster_welcomed",
        "a leader has told a cluster who it is",
        {"incarnation": "its name", "term": "the leader's", "founded": "whether there is a version"},
        note="comes in as {incarnation}",
    ),
    Event(
        "push_frozen",
        "the content of a push is fixed",
        {
            "push": "its name",
            "base": "version that it is the delta to",
            "steps": "inner steps that it covers",
            "samples": "that it covers",
            "nbytes": "of all of it, bytes",
            "seconds": "from the instant that fixes its content to this line, s",
            "manifest": "hash of the hashes of its blocks",
        },
    ),
    Event(
        "push_answered",
        "a cluster has heard what the chain says of a push",
        {
            "push": "its name",
            "answer": '"accepted", "rejected" or "void"',
            "version": "that its round made",
            "reason": "why",
        },
    ),
    Event(
        "version_fetched",
        "a cluster holds a version's bytes",
        {"version": "which", "nbytes": "fetched from followers, bytes", "seconds": "s"},
        _INCARNATION,
    ),
    Event(
        "version_adopted",
        "a cluster's base is this version from now on",
        {
            "version": "which",
            "outright": "whether its parameters are, too; what was trained since the last freezing is discarded then",
            "steps": "inner steps that its base did not hold, which stay on top or are discarded",
            "waited_s": "s that training stood still since the adoption before: for freezing, answers, bytes, exchange",
            "progress_samples": "samples of the whole job with it",
            "progress_steps": "step number of the whole job with it",
        },
        _INCARNATION,
    ),
    Event(
        "last_taken",
        "the job is over, and a cluster's model is its last version",
        {
            "version": "which",
            "steps": "inner steps of the cluster that it lacks, which are discarded",
            "samples": "that they used",
        },
        _INCARNATION,
    ),
    Event(
        "cluster_over",
        "an incarnation is over",
        {"reason": "why", "again": "whether the cluster comes in again"},
        _INCARNATION,
        note="is over: {reason}",
    ),
    Event(
        "inner_steps",
        "inner steps were taken since the last such event",
        {"steps": "how many", "samples": "that they used", "loss": "of the last one; none: nobody told it"},
        _INCARNATION,
    ),
    Event(
        "data_line",
        "data connections to a follower stand, or can no longer be made",
        {"peer": "the follower", "up": "whether", "reason": "why not"},
    ),
    # --- a server of one machine
    Event(
        "server_child",
        "a leader, follower or spare of a server has started or ended",
        {"child": "its name", "pid": "process id; 0: it has ended", "up": "bool", "reason": "how it ended"},
        note="{child} {reason}",
    ),
)
