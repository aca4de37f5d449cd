"""Events that the scheduler's machine or a member's may note; some of them the processes around them write, too."""

from chaos_lightning.events.registry import Event

EVENTS = (
    # --- a member's life
    Event(
        "welcomed",
        "the scheduler knows this member",
        {"role": '"founder", "joiner" or "standby"', "reason": "why this role"},
        {"id": "its id", "chain": "id of the chain"},
    ),
    Event("refused", "the scheduler does not let it in", {"reason": "why"}, {"peer": "address", "unlogged": "count"}),
    Event("leave", "it asks to leave", {"reason": "why"}),
    Event("left", "it has left", {"reason": "why"}),
    Event("fenced", "it was put out", {"reason": "why"}, {"rejoin": "whether it may join again"}),
    Event("finished", "the job is done", {"seq": "last slot", "step": "last step"}),
    Event("kept", "the last member's state lies in a file", {"step": "of the state"}, {"seq": "slot", "head": "hash"}),
    # --- views and slots
    Event(
        "view",
        "a view is known: by the scheduler it is stored, at a member it rules from the next slot on",
        {"id": '"term.number"', "members": "ids in rank order", "joiners": "ids", "reason": "why", "chain": "id"},
        {
            "links": "pairs of ids; none if every pair has one",
            "plan": "kind",
            "trees": "[weight, members, parents]",
            "owns": "parts of the state that this member owns in it, as [start, stop) of their numbers",
            "batch": "batch of fixed size and each member's share, as SAMPLES[/MICRO-BATCH]:SHARE[xMEMBERS],...",
        },
    ),
    Event("prepare", "a view is being prepared after a failure", {"number": '"term.number"', "reason": "why"}),
    Event(
        "decide",
        "the view after a failure is decided",
        {"id": '"term.number"', "members": "ids", "base": "header hash", "hand_on": "bool", "reason": "why"},
    ),
    Event("attempt", "a slot is open under a decided view", {"view": "id", "seq": "slot", "reason": "why"}),
    Event("dropped", "a message counts for nothing", {"what": "kind of message"}, {"seq": "slot", "reason": "why"}),
    # --- newcomers
    Event("way_in", "how a newcomer is to come in", {"way": '"replay" or "pause"', "reason": "why"}),
    Event("caught_up", "a learner has applied the log", {"seq": "last slot"}),
    # --- trouble
    Event("suspect", "it may be dead", {"evidence": "words"}),
    Event("death", "it is dead", {"evidence": "words"}),
    Event(
        "differs", "members are to be put out, since what they contribute differs", {"members": "ids", "reason": "why"}
    ),
    Event("notice", "words for people", {"text": "words"}, {"waiting": "whether the job waits"}, note="{text}"),
    Event(
        "error",
        "something failed",
        also={"text": "words", "where": "part", "what": "what was tried", "reason": "words"},
    ),
    # --- chains
    Event("chain_lost", "a member is of a chain that the store has lost", {"view": "its view", "text": "words"}),
    Event("chain_foreign", "a member is of another chain", {"view": "its view", "text": "words"}),
    Event("chain_stale", "the store lacks views that a member knows", {"lacks": "view ids", "text": "words"}),
    Event("rebuild", "a lost chain is rebuilt from its members", {"view": "id", "reporters": "ids", "term": "term"}),
    Event(
        "pipelines",
        "pipelines of a view were chosen, or none fit",
        {"view": 'id; "" if none fit', "reason": "why"},
        {
            "candidates": "ways that there were: {name, step_s, transition_s, samples, lacks}",
            "chosen": "index of one of them",
            "shape": "pipelines and their stages, in words",
            "layers": "by member: half-open intervals of the layers that it runs",
            "routes": "by pipeline: members that a micro-batch passes; empty for a vacant place",
            "detours": "number of stretches that micro-batches run elsewhere than in their pipeline",
            "step_s": "estimated",
            "busy": "share of a step in which each member computes, as estimated",
            "moved_nbytes": "of parts that move",
            "lost_layers": "layers that nobody holds",
            "least_members": "smallest number that a plan fits",
        },
        note="pipelines: {reason}",
    ),
    Event(
        "ended",
        "the job has ended without being finished, since it cannot go on",
        {"members": "ids", "view": "the last one", "reason": "why"},
        note="the job has ended: {reason}",
    ),
    Event("reset", "an operator has ended the job", {"members": "ids", "view": "the last one"}),
)
