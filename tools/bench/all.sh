#!/usr/bin/env bash
# usage: tools/bench/all.sh [NAME …]
# Run the benchmarks one after the other, keep their results in tools/bench/results/ and make the tables of docs/benchmarks.md.
# All of them take some hours of a quiet machine of two cores. One that fails is named at the end, and the others are run.
# A single run with other arguments: python tools/bench/NAME.py --json >FILE && python tools/bench/tables.py add NAME FILE
set -uo pipefail
cd "$(dirname "$0")/../.."
python=${PYTHON:-.venv/bin/python}
runs=(
    "quickstart --seeds 3"
    "omni"
    "agents-learn --parts learn"
    "agents-gateway --parts gateway"
    "agents-slow --parts slow"
    "agents-storm --parts storm"
    "agents-sandbox --parts sandbox"
    "algorithms --seeds 3 --steps 120"
    "staleness --seeds 3 --steps 300"
    "modes-drawn --parts drawn --drawn-seeds 2 --drawn-steps 24"
    "modes-media --parts drawn --media --rollout 4 --unit 1.6 --train 2 --drawn-seeds 2 --drawn-steps 16"
    "modes-real --parts real --seeds 8 --steps 60"
    "endurance --steps 2000 --faults 12"
    "endurance-video --video --steps 2000 --faults 24"
    "chaos --kills 100"
    "faults"
    "spool"
    "omni_media"
    "checkpoint --mb 200"
    "file_ops"
    "simulate --steps 60 --points 1:3:wait 0:3:wait 2:3:wait 4:3:wait 1:2:wait 1:3:drop"
    "r3 --rounds 5 --steps 60"
    "weights"
    "trainers --rounds 9"
    "omni_trainer"
    "memory"
    "lora --rounds 9"
    "trl --rounds 3 --steps 60"
    "trl-vl --sizes vl --rounds 3 --steps 20"
    "trl_accuracy --seeds 3"
    "slurm_chaos --faults 100 --requeues 5 --stalls 5"
    "slurm_chaos-large --parts faults --faults 8 --kinds preempted 'supervisor killed' --gap 3 --set model.hidden_size=1024 --set model.intermediate_size=4096 --set model.layers=8 --set model.heads=8 --set model.kv_heads=4 --set trainer.prompts_per_step=2 --set rollout.groups_per_request=1"
    "slurm_chaos-array --parts array"
    "slurm_chaos-ettr --parts ettr --ettr-faults 10 1"
)
for name in "$@"; do
    [[ " ${runs[*]%% *} " = *" $name "* ]] || { echo "no benchmark '$name'; there are: ${runs[*]%% *}" >&2 && exit 2; }
done
mkdir -p .bench/logs
failed=()
for run in "${runs[@]}"; do
    name=${run%% *} words=()
    [ $# -eq 0 ] || [[ " $* " = *" $name "* ]] || continue
    [[ "$run" = *" "* ]] && eval "words=(${run#* })" # some have quotes
    log=.bench/logs/$name.json
    "$python" "tools/bench/${name%%-*}.py" --json "${words[@]}" >"$log" && "$python" tools/bench/tables.py add "$name" "$log" || failed+=("$name")
done
[ ${#failed[@]} -eq 0 ] || { echo "failed: ${failed[*]}" >&2 && exit 1; }
