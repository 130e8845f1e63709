#!/bin/sh
# A closed loop under every policy, one after the other on one machine, from a profile measured first.
#
#   benchmarks/closed_loop.sh 70b AzureLLMInferenceTrace_conv.csv benchmarks/results [SECONDS]
#
# 8b: the KV room that a 24 GB card has beside the weights, 400 requests of up to 8,192 tokens in flight;
# 70b: what a 141 GB card has, 160 of up to 4,096, no weights on the host. SECONDS is the window (120),
# before which the tiers fill. POLICIES (gpu-only gated dualpace) names those that run.
set -eu
shape=$1 trace=$2 results=$3 seconds=${4:-120}
dualpace=${DUALPACE:-dualpace}
model=$(dirname "$0")/models/llama-3.1-$shape
case $shape in
8b)
    room="--gpu-kv-tokens 35200 --host-kv-size 48GiB"
    load="--skip-longer 8192 --num-requests 6000 --max-concurrency 400"
    filled=30
    ;;
70b)
    room="--gpu-kv-tokens 12800 --max-model-len 4096 --host-weights none --host-kv-size 64GiB"
    load="--skip-longer 4096 --num-requests 2000 --max-concurrency 160"
    filled=50
    ;;
*)
    echo "usage: $0 8b|70b TRACE RESULTS [SECONDS]" >&2
    exit 2
    ;;
esac
# shellcheck disable=SC2086  # the options are words
{
    if [ "${PROFILE:-yes}" = yes ]; then
        $dualpace profile run "$model" --load-format dummy $room --seconds 40
        $dualpace profile check "$model" --load-format dummy $room --seconds 30 || true
    fi
    for policy in ${POLICIES:-gpu-only gated dualpace}; do
        warmup=$filled
        [ "$policy" = gpu-only ] && warmup=15
        $dualpace bench offline --model "$model" --load-format dummy $room --policy "$policy" \
            --trace "$trace" $load --num-warmups 4 --warmup-seconds $warmup --duration "$seconds" \
            --json "$results/$shape-$policy-window.json"
    done
}
