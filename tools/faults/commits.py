"""The commits of a run: what each kind of them does to the run's folder, call by call.

A new kind of commit stands here before it is made: a run on the fault file system fails its test with any change that it finds in no
kind. `begins` says when a kind is made:

    ""          all the time            a role's name   when that role begins anew     run       once, when the run begins
    end         when it is asked to stop      again     when it goes on after that     change    when its recipe changes
    rare        by chance: it is known, and no schedule meets it by plan
"""

from __future__ import annotations

from itertools import chain

from tools.faults.schedules import Call, Kind, calls, published, removed, replaced, written

OPEN, CLAIMED = "requests/open/{r}.a{n}.v{n}", "requests/claimed/{any}"
VERSION, GONE_VERSION = "weights/v{n}.l{n}.i{n}", "{i}/v{n}.l{n}.i{n}.{h}"
OVER, ATTEMPT = "{l}.{h}.over", "critic/attempts/{n}"


def checkpoint(folder: str, final: str, files: tuple[str, ...]) -> tuple[Call, ...]:
    staged = f"{folder}/checkpoint-{{n}}"
    each = chain.from_iterable(
        written(f"{staged}/{name}") for name in (*files, "rng.safetensors", "state.json", "DONE")
    )
    return (*calls(f"mkdir {staged}"), *each, *calls(f"rename {staged} > {final}"))


def folder_of_tensors(staged: str, final: str, files: tuple[str, ...]) -> tuple[Call, ...]:
    each = chain.from_iterable(written(f"{staged}/{name}") for name in files)
    return (*calls(f"mkdir {staged}"), *each, *calls(f"rename {staged} > {final}"))


