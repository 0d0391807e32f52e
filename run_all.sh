#!/usr/bin/env bash
# The whole kit: set-up, preflight, stages 01 to 04; what is done is skipped, what is begun goes on.
#   ./run_all.sh                          with the constants at the top of each file (8 GPUs, /data)
#   ./run_all.sh 03_train 04_eval         only these stages
#   ./run_all.sh demo                     all of it on a CPU with a small real model, in ./demo-data
#   ./run_all.sh rehearse                 the real plan with a handful of samples, in ./rehearsal-data
set -euo pipefail
cd "$(dirname "${BASH_SOURCE[0]}")"
GIVEN=$(for name in "${!KIT_@}"; do printf '%s=%q ' "$name" "${!name}"; done)
AGAIN="${KIT_AGAIN:-$GIVEN./run_all.sh${*:+ $*}}"  # command that continues
ALL=(01_generate 01b_generate_synthetic 02_extract 03_train 04_eval)

PYTHON="${KIT_PYTHON:-.venv/bin/python}"   # interpreter; .venv is made when missing
SKIP_PREFLIGHT="${KIT_SKIP_PREFLIGHT:-0}"  # 1: go on although preflight found a fault
LOAD_MIN="${KIT_LOAD_MIN:-60}"             # minutes a server may take to load (Kimi-K2.5 takes 25)

# Settings for small machines, which run this again without the word.
[[ ! "${1:-}" =~ ^(demo|rehearse)$ ]] || KIT_AGAIN="$AGAIN" exec "tests/$1.sh" "${@:2}"
export no_proxy="${no_proxy:+$no_proxy,}127.0.0.1,localhost"  # servers of this box
export NO_PROXY="$no_proxy" VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS=1200  # Kimi's first steps are slow

say() { printf 'run_all: %s\n' "$*" || true; }  # who listened may be gone
die() { printf 'run_all: %s\n' "$*" >&2 || true; exit 1; }

STAGE_PID="" SERVER_PID=""  # of the stage that runs; of the server started here, a group's leader
stop_server() {
    [[ -n "$SERVER_PID" ]] || return 0
    say "stopping the server (pid $SERVER_PID)"
    kill -TERM "$SERVER_PID" 2>/dev/null || true
    timeout 60 tail --pid="$SERVER_PID" -f /dev/null >/dev/null || true
    kill -KILL -- "-$SERVER_PID" 2>/dev/null || true
    SERVER_PID=""
}
interrupted() {  # a stage ends cleanly on SIGTERM, whether it was ctrl-C or kill that came here
    trap '' INT TERM
    [[ -z "$STAGE_PID" ]] || kill -TERM "$STAGE_PID" 2>/dev/null || true
    wait "$STAGE_PID" 2>/dev/null || true
    die "interrupted; to continue: $AGAIN"
}
trap stop_server EXIT
trap interrupted INT TERM
trap '' HUP PIPE  # a lost terminal does not end it

start_server() {  # a server for 01b, with the flags that 04 serves with, unless SERVER_URL answers
    local start=$SECONDS log="$LOGS/server.log" status=0 pid now last=""
    if [[ "$URL" == *,* ]] || curl -fsS -m 5 -o /dev/null "$URL/health" 2>/dev/null; then
        say "using the server at $URL" && return  # 01b waits for several itself
    fi
    # 01b itself knows whether there is something to ask: then it misses a server (status 3).
    KIT_SERVER_URL=http://127.0.0.1:1 KIT_GIVE_UP_MIN=0 \
        "$PYTHON" 01b_generate_synthetic.py >/dev/null 2>&1 || status=$?
    ((status == 3)) || return 0
    # One that loads already, begun by hand, is waited for, and not stopped afterwards.
    pid=$(pgrep -of "vllm.*(api_server|serve).*--port[= ]${URL##*:}( |\$)") || {
        setsid "$PYTHON" -m vllm.entrypoints.openai.api_server --host 127.0.0.1 \
            --port "${URL##*:}" "${SERVE[@]:2}" >"$log" 2>&1 </dev/null &
        SERVER_PID=$! pid=$!
    }
    say "the server loads (pid $pid, log $log)"
    until curl -fsS -m 5 -o /dev/null "$URL/health" 2>/dev/null; do
        kill -0 "$pid" 2>/dev/null || { tail -n 20 "$log" >&2; die "the server died: $log"; }
        ((SECONDS - start < LOAD_MIN * 60)) || die "the server is not ready, see $log"
        now=$(grep -aoE '(Loading (safetensors|weights)|init engine).*' "$log" | tail -n 1) || true
        [[ "$now" == "$last" ]] || say "$((SECONDS - start)) s: $now"
        last="$now"
        sleep 2
    done
    say "the server is ready after $((SECONDS - start)) s"
}

wait_for_gpus() {  # extraction, training and evaluation need the GPUs to themselves
    local start=$SECONDS users
    command -v nvidia-smi >/dev/null || return 0
    while users=$(nvidia-smi ${CUDA_VISIBLE_DEVICES:+-i "$CUDA_VISIBLE_DEVICES"} \
        --query-compute-apps=pid,name --format=csv,noheader) && [[ $users ]]; do
        ((SECONDS - start < 600)) || die "the GPUs are in use by $users; end that first"
        sleep 5
    done
}

run_stage() {
    local status=0
    "$PYTHON" -u "$1.py" > >(exec tee -iap "$LOGS/$1.log") 2>&1 &
    STAGE_PID=$!
    wait "$STAGE_PID" || status=$?
    STAGE_PID=""
    ((status == 0)) || die "$1 failed (status $status), see $LOGS/$1.log; to continue: $AGAIN"
}

for stage in "$@"; do
    [[ " ${ALL[*]} " == *" $stage "* ]] || die "no stage '$stage'; to fix: choose from ${ALL[*]}"
done
[[ -x .venv/bin/vllm || -n "${KIT_PYTHON:-}" ]] || {
    say "installing requirements.txt into .venv"
    python3 -m venv .venv && .venv/bin/python -m pip install -q -r requirements.txt
}
mapfile -d '' SERVE < <("$PYTHON" -c '
import json, shlex, subprocess, sys
s = {}
for stage in ("01b_generate_synthetic.py", "04_eval.py"):
    said = subprocess.run([sys.executable, stage, "--settings"], stdout=-1).stdout
    s |= json.loads(said or sys.exit(2))
for key in ("tensor", "pipeline", "data"):
    s["ENGINE_ARGS"] += " --{}-parallel-size {}".format(key, s[key.upper() + "_PARALLEL"])
print(s["DATA"], s["SERVER_URL"], "--model", s["TARGET"],
      *["--trust-remote-code"] * s["TRUST_REMOTE_CODE"],
      *shlex.split(s["ENGINE_ARGS"] + " " + s["SERVE_ARGS"]), sep="\0", end="\0")')
((${#SERVE[@]} > 2)) || die "a setting is wrong (see above)"
./00_preflight.sh || [[ "$SKIP_PREFLIGHT" == 1 ]] ||
    die "preflight found faults; to go on all the same: KIT_SKIP_PREFLIGHT=1 $AGAIN"
URL="${SERVE[1]%/}" LOGS="${SERVE[0]}/logs"
mkdir -p "$LOGS"
[[ $# -gt 0 ]] || set -- "${ALL[@]}"
for stage in "$@"; do
    say "==== $stage"
    [[ "$stage" != 01b* ]] || start_server
    [[ "$stage" == 01* ]] || wait_for_gpus
    run_stage "$stage"
    stop_server
done
