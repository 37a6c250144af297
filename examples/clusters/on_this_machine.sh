#!/bin/sh
# A Ray cluster of three nodes on this machine, to try `ray job submit`: a head without CPUs and two nodes with two each.
#
#     sh examples/clusters/on_this_machine.sh         # Ctrl-C ends it
#
# Then, in another terminal, the commands of README.md ("On a cluster") with RAY_API_SERVER_ADDRESS=http://127.0.0.1:8265.
# A node's death is noticed within two seconds here; on a real cluster set the health checks of the head to about
# RAY_health_check_period_ms=1000, _timeout_ms=3000, _failure_threshold=3.
set -eu
export RAY_USAGE_STATS_ENABLED=0 RAY_AUTH_MODE=disabled RAY_GRACEFUL_SHUTDOWN_DRAIN_TIMEOUT_S=0
export RAY_health_check_initial_delay_ms=0 RAY_health_check_period_ms=500 RAY_health_check_timeout_ms=1000 RAY_health_check_failure_threshold=3
folder=$(mktemp -d /tmp/nodes-XXXX)
started=""
end() {
    trap - INT TERM EXIT
    for pid in $started; do kill "$pid" 2>/dev/null || true; done
    wait
    rm -rf "$folder"
}
trap end INT TERM EXIT
node() {
    name=$1
    shift
    ray start --block --temp-dir "$folder/$name" --object-store-memory 80000000 "$@" >"$folder/$name.log" 2>&1 &
    started="$! $started"
}
node head --head --port 6379 --num-cpus 0 --include-dashboard true --dashboard-port 8265
until grep -q "Ray runtime started" "$folder/head.log"; do kill -0 "${started%% *}" || { cat "$folder/head.log"; exit 1; }; sleep 0.2; done
node one --address 127.0.0.1:6379 --num-cpus 2
node two --address 127.0.0.1:6379 --num-cpus 2
echo "the cluster is coming up: http://127.0.0.1:8265 (what the nodes print: $folder/*.log)"
wait