TRAINING = (
    Kind("ledger entry", published("{i}", "ledger/{n}/{n}.json")),
    Kind("ledger's folder", calls("mkdir ledger/{n}"), begins="run"),
    Kind("request released", published("requests/open", OPEN)),
    Kind("version", folder_of_tensors("{i}/weights-{h}", VERSION, ("part-{n}.safetensors", "index.json"))),
    Kind("manifest", published("{i}", "weights/v{n}.l{n}.json")),
    Kind("latest.json", replaced("{i}", "weights/latest.json")),
    Kind("version removed", removed(VERSION, GONE_VERSION)),
    Kind(
        "manifest removed",
        calls("rename weights/v{n}.l{n}.json > {i}/v{n}.l{n}.json.{h}", "unlink {i}/v{n}.l{n}.json.{h}"),
    ),
    Kind("checkpoint", checkpoint("{i}", "checkpoints/step-{n}", ("model.safetensors", "optimizer-{n}.safetensors"))),
    Kind("checkpoint removed", removed("checkpoints/step-{n}", "{i}/old-{n}")),
    Kind("metrics of a trainer", calls("write metrics/trainer-{n}.jsonl")),
    Kind("samples in the loss", calls("write metrics/trainer-0.trained.jsonl")),
    Kind("first line of metrics", calls("create metrics/{any}.jsonl"), role="", begins="run"),
)
GENERATING = (
    Kind("claim directory", calls("mkdir requests/claimed/{any}"), role="rollout", begins="rollout"),
    Kind("claim", calls(f"rename {OPEN} > {CLAIMED}/{{r}}.a{{n}}.v{{n}}"), role="rollout"),
    Kind("shard", published("shards/{n}", "shards/{n}/{r}.h5"), role="rollout"),
    Kind("shards' folder", calls("mkdir shards/{n}"), role="rollout", begins="run"),
    Kind("claim ended", calls(f"unlink {CLAIMED}/{{r}}.a{{n}}.v{{n}}"), role="rollout"),
    Kind("evaluation", published("evals", "evals/{r}.h5"), role="rollout"),
    Kind("metrics of a worker", calls("write metrics/rollout-{n}.jsonl"), role="rollout"),
    Kind("shard that came second", published("quarantine", "quarantine/{any}"), role="rollout", begins="rare"),
)
SUPERVISING = (
    Kind(
        "lease",
        (*calls("mkdir lease/.{h}"), *written("lease/.{h}/holder.json"), *calls("rename lease/.{h} > {l}")),
        role="supervisor",
        begins="supervisor",
    ),
    Kind(
        "takeover",
        calls(
            f"rename {{l}} > {OVER}",
            "create lease/{n}.gone",
            "create lease/i{n}.gone",
            f"rmdir {OVER}/i{{n}}",
            f"unlink {OVER}/holder.json",
            f"rmdir {OVER}",
        ),
        role="supervisor",
        begins="supervisor",
    ),
    Kind(
        "what a superseded incarnation left",
        calls(
            "utime lease/{n}.gone",
            "utime lease/i{n}.gone",
            f"unlink {OVER}/{{any}}",
            f"unlink {OVER}/i{{n}}{{any}}/{{all}}",
            f"unlink {OVER}/i{{n}}/{{all}}",
            f"rmdir {OVER}/i{{n}}{{all}}",
        ),
        role="supervisor",
        begins="rare",
    ),
    Kind(
        "draft of a lease removed",
        calls("unlink lease/.{h}/holder.json", "rmdir lease/.{h}"),
        role="supervisor",
        begins="rare",
    ),
    Kind("lease renewed", calls("utime {l}/holder.json"), role="supervisor"),
    Kind("incarnation", calls("mkdir {i}", "rename {i} > {i}.over"), role="supervisor", begins="trainer"),
    Kind(
        "claim given back",
        calls(f"rename {CLAIMED}/{{r}}.a{{n}}.v{{n}} > {OPEN}", "rmdir requests/claimed/{any}"),
        role="supervisor",
        begins="rollout",
    ),
    Kind("outcome", replaced("{l}", "outcome.json"), role="supervisor", begins="end"),
    Kind("stop asked", published("", "stop"), role="", begins="rare"),
    Kind(
        "outcome and stop of before removed",
        calls("unlink outcome.json", "unlink stop"),
        role="supervisor",
        begins="again",
    ),
    Kind(
        "recipe changed",
        (*replaced("", "recipe.toml"), *replaced("", "changes.jsonl")),
        role="supervisor",
        begins="change",
    ),
    Kind("metrics of a supervisor", calls("write metrics/supervisor.jsonl"), role="supervisor", begins="trainer"),
    Kind("log of a role", calls("create logs/{any}.log"), role="supervisor", begins="rollout"),
    Kind("line of a log", calls("write logs/{any}.log"), role="", begins="trainer"),
    Kind("heartbeat", replaced("heartbeats", "heartbeats/{any}.json"), role=""),
    Kind(
        "trial whether the folder can be written",
        calls("create heartbeats/.{any}", "unlink heartbeats/.{any}"),
        role="supervisor",
        begins="supervisor",
    ),
)
SCORING = (
    Kind("column", published("columns/{n}", "columns/{n}/{r}.{any}.h5"), role="scorer", scene="scored"),
    Kind("columns' folder", calls("mkdir columns/{n}"), role="", begins="run", scene="scored"),
    Kind(
        "column removed",
        calls("rename columns/{n}/{r}.{any}.h5 > {i}/{any}", "unlink {i}/{r}.{any}.h5{any}"),
        begins="rare",
        scene="scored",
    ),
    Kind(
        "reference",
        folder_of_tensors("{i}/reference-{h}", "reference", ("part-{n}.safetensors", "index.json", "contents.json")),
        begins="run",
        scene="scored",
    ),
    Kind("metrics of a scorer", calls("write metrics/{any}-{n}.jsonl"), role="", scene="scored"),
    Kind("group", replaced("{i}", "weights/group.json"), begins="trainer", scene="scored"),
    Kind("group's store", written("weights/group-{h}"), role="", begins="trainer", scene="scored"),
    Kind("group's store removed", calls("unlink weights/group-{h}"), begins="rare", scene="scored"),
    Kind(
        "member of a group",
        replaced("weights/members", "weights/members/{any}"),
        role="",
        begins="rollout",
        scene="scored",
    ),
    Kind("member that left", calls("unlink weights/members/{any}"), role="", begins="end", scene="scored"),
    Kind("members' folder", calls("mkdir weights/members"), role="", begins="run", scene="scored"),
    Kind(
        "weights wanted",
        calls("create weights/wanted/{any}", "utime weights/wanted/{any}"),
        role="rollout",
        begins="rare",
        scene="scored",
    ),
    Kind(
        "weights wanted, and written",
        calls("rename weights/wanted/{any} > {i}/{any}", "unlink {i}/{any}"),
        begins="rare",
        scene="scored",
    ),
)
CRITIC = (
    Kind("value", published(ATTEMPT, "columns/{n}/{r}.{any}.h5"), role="critic", scene="critic"),
    Kind(
        "critic's folders",
        calls("mkdir critic", "mkdir critic/attempts", "mkdir critic/checkpoints"),
        role="critic",
        begins="run",
        scene="critic",
    ),
    Kind(
        "critic's attempt",
        calls(
            f"mkdir {ATTEMPT}",
            f"rename {ATTEMPT} > {ATTEMPT}/attempt-{{n}}",
            f"unlink {ATTEMPT}{{all}}",
            f"rmdir {ATTEMPT}{{all}}",
        ),
        role="critic",
        begins="critic",
        scene="critic",
    ),
    Kind(
        "critic's checkpoint",
        checkpoint(ATTEMPT, "critic/checkpoints/step-{n}", ("critic.safetensors", "critic_optimizer-{n}.safetensors")),
        role="critic",
        scene="critic",
    ),
    Kind(
        "critic's checkpoint removed",
        removed("critic/checkpoints/step-{n}", f"{ATTEMPT}/old-{{n}}"),
        role="critic",
        scene="critic",
    ),
    Kind(
        "critic's first weights",
        (
            *calls(f"mkdir {ATTEMPT}/policy.staged"),
            *written(f"{ATTEMPT}/policy.staged/{{any}}"),
            *calls(f"rename {ATTEMPT}/policy.staged > {ATTEMPT}/policy"),
        ),
        role="critic",
        begins="run",
        scene="critic",
    ),
    Kind("rendezvous of ranks", written(f"{ATTEMPT}/rendezvous"), role="critic", begins="critic", scene="critic"),
)
PARTIAL = (
    Kind(
        "partial rollout",
        published("requests/partial", "requests/partial/{r}.p{n}.h5"),
        role="rollout",
        scene="partial",
    ),
    Kind("partial rollout removed", calls("unlink requests/partial/{r}.p{n}.h5"), role="rollout", scene="partial"),
    Kind(
        "claim put back",
        calls(
            f"rename {CLAIMED}/{{r}}.a{{n}}.v{{n}} > {OPEN}.p{{n}}",
            f"rename {CLAIMED}/{{r}}.a{{n}}.v{{n}}.p{{n}} > {OPEN}.p{{n}}",
        ),
        role="rollout",
        scene="partial",
    ),
    Kind(
        "claim of a part",
        calls(f"rename {OPEN}.p{{n}} > {CLAIMED}/{{r}}.a{{n}}.v{{n}}.p{{n}}"),
        role="rollout",
        scene="partial",
    ),
    Kind(
        "claim of a part ended", calls(f"unlink {CLAIMED}/{{r}}.a{{n}}.v{{n}}.p{{n}}"), role="rollout", scene="partial"
    ),
)
AFTER_ERRORS = (
    Kind("hidden file given up", calls("unlink .{any}.{h}", "unlink {all}/.{any}.{h}"), role="", begins="rare"),
    Kind("staged folder given up", calls("unlink {i}/{any}-{any}/{all}", "rmdir {i}/{any}-{any}"), begins="rare"),
    Kind(
        "shard put aside",
        (
            *calls("rename shards/{n}/{r}.h5 > {all}", "rename {i}/{any} > quarantine/{any}"),
            *published("{i}", "quarantine/{r}.{any}"),
        ),
        begins="rare",
    ),
    Kind(
        "checkpoint put aside",
        calls("rename checkpoints/step-{n} > {i}/{any}", "rename {i}/{any} > quarantine/{any}"),
        begins="rare",
    ),
    Kind("folder made when it is needed", calls("mkdir weights/wanted", "mkdir evals"), role="", begins="rare"),
    Kind(
        "bytecode that Python keeps",
        calls(*(f"{op} snapshot/code/{{all}}__pycache__{{all}}" for op in ("mkdir", "create", "write", "unlink"))),
        role="",
        begins="rare",
    ),
    Kind(
        "bytecode in place",
        calls("rename snapshot/code/{all}.pyc.{n} > snapshot/code/{all}.pyc"),
        role="",
        begins="rare",
    ),
    Kind("damaged value removed", calls("unlink columns/{n}/{r}.{any}.h5"), role="", begins="rare"),
)
ELSEWHERE = {
    "caches": "compiled kernels, of GPUs alone",
    "scorer": "a rendezvous of ranks, as the critic's",
    "slurm": "scripts, jobs, places and ends of jobs: on a private cluster (tests/slurm)",
    "model": "made with the run, under its hidden name",
    "identity": "made with the run, under its hidden name",
    "rows": "made with the run, under its hidden name",
    "doing": "made with the run, under its hidden name",
    "tracking": "copies, made anew at each start",
}
"""Paths of a run that no scene's kind names, and why: see docs/promises.md."""

KINDS: tuple[Kind, ...] = (*TRAINING, *GENERATING, *SUPERVISING, *SCORING, *CRITIC, *PARTIAL, *AFTER_ERRORS)
